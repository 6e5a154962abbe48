/** The client: calls, deadlines, cancelling. What to retry is decided in session.js. */

import { performance } from 'node:perf_hooks';
import { setTimeout as sleep } from 'node:timers/promises';

import { Metadata } from '@grpc/grpc-js';

import {
  CancelledError,
  DeadlineExceededError,
  InternalError,
  OctavoError,
  OverloadedError,
  UnavailableError,
  deadlinePassed,
  fromFailure,
  invalid,
} from './errors.js';
import { CompletionBuilder } from './events.js';
import { InferenceService } from './protos.js';
import { buildDetokenize, buildGenerate, buildTokenize } from './request.js';
import { backoffMs, retryPolicy } from './retry.js';
import { Session } from './session.js';
import { channelCredentials, channelOptions, parseTarget } from './target.js';

const MAX_TIMEOUT_MS = 2_000_000_000; // 23 days: Node's timers take little more
const TIMER_MS = 50; // gRPC's timer may fire so much before ours
const OPTIONS = ['apiKey', 'allowInsecureKey', 'tls', 'timeoutMs', 'unaryTimeoutMs', 'retry'];

/** Talks to a scheduler. See index.d.ts for what each method takes and gives. */
export class OctavoClient {
  #stub;
  #address;
  #metadata;
  #policy;
  #timeoutMs;
  #unaryTimeoutMs;
  #live = new Set(); // an AbortController for every call under way
  #isClosed = false;

