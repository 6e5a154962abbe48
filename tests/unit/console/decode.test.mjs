import assert from 'node:assert/strict';
import { test } from 'node:test';
import {
  Frames,
  chainOf,
  movesOf,
  numbersOf,
  ownersOf,
} from '../../../clients/gateway/octavo_gateway/console/decode.js';

const packedBytes = (...values) => Buffer.from(values).toString('base64');
const packedNumbers = (...values) =>
  Buffer.from(new Uint8Array(new Uint32Array(values).buffer)).toString('base64');

function line(changes = {}) {
  const sequences = [
    { request_id: 'a', sample_index: 0, num_blocks: 2 },
    { request_id: 'a', sample_index: 1, num_blocks: 2 },
    { request_id: 'w', sample_index: 0, num_blocks: 0 },
  ];
  const executor = {
    address: 'e:1',
    sequences,
    tables: packedNumbers(0, 3, 0, 2),
    steps: [],
    kinds: packedBytes(2, 1, 2, 2, 0),
    ref_counts: packedBytes(2, 0, 1, 1, 0),
    ...changes,
  };
  return { scheduler_id: 's', executors: [executor] };
}

test('a line becomes typed arrays, a table for each sequence, an owner for each block', () => {
  const [executor] = new Frames().decode(line()).executors;
  assert.deepEqual([...executor.kinds], [2, 1, 2, 2, 0]);
  assert.deepEqual([...executor.refCounts], [2, 0, 1, 1, 0]);
  assert.deepEqual(
    executor.sequences.map((each) => [...each.table]),
    [[0, 3], [0, 2], []],
  );
  assert.deepEqual([...executor.owners], [0, -1, 1, 0, -1]);
  assert.deepEqual(
    executor.sequences.map((each) => each.key),
    ['a/0', 'a/1', 'w/0'],
  );
});

test('block ids beyond two bytes are read as they are', () => {
  assert.deepEqual(
    [...numbersOf(packedNumbers(0, 65_536, 4_294_967_295))],
    [0, 65_536, 4_294_967_295],
  );
  assert.throws(() => numbersOf(packedBytes(1, 2, 3)), /broken length/);
});

test('blocks that a line leaves out are those of the line before', () => {
  const frames = new Frames();
  frames.decode(line());
  const [executor] = frames.decode(
    line({ kinds: undefined, ref_counts: undefined, tables: packedNumbers(0, 3, 0, 4) }),
  ).executors;
  assert.deepEqual([...executor.kinds], [2, 1, 2, 2, 0]);
  assert.equal(executor.owners[4], 1);
});

test('an executor that left and came back has to say its blocks anew', () => {
  const frames = new Frames();
  frames.decode(line());
  frames.decode({ scheduler_id: 's', executors: [] });
  assert.throws(
    () => frames.decode(line({ kinds: undefined, ref_counts: undefined })),
    /no blocks/,
  );
});

test('tables that do not add up are refused', () => {
  assert.throws(() => new Frames().decode(line({ tables: packedNumbers(0, 3, 0) })), /cut off/);
  assert.throws(
    () => new Frames().decode(line({ tables: packedNumbers(0, 3, 0, 2, 1) })),
    /more blocks/,
  );
  assert.throws(() => new Frames().decode(line({ ref_counts: packedBytes(1) })), /half/);
});

test('the chain of a block names all that have it, and where', () => {
  const [executor] = new Frames().decode(line()).executors;
  assert.deepEqual(
    chainOf(executor, 0).map(({ sequence, logical }) => [sequence.key, logical]),
    [
      ['a/0', 0],
      ['a/1', 0],
    ],
  );
  assert.deepEqual(
    chainOf(executor, 2).map(({ sequence, logical }) => [sequence.key, logical]),
    [['a/1', 1]],
  );
  assert.deepEqual(chainOf(executor, 4), []);
});

test('a table that names a block that there is not does no harm', () => {
  assert.deepEqual([...ownersOf([{ table: Uint32Array.of(9, 1) }], 3)], [-1, 0, -1]);
});

test('moves tell copies and swaps apart', () => {
  const steps = [
    { copied_blocks: [5], swapped_out_blocks: [1], swapped_in_blocks: [] },
    { copied_blocks: [], swapped_out_blocks: [], swapped_in_blocks: [1, 2] },
  ];
  assert.deepEqual([...movesOf(steps)].sort(), [
    [1, 'in'],
    [2, 'in'],
    [5, 'copy'],
  ]);
});
