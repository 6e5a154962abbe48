// What each block looks like on the map: a number for each, and the pixels for each number.
// No DOM in here.

import { CACHED, FENCED, FREE } from './decode.js';
import { HUES, PATTERNS, mix, readableOn, tile } from './colours.js';

const FADED = 0.78; // of the way to the board's colour
// Codes of cells that belong to no sequence; then come hue and pattern of those that do, each
// with and without sharing; and all of them again, faded.
const CODES = { free: 0, cached: 1, fenced: 2, held: 3, heldShared: 4, owned: 5 };
const FADE = 256;

export class Looks {
  #colours = null;
  #cell = 0;
  #tiles = new Map();
  #codes = new Uint16Array(0);

  setColours(colours) {
    this.#colours = colours;
    this.#tiles.clear();
  }

  setCell(cell) {
    if (cell !== this.#cell) this.#tiles.clear();
    this.#cell = cell;
  }

  // A code for each block. followed: key of the sequence besides which all fade, or null.
  codesOf({ kinds, refCounts, owners, sequences }, styleOf, followed) {
    const styles = sequences.map((sequence) => {
      const { hue, pattern } = styleOf(sequence) ?? { hue: 0, pattern: 0 }; // without blocks
      return CODES.owned + (hue * PATTERNS.length + pattern) * 2;
    });
    if (this.#codes.length !== kinds.length) this.#codes = new Uint16Array(kinds.length);
    const codes = this.#codes;
    for (let block = 0; block < kinds.length; block++) {
      const isShared = refCounts[block] > 1 ? 1 : 0;
      const kind = kinds[block];
      if (kind === FREE) codes[block] = CODES.free;
      else if (kind === CACHED) codes[block] = CODES.cached;
      else if (kind === FENCED) codes[block] = CODES.fenced;
      else if (owners[block] < 0) codes[block] = CODES.held + isShared;
      else codes[block] = styles[owners[block]] + isShared;
    }
    const sequence = sequences.find((each) => each.key === followed);
    if (sequence) {
      const lit = new Uint8Array(kinds.length);
      for (const block of sequence.table) lit[block] = 1;
      for (let block = 0; block < kinds.length; block++) if (!lit[block]) codes[block] += FADE;
    }
    return codes;
  }

  // The pixels of a cell, row by row.
  tileOf(code) {
    let made = this.#tiles.get(code);
    if (made === undefined) {
      made = tile(this.#cell, this.#colours.board, this.#lookOf(code));
      this.#tiles.set(code, made);
    }
    return made;
  }

  // The colour of a number on a cell, for CSS.
  numberOn(code) {
    const colour = readableOn(this.#lookOf(code).fill);
    return `rgb(${colour.join(' ')} / ${code >= FADE ? 0.5 : 1})`;
  }

  #lookOf(code) {
    if (code < FADE) return this.#plainLookOf(code);
    const faded = (colour) => mix(colour, this.#colours.board, FADED);
    const look = Object.entries(this.#plainLookOf(code - FADE));
    return Object.fromEntries(
      look.map(([name, value]) => [name, Array.isArray(value) ? faded(value) : value]),
    );
  }

  #plainLookOf(code) {
    const { free, cached, fenced, held, ink } = this.#colours;
    if (code === CODES.free) return { fill: free };
    if (code === CODES.cached) return { fill: cached };
    if (code === CODES.fenced) return { fill: fenced, cross: ink };
    if (code === CODES.held) return { fill: held };
    if (code === CODES.heldShared) return { fill: held, ring: ink };
    const style = (code - CODES.owned) >> 1;
    const fill = HUES[Math.floor(style / PATTERNS.length)];
    const isShared = (code - CODES.owned) & 1;
    return isShared ? { fill, ring: ink } : { fill, pattern: style % PATTERNS.length };
  }
}
