/**
 * A fake scheduler: a real gRPC server on a free port, with scripted failures.
 *
 * It "generates" numbers: the token at position p of choice c is 100 * c + p + 1, and its
 * text is that number and a blank. So any gap or repeat after a resume shows.
 */

import { Metadata, Server, ServerCredentials, status } from '@grpc/grpc-js';
import { load } from '@grpc/proto-loader';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

import { InferenceService, LOADER_OPTIONS } from '../../src/protos.js';

export const SEED = '18446744073709551557'; // no double has its value

const details = await load('octavo/client/details.proto', {
  ...LOADER_OPTIONS,
  includeDirs: [fileURLToPath(new URL('../../proto/', import.meta.url))],
});

function packed(name, message) {
  const value = details[`octavo.client.${name}`].serialize(message);
  return { type_url: `type.googleapis.com/google.rpc.${name}`, value };
}

export const violation = (field, description) =>
  packed('BadRequest', { field_violations: [{ field, description }] });
export const info = (reason, metadata = {}) =>
  packed('ErrorInfo', { reason, domain: 'octavo', metadata });
export const retryAfter = (seconds, nanos = 0) =>
  packed('RetryInfo', { retry_delay: { seconds, nanos } });

/** The error that ends a call with these details. */
function scripted({ code, message = 'scripted', details: list = [] }) {
  const metadata = new Metadata();
  if (list.length) {
    const bytes = details['octavo.client.Status'].serialize({ code, message, details: list });
    metadata.set('grpc-status-details-bin', bytes);
  }
  return Object.assign(new Error(message), { code, details: message, metadata });
}

/** Start a fake; what a test scripts and inspects are its fields. */
export async function startFake() {
  const fake = {
    failures: [], // one per Generate call: {code, afterDeltas, details, isStarted} or null
    unaryFailures: [],
    deltaMs: 0,
    requests: [],
    metadata: [],
    numUnaryCalls: 0,
    numCancelled: 0,
  };

  async function generate(call) {
    const { request } = call;
    fake.requests.push(request);
    fake.metadata.push(call.metadata);
    let isCancelled = false;
    call.on('cancelled', () => {
      isCancelled = true;
      fake.numCancelled += 1;
    });
    const failure = fake.failures.shift() ?? null;
    if (failure?.isStarted ?? true) call.write({ started: started(request) });
    let numSent = 0;
    for (const response of body(request)) {
      if (isCancelled || numSent === failure?.afterDeltas) break;
      call.write(response);
      numSent += 1;
      await sleep(fake.deltaMs);
    }
    if (isCancelled) return;
    for (const response of failure?.beforeStatus ?? []) call.write(response);
    if (failure) {
      call.emit('error', scripted(failure));
      return;
    }
    call.write({ usage: { num_prompt_tokens: 3, num_completion_tokens: 5, queue_seconds: 0.5 } });
    call.end();
  }

  const unary = (answer) => (call, callback) => {
    fake.numUnaryCalls += 1;
    fake.metadata.push(call.metadata);
    const failure = fake.unaryFailures.shift();
    if (failure) callback(scripted(failure));
    else callback(null, answer(call.request));
  };

  const server = new Server();
  server.addService(InferenceService.service, {
    Generate: generate,
    Tokenize: unary(({ text, chat }) => ({
      token_ids: [...(text ?? chat.messages[0].content)].map((letter) => letter.charCodeAt(0)),
    })),
    Detokenize: unary(({ token_ids: ids }) => ({ text: String.fromCharCode(...ids) })),
    GetModel: unary(() => ({ model: 'fake', max_model_len: 512, kv_capacity_tokens: '1024' })),
  });
  const port = await new Promise((resolve, reject) => {
    server.bindAsync('127.0.0.1:0', ServerCredentials.createInsecure(), (error, bound) =>
      error ? reject(error) : resolve(bound),
    );
  });
  fake.target = `127.0.0.1:${port}`;
  fake.stop = () => server.forceShutdown();
  return fake;
}

function started(request) {
  const seed = request.sampling?.seed ?? SEED;
  return { request_id: request.request_id || 'drawn', model: 'fake', num_prompt_tokens: 3, seed };
}

function* body(request) {
  const received = new Map(request.resume.map(({ index, token_ids: ids }) => [index, ids.length]));
  const numTokens = request.stopping?.max_tokens ?? 2;
  const indices = Array.from({ length: request.n || 1 }, (_, index) => index);
  for (let position = 0; position < numTokens; position += 1) {
    for (const index of indices) {
      if (position < (received.get(index) ?? 0)) continue;
      const number = 100 * index + position + 1;
      yield { delta: { index, text: `${number} `, token_ids: [number] } };
    }
  }
  for (const index of indices) {
    yield { finished: { index, num_tokens: numTokens, reason: 'FINISH_REASON_LENGTH' } };
  }
}

export { status };
