// Compiled, never run: what the types must allow, and what they must refuse.

import {
  InvalidArgumentError,
  OctavoClient,
  OctavoError,
  type Completion,
  type GenerateParams,
} from '@octavo/client';

const client = new OctavoClient('grpcs://octavo.example:50051', {
  apiKey: 'octavo-key',
  tls: { ca: 'PEM', cert: Buffer.from('PEM'), key: 'PEM', serverName: 'octavo' },
  retry: { maxAttempts: 3 },
});

const params: GenerateParams = {
  tokens: new Uint32Array([1, 2]),
  sampling: { seed: 18446744073709551615n, logit_bias: { 7: -1.5 } },
  stopping: { stop: 'END', max_tokens: 4 },
  beam: { width: 2 },
  signal: AbortSignal.timeout(1000),
};

export async function stream(): Promise<string> {
  let text = '';
  for await (const event of client.generate(params)) {
    if (event.type === 'delta') text += event.text;
    else if (event.type === 'started') text += event.seed.toString();
    else if (event.type === 'finished') text += event.reason satisfies string;
    else text += event.num_completion_tokens;
  }
  return text;
}

export async function whole(): Promise<Completion> {
  try {
    return await client.chat([{ role: 'user', content: 'Hi' }], { n: 2, timeoutMs: 1000 });
  } catch (error) {
    if (error instanceof InvalidArgumentError) console.error(error.field, error.fieldViolations);
    if (error instanceof OctavoError) console.error(error.code, error.retryDelayMs ?? 0);
    throw error;
  }
}

export async function refused(): Promise<void> {
  // @ts-expect-error: a prompt is needed
  await client.complete({ n: 1 });
  // @ts-expect-error: one prompt only
  await client.complete({ text: 'a', tokens: [1] });
  // @ts-expect-error: the wire's names
  await client.complete({ text: 'a', stopping: { maxTokens: 1 } });
  // @ts-expect-error: a chat is an array
  await client.chat('Hi');
}
