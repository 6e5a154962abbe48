// What the counters of a few seconds say. No DOM in here.

const GROWING = [
  'num_generated_tokens',
  'num_prompt_tokens',
  'num_recompute_preemptions',
  'num_swap_preemptions',
  'num_copied_blocks',
  'num_prefix_hit_tokens',
  'num_prefix_query_tokens',
  'num_finished',
];

// Keeps the counters, summed over executors, of the last `seconds`.
export class Rates {
  #seen = [];

  constructor(seconds = 5) {
    this.seconds = seconds;
  }

  add(snapshot) {
    const sums = { at: snapshot.time_ms / 1000 };
    for (const name of GROWING) {
      sums[name] = snapshot.executors.reduce((sum, executor) => sum + executor.counters[name], 0);
    }
    const last = this.#seen.at(-1);
    // Counters that fell are another scheduler's, or an executor has left: begin anew.
    if (last && (sums.at <= last.at || GROWING.some((name) => sums[name] < last[name])))
      this.#seen = [];
    this.#seen.push(sums);
    while (this.#seen.length > 2 && this.#seen[1].at <= sums.at - this.seconds) this.#seen.shift();
  }

  // Per second; null before there are two snapshots.
  perSecond(name) {
    if (this.#seen.length < 2) return null;
    const first = this.#seen[0],
      last = this.#seen.at(-1);
    return (last[name] - first[name]) / (last.at - first.at);
  }

  // The share of prompt tokens that the prefix cache had, since the scheduler began; null if
  // there was no prompt yet.
  hitRate() {
    const last = this.#seen.at(-1);
    return last && last.num_prefix_query_tokens > 0
      ? last.num_prefix_hit_tokens / last.num_prefix_query_tokens
      : null;
  }
}

export const PHASES = ['plan', 'wire', 'queue', 'prepare', 'forward', 'sample'];

export function phasesOf(step) {
  return PHASES.map((phase) => step[`${phase}_ns`] / 1e6);
}

// Milliseconds of a whole step.
export function lengthOf(step) {
  return phasesOf(step).reduce((sum, each) => sum + each, 0);
}

export function median(numbers) {
  if (numbers.length === 0) return 0;
  const sorted = [...numbers].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// 1, 2 or 5 times a power of ten, at least `value`.
export function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * (1 - 1e-9));
}

export function milliseconds(ms) {
  if (ms >= 10_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  if (ms >= 100) return `${ms.toFixed(0)} ms`;
  if (ms >= 1) return `${ms.toFixed(1)} ms`;
  return ms > 0 ? `${(ms * 1000).toFixed(0)} µs` : '0 ms';
}

export function count(number) {
  return Math.round(number).toLocaleString('en-US');
}
