// The block map: pixels written one by one, so that 100,000 blocks cost as much as 100.

import { packed } from './colours.js';
import { KIND_NAMES, chainOf } from './decode.js';
import { blockAt, fit, grid, moved, placeOf, rowsShown, zoomed } from './layout.js';
import { Looks } from './looks.js';
import { tipOf } from './tip.js';

const PAD = 6; // CSS pixels around the cells
const TIP_GAP = 8;
const FLASH_MS = 1200;
const MIN_NUMBER_CELL = 15; // CSS pixels: below it a count cannot be read
const MAX_OUTLINES = 4000;

const reducedMotion = matchMedia('(prefers-reduced-motion: reduce)');

export class BlockMap {
  #canvas;
  #context;
  #scroller;
  #spacer;
  #tip;
  #live;
  #onSelect;
  #styleOf;
  #colours = null;
  #executor = null;
  #layout = null;
  #zoom = 0; // zoom 0: fit
  #looks = new Looks();
  #codes = new Uint16Array(0);
  #selected = null;
  #image = null;
  #pixels = null;
  #isStale = true;
  #isQueued = false;
  #flashes = new Map();
  #cursor = 0;
  #hovered = -1;
  #chain = [];

  // parts: the elements {canvas, scroller, spacer, tip, live}.
  // styleOf(sequence): {hue, pattern}. onSelect(key or null): somebody is followed.
  constructor(parts, { styleOf, onSelect }) {
    this.#canvas = parts.canvas;
    this.#context = parts.canvas.getContext('2d', { alpha: false });
    this.#scroller = parts.scroller;
    this.#spacer = parts.spacer;
    this.#tip = parts.tip;
    this.#live = parts.live;
    this.#styleOf = styleOf;
    this.#onSelect = onSelect;
    new ResizeObserver(() => this.#resize()).observe(parts.scroller);
    parts.scroller.addEventListener('scroll', () => this.#redraw(true));
    this.#canvas.addEventListener('pointermove', (event) =>
      this.#hover(this.#blockOf(event), false),
    );
    this.#canvas.addEventListener('pointerleave', () => this.#hover(-1, false));
    this.#canvas.addEventListener('click', (event) => this.#follow(this.#blockOf(event)));
    this.#canvas.addEventListener('keydown', (event) => this.#key(event));
    this.#canvas.addEventListener('blur', () => this.#hover(-1, false));
    this.#canvas.addEventListener('focus', () => this.#redraw(false));
    parts.scroller.addEventListener('wheel', (event) => this.#wheel(event), { passive: false });
  }

  setColours(colours) {
    this.#colours = colours;
    this.#looks.setColours(colours);
    this.#redraw(true);
  }

  // Show an executor's blocks; `moves` says which were made or moved since the last time.
  show(executor, moves) {
    const isOther =
      executor.address !== this.#executor?.address ||
      executor.kinds.length !== this.#executor.kinds.length;
    this.#executor = executor;
    if (isOther) {
      this.#flashes.clear();
      this.#arrange();
    }
    const now = performance.now();
    for (const [block, kind] of moves) this.#flashes.set(block, { kind, at: now });
    this.#lookAgain();
    if (this.#hovered >= 0) this.#hover(this.#hovered, null);
  }

  // Follow one sequence: all others' blocks are dimmed. null: nobody.
  select(key) {
    this.#selected = key;
    this.#lookAgain();
  }

  // direction: 1 larger, -1 smaller, 0 back to what fits.
  zoom(direction) {
    if (this.#layout === null) return;
    const anchor = this.#hovered >= 0 ? this.#hovered : this.#cursor;
    this.#zoom = direction === 0 ? 0 : zoomed(this.#layout.cell, direction, 96 * this.#ratio);
    this.#arrange();
    this.#lookAgain();
    this.#reveal(anchor);
  }

  get #ratio() {
    return window.devicePixelRatio || 1;
  }

  get #pad() {
    return Math.round(PAD * this.#ratio);
  }

  #resize() {
    const ratio = this.#ratio;
    const width = Math.max(1, Math.floor(this.#scroller.clientWidth * ratio));
    const height = Math.max(1, Math.floor(this.#scroller.clientHeight * ratio));
    if (this.#image?.width === width && this.#image?.height === height) return;
    this.#canvas.width = width;
    this.#canvas.height = height;
    this.#canvas.style.width = `${width / ratio}px`;
    this.#canvas.style.height = `${height / ratio}px`;
    this.#image = this.#context.createImageData(width, height);
    this.#pixels = new Uint32Array(this.#image.data.buffer);
    this.#arrange();
    this.#lookAgain();
  }

  #arrange() {
    const numBlocks = this.#executor?.kinds.length ?? 0;
    if (numBlocks === 0 || this.#image === null) {
      this.#layout = null;
      this.#redraw(true);
      return;
    }
    const width = Math.max(1, this.#image.width - 2 * this.#pad);
    const height = Math.max(1, this.#image.height - 2 * this.#pad);
    this.#layout = this.#zoom
      ? grid(numBlocks, width, Math.min(this.#zoom, width))
      : fit(numBlocks, width, height, Math.round(34 * this.#ratio));
    this.#looks.setCell(this.#layout.cell);
    this.#cursor = Math.min(this.#cursor, numBlocks - 1);
    Object.assign(this.#canvas.dataset, { columns: this.#layout.columns, cell: this.#layout.cell });
    this.#spacer.style.height = `${(this.#layout.height + 2 * this.#pad) / this.#ratio}px`;
    this.#redraw(true);
  }

  // Work out how each block looks: once per frame, so that drawing is only copying.
  #lookAgain() {
    if (this.#executor === null) return;
    this.#codes = this.#looks.codesOf(this.#executor, this.#styleOf, this.#selected);
    this.#redraw(true);
  }

  #redraw(isStale) {
    this.#isStale ||= isStale;
    if (this.#isQueued) return;
    this.#isQueued = true;
    requestAnimationFrame(() => {
      this.#isQueued = false;
      this.#draw();
    });
  }

  #draw() {
    if (this.#image === null || this.#colours === null) return;
    if (this.#isStale) {
      this.#fill();
      this.#isStale = false;
    }
    this.#context.putImageData(this.#image, 0, 0);
    if (this.#layout === null) return;
    this.#drawCounts();
    this.#drawChain();
    if (this.#drawFlashes()) this.#redraw(false);
  }

  get #top() {
    return Math.round(this.#scroller.scrollTop * this.#ratio) - this.#pad;
  }

  #fill() {
    const pixels = this.#pixels,
      { width, height } = this.#image;
    pixels.fill(packed(this.#colours.board));
    const layout = this.#layout;
    if (layout === null) return;
    const { cell, columns, numBlocks } = layout,
      top = this.#top,
      pad = this.#pad,
      codes = this.#codes;
    const [first, end] = rowsShown(layout, top, height);
    for (let row = first; row < end; row++) {
      const y = row * cell - top;
      const from = Math.max(0, -y),
        to = Math.min(cell, height - y);
      const lastBlock = Math.min(numBlocks, (row + 1) * columns);
      for (let block = row * columns, x = pad; block < lastBlock; block++, x += cell) {
        const source = this.#looks.tileOf(codes[block]);
        for (let line = from; line < to; line++) {
          let target = (y + line) * width + x,
            pixel = line * cell;
          for (const stop = pixel + cell; pixel < stop; pixel++, target++)
            pixels[target] = source[pixel];
        }
      }
    }
  }

  #drawCounts() {
    const { cell, columns, numBlocks } = this.#layout;
    if (cell < MIN_NUMBER_CELL * this.#ratio) return;
    const context = this.#context,
      { refCounts } = this.#executor,
      top = this.#top;
    context.font = `700 ${Math.round(cell * 0.52)}px system-ui, sans-serif`;
    context.textAlign = 'center';
    context.textBaseline = 'middle';
    const [first, end] = rowsShown(this.#layout, top, this.#image.height);
    for (let block = first * columns; block < Math.min(numBlocks, end * columns); block++) {
      if (refCounts[block] < 2) continue;
      const { x, y } = placeOf(this.#layout, block);
      context.fillStyle = this.#looks.numberOn(this.#codes[block]);
      context.fillText(
        refCounts[block] === 255 ? '…' : String(refCounts[block]),
        x + this.#pad + (cell - 1) / 2,
        y - top + cell / 2,
      );
    }
  }

  #drawChain() {
    const focused =
      this.#hovered >= 0
        ? this.#hovered
        : document.activeElement === this.#canvas
          ? this.#cursor
          : -1;
    const context = this.#context,
      ratio = this.#ratio;
    const ink = `rgb(${this.#colours.ink.join(' ')})`;
    if (focused >= 0 && this.#layout.cell >= 3 * ratio) {
      context.strokeStyle = ink;
      context.lineWidth = Math.max(1, Math.round(1.25 * ratio));
      let left = MAX_OUTLINES;
      for (const { sequence } of this.#chain) {
        for (const block of sequence.table) if (left-- > 0) this.#outline(block, 0.5);
      }
    }
    if (focused >= 0) {
      context.strokeStyle = ink;
      context.lineWidth = Math.max(2, Math.round(2.5 * ratio));
      this.#outline(focused, -1.5 * ratio);
    }
  }

  #outline(block, inset) {
    const { cell } = this.#layout,
      { x, y } = placeOf(this.#layout, block);
    const size = Math.max(1, cell - 1 - 2 * inset);
    this.#context.strokeRect(x + this.#pad + inset, y - this.#top + inset, size, size);
  }

  // Mark what was copied or swapped; returns whether there is more to come.
  #drawFlashes() {
    const now = performance.now(),
      context = this.#context,
      { cell } = this.#layout,
      ratio = this.#ratio;
    for (const [block, { kind, at }] of this.#flashes) {
      const age = (now - at) / FLASH_MS;
      if (age >= 1 || block >= this.#layout.numBlocks) {
        this.#flashes.delete(block);
        continue;
      }
      const strength = reducedMotion.matches ? 0.85 : 1 - age * age;
      const colour = this.#colours[kind].join(' ');
      const { x, y } = placeOf(this.#layout, block);
      const grow = reducedMotion.matches ? 2 * ratio : (1 + 5 * age) * ratio;
      const left = x + this.#pad,
        above = y - this.#top;
      if (kind !== 'out') {
        context.fillStyle = `rgb(${colour} / ${strength * 0.8})`;
        context.fillRect(left, above, Math.max(cell - 1, 2), Math.max(cell - 1, 2));
      }
      context.strokeStyle = `rgb(${colour} / ${strength})`;
      context.lineWidth = Math.max(1.5 * ratio, cell / 12);
      context.strokeRect(left - grow, above - grow, cell - 1 + 2 * grow, cell - 1 + 2 * grow);
    }
    return this.#flashes.size > 0;
  }

  #blockOf(event) {
    if (this.#layout === null) return -1;
    const box = this.#canvas.getBoundingClientRect(),
      ratio = this.#ratio;
    const x = (event.clientX - box.left) * ratio - this.#pad;
    return blockAt(this.#layout, x, (event.clientY - box.top) * ratio + this.#top);
  }

  // byKeys: true when the cursor moved, so that it is read out; null: the same block anew.
  #hover(block, byKeys) {
    if (this.#layout === null || block >= this.#layout.numBlocks) block = -1;
    if (block === this.#hovered && byKeys === false) return;
    this.#hovered = block;
    this.#tip.hidden = block < 0;
    this.#chain = block < 0 ? [] : chainOf(this.#executor, block);
    if (block >= 0) {
      this.#tip.replaceChildren(
        tipOf(
          this.#executor,
          block,
          this.#chain,
          (sequence) => this.#styleOf(sequence),
          this.#colours,
        ),
      );
      this.#placeTip(block);
      if (byKeys) this.#live.textContent = this.#describe(block);
    }
    this.#redraw(false);
  }

  #describe(block) {
    const { kinds, refCounts } = this.#executor;
    const owners = this.#chain
      .slice(0, 4)
      .map(
        ({ sequence, logical }) =>
          `${sequence.request_id} sample ${sequence.sample_index}, logical block ${logical}`,
      );
    const more = this.#chain.length > 4 ? [`and ${this.#chain.length - 4} more`] : [];
    return [
      `Block ${block}: ${KIND_NAMES[kinds[block]]}, ${refCounts[block]} references`,
      ...owners,
      ...more,
    ].join('; ');
  }

  // Below the block, or else above it: its row stays in sight.
  #placeTip(block) {
    const ratio = this.#ratio;
    const frame = this.#scroller.getBoundingClientRect();
    const { x, y } = placeOf(this.#layout, block);
    const cell = this.#layout.cell / ratio;
    const above = (y - this.#top) / ratio;
    const { offsetWidth: width, offsetHeight: height } = this.#tip;
    const left = Math.max(4, Math.min((x + this.#pad) / ratio, frame.width - width - 4));
    const below = above + cell + TIP_GAP;
    const top = below + height < frame.height ? below : above - height - TIP_GAP;
    this.#tip.style.left = `${left}px`;
    this.#tip.style.top = `${Math.max(4, Math.min(top, frame.height - height - 4))}px`;
  }

  #reveal(block) {
    if (this.#layout === null) return;
    const ratio = this.#ratio,
      y = (placeOf(this.#layout, block).y + this.#pad) / ratio,
      cell = this.#layout.cell / ratio;
    const { scrollTop, clientHeight } = this.#scroller;
    if (y < scrollTop) this.#scroller.scrollTop = y - PAD;
    else if (y + cell > scrollTop + clientHeight)
      this.#scroller.scrollTop = y + cell - clientHeight + PAD;
  }

  #follow(block) {
    if (block < 0) return;
    this.#cursor = block;
    const keys = chainOf(this.#executor, block).map(({ sequence }) => sequence.key);
    // Again and again: through all that share the block, then nobody.
    this.#onSelect(keys[keys.indexOf(this.#selected) + 1] ?? null);
  }

  #key(event) {
    if (this.#layout === null || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === '+' || event.key === '=') this.zoom(1);
    else if (event.key === '-') this.zoom(-1);
    else if (event.key === '0') this.zoom(0);
    else if (event.key === 'Enter' || event.key === ' ') this.#follow(this.#cursor);
    else if (event.key === 'Escape') this.#onSelect(null);
    else {
      const target = moved(
        this.#layout,
        this.#hovered >= 0 ? this.#hovered : this.#cursor,
        event.key,
      );
      if (!/^(Arrow|Page|Home|End)/.test(event.key)) return;
      this.#cursor = target;
      this.#reveal(target);
      this.#hover(target, true);
    }
    event.preventDefault();
  }

  #wheel(event) {
    if (!event.ctrlKey) return;
    event.preventDefault();
    this.zoom(event.deltaY < 0 ? 1 : -1);
  }
}
