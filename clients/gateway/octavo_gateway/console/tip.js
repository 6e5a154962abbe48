// What is said about one block, and the small squares that stand for a sequence elsewhere.

import { KIND_NAMES } from './decode.js';
import { HUES, tile } from './colours.js';

const MAX_OWNERS = 8;
const SWATCH = 14; // CSS pixels

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// The ids of this gateway are long, and differ at their beginning.
export function shortId(id) {
  const found = /^((?:chat)?cmpl-)([0-9a-f]{32})(\.\d+)$/.exec(id);
  if (found) return `${found[1]}${found[2].slice(0, 6)}…${found[3]}`;
  return id.length > 24 ? `${id.slice(0, 14)}…${id.slice(-8)}` : id;
}

// A square of the look that cells of the map have.
export function swatch(look, board) {
  const ratio = window.devicePixelRatio || 1;
  const size = Math.round(SWATCH * ratio);
  const canvas = element('canvas', { className: 'swatch', width: size, height: size });
  const context = canvas.getContext('2d');
  const image = context.createImageData(size, size);
  new Uint32Array(image.data.buffer).set(tile(size, board, look));
  context.putImageData(image, 0, 0);
  return canvas;
}

export function sequenceSwatch({ hue, pattern }, colours) {
  return swatch({ fill: HUES[hue], pattern }, colours.board);
}

// Block, state, references; then who owns it, and where in its table it stands.
export function tipOf(executor, block, chain, styleOf, colours) {
  const size = executor.pool.block_size;
  const references = executor.refCounts[block];
  const state = KIND_NAMES[executor.kinds[block]];
  const counted =
    references === 1
      ? '1 reference'
      : `${references === 255 ? '255 or more' : references} references`;
  const made = document.createDocumentFragment();
  made.append(
    element('b', {}, `Block ${block}`),
    ` · ${state}${references > 0 ? ` · ${counted}` : ''}`,
  );
  const list = element('ul');
  for (const { sequence, logical } of chain.slice(0, MAX_OWNERS)) {
    const first = logical * size,
      end = Math.min(first + size, sequence.num_tokens);
    const tokens = end > first ? `tokens ${first}–${end - 1}` : 'for tokens to come';
    const text = `${shortId(sequence.request_id)} · sample ${sequence.sample_index} · logical ${logical} · ${tokens}`;
    list.append(
      element('li', {}, sequenceSwatch(styleOf(sequence), colours), element('span', {}, text)),
    );
  }
  if (chain.length > MAX_OWNERS)
    list.append(element('li', {}, `and ${chain.length - MAX_OWNERS} more`));
  if (chain.length > 0) made.append(list);
  else if (references > 0)
    made.append(
      element(
        'ul',
        {},
        element(
          'li',
          {},
          state === 'fenced'
            ? 'Freed; a step in flight may still read it.'
            : 'Held for a sequence that ends or is about to begin.',
        ),
      ),
    );
  else if (state === 'cached')
    made.append(
      element('ul', {}, element('li', {}, "Nobody's; a prompt that begins the same may hit it.")),
    );
  return made;
}
