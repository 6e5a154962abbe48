// A headless browser with the console open, and what a person does with it.

import assert from 'node:assert/strict';
import { createRequire } from 'node:module';
import { join } from 'node:path';

export const { OCTAVO_CHECK_PART: part, OCTAVO_CHECK_URL: url } = process.env;
const {
  OCTAVO_CHECK_CHROMIUM: executablePath,
  OCTAVO_CHECK_MODULES: modules,
  OCTAVO_CHECK_PICTURES: pictures,
} = process.env;
const { chromium } = createRequire(join(modules, 'x.js'))('playwright-core');
export const WAIT = { timeout: 240_000 };
export const say = (text) => console.log(`  ok: ${text}`);

export const browser = await chromium.launch({
  executablePath,
  args: ['--headless', '--no-sandbox', '--disable-gpu', '--disable-background-networking'],
});

export async function open({
  colorScheme = 'dark',
  width = 1440,
  height = 900,
  reducedMotion = 'no-preference',
} = {}) {
  const context = await browser.newContext({
    viewport: { width, height },
    colorScheme,
    reducedMotion,
  });
  const page = await context.newPage();
  page.setDefaultTimeout(WAIT.timeout);
  const problems = [];
  page.on('pageerror', (error) => problems.push(String(error)));
  page.on('console', (message) => {
    if (message.type() === 'error') problems.push(message.text());
  });
  await page.goto(`${url}/console`);
  await live(page);
  return { page, context, problems };
}

export async function live(page) {
  await page.waitForFunction(
    () => document.getElementById('status').dataset.kind === 'live',
    null,
    WAIT,
  );
}

export const text = (page, id) => page.locator(`#${id}`).innerText();
export const number = async (page, id) =>
  Number((await text(page, id)).replace(/[^\d.]/g, '')) || 0;
export const used = (page) =>
  page.evaluate(() =>
    Number(document.querySelector('#pool-text b').textContent.replaceAll(',', '')),
  );
export const pixels = (page) => page.evaluate(() => document.getElementById('map').toDataURL());

export async function until(page, what, check) {
  const end = Date.now() + WAIT.timeout;
  while (!(await check())) {
    if (Date.now() > end)
      assert.fail(
        `it took too long until ${what}; shown: ${await page.locator('.tiles').innerText()} ${await text(page, 'pool-text')}`.replaceAll(
          '\n',
          ' ',
        ),
      );
    await page.waitForTimeout(50);
  }
  say(what);
}

export async function picture(page, name) {
  if (pictures) await page.screenshot({ path: join(pictures, `console-${name}.png`) });
}

export async function send(page, { n = 4, maxTokens = 96, prompt } = {}) {
  if (prompt) await page.fill('#prompt', prompt);
  await page.fill('#n', String(n));
  await page.fill('#max-tokens', String(maxTokens));
  await page.click('#form button[type=submit]');
}

export async function idle(page) {
  await until(
    page,
    'all is idle again',
    async () =>
      (await number(page, 'tile-running')) === 0 && (await page.locator('#stop-all').isDisabled()),
  );
}

// Goes from block to block by the keyboard, as fast as the page can, until one is described so.
export async function findByKeys(page, wanted) {
  await page.focus('#map');
  await page.keyboard.press('Home');
  const told = await page.evaluate((source) => {
    const map = document.getElementById('map'),
      live = document.getElementById('map-live');
    for (let i = 0; i < 20_000 && !new RegExp(source).test(live.textContent); i++) {
      map.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight' }));
    }
    return live.textContent;
  }, wanted.source);
  assert.match(told, wanted);
  return told;
}

// Moves the mouse to a block of which the keyboard has found that it is described so.
export async function hoverFinds(page, wanted) {
  const block = Number((await findByKeys(page, wanted)).match(/\d+/)[0]);
  const place = await page.locator('#map').evaluate((map, at) => {
    const { columns, cell } = map.dataset,
      ratio = devicePixelRatio;
    return {
      x: 6 + (((at % columns) + 0.5) * cell) / ratio,
      y: 6 + ((Math.floor(at / columns) + 0.5) * cell) / ratio,
    };
  }, block);
  await page.locator('#map').evaluate((map) => map.blur());
  assert.ok(!(await page.locator('#tip').isVisible()));
  const box = await page.locator('#map').boundingBox();
  await page.mouse.move(box.x + place.x, box.y + place.y);
  assert.match(await text(page, 'tip'), new RegExp(`^Block ${block} `));
  say(`the mouse finds block ${block}: ${wanted}`);
}
