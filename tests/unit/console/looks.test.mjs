import assert from 'node:assert/strict';
import { test } from 'node:test';
import { HUES, packed } from '../../../clients/gateway/octavo_gateway/console/colours.js';
import { Looks } from '../../../clients/gateway/octavo_gateway/console/looks.js';

const COLOURS = {
  board: [0, 0, 0],
  free: [10, 10, 10],
  cached: [20, 20, 20],
  held: [30, 30, 30],
  fenced: [40, 40, 40],
  ink: [255, 255, 255],
};
const CELL = 12;
// Free, cached, fenced, held by nobody that is listed; then a block of each, and one of both.
const EXECUTOR = {
  kinds: Uint8Array.of(0, 1, 3, 2, 2, 2, 2),
  refCounts: Uint8Array.of(0, 0, 1, 1, 1, 1, 2),
  owners: Int32Array.of(-1, -1, -1, -1, 0, 1, 0),
  sequences: [
    { key: 'a/0', table: Uint32Array.of(6, 4) },
    { key: 'b/0', table: Uint32Array.of(6, 5) },
  ],
};
const styleOf = (sequence) => ({ hue: sequence.key === 'a/0' ? 2 : 3, pattern: 0 });

function drawn(followed) {
  const looks = new Looks();
  looks.setColours(COLOURS);
  looks.setCell(CELL);
  const codes = looks.codesOf(EXECUTOR, styleOf, followed);
  const middle = 5 * CELL + 8; // off the diagonals
  return [...codes].map((code) => ({
    corner: looks.tileOf(code)[0],
    inside: looks.tileOf(code)[middle],
  }));
}

test('every state has its colour, and a sequence that of its request', () => {
  const inside = drawn(null).map((each) => each.inside);
  const expected = [COLOURS.free, COLOURS.cached, COLOURS.fenced, COLOURS.held, HUES[2], HUES[3]];
  assert.deepEqual(
    inside.slice(0, 6),
    expected.map((colour) => packed(colour)),
  );
});

test('a shared block has the ring that others have not', () => {
  const ring = packed(COLOURS.ink);
  assert.deepEqual(
    drawn(null).map((each) => each.corner === ring),
    [false, false, true, false, false, false, true], // a fenced one's corner is its cross
  );
});

test('all but the blocks of the sequence that is followed fade', () => {
  const plain = drawn(null);
  const isAsBefore = drawn('a/0').map((each, block) => each.inside === plain[block].inside);
  assert.deepEqual(isAsBefore, [false, false, false, false, true, false, true]);
});

test('following one that has ended fades nothing', () => {
  assert.deepEqual(drawn('gone/0'), drawn(null));
});
