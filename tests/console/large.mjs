// Many blocks: 10,000 at work, 100,000 made up.

import assert from 'node:assert/strict';
import {
  hoverFinds,
  idle,
  number,
  open,
  picture,
  pixels,
  say,
  text,
  until,
  url,
  used,
} from './browser.mjs';

// A frame of 100,000 blocks: no machine for tests has such a pool.
export async function hundredThousand() {
  const numBlocks = 100_000,
    numSequences = 256,
    each = 320;
  const kinds = new Uint8Array(numBlocks),
    counts = new Uint8Array(numBlocks),
    tables = new Uint32Array(numSequences * each);
  for (let i = 0; i < tables.length; i++) {
    const sequence = Math.floor(i / each),
      logical = i % each;
    const block =
      logical < 16 ? Math.floor(sequence / 4) * 16 + logical : 1024 + ((i * 7919) % 90_000);
    tables[i] = block;
    kinds[block] = 2;
    counts[block] += 1;
  }
  for (let i = 95_000; i < numBlocks; i++) kinds[i] ||= 1;
  const base64 = (array) => Buffer.from(array.buffer).toString('base64');
  const { page, context, problems } = await open({ width: 1600, height: 1000 });
  const real = await page.evaluate(async () => {
    const reader = (await fetch('console/watch?interval_ms=100')).body
      .pipeThrough(new TextDecoderStream())
      .getReader();
    let line = '';
    while (!line.includes('\n')) line += (await reader.read()).value;
    await reader.cancel();
    return JSON.parse(line.split('\n')[0]);
  });
  const [executor] = real.executors;
  const sequences = Array.from({ length: numSequences }, (_, i) => ({
    request_id: `request-${Math.floor(i / 4)}`,
    sample_index: i % 4,
    row: i,
    status: 'running',
    num_tokens: each * 16,
    num_computed_tokens: each * 16,
    num_prompt_tokens: 256,
    tenant: '',
    priority: 0,
    num_blocks: each,
  }));
  const frame = {
    ...real,
    executors: [
      {
        ...executor,
        sequences,
        num_more_sequences: 0,
        tables: base64(tables),
        kinds: base64(kinds),
        ref_counts: base64(counts),
        pool: { ...executor.pool, num_total: numBlocks },
      },
    ],
  };
  await page.route('**/console/watch*', (route) =>
    route.fulfill({
      status: 200,
      contentType: 'application/x-ndjson',
      body: `${JSON.stringify(frame)}\n`.repeat(5),
    }),
  );
  const before = await pixels(page);
  await page.click('#pause');
  await page.click('#pause');
  await until(
    page,
    'a map of 100,000 blocks is drawn',
    async () => (await pixels(page)) !== before && /100,000/.test(await text(page, 'pool-text')),
  );
  await picture(page, '100k');
  await page.focus('#map');
  await page.keyboard.press('End');
  assert.match(await page.locator('#map-live').textContent(), /^Block 99999: cached/);
  for (let i = 0; i < 12; i++) await page.keyboard.press('+');
  assert.ok(
    await page.evaluate(() => document.getElementById('scroller').scrollTop > 10_000),
    'larger cells scroll, and the cursor stays in sight',
  );
  say('its last block is cached; enlarged, the map scrolls');
  assert.deepEqual(problems, []);
  await context.close();
}

export async function large() {
  const { page, context, problems } = await open({ colorScheme: 'dark' });
  const stop = new AbortController();
  const ask = (i) =>
    fetch(`${url}/v1/completions`, {
      method: 'POST',
      signal: stop.signal,
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify({
        prompt: longPrompt(i % 80),
        max_tokens: 600 + 37 * (i % 20),
        ignore_eos: true,
      }),
    }).catch((error) => error);
  const answers = Array.from({ length: 80 }, (_, i) => ask(i));
  await until(
    page,
    'eighty long prompts run in 10,000 blocks',
    async () => (await used(page)) > 3000,
  );
  answers.push(...Array.from({ length: 80 }, (_, i) => ask(80 + i)));
  await until(
    page,
    'eighty more share their prompts',
    async () => (await number(page, 'tile-shared')) > 1500 && (await used(page)) > 5800,
  );
  await hoverFinds(page, /^Block [23]\d{3}: referenced, 2 references/);
  await picture(page, '10k');
  stop.abort();
  await Promise.all(answers);
  await idle(page);
  assert.deepEqual(problems, []);
  await context.close();
}

function longPrompt(seed) {
  const nouns = [
    'harbour',
    'engine',
    'garden',
    'letter',
    'mountain',
    'clock',
    'violin',
    'river',
    'market',
    'comet',
    'bridge',
    'castle',
  ];
  const verbs = [
    'remembers',
    'follows',
    'repairs',
    'describes',
    'carries',
    'imagines',
    'measures',
    'paints',
  ];
  const words = [`Story ${seed}.`];
  for (let i = 0; i < 60 + 15 * (seed % 7); i++)
    words.push(
      `The ${nouns[(i * 5 + seed * 7) % nouns.length]} ${verbs[(i * 3 + seed) % verbs.length]} the ${nouns[(i * 7 + seed * 3 + 1) % nouns.length]}.`,
    );
  return words.join(' ');
}
