/** From the wire's responses to what a caller reads: plain objects, told apart by `type`. */

import { InternalError } from './errors.js';

const REASONS = {
  FINISH_REASON_STOP: 'stop',
  FINISH_REASON_LENGTH: 'length',
  FINISH_REASON_CANCELLED: 'cancelled',
  FINISH_REASON_ERROR: 'error',
};

/** Read one response; null for a kind that this client does not know yet. */
export function parseEvent(response) {
  switch (response.event) {
    case 'started':
      return { type: 'started', ...response.started, seed: BigInt(response.started.seed) };
    case 'delta':
      return { type: 'delta', ...response.delta };
    case 'finished':
      return parseFinished(response.finished);
    case 'usage':
      return { type: 'usage', ...response.usage };
    default:
      return null;
  }
}

function parseFinished(finished) {
  const reason = REASONS[finished.reason];
  if (reason === undefined) {
    throw broken(`choice ${finished.index} ended with unknown reason ${finished.reason}`);
  }
  return {
    type: 'finished',
    index: finished.index,
    reason,
    num_tokens: finished.num_tokens,
    stop: finished.stop ?? null,
    stop_token_id: finished.stop_token_id ?? null,
    cumulative_logprob: finished.cumulative_logprob ?? null,
    error: finished.error,
  };
}

/** The error for a service that broke its own contract. */
export function broken(message) {
  return new InternalError(message, { code: 'INTERNAL' });
}

/** Adds the events of a stream up to a Completion. */
export class CompletionBuilder {
  #started = null;
  #usage = null;
  #deltas = new Map();
  #finished = new Map();

  add(event) {
    if (event.type === 'started') this.#started = event;
    else if (event.type === 'usage') this.#usage = event;
    else if (event.type === 'finished') this.#finished.set(event.index, event);
    else if (this.#deltas.has(event.index)) this.#deltas.get(event.index).push(event);
    else this.#deltas.set(event.index, [event]);
  }

  /** @throws {InternalError} if the stream lacked its start, its usage or any finished choice. */
  build() {
    if (!this.#started || !this.#usage || !this.#finished.size) {
      throw broken('the stream ended without an answer');
    }
    const { request_id, model, seed } = this.#started;
    const { type: _, ...usage } = this.#usage;
    const indices = [...this.#finished.keys()].sort((one, other) => one - other);
    const choices = indices.map((index) => this.#choice(index));
    return { request_id, model, seed, choices, usage, text: choices[0].text };
  }

  #choice(index) {
    const deltas = this.#deltas.get(index) ?? [];
    const echo = deltas.filter((delta) => delta.is_prompt);
    const own = deltas.filter((delta) => !delta.is_prompt);
    const { type: _, reason, num_tokens: __, ...end } = this.#finished.get(index);
    return {
      ...end,
      text: own.map((delta) => delta.text).join(''),
      token_ids: own.flatMap((delta) => delta.token_ids),
      logprobs: own.flatMap((delta) => delta.logprobs),
      finish_reason: reason,
      prompt_text: echo.map((delta) => delta.text).join(''),
      prompt_token_ids: echo.flatMap((delta) => delta.token_ids),
      prompt_logprobs: echo.flatMap((delta) => delta.logprobs),
    };
  }
}
