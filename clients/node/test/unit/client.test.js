import assert from 'node:assert/strict';
import { afterEach, beforeEach, test } from 'node:test';

import {
  CancelledError,
  ConnectionFailedError,
  DeadlineExceededError,
  InternalError,
  InvalidArgumentError,
  NeverFitsError,
  OctavoClient,
  OverloadedError,
  UnauthenticatedError,
  UnavailableError,
} from '@octavo/client';

import { SEED, info, retryAfter, startFake, status, violation } from './fake.js';

const QUICK = { initialBackoffMs: 5, maxBackoffMs: 10 };
let fake;
let client;

beforeEach(async () => {
  fake = await startFake();
  client = new OctavoClient(fake.target, { retry: QUICK });
});

afterEach(() => {
  client.close();
  fake.stop();
});

async function read(events) {
  const seen = [];
  for await (const event of events) seen.push(event);
  return seen;
}

/** Wait until a condition holds; a test that waits in vain fails by its own assertion. */
async function until(condition) {
  for (let attempt = 0; attempt < 500 && !condition(); attempt += 1) {
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

test('a stream is one started, the deltas, one finished per choice and one usage', async () => {
  const events = await read(client.generate({ text: 'hi', stopping: { max_tokens: 2 } }));
  assert.deepEqual(
    events.map((event) => event.type),
    ['started', 'delta', 'delta', 'finished', 'usage'],
  );
  assert.equal(events[0].seed, BigInt(SEED));
  assert.deepEqual(events[1], {
    type: 'delta',
    index: 0,
    text: '1 ',
    token_ids: [1],
    logprobs: [],
    is_prompt: false,
  });
  assert.equal(events[3].reason, 'length');
  assert.equal(events[3].stop, null);
  assert.equal(events[4].queue_seconds, 0.5);
});

test('complete collects every choice', async () => {
  const whole = await client.complete({ tokens: [5], n: 2, stopping: { max_tokens: 3 } });
  assert.deepEqual(
    whole.choices.map((choice) => choice.token_ids),
    [
      [1, 2, 3],
      [101, 102, 103],
    ],
  );
  assert.equal(whole.text, '1 2 3 ');
  assert.equal(whole.choices[1].text, '101 102 103 ');
  assert.equal(whole.choices[1].finish_reason, 'length');
  assert.deepEqual(fake.requests[0].tokens.ids, [5]);
});

test('chat sends the messages', async () => {
  await client.chat([{ role: 'user', content: 'Hi' }]);
  assert.deepEqual(fake.requests[0].chat.messages, [{ role: 'user', content: 'Hi' }]);
});

for (const seed of [2n ** 64n - 1n, '18446744073709551615', 2n ** 63n + 1n, 0, 7]) {
  test(`seed ${seed} (${typeof seed}) reaches the service with every bit`, async () => {
    const whole = await client.complete({ text: 'a', sampling: { seed } });
    assert.equal(fake.requests[0].sampling.seed, String(seed));
    assert.equal(whole.seed, BigInt(seed));
  });
}

test('what is not given is not sent', async () => {
  await client.complete({ text: 'a', sampling: { temperature: 0, top_k: undefined } });
  const { sampling, stopping } = fake.requests[0];
  assert.equal(sampling.temperature, 0);
  assert.ok(!('top_k' in sampling) && !('seed' in sampling));
  assert.equal(stopping, null);
});

test('a stream that breaks is resumed without a gap or a repeat', async () => {
  fake.failures = [
    { code: status.UNAVAILABLE, afterDeltas: 5 },
    { code: status.UNAVAILABLE, isStarted: false, afterDeltas: 0 }, // not ready yet
    { code: status.CANCELLED, afterDeltas: 4 }, // torn down: we did not cancel
  ];
  const request = { text: 'hi', n: 2, stopping: { max_tokens: 6 }, request_id: 'mine' };
  const events = await read(client.generate(request));
  const numbers = { 0: [], 1: [] };
  for (const event of events) {
    if (event.type === 'delta') numbers[event.index].push(...event.token_ids);
  }
  assert.deepEqual(numbers, { 0: [1, 2, 3, 4, 5, 6], 1: [101, 102, 103, 104, 105, 106] });
  const count = (type) => events.filter((event) => event.type === type).length;
  assert.deepEqual([count('started'), count('finished'), count('usage')], [1, 2, 1]);
  const last = fake.requests.at(-1);
  assert.deepEqual(last.resume, [
    { index: 0, token_ids: [1, 2, 3, 4, 5] },
    { index: 1, token_ids: [101, 102, 103, 104] },
  ]);
  assert.equal(last.sampling.seed, SEED);
  assert.equal(new Set(fake.requests.map((each) => each.request_id)).size, 4);
  assert.ok(fake.requests.every((each) => each.text === 'hi' && each.n === 2));
});

test('a choice that a draining service ends as cancelled goes on elsewhere', async () => {
  const end = { finished: { index: 0, reason: 'FINISH_REASON_CANCELLED', num_tokens: 2 } };
  fake.failures = [{ code: status.UNAVAILABLE, afterDeltas: 2, beforeStatus: [end] }];
  const whole = await client.complete({ text: 'hi', stopping: { max_tokens: 4 } });
  assert.deepEqual(whole.choices[0].token_ids, [1, 2, 3, 4]);
  assert.equal(whole.choices[0].finish_reason, 'length');
});

test('losing only the usage is no error', async () => {
  fake.failures = [{ code: status.UNAVAILABLE, afterDeltas: 4 }];
  const whole = await client.complete({ text: 'hi', stopping: { max_tokens: 3 } });
  assert.equal(whole.usage.num_completion_tokens, 3);
  assert.equal(fake.requests.length, 1);
});

test('resuming gives up after resumeMs without progress', async () => {
  client.close();
  client = new OctavoClient(fake.target, { retry: { ...QUICK, resumeMs: 60 } });
  fake.failures = [
    { code: status.UNAVAILABLE, afterDeltas: 1 },
    ...Array(200).fill({ code: status.UNAVAILABLE, isStarted: false, afterDeltas: 0 }),
  ];
  await assert.rejects(client.complete({ text: 'hi' }), UnavailableError);
  assert.ok(fake.requests.length > 2);
  assert.ok(fake.failures.length > 0);
});

test('an error of the service after tokens is not resumed', async () => {
  fake.failures = [{ code: status.INTERNAL, message: 'poison', afterDeltas: 1 }];
  await assert.rejects(client.complete({ text: 'hi' }), (error) => {
    assert.ok(error instanceof InternalError);
    assert.match(error.message, /poison/);
    return true;
  });
  assert.equal(fake.requests.length, 1);
});

test('an overloaded service is asked again, no sooner than it says', async () => {
  const details = [info('QUEUE_FULL'), retryAfter(0, 300_000_000)];
  fake.failures = [{ code: status.RESOURCE_EXHAUSTED, isStarted: false, afterDeltas: 0, details }];
  const begin = performance.now();
  await client.complete({ text: 'hi' });
  assert.ok(performance.now() - begin >= 295);
  assert.equal(fake.requests.length, 2);
});

test('the last refusal carries reason and delay', async () => {
  const details = [info('QUEUE_FULL', { limit: '8' }), retryAfter(0, 20_000_000)];
  fake.failures = Array(9).fill({
    code: status.RESOURCE_EXHAUSTED,
    isStarted: false,
    afterDeltas: 0,
    details,
  });
  await assert.rejects(client.complete({ text: 'hi' }), (error) => {
    assert.ok(error instanceof OverloadedError);
    assert.equal(error.code, 'RESOURCE_EXHAUSTED');
    assert.equal(error.reason, 'QUEUE_FULL');
    assert.deepEqual(error.metadata, { limit: '8' });
    assert.equal(error.retryDelayMs, 20);
    return true;
  });
  assert.equal(fake.requests.length, 5);
});

test('a delay that ends after the deadline is not waited for', async () => {
  const details = [retryAfter(3600)];
  fake.failures = [{ code: status.RESOURCE_EXHAUSTED, isStarted: false, afterDeltas: 0, details }];
  await assert.rejects(client.complete({ text: 'hi', timeoutMs: 20_000 }), OverloadedError);
});

test('INVALID_ARGUMENT names field and bound, and is not retried', async () => {
  const details = [violation('sampling.top_p', 'sampling.top_p must be above 0, to 1, got 2')];
  fake.failures = [{ code: status.INVALID_ARGUMENT, isStarted: false, afterDeltas: 0, details }];
  await assert.rejects(client.complete({ text: 'hi' }), (error) => {
    assert.ok(error instanceof InvalidArgumentError);
    assert.equal(error.field, 'sampling.top_p');
    assert.deepEqual(error.fieldViolations, [
      { field: 'sampling.top_p', description: 'sampling.top_p must be above 0, to 1, got 2' },
    ]);
    return true;
  });
  assert.equal(fake.requests.length, 1);
});

for (const [code, Kind] of [
  [status.FAILED_PRECONDITION, NeverFitsError],
  [status.UNAUTHENTICATED, UnauthenticatedError],
]) {
  test(`${status[code]} is a ${Kind.name}, at once`, async () => {
    fake.failures = [{ code, isStarted: false, afterDeltas: 0 }];
    await assert.rejects(client.complete({ text: 'hi' }), Kind);
    assert.equal(fake.requests.length, 1);
  });
}

test('details that are garbage do not hide the status', async () => {
  const details = [{ type_url: 'type.googleapis.com/google.rpc.RetryInfo', value: Buffer.from([255]) }];
  fake.failures = [{ code: status.FAILED_PRECONDITION, isStarted: false, afterDeltas: 0, details }];
  await assert.rejects(client.complete({ text: 'hi' }), NeverFitsError);
});

test('nothing listening is ConnectionFailedError, with the address', async () => {
  const nobody = new OctavoClient('127.0.0.1:1', { retry: { ...QUICK, maxAttempts: 2 } });
  await assert.rejects(nobody.getModel(), (error) => {
    assert.ok(error instanceof ConnectionFailedError);
    assert.match(error.message, /127\.0\.0\.1:1/);
    return true;
  });
  nobody.close();
});

test('the deadline ends a stream, and the service hears of it', async () => {
  fake.deltaMs = 20;
  const request = { text: 'hi', stopping: { max_tokens: 5000 }, timeoutMs: 150 };
  await assert.rejects(client.complete(request), (error) => {
    assert.ok(error instanceof DeadlineExceededError);
    assert.match(error.message, /150 ms/);
    return true;
  });
  await until(() => fake.numCancelled === 1);
  assert.equal(fake.numCancelled, 1);
});

test('leaving the loop cancels the call', async () => {
  fake.deltaMs = 10;
  for await (const event of client.generate({ text: 'hi', stopping: { max_tokens: 5000 } })) {
    if (event.type === 'delta') break;
  }
  await until(() => fake.numCancelled === 1);
  assert.equal(fake.numCancelled, 1);
});

test('aborting cancels the call and throws the reason', async () => {
  fake.deltaMs = 10;
  const controller = new AbortController();
  const request = { text: 'hi', stopping: { max_tokens: 5000 }, signal: controller.signal };
  const reason = new Error('enough');
  const reading = read(client.generate(request));
  setTimeout(() => controller.abort(reason), 60);
  await assert.rejects(reading, reason);
  await until(() => fake.numCancelled === 1);
  assert.equal(fake.numCancelled, 1);
});

test('a signal that is aborted already sends nothing', async () => {
  const signal = AbortSignal.abort();
  await assert.rejects(client.complete({ text: 'hi', signal }), { name: 'AbortError' });
  await assert.rejects(client.tokenize('hi', { signal }), { name: 'AbortError' });
  assert.equal(fake.requests.length + fake.numUnaryCalls, 0);
});

test('aborting ends a wait between retries', async () => {
  const details = [retryAfter(3600)];
  fake.failures = [{ code: status.RESOURCE_EXHAUSTED, isStarted: false, afterDeltas: 0, details }];
  const controller = new AbortController();
  const request = { text: 'hi', timeoutMs: 2e9, signal: controller.signal };
  const whole = client.complete(request);
  setTimeout(() => controller.abort(), 100);
  await assert.rejects(whole, { name: 'AbortError' });
  assert.equal(fake.requests.length, 1);
});

test('close cancels what runs, and later calls are refused', async () => {
  fake.deltaMs = 10;
  const reading = read(client.generate({ text: 'hi', stopping: { max_tokens: 5000 } }));
  await until(() => fake.requests.length === 1);
  client.close();
  client.close();
  await assert.rejects(reading, CancelledError);
  await assert.rejects(client.getModel(), CancelledError);
});

test('unary calls give plain values, and are retried', async () => {
  fake.unaryFailures = [{ code: status.UNAVAILABLE }, { code: status.UNAVAILABLE }];
  assert.deepEqual(await client.tokenize('ab'), [97, 98]);
  assert.equal(fake.numUnaryCalls, 3);
  assert.deepEqual(await client.tokenize([{ role: 'user', content: 'ab' }]), [97, 98]);
  assert.equal(await client.detokenize([104, 105]), 'hi');
  const model = await client.getModel();
  assert.deepEqual([model.model, model.kv_capacity_tokens], ['fake', 1024]);
});

test('the API key travels as a bearer token', async () => {
  const keyed = new OctavoClient(fake.target, { apiKey: 'octavo-secret' });
  await keyed.complete({ text: 'hi' });
  await keyed.getModel();
  keyed.close();
  assert.deepEqual(
    fake.metadata.map((metadata) => metadata.get('authorization')),
    [['Bearer octavo-secret'], ['Bearer octavo-secret']],
  );
});
