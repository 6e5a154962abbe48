/**
 * Against a scheduler with mutual TLS and API keys. The environment says where it is, which
 * files its CA, our certificate and our key are in, and which API key it knows:
 *   OCTAVO_TEST_TARGET, OCTAVO_TEST_CA, OCTAVO_TEST_CERT, OCTAVO_TEST_KEY, OCTAVO_TEST_API_KEY
 */

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

import { OctavoClient, PermissionDeniedError, UnauthenticatedError, UnavailableError } from '@octavo/client';

const { OCTAVO_TEST_TARGET: target, OCTAVO_TEST_API_KEY: apiKey } = process.env;
const [ca, cert, key] = ['CA', 'CERT', 'KEY'].map((name) =>
  readFileSync(process.env[`OCTAVO_TEST_${name}`], 'utf8'),
);
const REQUEST = { tokens: [5, 6, 7], stopping: { max_tokens: 3, ignore_eos: true } };

/** Run with a client, and hang up in any case. */
async function using(options, run) {
  const client = new OctavoClient(target, { retry: { maxAttempts: 1 }, ...options });
  try {
    return await run(client);
  } finally {
    client.close();
  }
}

test('with certificate and key, streams and unary calls are answered', async () => {
  await using({ apiKey, tls: { ca, cert, key } }, async (client) => {
    const whole = await client.complete(REQUEST);
    assert.equal(whole.choices[0].token_ids.length, 3);
    assert.equal((await client.getModel()).vocab_size, 97);
  });
});

test('an API key that is missing or unknown is UNAUTHENTICATED, with the reason', async () => {
  for (const [given, reason] of [[undefined, 'API_KEY_MISSING'], ['octavo-guess', 'API_KEY_UNKNOWN']]) {
    await using({ apiKey: given, tls: { ca, cert, key } }, async (client) => {
      await assert.rejects(client.complete(REQUEST), (error) => {
        assert.ok(error instanceof UnauthenticatedError, error);
        assert.equal(error.reason, reason);
        return true;
      });
    });
  }
});

test("another key's tenant is PERMISSION_DENIED, and names the field", async () => {
  await using({ apiKey, tls: { ca, cert, key } }, async (client) => {
    await assert.rejects(client.complete({ ...REQUEST, tenant: 'other' }), (error) => {
      assert.ok(error instanceof PermissionDeniedError, error);
      assert.equal(error.fieldViolations[0].field, 'tenant');
      return true;
    });
  });
});

for (const [what, tls] of [
  ['other roots than the CA', true],
  ['no certificate', { ca }],
  ['another name', { ca, cert, key, serverName: 'elsewhere.example' }],
]) {
  test(`with ${what}, there is no connection`, async () => {
    await using({ apiKey, tls }, (client) => assert.rejects(client.getModel(), UnavailableError));
  });
}

test('without TLS, there is no connection', async () => {
  await using({ apiKey }, (client) => assert.rejects(client.getModel(), UnavailableError));
});
