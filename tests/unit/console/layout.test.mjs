import assert from 'node:assert/strict';
import { test } from 'node:test';
import {
  blockAt,
  fit,
  grid,
  moved,
  placeOf,
  rowsShown,
  zoomed,
} from '../../../clients/gateway/octavo_gateway/console/layout.js';

test('all blocks fit, in cells as large as that allows', () => {
  for (const numBlocks of [1, 7, 400, 10_000, 100_000]) {
    for (const [width, height] of [
      [800, 500],
      [1600, 900],
      [333, 777],
    ]) {
      const layout = fit(numBlocks, width, height);
      assert.ok(layout.columns * layout.rows >= numBlocks);
      assert.ok(
        layout.width <= width && layout.height <= height,
        `${numBlocks} in ${width} x ${height}`,
      );
      const larger = grid(numBlocks, width, layout.cell + 1);
      assert.ok(layout.cell === 44 || larger.height > height, 'a larger cell would have fitted');
    }
  }
});

test('what cannot fit has cells of a pixel, and scrolls', () => {
  const layout = fit(1_000_000, 500, 300);
  assert.equal(layout.cell, 1);
  assert.equal(layout.height, 2000);
});

test('a point leads to its block and a block to its place', () => {
  const layout = grid(103, 105, 10);
  assert.deepEqual([layout.columns, layout.rows], [10, 11]);
  for (const block of [0, 9, 10, 57, 102]) {
    const { x, y } = placeOf(layout, block);
    assert.equal(blockAt(layout, x, y), block);
    assert.equal(blockAt(layout, x + 9, y + 9), block);
  }
  assert.equal(blockAt(layout, 100, 0), -1, 'beside the last column');
  assert.equal(blockAt(layout, 35, 105), -1, 'after the last block');
  assert.equal(blockAt(layout, -1, 5), -1);
});

test('only rows of which something shows are drawn', () => {
  const layout = grid(1000, 100, 10); // 100 rows of 10
  assert.deepEqual(rowsShown(layout, 0, 35), [0, 4]);
  assert.deepEqual(rowsShown(layout, 15, 20), [1, 4]);
  assert.deepEqual(rowsShown(layout, 990, 100), [99, 100]);
  assert.deepEqual(rowsShown(layout, -6, 20), [0, 2]);
});

test('keys move the cursor, and never off the map', () => {
  const layout = grid(25, 100, 10); // rows of 10, 10 and 5
  assert.equal(moved(layout, 11, 'ArrowLeft'), 10);
  assert.equal(moved(layout, 11, 'ArrowUp'), 1);
  assert.equal(moved(layout, 11, 'ArrowDown'), 21);
  assert.equal(moved(layout, 18, 'ArrowDown'), 18, 'there is nothing below');
  assert.equal(moved(layout, 0, 'ArrowLeft'), 0);
  assert.equal(moved(layout, 24, 'ArrowRight'), 24);
  assert.equal(moved(layout, 13, 'Home'), 0);
  assert.equal(moved(layout, 13, 'End'), 24);
  assert.equal(moved(layout, 18, 'PageUp'), 8);
  assert.equal(moved(layout, 3, 'PageDown'), 23);
  assert.equal(moved(layout, 8, 'PageDown'), 18);
  assert.equal(moved(layout, 13, 'x'), 13);
});

test('zooming goes by a pixel at least, and stays in its bounds', () => {
  assert.equal(zoomed(1, 1), 2);
  assert.equal(zoomed(1, -1), 1);
  assert.equal(zoomed(20, 1), 25);
  assert.equal(zoomed(25, -1), 20);
  assert.equal(zoomed(90, 1), 96);
});
