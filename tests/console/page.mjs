// The browser's side of run.py: uses the page, and says what it saw.

import assert from 'node:assert/strict';
import {
  WAIT,
  browser,
  findByKeys,
  hoverFinds,
  idle,
  live,
  number,
  open,
  part,
  picture,
  pixels,
  say,
  send,
  text,
  until,
  url,
  used,
} from './browser.mjs';
import { hundredThousand, large } from './large.mjs';

const STORY =
  'The old lighthouse stood at the end of the pier, and every evening its keeper climbed the ' +
  'stairs to light the lamp. He had done so for thirty years, in summer and in winter, and he ' +
  'knew every ship by the sound of its bell. One night, in the middle of a storm, he heard a ' +
  'bell that he had never heard before. He took his coat, opened the door, and';

async function use() {
  const { page, context, problems } = await open();
  const empty = await pixels(page);
  await send(page, { n: 4, maxTokens: 112, prompt: STORY });
  await until(
    page,
    'blocks of four choices are shared',
    async () => (await number(page, 'tile-shared')) > 0,
  );
  const shared = await findByKeys(page, /: referenced, 4 references/);
  assert.match(await text(page, 'tip'), /4 references/);
  assert.equal(await page.locator('#tip li').count(), 4, 'the owner chain names all four');
  say(`the keyboard finds a block of all four: ${shared.slice(0, 60)}…`);
  assert.notEqual(await pixels(page), empty);
  say('the map has changed');
  await hoverFinds(page, /referenced, 1 references/);
  await page.click('#many');
  await until(
    page,
    'eight more run beside it',
    async () => (await number(page, 'tile-running')) >= 12,
  );
  await page.click('#again');
  await until(
    page,
    'the same prompt once more is served from its blocks, and the map fills',
    async () => (await number(page, 'tile-running')) >= 12 && (await used(page)) > 150,
  );
  await hoverFinds(page, /[5-8] references/);
  await picture(page, 'dark');
  await page.emulateMedia({ colorScheme: 'light' });
  await page.waitForTimeout(700);
  await picture(page, 'light');
  await page.emulateMedia({ colorScheme: 'dark' });
  await followed(page);
  await idle(page);
  const answers = await page.locator('.choice p').allInnerTexts();
  assert.equal(answers.length, 16);
  assert.ok(
    answers.every((answer) => answer.length > 0),
    'every choice has its text',
  );
  say('sixteen choices came, with their texts');
  await page.click('#again');
  await page.waitForFunction(
    () => /cached/.test(document.querySelector('.answer header').innerText),
    null,
    WAIT,
  );
  say('the same prompt again is found in the cache');
  await idle(page);
  await beam(page);
  await timeline(page);
  await themes(page);
  assert.deepEqual(problems, [], 'the browser complains');
  await lostAndFound(page, context);
  await context.close();
  await narrow();
  await withoutKey();
  await hundredThousand();
}

async function followed(page) {
  const before = await pixels(page);
  await page.locator('#rows tr').first().click();
  await until(
    page,
    'a sequence that is chosen stands out',
    async () =>
      (await page.locator('#rows tr[aria-selected=true]').count()) === 1 &&
      (await pixels(page)) !== before,
  );
  await page.focus('#map');
  await page.keyboard.press('Escape');
}

async function beam(page) {
  await page.check('#beam');
  assert.ok(await page.locator('#temperature').isDisabled());
  await send(page, { n: 3, maxTokens: 12 });
  await page.waitForFunction(
    () =>
      document.querySelectorAll('.answer:first-child .choice').length === 3 &&
      /out/.test(document.querySelector('.answer header').innerText),
    null,
    WAIT,
  );
  assert.equal(await page.locator('.answer.failed').count(), 0);
  await page.uncheck('#beam');
  say('a beam search shows its three beams');
}

async function timeline(page) {
  await page.focus('#steps');
  await page.keyboard.press('ArrowLeft');
  const told = await page.locator('#steps-live').textContent();
  assert.match(told, /^Step \d+: .*plan .*wire .*queue .*prepare .*forward .*sample /);
  say(`a step has its phases: ${told}`);
}

async function themes(page) {
  const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const seen = new Set([await background()]);
  await page.click('#theme'); // light, on a dark system
  seen.add(await background());
  assert.equal(await text(page, 'theme'), 'Theme: light');
  assert.equal(seen.size, 2);
  await page.click('#theme');
  await page.click('#theme');
  say('light, dark, and as the system has it');
}

async function lostAndFound(page, context) {
  await context.setOffline(true);
  await page.click('#pause');
  await page.click('#pause');
  await page.waitForFunction(
    () => document.getElementById('status').dataset.kind === 'lost',
    null,
    WAIT,
  );
  assert.match(await text(page, 'status'), /trying again in \d+ s/);
  assert.ok(await page.locator('#trouble').isVisible());
  await picture(page, 'lost');
  await context.setOffline(false);
  await live(page);
  assert.ok(!(await page.locator('#trouble').isVisible()));
  say('a lost connection is told, and made again');
}

async function narrow() {
  const { page, context, problems } = await open({
    width: 390,
    height: 844,
    colorScheme: 'light',
    reducedMotion: 'reduce',
  });
  const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  assert.ok(overflow <= 0, `the page is ${overflow} pixels too wide for a phone`);
  await send(page, { n: 2, maxTokens: 8 });
  await idle(page);
  await picture(page, 'phone');
  assert.deepEqual(problems, []);
  say('it fits a phone, and stays still where motion is not wanted');
  await context.close();
}

async function withoutKey() {
  const context = await browser.newContext({ viewport: { width: 1200, height: 800 } });
  const page = await context.newPage();
  const keys = [];
  await page.route('**/console/watch*', (route) => {
    const key = route.request().headers().authorization;
    keys.push(key);
    if (key === 'Bearer octavo-good') route.continue({ headers: {} });
    else
      route.fulfill({
        status: key ? 403 : 401,
        contentType: 'application/json',
        body: JSON.stringify({
          error: { message: key ? "this takes an administrator's key" : 'an API key is needed' },
        }),
      });
  });
  await page.goto(`${url}/console`);
  await page.locator('#key-dialog[open]').waitFor(WAIT);
  await page.fill('#key', 'octavo-users');
  await page.click('#key-form button[value=save]');
  await page.waitForFunction(
    () => /administrator/.test(document.getElementById('key-error').textContent),
    null,
    WAIT,
  );
  await page.fill('#key', 'octavo-good');
  await page.click('#key-form button[value=save]');
  await live(page);
  assert.deepEqual(keys.slice(0, 3), [undefined, 'Bearer octavo-users', 'Bearer octavo-good']);
  say('without a key it asks for one, and says why one is not enough');
  await context.close();
}

try {
  await (part === 'large' ? large() : use());
} finally {
  await browser.close();
}
