// The latest steps of every executor, and how high their chart is. No DOM in here.

import { niceCeiling } from './rates.js';

const MAX_STEPS = 256;
const OUTLIER = 1.6; // times the 95th percentile: longer bars are cut off, and marked

// Keeps the latest steps of each executor, whichever is shown.
export class StepHistory {
  #steps = new Map();

  add(executors) {
    for (const { address, steps } of executors) {
      const kept = this.#steps.get(address) ?? [],
        last = kept.at(-1);
      // Another scheduler counts anew, but its steps are later.
      const fresh = steps.filter(
        (step) =>
          !last || step.step_id > last.step_id || step.planned_unix_ns > last.planned_unix_ns,
      );
      this.#steps.set(address, [...kept, ...fresh].slice(-MAX_STEPS));
    }
  }

  of(address) {
    return this.#steps.get(address) ?? [];
  }
}

// The top of the scale: nearly all bars fit; one that took seconds must not flatten the rest.
export function scaleOf(lengths) {
  if (lengths.length === 0) return 1;
  const sorted = [...lengths].sort((a, b) => a - b);
  const high = sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * 0.95))];
  return niceCeiling(Math.min(sorted.at(-1), high * OUTLIER));
}
