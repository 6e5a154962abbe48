// The tiles, the pool's bar, the executors' tabs, the list of sequences.

import { sparkline } from './charts.js';
import { count, milliseconds } from './rates.js';
import { element, sequenceSwatch, shortId } from './tip.js';

const MAX_ROWS = 200;
const HISTORY = 120;

export class Tiles {
  #part;
  #rate = [];
  #ttft = [];
  #itl = [];

  constructor(part) {
    this.#part = part;
  }

  show({ executors, latency }, rates) {
    const part = this.#part,
      rate = rates.perSecond('num_generated_tokens');
    push(this.#rate, rate);
    push(this.#ttft, latency.num_first_tokens ? latency.ttft_p50_seconds : null);
    push(this.#itl, latency.num_later_tokens ? latency.itl_p50_seconds : null);
    part('tile-rate').textContent = rate === null ? '–' : rate < 10 ? rate.toFixed(1) : count(rate);
    showLatency(
      part,
      'ttft',
      latency.num_first_tokens,
      latency.ttft_p50_seconds,
      latency.ttft_p99_seconds,
    );
    showLatency(
      part,
      'itl',
      latency.num_later_tokens,
      latency.itl_p50_seconds,
      latency.itl_p99_seconds,
    );
    sparkline(part('spark-rate'), this.#rate);
    sparkline(part('spark-ttft'), this.#ttft);
    sparkline(part('spark-itl'), this.#itl);
    for (const name of ['running', 'queued', 'preempted'])
      part(`tile-${name}`).textContent = count(sum(executors, (each) => each[`num_${name}`]));
    const hits = rates.hitRate();
    part('tile-hits').textContent =
      hits === null ? '–' : `${(hits * 100).toFixed(hits < 0.1 ? 1 : 0)} %`;
    const found = sum(executors, (each) => each.counters.num_prefix_hit_tokens),
      asked = sum(executors, (each) => each.counters.num_prefix_query_tokens);
    part('tile-hits-sub').textContent = asked
      ? `${count(found)} of ${count(asked)}`
      : 'no prompts yet';
    part('tile-shared').textContent = count(sum(executors, (each) => each.pool.num_shared));
    const preemptions = sum(
      executors,
      (each) => each.counters.num_recompute_preemptions + each.counters.num_swap_preemptions,
    );
    part('tile-cow').textContent =
      `${count(sum(executors, (each) => each.counters.num_copied_blocks))} copied · ${count(preemptions)} preempted`;
  }
}

function push(history, value) {
  history.push(value);
  if (history.length > HISTORY) history.shift();
}

function sum(executors, of) {
  return executors.reduce((total, executor) => total + of(executor), 0);
}

function showLatency(part, name, number, p50, p99) {
  part(`tile-${name}`).textContent = number ? milliseconds(p50 * 1000) : '–';
  part(`tile-${name}-99`).textContent = number ? `p99 ${milliseconds(p99 * 1000)}` : 'none in 10 s';
}

export class PoolBar {
  #bar;
  #text;
  #parts = new Map();

  constructor(bar, text) {
    this.#bar = bar;
    this.#text = text;
    for (const name of ['shared', 'own', 'fenced', 'cached']) {
      const part = element('span', { className: name });
      this.#parts.set(name, part);
      bar.append(part);
    }
  }

  show(pool) {
    const total = pool.num_total || 1;
    const own = Math.max(0, pool.num_referenced - pool.num_shared - pool.num_fenced);
    const numbers = {
      shared: pool.num_shared,
      own,
      fenced: pool.num_fenced,
      cached: pool.num_cached,
    };
    for (const [name, number] of Object.entries(numbers))
      this.#parts.get(name).style.width = `${(100 * number) / total}%`;
    const host = pool.num_host_total
      ? ` · host ${count(pool.num_host_total - pool.num_host_free)} of ${count(pool.num_host_total)}`
      : '';
    const words = `${count(pool.num_referenced)} referenced, ${count(pool.num_shared)} of them shared, ${count(pool.num_cached)} cached, ${count(pool.num_free)} free`;
    this.#bar.setAttribute('aria-label', `Pool of ${count(pool.num_total)} blocks: ${words}`);
    this.#text.replaceChildren(
      element('b', {}, count(pool.num_referenced)),
      ' referenced · ',
      element('b', {}, count(pool.num_shared)),
      ' shared · ',
      element('b', {}, count(pool.num_cached)),
      ' cached · ',
      element('b', {}, count(pool.num_free)),
      ` free · of ${count(pool.num_total)} × ${pool.block_size} tokens${host}`,
    );
  }
}

export class Tabs {
  #list;
  #onChoose;
  #buttons = new Map();

  constructor(list, onChoose) {
    this.#list = list;
    this.#onChoose = onChoose;
    list.addEventListener('keydown', (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const all = [...this.#buttons.values()],
        at = all.indexOf(document.activeElement);
      if (step === undefined || at < 0) return;
      const next = all[(at + step + all.length) % all.length];
      next.focus();
      next.click();
    });
  }

  show(executors, chosen) {
    for (const [address, button] of this.#buttons) {
      if (executors.some((each) => each.address === address)) continue;
      button.remove();
      this.#buttons.delete(address);
    }
    for (const executor of executors) {
      let button = this.#buttons.get(executor.address);
      if (button === undefined) {
        button = element('button', { type: 'button', role: 'tab', 'aria-controls': 'map-panel' });
        button.addEventListener('click', () => this.#onChoose(executor.address));
        this.#buttons.set(executor.address, button);
        this.#list.append(button);
      }
      const isChosen = executor.address === chosen;
      button.setAttribute('aria-selected', String(isChosen));
      button.tabIndex = isChosen ? 0 : -1;
      const state = !executor.connected ? 'not connected' : executor.draining ? 'draining' : '';
      button.replaceChildren(
        executor.address,
        ...(state ? [' ', element('span', { className: 'off' }, state)] : []),
      );
    }
  }
}

// The list of sequences: rows are kept and changed, so that focus and scroll stay.
export class Rows {
  #body;
  #empty;
  #count;
  #rows = new Map();
  #styleOf;
  #colours;
  #onSelect;
  #isMine;

  constructor(body, empty, counted, { styleOf, colours, onSelect, isMine }) {
    this.#body = body;
    this.#empty = empty;
    this.#count = counted;
    this.#styleOf = styleOf;
    this.#colours = colours;
    this.#onSelect = onSelect;
    this.#isMine = isMine;
  }

  show(executor, selected) {
    const shown = executor?.sequences.slice(0, MAX_ROWS) ?? [];
    const keys = new Set(shown.map((sequence) => sequence.key));
    for (const [key, row] of this.#rows) {
      if (keys.has(key)) continue;
      row.root.remove();
      this.#rows.delete(key);
    }
    shown.forEach((sequence, index) => {
      const row = this.#rowOf(sequence);
      if (this.#body.children[index] !== row.root)
        this.#body.insertBefore(row.root, this.#body.children[index] ?? null);
      row.root.setAttribute('aria-selected', String(sequence.key === selected));
      row.update(sequence, this.#isMine(sequence.request_id));
    });
    const hidden = executor
      ? executor.sequences.length - shown.length + executor.num_more_sequences
      : 0;
    this.#count.textContent = hidden ? `and ${count(hidden)} more` : '';
    this.#empty.hidden = shown.length > 0;
  }

  recolour() {
    for (const row of this.#rows.values()) row.style = null;
  }

  #rowOf(sequence) {
    let row = this.#rows.get(sequence.key);
    if (row === undefined) {
      row = new Row(sequence, () => this.#onSelect(sequence.key));
      this.#rows.set(sequence.key, row);
    }
    const style = this.#styleOf(sequence);
    const name = style ? `${style.hue}/${style.pattern}` : 'none';
    if (row.style !== name) {
      row.style = name;
      row.square.replaceChildren(...(style ? [sequenceSwatch(style, this.#colours())] : []));
    }
    return row;
  }
}

class Row {
  style = null;

  constructor(sequence, onSelect) {
    this.square = element('td');
    this.name = element(
      'button',
      { type: 'button', className: 'link' },
      `${shortId(sequence.request_id)} #${sequence.sample_index}`,
    );
    this.state = element('span');
    this.tokens = element('td', { className: 'num' });
    this.blocks = element('td', { className: 'num' });
    const tenant = element(
      'td',
      { title: `priority ${sequence.priority}` },
      sequence.tenant || '–',
    );
    this.root = element(
      'tr',
      {},
      this.square,
      element('td', {}, this.name),
      element('td', {}, this.state),
      this.tokens,
      this.blocks,
      tenant,
    );
    this.root.addEventListener('click', onSelect);
  }

  // isMine: whether this page has sent it, which it knows from the first token on.
  update(sequence, isMine) {
    this.name.classList.toggle('mine', isMine);
    this.name.title = `${sequence.request_id}, sample ${sequence.sample_index}${isMine ? ': sent from here' : ''}`;
    this.state.className = `state-${sequence.status}`;
    this.state.textContent = sequence.status;
    const computed =
      sequence.num_computed_tokens < sequence.num_prompt_tokens && sequence.num_blocks
        ? `${count(sequence.num_computed_tokens)} / `
        : '';
    this.tokens.textContent = `${computed}${count(sequence.num_tokens)}`;
    this.tokens.title = `${count(sequence.num_prompt_tokens)} of the prompt; ${count(sequence.num_computed_tokens)} computed`;
    this.blocks.textContent = count(sequence.num_blocks);
  }
}
