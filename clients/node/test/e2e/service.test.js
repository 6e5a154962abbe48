/**
 * Against the running services. The environment says where they are, and what plain runs
 * of the Python SDK gave:
 *   OCTAVO_TEST_TARGET    HOST:PORT
 *   OCTAVO_TEST_EXPECTED  a JSON file: {greedy, seeded, chat, tokens}
 *   OCTAVO_TEST_PROTOS    folder of the protos, for the admin's view
 */

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { after, before, test } from 'node:test';

import { credentials, loadPackageDefinition } from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';
import {
  AlreadyExistsError,
  InvalidArgumentError,
  NotFoundError,
  OctavoClient,
} from '@octavo/client';

import { startProxy } from './cutting_proxy.js';

const TARGET = process.env.OCTAVO_TEST_TARGET;
const EXPECTED = JSON.parse(readFileSync(process.env.OCTAVO_TEST_EXPECTED, 'utf8'));
const GREEDY = { sampling: { temperature: 0 }, stopping: { max_tokens: 48, ignore_eos: true } };

let client;
let admin;

before(() => {
  client = new OctavoClient(TARGET);
  const definitions = loadSync('octavo/v1/admin.proto', {
    includeDirs: [process.env.OCTAVO_TEST_PROTOS],
    keepCase: true,
    defaults: true,
  });
  const { AdminService } = loadPackageDefinition(definitions).octavo.v1;
  admin = new AdminService(TARGET, credentials.createInsecure());
});

after(() => {
  client.close();
  admin.close();
});

function snapshot() {
  return new Promise((resolve, reject) => {
    admin.Snapshot({}, { deadline: Date.now() + 10_000 }, (error, { snapshot: state } = {}) =>
      error ? reject(error) : resolve(state.executors[0]),
    );
  });
}

async function read(events) {
  const seen = [];
  for await (const event of events) seen.push(event);
  return seen;
}

const textOf = (events) => events.map((event) => event.text ?? '').join('');

test('a greedy stream gives the text of the Python SDK', async () => {
  const events = await read(client.generate({ text: EXPECTED.greedy.prompt, ...GREEDY }));
  assert.equal(textOf(events), EXPECTED.greedy.text);
  assert.ok(events.filter((event) => event.type === 'delta').length > 10);
  assert.equal(events.at(-1).type, 'usage');
  assert.equal(events.at(-1).num_completion_tokens, 48);
});

test('two choices with a seed of 64 bits draw the tokens of the Python SDK', async () => {
  const { prompt, seed, choices } = EXPECTED.seeded;
  const whole = await client.complete({
    text: prompt,
    n: 2,
    sampling: { seed, temperature: 0.9, top_p: 0.95 },
    stopping: { max_tokens: 16 },
  });
  assert.deepEqual(whole.choices.map((choice) => choice.token_ids), choices);
  assert.notDeepEqual(choices[0], choices[1]);
  assert.equal(whole.seed, BigInt(seed));
});

test('the seed that the service drew gives the same tokens again, as it was told', async () => {
  const request = { text: 'A fable:', stopping: { max_tokens: 12 }, sampling: { temperature: 1 } };
  const first = await client.complete(request);
  const again = await client.complete({
    ...request,
    sampling: { temperature: 1, seed: first.seed },
  });
  assert.deepEqual(again.choices[0].token_ids, first.choices[0].token_ids);
});

test('a chat is answered as the Python SDK has it', async () => {
  const whole = await client.chat(EXPECTED.chat.messages, {
    sampling: { temperature: 0 },
    stopping: { max_tokens: 12 },
  });
  assert.equal(whole.text, EXPECTED.chat.text);
});

test('a stop string ends the text before it, and is named', async () => {
  const { text } = EXPECTED.greedy;
  const stop = text.slice(21, 26);
  const whole = await client.complete({
    text: EXPECTED.greedy.prompt,
    sampling: { temperature: 0 },
    stopping: { max_tokens: 48, ignore_eos: true, stop },
  });
  assert.equal(whole.text, text.slice(0, text.indexOf(stop)));
  assert.equal(whole.choices[0].finish_reason, 'stop');
  assert.equal(whole.choices[0].stop, stop);
});

