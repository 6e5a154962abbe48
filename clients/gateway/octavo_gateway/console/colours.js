// How cells look: a hue per request, a pattern per sample. No DOM in here.
//
// The hues are Paul Tol's "bright" scheme, which people with any kind of colour blindness can
// tell apart, and which stands out from white as from black. Patterns say the same again.

export const HUES = [
  [0x44, 0x77, 0xaa],
  [0xee, 0x66, 0x77],
  [0x22, 0x88, 0x33],
  [0xcc, 0xbb, 0x44],
  [0x66, 0xcc, 0xee],
  [0xaa, 0x33, 0x77],
];
export const PATTERNS = [
  'plain',
  'rising stripes',
  'dots',
  'level stripes',
  'falling stripes',
  'upright stripes',
  'squares',
  'grid',
];
const MIN_PATTERN_CELL = 7;
const MIN_RING_CELL = 5;

// Gives requests a slot each, and keeps it for as long as they live: colours must not jump.
// A slot that was given back is the last to be given again.
export class Slots {
  #ofRequest = new Map();
  #free = [];
  #num = 0;

  // Takes note of who lives now, and who of them has something to be coloured.
  update(requestIds, coloured = requestIds) {
    const live = new Set(requestIds);
    for (const [id, slot] of this.#ofRequest) {
      if (live.has(id)) continue;
      this.#ofRequest.delete(id);
      this.#free.push(slot);
    }
    for (const id of coloured) {
      if (!this.#ofRequest.has(id)) this.#ofRequest.set(id, this.#take());
    }
  }

  // Hues go first: fresh slots are preferred until every hue has been used once.
  #take() {
    return this.#free.length > 0 && this.#num >= HUES.length ? this.#free.shift() : this.#num++;
  }

  // null for who has no slot.
  styleOf(requestId, sampleIndex) {
    const slot = this.#ofRequest.get(requestId);
    if (slot === undefined) return null;
    const turn = Math.floor(slot / HUES.length);
    return { hue: slot % HUES.length, pattern: (sampleIndex + turn) % PATTERNS.length };
  }
}

export function mix(one, other, share) {
  return one.map((value, i) => Math.round(value + (other[i] - value) * share));
}

// A pixel as ImageData has it, on the machines that there are: little-endian.
export function packed([red, green, blue], alpha = 255) {
  return ((alpha << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

// Relative luminance as WCAG defines it, 0 to 1.
export function luminance(colour) {
  const [red, green, blue] = colour.map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

export function readableOn(colour) {
  return luminance(colour) > 0.22 ? [0x10, 0x14, 0x1a] : [0xff, 0xff, 0xff];
}

// Space between cells: none where they are a few pixels.
export function gapOf(cell) {
  return cell >= 24 ? 2 : cell >= 4 ? 1 : 0;
}

// Whether the ink of a pattern covers a point of a cell's inside, which is `size` wide.
export function hasInk(pattern, x, y, size) {
  const period = Math.max(4, Math.round(size / 4));
  const line = Math.max(1, Math.round(period / 3));
  switch (pattern) {
    case 1:
      return (x + y) % period < line;
    case 2:
      return x % period < line + 1 && y % period < line + 1 && x % period > 0 && y % period > 0;
    case 3:
      return y % period < line;
    case 4:
      return (x - y + size * period) % period < line;
    case 5:
      return x % period < line;
    case 6:
      return (Math.floor((2 * x) / period) + Math.floor((2 * y) / period)) % 2 === 0;
    case 7:
      return x % period < line || y % period < line;
    default:
      return false;
  }
}

// One cell's pixels, row by row.
//   look: {fill, ink?, pattern?, ring?, cross?}: colours [r, g, b]; `ring` marks a shared block
//   and fills cells that are too small for one; `cross` strikes a fenced block through.
export function tile(cell, board, look) {
  const pixels = new Uint32Array(cell * cell).fill(packed(board));
  const inside = cell - gapOf(cell);
  const ring = look.ring === undefined ? 0 : ringOf(cell);
  const solid = look.ring !== undefined && cell < MIN_RING_CELL ? look.ring : look.fill;
  const base = packed(solid);
  const ink = packed(look.ink ?? mix(look.fill, [0, 0, 0], 0.5));
  const rim = look.ring === undefined ? base : packed(look.ring);
  const cross = look.cross === undefined ? base : packed(look.cross);
  const hasPattern = look.pattern > 0 && cell >= MIN_PATTERN_CELL && look.ring === undefined;
  for (let y = 0; y < inside; y++) {
    for (let x = 0; x < inside; x++) {
      let pixel = base;
      if (hasPattern && hasInk(look.pattern, x, y, inside)) pixel = ink;
      if (look.cross !== undefined && cell >= MIN_RING_CELL && isOnCross(x, y, inside))
        pixel = cross;
      if (ring > 0 && Math.min(x, y, inside - 1 - x, inside - 1 - y) < ring) pixel = rim;
      pixels[y * cell + x] = pixel;
    }
  }
  return pixels;
}

function ringOf(cell) {
  return cell < MIN_RING_CELL ? 0 : Math.max(1, Math.round(cell / 14));
}

function isOnCross(x, y, size) {
  const width = size / 14;
  return Math.abs(x - y) <= width || Math.abs(x + y - (size - 1)) <= width;
}
