// Where each block is on the map. No DOM in here; all lengths are device pixels.

export const MAX_CELL = 44;

// The largest cells with which all blocks fit into the frame; 1 pixel each if none do, and
// then the map scrolls.
export function fit(numBlocks, width, height, maxCell = MAX_CELL) {
  let cell = Math.max(1, Math.floor(Math.min(maxCell, width, height)));
  while (cell > 1 && !fits(numBlocks, width, height, cell)) cell--;
  return grid(numBlocks, width, cell);
}

function fits(numBlocks, width, height, cell) {
  return Math.ceil(numBlocks / Math.floor(width / cell)) * cell <= height;
}

export function grid(numBlocks, width, cell) {
  const columns = Math.max(1, Math.min(numBlocks, Math.floor(width / cell)));
  const rows = Math.ceil(numBlocks / columns);
  return { numBlocks, cell, columns, rows, width: columns * cell, height: rows * cell };
}

// The block at a point of the map, counted from the top of its first row; -1 beside it.
export function blockAt(layout, x, y) {
  const column = Math.floor(x / layout.cell);
  const row = Math.floor(y / layout.cell);
  if (column < 0 || row < 0 || column >= layout.columns) return -1;
  const block = row * layout.columns + column;
  return block < layout.numBlocks ? block : -1;
}

export function placeOf(layout, block) {
  return {
    x: (block % layout.columns) * layout.cell,
    y: Math.floor(block / layout.columns) * layout.cell,
  };
}

// The rows of which something shows: [first, end).
export function rowsShown(layout, top, height) {
  const first = Math.min(layout.rows, Math.max(0, Math.floor(top / layout.cell)));
  return [first, Math.min(layout.rows, Math.ceil((top + height) / layout.cell))];
}

// Where the cursor goes by a key; the block itself if the key is none of these.
export function moved(layout, block, key, rowsOfPage = 8) {
  const last = layout.numBlocks - 1;
  const steps = {
    ArrowLeft: -1,
    ArrowRight: 1,
    ArrowUp: -layout.columns,
    ArrowDown: layout.columns,
    PageUp: -layout.columns * rowsOfPage,
    PageDown: layout.columns * rowsOfPage,
  };
  if (key === 'Home') return 0;
  if (key === 'End') return last;
  const target = block + (steps[key] ?? 0);
  if (target >= 0 && target <= last) return target;
  // Up and down stay in their column at the edge; a page goes as far as there is.
  if (key === 'PageUp') return block % layout.columns;
  if (key === 'PageDown') return lastInColumn(layout, block % layout.columns);
  return block;
}

function lastInColumn(layout, column) {
  const block = (layout.rows - 1) * layout.columns + column;
  return block < layout.numBlocks ? block : block - layout.columns;
}

// The cell after a step of zooming: about a quarter larger or smaller, by a pixel at least.
export function zoomed(cell, direction, maxCell = 96) {
  const next =
    direction > 0
      ? Math.max(cell + 1, Math.round(cell * 1.25))
      : Math.min(cell - 1, Math.round(cell / 1.25));
  return Math.min(maxCell, Math.max(1, next));
}
