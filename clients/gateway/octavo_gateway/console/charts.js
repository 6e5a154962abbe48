// The step timeline, a canvas, and the small lines in the tiles, which are SVG.

import { scaleOf } from './history.js';
import { PHASES, count, lengthOf, median, milliseconds, phasesOf } from './rates.js';
import { element } from './tip.js';

const AXIS = 54; // CSS pixels for the labels
const BAR = 5,
  MIN_BAR = 2;
const MAX_STEPS = 256;

export class Timeline {
  #canvas;
  #context;
  #tip;
  #live;
  #legend;
  #now;
  #steps = [];
  #colours = null;
  #shown = [];
  #hovered = -1;
  #medians = new Map();

  constructor({ canvas, tip, live, legend, now }) {
    this.#canvas = canvas;
    this.#context = canvas.getContext('2d');
    this.#tip = tip;
    this.#live = live;
    this.#legend = legend;
    this.#now = now;
    for (const phase of PHASES) {
      const value = element('b');
      this.#medians.set(phase, value);
      legend.append(
        element(
          'span',
          { title: TITLES[phase] },
          element('i', { className: `phase-${phase}` }),
          phase,
          value,
        ),
      );
    }
    new ResizeObserver(() => this.#draw()).observe(canvas);
    canvas.addEventListener('pointermove', (event) => this.#hover(this.#indexAt(event), false));
    canvas.addEventListener('pointerleave', () => this.#hover(-1, false));
    canvas.addEventListener('blur', () => this.#hover(-1, false));
    canvas.addEventListener('keydown', (event) => this.#key(event));
  }

  setColours(colours) {
    this.#colours = colours;
    this.#draw();
  }

  show(steps) {
    this.#steps = steps;
    for (const phase of PHASES) {
      this.#medians.get(phase).textContent = steps.length
        ? milliseconds(median(steps.map((step) => step[`${phase}_ns`] / 1e6)))
        : '–';
    }
    const last = steps.at(-1);
    this.#now.textContent = last
      ? `step ${last.step_id} · ${milliseconds(median(steps.map(lengthOf)))} each`
      : 'no step yet';
    this.#draw();
  }

  #draw() {
    const ratio = window.devicePixelRatio || 1,
      canvas = this.#canvas,
      context = this.#context;
    const width = canvas.clientWidth,
      height = canvas.clientHeight;
    if (this.#colours === null || width === 0) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const bar = Math.max(MIN_BAR, Math.min(BAR, Math.floor((width - AXIS) / MAX_STEPS)));
    this.#shown = this.#steps.slice(-Math.floor((width - AXIS) / (bar + 1)));
    const top = scaleOf(this.#shown.map(lengthOf)),
      bottom = height - 4,
      span = bottom - 12;
    this.#drawScale(width, bottom, span, top);
    const first = width - this.#shown.length * (bar + 1);
    this.#shown.forEach((step, index) => {
      const x = first + index * (bar + 1);
      let y = bottom;
      phasesOf(step).forEach((phase, number) => {
        const length = Math.min((phase / top) * span, y - (bottom - span));
        context.fillStyle = this.#colours[PHASES[number]];
        context.fillRect(x, y - length, bar, length);
        y -= length;
      });
      if (lengthOf(step) > top * 1.001) {
        // cut off
        context.fillStyle = this.#colours.text;
        context.fillRect(x, bottom - span - 3, bar, 2);
      }
      if (index === this.#hovered) {
        context.strokeStyle = this.#colours.text;
        context.strokeRect(x - 1, y - 1, bar + 2, bottom - y + 2);
      }
    });
  }

  #drawScale(width, bottom, span, top) {
    const context = this.#context;
    context.font = '11px system-ui, sans-serif';
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    for (const share of [0, 0.5, 1]) {
      const y = Math.round(bottom - share * span) + 0.5;
      context.strokeStyle = this.#colours.line;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(AXIS, y);
      context.lineTo(width, y);
      context.stroke();
      context.fillStyle = this.#colours.dim;
      context.fillText(
        share === 0 ? '0' : milliseconds(top * share),
        AXIS - 6,
        Math.max(6, Math.min(y, bottom - 2)),
      );
    }
  }

  get #place() {
    const width = this.#canvas.clientWidth;
    const bar = Math.max(MIN_BAR, Math.min(BAR, Math.floor((width - AXIS) / MAX_STEPS)));
    return { each: bar + 1, first: width - this.#shown.length * (bar + 1) };
  }

  #indexAt(event) {
    const { each, first } = this.#place;
    const index = Math.floor(
      (event.clientX - this.#canvas.getBoundingClientRect().left - first) / each,
    );
    return index >= 0 && index < this.#shown.length ? index : -1;
  }

  #hover(index, byKeys) {
    this.#hovered = index;
    this.#tip.hidden = index < 0;
    const step = this.#shown[index];
    if (step) {
      this.#tip.replaceChildren(stepTip(step));
      const { each, first } = this.#place,
        width = this.#tip.offsetWidth;
      const x = first + index * each;
      this.#tip.style.left = `${x > width + 20 ? x - width - 8 : x + 16}px`;
      this.#tip.style.bottom = '6px';
      if (byKeys)
        this.#live.textContent = `Step ${step.step_id}: ${milliseconds(lengthOf(step))}; ${PHASES.map((phase) => `${phase} ${milliseconds(step[`${phase}_ns`] / 1e6)}`).join(', ')}`;
    }
    this.#draw();
  }

  #key(event) {
    const last = this.#shown.length - 1,
      now = this.#hovered < 0 ? last + 1 : this.#hovered;
    const target = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    if (target === undefined || last < 0) return;
    event.preventDefault();
    this.#hover(Math.max(0, Math.min(last, target)), true);
  }
}

const TITLES = {
  plan: 'The scheduler decided the step',
  wire: 'Encoding, network, decoding, and the wait for the event loop',
  queue: 'The plan lay waiting, because the device was busy',
  prepare: 'Deltas applied, inputs built',
  forward: 'Block moves and the model',
  sample: 'Logits to tokens',
};

function stepTip(step) {
  const made = document.createDocumentFragment();
  made.append(element('b', {}, `Step ${step.step_id}`), ` · ${milliseconds(lengthOf(step))}`);
  const list = element('dl');
  for (const phase of PHASES)
    list.append(
      element('dt', {}, phase),
      element('dd', {}, milliseconds(step[`${phase}_ns`] / 1e6)),
    );
  const moves = [
    ['copied', step.copied_blocks],
    ['swapped out', step.swapped_out_blocks],
    ['swapped in', step.swapped_in_blocks],
  ];
  const sizes = [
    ['decodes', step.num_decodes],
    ['prompt tokens', step.num_chunk_tokens],
    ['sampled', step.num_sampled],
    ['plan', `${count(step.plan_bytes)} B`],
  ];
  for (const [name, size] of sizes)
    list.append(element('dt', {}, name), element('dd', {}, String(size)));
  for (const [name, blocks] of moves)
    if (blocks.length > 0)
      list.append(element('dt', {}, name), element('dd', {}, `${blocks.length} blocks`));
  made.append(list);
  return made;
}

// A line of the latest values in an SVG, from 0 to their maximum; null leaves a gap.
export function sparkline(svg, values, length = 120) {
  const shown = values.slice(-length),
    top = Math.max(...shown.map((value) => value ?? 0), 1e-9);
  const points = shown.map((value, i) =>
    value === null
      ? null
      : [((length - shown.length + i) / (length - 1)) * 100, 34 - (value / top) * 32],
  );
  let line = '',
    isDrawing = false;
  for (const point of points) {
    line +=
      point === null ? '' : `${isDrawing ? 'L' : 'M'}${point[0].toFixed(2)} ${point[1].toFixed(2)}`;
    isDrawing = point !== null;
  }
  if (svg.childElementCount === 0) {
    svg.setAttribute('viewBox', '0 0 100 36');
    svg.setAttribute('preserveAspectRatio', 'none');
    svg.append(document.createElementNS('http://www.w3.org/2000/svg', 'path'));
  }
  svg.firstElementChild.setAttribute('d', line || 'M0 0');
}
