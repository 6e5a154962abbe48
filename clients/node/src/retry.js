/** When to ask again, and how long to wait first. */

import { invalid } from './errors.js';

/** Only what the service did not run, or can resume, is retried. */
const DEFAULTS = {
  maxAttempts: 5,
  resumeMs: 60_000,
  initialBackoffMs: 100,
  maxBackoffMs: 5_000,
};

/**
 * Check a policy and fill in what it leaves out.
 *
 * @throws {InvalidArgumentError} if a bound makes no sense.
 */
export function retryPolicy(given = {}) {
  for (const name of Object.keys(given)) {
    if (!(name in DEFAULTS)) {
      throw invalid(`retry.${name}`, `one of ${Object.keys(DEFAULTS).join(', ')}`, name);
    }
  }
  const policy = { ...DEFAULTS, ...given };
  if (!Number.isInteger(policy.maxAttempts) || policy.maxAttempts < 1) {
    throw invalid('retry.maxAttempts', 'a whole number, at least 1', policy.maxAttempts);
  }
  if (!(policy.resumeMs >= 0)) {
    throw invalid('retry.resumeMs', 'a number, at least 0', policy.resumeMs);
  }
  if (!(policy.initialBackoffMs > 0)) {
    throw invalid('retry.initialBackoffMs', 'a number above 0', policy.initialBackoffMs);
  }
  if (!(policy.maxBackoffMs >= policy.initialBackoffMs)) {
    throw invalid('retry.maxBackoffMs', 'at least initialBackoffMs', policy.maxBackoffMs);
  }
  return Object.freeze(policy);
}

/**
 * Milliseconds to wait after that many failures in a row.
 *
 * Jitter only ever lengthens the service's own delay, so that a crowd that was told the
 * same delay comes back neither at one instant nor too early.
 */
export function backoffMs(policy, numFailures, retryDelayMs) {
  if (retryDelayMs !== null) return retryDelayMs * (1 + Math.random() / 4);
  const backoff = policy.initialBackoffMs * 2 ** Math.min(numFailures - 1, 32);
  return (Math.min(backoff, policy.maxBackoffMs) * (1 + Math.random())) / 2;
}
