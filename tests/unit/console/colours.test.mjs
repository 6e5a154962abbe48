import assert from 'node:assert/strict';
import { test } from 'node:test';
import {
  HUES,
  PATTERNS,
  Slots,
  gapOf,
  hasInk,
  packed,
  readableOn,
  tile,
} from '../../../clients/gateway/octavo_gateway/console/colours.js';

const BOARD = [1, 2, 3],
  INK = [255, 255, 255];
const styles = (slots, ids) => ids.map((id) => JSON.stringify(slots.styleOf(id, 0)));

test('requests that live together look different, as long as there are looks', () => {
  const slots = new Slots(),
    ids = Array.from({ length: HUES.length * PATTERNS.length }, (_, i) => `r${i}`);
  slots.update(ids);
  assert.equal(new Set(styles(slots, ids)).size, ids.length);
});

test('samples of a request share a hue and differ by pattern', () => {
  const slots = new Slots();
  slots.update(['a']);
  const samples = [0, 1, 2, 3].map((index) => slots.styleOf('a', index));
  assert.equal(new Set(samples.map((each) => each.hue)).size, 1);
  assert.equal(new Set(samples.map((each) => each.pattern)).size, 4);
});

test('a request keeps its look while others come and go', () => {
  const slots = new Slots();
  slots.update(['a', 'b', 'c']);
  const before = styles(slots, ['b']);
  for (let i = 0; i < 100; i++) slots.update(['b', `x${i}`]);
  assert.deepEqual(styles(slots, ['b']), before);
  assert.notDeepEqual(styles(slots, ['x99']), before);
});

test('requests one after the other take one hue after the other', () => {
  const slots = new Slots(),
    seen = new Set();
  for (let i = 0; i < HUES.length; i++) {
    slots.update([`r${i}`]);
    seen.add(slots.styleOf(`r${i}`, 0).hue);
  }
  assert.equal(seen.size, HUES.length);
});

test("a pixel has its bytes in ImageData's order", () => {
  assert.deepEqual([...new Uint8Array(Uint32Array.of(packed([1, 2, 3])).buffer)], [1, 2, 3, 255]);
});

test('a plain cell is its colour, with a gap on two sides', () => {
  const pixels = tile(6, BOARD, { fill: HUES[0] });
  assert.equal(gapOf(6), 1);
  for (let y = 0; y < 6; y++) {
    for (let x = 0; x < 6; x++)
      assert.equal(pixels[y * 6 + x], packed(x < 5 && y < 5 ? HUES[0] : BOARD));
  }
});

test('cells of one to three pixels have no gap, and shared ones are all ink', () => {
  for (const cell of [1, 2, 3]) {
    assert.deepEqual(new Set(tile(cell, BOARD, { fill: HUES[1] })), new Set([packed(HUES[1])]));
    assert.deepEqual(
      new Set(tile(cell, BOARD, { fill: HUES[1], ring: INK })),
      new Set([packed(INK)]),
    );
  }
});

test('a shared cell has a ring around its colour', () => {
  const pixels = tile(12, BOARD, { fill: HUES[2], ring: INK });
  assert.equal(pixels[0], packed(INK));
  assert.equal(pixels[5 * 12], packed(INK));
  assert.equal(pixels[5 * 12 + 5], packed(HUES[2]));
});

test('patterns are different, and none is all ink or none', () => {
  for (const size of [8, 13, 22, 40]) {
    const drawn = PATTERNS.map((_, pattern) => {
      let bits = '';
      for (let y = 0; y < size; y++)
        for (let x = 0; x < size; x++) bits += hasInk(pattern, x, y, size) ? '1' : '0';
      return bits;
    });
    assert.equal(new Set(drawn).size, PATTERNS.length, `at ${size}`);
    drawn.slice(1).forEach((bits, i) => {
      const share = [...bits].filter((bit) => bit === '1').length / bits.length;
      assert.ok(share > 0.04 && share < 0.75, `${PATTERNS[i + 1]} at ${size}: ${share}`);
    });
  }
});

test('free, cached and fenced differ at any size', () => {
  const looks = [
    { fill: [240, 240, 240] },
    { fill: [150, 150, 150] },
    { fill: [230, 120, 40], cross: INK },
  ];
  for (let cell = 1; cell < 40; cell++) {
    assert.equal(new Set(looks.map((look) => tile(cell, BOARD, look).join())).size, 3);
  }
});

test('numbers are black on bright hues and white on dark ones', () => {
  assert.deepEqual(readableOn([255, 255, 255]), [0x10, 0x14, 0x1a]);
  assert.deepEqual(readableOn([0, 0, 0]), [255, 255, 255]);
});