  constructor(target, options = {}) {
    for (const name of Object.keys(options)) {
      if (!OPTIONS.includes(name)) {
        throw invalid(name, `left out: there is only ${OPTIONS.join(', ')}`, name);
      }
    }
    const address = parseTarget(target);
    if (options.tls && address.tls === false) {
      throw invalid('tls', 'left out with a target grpc://, which says that there is none', 'both');
    }
    const tls = options.tls || address.tls;
    this.#policy = retryPolicy(options.retry);
    this.#timeoutMs = timeout('timeoutMs', options.timeoutMs ?? 600_000);
    this.#unaryTimeoutMs = timeout('unaryTimeoutMs', options.unaryTimeoutMs ?? 30_000);
    const mayCarryKey = tls || address.isLocal || options.allowInsecureKey === true;
    this.#metadata = authorization(options.apiKey, mayCarryKey);
    this.#address = address.address;
    this.#stub = new InferenceService(
      address.address,
      channelCredentials(tls),
      channelOptions(address, tls),
    );
  }

  generate({ signal, timeoutMs, ...params }) {
    const limitMs = timeout('timeoutMs', timeoutMs ?? this.#timeoutMs);
    const session = new Session(buildGenerate(params), this.#policy);
    return this.#stream(session, signal, deadlineIn(limitMs));
  }

  async complete(params) {
    const builder = new CompletionBuilder();
    for await (const event of this.generate(params)) builder.add(event);
    return builder.build();
  }

  async chat(messages, params = {}) {
    return this.complete({ ...params, chat: messages });
  }

  async tokenize(input, { model = '', ...options } = {}) {
    const response = await this.#unary('Tokenize', buildTokenize(input, model), options);
    return response.token_ids;
  }

  async detokenize(tokenIds, { keep_special_tokens = false, model = '', ...options } = {}) {
    const request = buildDetokenize(tokenIds, keep_special_tokens, model);
    return (await this.#unary('Detokenize', request, options)).text;
  }

  async getModel({ model = '', ...options } = {}) {
    const response = await this.#unary('GetModel', { model }, options);
    return { ...response, kv_capacity_tokens: Number(response.kv_capacity_tokens) };
  }

  close() {
    if (this.#isClosed) return;
    this.#isClosed = true;
    const reason = new CancelledError('the client was closed', { code: 'CANCELLED' });
    for (const controller of this.#live) controller.abort(reason);
    this.#stub.close();
  }

  /** Yield a request's events, over as many calls as it takes. */
  async *#stream(session, signal, deadline) {
    const live = this.#enter(signal);
    try {
      for (;;) {
        let failure;
        try {
          yield* this.#oneCall(session, live.signal, deadline);
          return;
        } catch (error) {
          live.signal.throwIfAborted();
          failure = this.#translate(error, deadline);
        }
        const delayMs = session.afterFailure(failure, performance.now());
        if (delayMs === null) {
          yield* session.finish();
          return;
        }
        await pause(delayMs, live.signal, deadline, failure);
      }
    } finally {
      live.leave();
    }
  }

  async *#oneCall(session, signal, deadline) {
    const call = this.#stub.Generate(session.nextRequest(), this.#metadata, { deadline: deadline.at });
    call.on('error', () => {}); // the one after our own cancel has no other listener
    const cancel = () => call.cancel();
    signal.addEventListener('abort', cancel, { once: true });
    try {
      for await (const response of call) {
        signal.throwIfAborted(); // some responses may have been waiting here
        yield* session.receive(response);
      }
      yield* session.finish();
    } finally {
      signal.removeEventListener('abort', cancel);
      call.cancel();
    }
  }

  /** Call once, and again while the service is only busy or away. */
  async #unary(method, request, { signal, timeoutMs, ...rest }) {
    const [unknown] = Object.keys(rest);
    if (unknown) throw invalid(unknown, 'left out: no such option', rest[unknown]);
    const deadline = deadlineIn(timeout('timeoutMs', timeoutMs ?? this.#unaryTimeoutMs));
    const live = this.#enter(signal);
    try {
      for (let attempt = 1; ; attempt += 1) {
        try {
          return await this.#callOnce(method, request, live.signal, deadline);
        } catch (error) {
          live.signal.throwIfAborted();
          const failure = this.#translate(error, deadline);
          const isPassing = failure instanceof UnavailableError || failure instanceof OverloadedError;
          if (!isPassing || attempt >= this.#policy.maxAttempts) throw failure;
          const delayMs = backoffMs(this.#policy, attempt, failure.retryDelayMs);
          await pause(delayMs, live.signal, deadline, failure);
        }
      }
    } finally {
      live.leave();
    }
  }

  #callOnce(method, request, signal, deadline) {
    return new Promise((resolve, reject) => {
      const options = { deadline: deadline.at };
      const call = this.#stub[method](request, this.#metadata, options, (error, response) => {
        signal.removeEventListener('abort', cancel);
        if (error) reject(error);
        else resolve(response);
      });
      const cancel = () => call.cancel();
      signal.addEventListener('abort', cancel, { once: true });
    });
  }

  /** Join the caller's signal and `close` in one signal for the time of a call. */
  #enter(signal) {
    if (this.#isClosed) throw new CancelledError('the client was closed', { code: 'CANCELLED' });
    signal?.throwIfAborted();
    const controller = new AbortController();
    const abort = () => controller.abort(signal.reason);
    signal?.addEventListener('abort', abort, { once: true });
    this.#live.add(controller);
    const leave = () => {
      signal?.removeEventListener('abort', abort);
      this.#live.delete(controller);
    };
    return { signal: controller.signal, leave };
  }

  #translate(error, deadline) {
    if (error instanceof OctavoError || typeof error?.code !== 'number') throw error;
    const failure = fromFailure(error, this.#address);
    const isPast = Date.now() >= deadline.at - TIMER_MS;
    const isVague =
      failure instanceof CancelledError ||
      failure instanceof InternalError ||
      failure instanceof UnavailableError;
    if (failure instanceof DeadlineExceededError || (isPast && !failure.reason && isVague)) {
      return deadlinePassed(deadline.limitMs, error);
    }
    return failure;
  }
}

/** @throws the failure, if the pause would end after the deadline; the signal's reason. */
async function pause(delayMs, signal, deadline, failure) {
  if (Date.now() + delayMs >= deadline.at) throw failure;
  try {
    await sleep(delayMs, undefined, { signal });
  } catch {
    signal.throwIfAborted();
  }
}

function deadlineIn(limitMs) {
  return { at: Date.now() + limitMs, limitMs };
}

function timeout(name, value) {
  if (!(typeof value === 'number' && value > 0 && value <= MAX_TIMEOUT_MS)) {
    throw invalid(name, `a number above 0, to ${MAX_TIMEOUT_MS}`, value);
  }
  return value;
}

/** The metadata of every call. A key goes over an encrypted or a local connection only. */
function authorization(apiKey, mayCarryKey) {
  const metadata = new Metadata();
  if (apiKey === undefined || apiKey === null || apiKey === '') return metadata;
  if (typeof apiKey !== 'string' || !/^[\x21-\x7e]+$/.test(apiKey)) {
    throw invalid('apiKey', 'printable ASCII without blanks', 'something else');
  }
  if (!mayCarryKey) {
    throw invalid('apiKey', 'sent with tls, or with allowInsecureKey: true', 'neither');
  }
  metadata.set('authorization', `Bearer ${apiKey}`);
  return metadata;
}
