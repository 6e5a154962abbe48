/**
 * One request over as many calls as it takes: what to send, what to pass on, when to give up.
 *
 * No I/O in here. A stream that broke after tokens came is resumed: the next call brings
 * the tokens received and the seed in use, and the service goes on after them.
 */

import { CancelledError, OverloadedError, UnavailableError } from './errors.js';
import { broken, parseEvent } from './events.js';
import { backoffMs } from './retry.js';

const MAX_REQUEST_ID_CHARS = 128;
const PROVISIONAL = new Set(['cancelled', 'error']);

/**
 * State of one request across calls.
 *
 * Invariant: the events passed on form one unbroken stream (a started, deltas without a gap
 * or a repeat, one finished per choice, a usage), however many calls it took.
 */
export class Session {
  #request;
  #policy;
  #choices = new Map(); // index -> {tokenIds, echoCall, finished}
  #started = null;
  // An end by cancellation or error is held back until the call's status is known: a
  // draining service ends its choices so, and then says UNAVAILABLE.
  #held = [];
  #isUsageSeen = false;
  #numCalls = 0;
  #numFailures = 0;
  #failingSinceMs = null;

  constructor(request, policy) {
    this.#request = request;
    this.#policy = policy;
  }

  /** What to send on the next call. */
  nextRequest() {
    this.#numCalls += 1;
    this.#held = [];
    if (this.#numCalls === 1) return this.#request;
    const request = { ...this.#request };
    if (request.request_id) {
      // The broken call may still be live at the service, under the old id.
      const suffix = `.r${this.#numCalls - 1}`;
      request.request_id = request.request_id.slice(0, MAX_REQUEST_ID_CHARS - suffix.length) + suffix;
    }
    if (this.#started) {
      request.sampling = { ...request.sampling, seed: String(this.#started.seed) };
    }
    request.resume = [...this.#choices]
      .filter(([, choice]) => choice.tokenIds.length)
      .sort(([one], [other]) => one - other)
      .map(([index, choice]) => ({ index, token_ids: choice.tokenIds }));
    return request;
  }

  /** Take in one response; return the events to pass on. */
  receive(response) {
    const event = parseEvent(response);
    switch (event?.type) {
      case 'started':
        if (this.#started) return [];
        this.#started = event;
        return [event];
      case 'delta':
        return this.#receiveDelta(event);
      case 'finished':
        return this.#receiveFinished(event);
      case 'usage':
        this.#held.push(event);
        return [];
      default:
        return [];
    }
  }

  #choice(index) {
    if (!this.#choices.has(index)) {
      this.#choices.set(index, { tokenIds: [], echoCall: 0, finished: null });
    }
    return this.#choices.get(index);
  }

  #receiveDelta(delta) {
    const choice = this.#choice(delta.index);
    if (choice.finished) return [];
    if (delta.is_prompt) {
      choice.echoCall ||= this.#numCalls;
      return choice.echoCall === this.#numCalls ? [delta] : [];
    }
    if (!delta.token_ids.length && !delta.text) return [];
    choice.tokenIds.push(...delta.token_ids);
    this.#numFailures = 0;
    this.#failingSinceMs = null;
    return [delta];
  }

  #receiveFinished(event) {
    const choice = this.#choice(event.index);
    if (choice.finished) return [];
    if (PROVISIONAL.has(event.reason)) {
      this.#held.push(event);
      return [];
    }
    choice.finished = event;
    return [event];
  }

  /**
   * The call ended well; return the last events.
   *
   * @throws {InternalError} if a choice has no end.
   */
  finish() {
    const events = this.#held;
    this.#held = [];
    for (const event of events) {
      if (event.type === 'finished') this.#choices.get(event.index).finished = event;
      else this.#isUsageSeen = true;
    }
    if (!this.#started || !this.#isComplete) {
      throw broken('the service ended the stream before every choice was finished');
    }
    return this.#isUsageSeen ? events : [...events, this.#ownUsage()];
  }

  /**
   * The call failed; say what next.
   *
   * @param {OctavoError} failure what it failed with.
   * @param {number} nowMs monotonic time.
   * @returns {number | null} milliseconds to wait before the next call; null: the answer is
   *   complete anyway (only the usage was lost), end with `finish`.
   * @throws the failure, if it is not worth another call.
   */
  afterFailure(failure, nowMs) {
    // We did not cancel: the service's side went away in mid-call.
    const isBreak = failure instanceof UnavailableError || failure instanceof CancelledError;
    if (isBreak && this.#isComplete) return null;
    if (!isBreak && !(failure instanceof OverloadedError)) throw failure;
    this.#numFailures += 1;
    const delayMs = backoffMs(this.#policy, this.#numFailures, failure.retryDelayMs);
    if (this.#hasTokens) {
      this.#failingSinceMs ??= nowMs;
      if (nowMs + delayMs - this.#failingSinceMs > this.#policy.resumeMs) throw failure;
    } else if (this.#numCalls >= this.#policy.maxAttempts) {
      throw failure;
    }
    return delayMs;
  }

  get #isComplete() {
    const ended = [...this.#choices.values()].filter((choice) => choice.finished);
    return ended.length >= (this.#request.n || 1);
  }

  get #hasTokens() {
    return [...this.#choices.values()].some((choice) => choice.tokenIds.length);
  }

  /** A usage for a stream that lost the service's; its times are not known. */
  #ownUsage() {
    let numTokens = 0;
    for (const choice of this.#choices.values()) numTokens += choice.finished.num_tokens;
    return {
      type: 'usage',
      num_prompt_tokens: this.#started.num_prompt_tokens,
      num_completion_tokens: numTokens,
      cached_prompt_tokens: 0,
      num_preemptions: 0,
      queue_seconds: 0,
      first_token_seconds: 0,
      total_seconds: 0,
    };
  }
}
