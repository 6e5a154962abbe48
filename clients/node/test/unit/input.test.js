import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

import { InvalidArgumentError, OctavoClient } from '@octavo/client';

import { definitions } from '../../src/protos.js';
import * as schemas from '../../src/request.js';

const TYPES = readFileSync(new URL('../../index.d.ts', import.meta.url), 'utf8');
const BY_CLIENT = { GenerateRequest: ['resume'] }; // filled in by the client itself

/** Names of a message's fields in the protos. */
function fieldsOf(name) {
  return definitions[`octavo.v1.${name}`].type.field.map((field) => field.name).sort();
}

/** Names of the properties of an interface of index.d.ts. */
function propertiesOf(name) {
  const [, body] = new RegExp(`export interface ${name}(?: extends \\w+)? \\{\n([^}]*(?:\\{[^}]*\\}[^}]*)*?)\n\\}`).exec(TYPES);
  return [...body.matchAll(/^ {2}(\w+)\??:/gm)].map(([, property]) => property).sort();
}

for (const name of Object.keys(schemas).filter((each) => schemas[each].fields)) {
  test(`the schema of ${name} has the fields of the proto`, () => {
    const fields = [...Object.keys(schemas[name].fields), ...(BY_CLIENT[name] ?? [])];
    assert.deepEqual(fields.sort(), fieldsOf(name));
  });
}

for (const name of ['ChatMessage', 'SamplingParams', 'StoppingParams', 'BeamSearch', 'OutputOptions', 'CacheOptions', 'TokenLogprob', 'PositionLogprobs']) {
  test(`the type ${name} has the fields of the proto`, () => {
    assert.deepEqual(propertiesOf(name), fieldsOf(name));
  });
}

for (const name of ['Started', 'Delta', 'Finished', 'Usage']) {
  test(`the event ${name} has a type and the fields of the proto`, () => {
    assert.deepEqual(propertiesOf(name), [...fieldsOf(name), 'type'].sort());
  });
}

test('the type GenerateOptions has the fields of the request but its prompt', () => {
  const prompt = ['text', 'tokens', 'chat'];
  const expected = fieldsOf('GenerateRequest').filter((name) => ![...prompt, 'resume'].includes(name));
  assert.deepEqual(propertiesOf('GenerateOptions'), expected);
});

test('the type Model has the fields of GetModelResponse', () => {
  assert.deepEqual(propertiesOf('Model'), fieldsOf('GetModelResponse'));
});

const BAD_REQUESTS = [
  [{}, 'prompt'],
  [{ text: 'a', tokens: [1] }, 'prompt'],
  [{ text: 7 }, 'text'],
  [{ tokens: 'abc' }, 'tokens'],
  [{ tokens: [1, -2] }, 'tokens[1]'],
  [{ tokens: [1.5] }, 'tokens[0]'],
  [{ tokens: [2 ** 32] }, 'tokens[0]'],
  [{ chat: 'hello' }, 'chat'],
  [{ chat: [{ role: 'user' }, { role: 'user', text: 'x' }] }, 'chat[1].text'],
  [{ text: 'a', maxTokens: 3 }, 'maxTokens'],
  [{ text: 'a', toString: 3 }, 'toString'],
  [{ text: 'a', stopping: { maxTokens: 3 } }, 'stopping.maxTokens'],
  [{ text: 'a', stopping: 5 }, 'stopping'],
  [{ text: 'a', stopping: { max_tokens: '5' } }, 'stopping.max_tokens'],
  [{ text: 'a', stopping: { max_tokens: NaN } }, 'stopping.max_tokens'],
  [{ text: 'a', stopping: { stop: ['x', 1] } }, 'stopping.stop[1]'],
  [{ text: 'a', stopping: { ignore_eos: 1 } }, 'stopping.ignore_eos'],
  [{ text: 'a', sampling: { temperature: '0' } }, 'sampling.temperature'],
  [{ text: 'a', sampling: { seed: 2 ** 53 } }, 'sampling.seed'],
  [{ text: 'a', sampling: { seed: -1 } }, 'sampling.seed'],
  [{ text: 'a', sampling: { seed: 2n ** 64n } }, 'sampling.seed'],
  [{ text: 'a', sampling: { seed: '0x10' } }, 'sampling.seed'],
  [{ text: 'a', sampling: { logit_bias: [1] } }, 'sampling.logit_bias'],
  [{ text: 'a', sampling: { logit_bias: { x: 1 } } }, 'sampling.logit_bias'],
  [{ text: 'a', sampling: { logit_bias: { 5: '1' } } }, 'sampling.logit_bias[5]'],
  [{ text: 'a', priority: 2 ** 31 }, 'priority'],
  [{ text: 'a', timeoutMs: 0 }, 'timeoutMs'],
  [{ text: 'a', timeoutMs: Infinity }, 'timeoutMs'],
];