test('log-probabilities and the echoed prompt arrive', async () => {
  const whole = await client.complete({
    text: EXPECTED.greedy.prompt,
    sampling: { temperature: 0 },
    stopping: { max_tokens: 3 },
    output: { logprobs: 2, prompt_logprobs: 1, echo: true },
  });
  const [choice] = whole.choices;
  assert.equal(choice.prompt_text, EXPECTED.greedy.prompt);
  assert.equal(choice.logprobs.length, 3);
  choice.logprobs.forEach((position, index) => {
    assert.equal(position.chosen.token_id, choice.token_ids[index]);
    assert.ok(position.chosen.logprob <= 0);
    assert.deepEqual(position.top[0], position.chosen); // greedy takes the likeliest
    assert.equal(position.top.length, 2);
  });
  assert.equal(choice.prompt_logprobs.length, choice.prompt_token_ids.length);
  assert.equal(choice.prompt_logprobs[0].chosen, null);
});

test('tokens, text and model are told as by the Python SDK', async () => {
  const { text, ids, model } = EXPECTED.tokens;
  assert.deepEqual(await client.tokenize(text), ids);
  assert.equal(await client.detokenize(ids), text);
  const described = await client.getModel();
  assert.deepEqual(described, model);
});

test('a field out of bounds is named, with its bound and the constant for programs', async () => {
  const bad = { text: 'a', sampling: { temperature: -1 } };
  await assert.rejects(client.complete(bad), (error) => {
    assert.ok(error instanceof InvalidArgumentError);
    assert.equal(error.field, 'sampling.temperature');
    assert.match(error.fieldViolations[0].description, /between 0 and 100/);
    assert.equal(error.reason, 'INVALID_FIELD');
    return true;
  });
  await assert.rejects(client.complete({ text: 'a', model: 'gpt-5' }), NotFoundError);
});

test('a live request_id is refused, and its owner goes on', async () => {
  const request = { text: 'First', request_id: 'node-same', ...GREEDY };
  const first = client.generate(request);
  assert.equal((await first.next()).value.type, 'started');
  await assert.rejects(client.complete({ ...request, text: 'Second' }), AlreadyExistsError);
  const usage = (await read(first)).at(-1);
  assert.equal(usage.num_completion_tokens, 48);
});

for (const way of ['abort', 'leave']) {
  test(`to ${way} frees the blocks while the client stays`, async () => {
    const controller = new AbortController();
    const stopping = { max_tokens: 2000, ignore_eos: true };
    const events = client.generate({ text: 'Endless:', stopping, signal: controller.signal });
    let numDeltas = 0;
    const reading = (async () => {
      for await (const event of events) {
        if (event.type === 'delta') numDeltas += 1;
        if (numDeltas < 3) continue;
        if (way === 'leave') break;
        controller.abort();
      }
    })();
    if (way === 'abort') await assert.rejects(reading, { name: 'AbortError' });
    else await reading;
    let state = await snapshot();
    for (let attempt = 0; attempt < 500 && state.pool.num_referenced > 0; attempt += 1) {
      await new Promise((resolve) => setTimeout(resolve, 20));
      state = await snapshot();
    }
    assert.equal(state.pool.num_referenced, 0);
    assert.equal(state.num_running, 0);
    assert.equal(numDeltas, 3);
  });
}

test('streams that are cut on the way, twice, go on without a gap or a repeat', async () => {
  const proxy = await startProxy(TARGET);
  const far = new OctavoClient(proxy.target, { retry: { initialBackoffMs: 20 } });
  try {
    const { prompt, seed } = EXPECTED.seeded;
    const request = {
      text: prompt,
      n: 2,
      sampling: { seed, temperature: 0.9, top_p: 0.95 },
      stopping: { max_tokens: 40, ignore_eos: true },
    };
    const whole = await client.complete(request);
    const tokens = { 0: [], 1: [] };
    const texts = { 0: '', 1: '' };
    const types = [];
    let numTokens = 0;
    const cuts = [8, 32];
    for await (const event of far.generate({ ...request, request_id: 'node-cut' })) {
      if (event.type !== 'delta') {
        types.push(event.type);
        continue;
      }
      tokens[event.index].push(...event.token_ids);
      texts[event.index] += event.text;
      numTokens += event.token_ids.length;
      if (numTokens >= cuts[0]) {
        cuts.shift();
        proxy.cut();
      }
    }
    assert.equal(cuts.length, 0);
    assert.deepEqual(types, ['started', 'finished', 'finished', 'usage']);
    for (const choice of whole.choices) {
      assert.deepEqual(tokens[choice.index], choice.token_ids);
      assert.equal(texts[choice.index], choice.text);
    }
  } finally {
    far.close();
    proxy.stop();
  }
});
