// The story of one request: where its time went as a bar, then what happened, and when.

import { count, milliseconds } from './rates.js';
import { errorOf, headersOf } from './stream.js';
import { element, shortId } from './tip.js';

const AGAIN_MS = 1000; // while it lives
const MEANINGS = {
  queued: 'waits in the queue, behind others',
  blocked: 'next in the queue, without room',
  prefill: 'its prompt is computed',
  decode: 'tokens are generated',
  preempted: 'its blocks went to others',
  moved: 'lost its executor, waits for another',
};

// Milliseconds of each phase, in the order in which they first came.
export function sumsOf(spans) {
  const sums = new Map();
  for (const { phase, begin_ms: begin, end_ms: end } of spans)
    sums.set(phase, (sums.get(phase) ?? 0) + end - begin);
  return sums;
}

// What an event's fields mean for its kind.
// `executor`: known from the events before.
export function wordsOf(event, story, executor = '') {
  const on = event.executor && event.executor !== executor ? `on ${event.executor}` : '';
  const other = event.other_request_id && shortId(event.other_request_id);
  const cause = other ? `for ${other}` : '';
  const tokens = `${count(event.num_tokens)} tokens`;
  const parts = {
    blocked: [other && `${other} holds the most`, on],
    admitted: [
      on,
      `${count(event.num_tokens)} of ${count(story.num_prompt_tokens)} prompt tokens cached`,
    ],
    preempted_recompute: [cause, `${tokens} to compute again`],
    preempted_swap: [cause, `${tokens} to the host's memory`],
    finished: [tokens],
  }[event.kind] ?? [cause, on];
  return [event.detail, ...parts].filter(Boolean).join(', ');
}

export class Story {
  #root;
  #key;
  #isLive;
  #id = null;
  #timer = 0;
  #abort = null;

  // isLive(id): whether the request still has sequences; the end of one choice is none of its own.
  constructor(root, { key, isLive }) {
    this.#isLive = isLive;
    this.#root = root;
    this.#key = key;
  }

  // Tell of this request, and go on while it lives; null: of none.
  show(id) {
    if (id === this.#id) return;
    this.#id = id;
    this.#abort?.abort();
    clearTimeout(this.#timer);
    this.#root.hidden = id === null;
    this.#root.replaceChildren();
    if (id !== null) this.#load(id);
  }

  async #load(id) {
    const abort = (this.#abort = new AbortController());
    try {
      const response = await fetch(`console/story?request_id=${encodeURIComponent(id)}`, {
        headers: headersOf(this.#key()),
        signal: abort.signal,
        cache: 'no-store',
      });
      if (!response.ok) throw await errorOf(response);
      const story = await response.json();
      if (id !== this.#id) return;
      const hasEnded = story.has_ended && !this.#isLive(id);
      this.#draw({ ...story, has_ended: hasEnded });
      if (!hasEnded) this.#timer = setTimeout(() => this.#load(id), AGAIN_MS);
    } catch (error) {
      if (id === this.#id && !abort.signal.aborted)
        this.#draw({ request_id: id, spans: [], events: [], trouble: error.message });
    }
  }

  #draw(story) {
    const scrolled = this.#root.querySelector('ol')?.scrollTop ?? 0;
    const close = element(
      'button',
      { type: 'button', className: 'small', 'aria-label': 'Close the story' },
      '×',
    );
    close.addEventListener('click', () => this.show(null));
    const sums = sumsOf(story.spans),
      total = [...sums.values()].reduce((sum, each) => sum + each, 0);
    const parts = [
      element(
        'header',
        {},
        element('h3', { title: story.request_id }, `Story of ${shortId(story.request_id)}`),
        element(
          'span',
          { className: 'dim' },
          total ? `${milliseconds(total)}${story.has_ended ? '' : ' so far'}` : '',
        ),
        close,
      ),
    ];
    if (story.trouble) parts.push(element('p', { className: 'error' }, story.trouble));
    if (total) parts.push(barOf(story.spans, total), legendOf(sums, total));
    const list = element('ol');
    let executor = '';
    story.events.forEach((event, number) => {
      if (story.num_events_dropped && number === story.events.length >> 1)
        list.append(
          element(
            'li',
            {},
            element('span'),
            `… ${count(story.num_events_dropped)} more in between, not kept`,
          ),
        );
      list.append(
        element(
          'li',
          {},
          element('span', { className: 'when' }, number ? milliseconds(event.at_ms) : '0'),
          element(
            'span',
            {},
            element('b', { className: `event-${event.kind}` }, event.kind.replace('_', ' ')),
            ` ${wordsOf(event, story, executor)}`,
          ),
        ),
      );
      executor = event.executor || executor;
    });
    parts.push(list);
    this.#root.replaceChildren(...parts);
    list.scrollTop = scrolled;
  }
}

function barOf(spans, total) {
  const bar = element('div', {
    className: 'story-bar',
    role: 'img',
    'aria-label': 'Its phases, in order of time',
  });
  for (const { phase, begin_ms: begin, end_ms: end } of spans) {
    const part = element('span', {
      className: `told-${phase}`,
      title: `${phase}: ${milliseconds(end - begin)}`,
    });
    part.style.flexGrow = String((end - begin) / total);
    bar.append(part);
  }
  return bar;
}

function legendOf(sums, total) {
  const legend = element('p', { className: 'steps-legend' });
  for (const [phase, sum] of sums) {
    legend.append(
      element(
        'span',
        { title: MEANINGS[phase] ?? '' },
        element('i', { className: `told-${phase}` }),
        phase,
        element('b', {}, milliseconds(sum)),
        `${((100 * sum) / total).toFixed(0)} %`,
      ),
    );
  }
  return legend;
}