for (const [request, field] of BAD_REQUESTS) {
  test(`before anything is sent, an error names ${field} of ${Object.keys(request)}`, () => {
    const client = new OctavoClient('127.0.0.1:1');
    assert.throws(() => client.generate(request), (error) => {
      assert.ok(error instanceof InvalidArgumentError, error);
      assert.equal(error.field, field);
      assert.equal(error.code, 'INVALID_ARGUMENT');
      return true;
    });
    client.close();
  });
}

const BAD_CLIENTS = [
  ['localhost', {}, 'target'],
  ['http://localhost:1', {}, 'target'],
  ['localhost:0', {}, 'target'],
  ['localhost:65536', {}, 'target'],
  ['grpc://user@localhost:1', {}, 'target'],
  [undefined, {}, 'target'],
  ['localhost:1', { api_key: 'x' }, 'api_key'],
  ['localhost:1', { apiKey: 'two words' }, 'apiKey'],
  ['octavo.example:1', { apiKey: 'secret' }, 'apiKey'],
  ['localhost:1', { tls: { cert: 'x' } }, 'tls.key'],
  ['localhost:1', { tls: { key: 'x' } }, 'tls.cert'],
  ['localhost:1', { tls: { certificate: 'x' } }, 'tls.certificate'],
  ['localhost:1', { tls: { ca: 5 } }, 'tls.ca'],
  ['grpc://localhost:1', { tls: true }, 'tls'],
  ['localhost:1', { tls: { cert: 'x', key: 'y' } }, 'tls'],
  ['localhost:1', { timeoutMs: -1 }, 'timeoutMs'],
  ['localhost:1', { unaryTimeoutMs: '5' }, 'unaryTimeoutMs'],
  ['localhost:1', { retry: { attempts: 1 } }, 'retry.attempts'],
  ['localhost:1', { retry: { maxAttempts: 0 } }, 'retry.maxAttempts'],
  ['localhost:1', { retry: { maxBackoffMs: 1 } }, 'retry.maxBackoffMs'],
];

for (const [target, options, field] of BAD_CLIENTS) {
  test(`a client for ${target} with ${JSON.stringify(options)} is refused for ${field}`, () => {
    assert.throws(() => new OctavoClient(target, options), (error) => {
      assert.ok(error instanceof InvalidArgumentError, error);
      assert.equal(error.field, field);
      return true;
    });
  });
}

test('the error of a bad key does not show it', () => {
  assert.throws(() => new OctavoClient('localhost:1', { apiKey: 'my secret' }), (error) => {
    assert.doesNotMatch(error.message, /secret/);
    return true;
  });
});

for (const [target, options] of [
  ['[::1]:50051', { apiKey: 'secret' }],
  ['grpcs://octavo.example:443', { apiKey: 'secret' }],
  ['octavo.example:50051', { apiKey: 'secret', tls: true }],
  ['octavo.example:50051', { apiKey: 'secret', allowInsecureKey: true }],
  ['dns:///octavo.example:50051', {}],
  ['octavo.example:50051', { apiKey: '' }],
]) {
  test(`a client for ${target} with ${Object.keys(options)} is fine`, () => {
    new OctavoClient(target, options).close();
  });
}
