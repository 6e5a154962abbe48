// The browser's side of console_check.py: uses the page, and says what it saw.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

const { OCTAVO_CHECK_PART: part, OCTAVO_CHECK_URL: url, OCTAVO_CHECK_CHROMIUM: executablePath, OCTAVO_CHECK_MODULES: modules, OCTAVO_CHECK_PICTURES: pictures } = process.env;
const { chromium } = createRequire(join(modules, "x.js"))("playwright-core");
const WAIT = { timeout: 240_000 };
const say = (text) => console.log(`  ok: ${text}`);

let browser;

async function open({ colorScheme = "dark", width = 1440, height = 900, reducedMotion = "no-preference" } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme, reducedMotion });
  const page = await context.newPage();
  page.setDefaultTimeout(WAIT.timeout);
  const problems = [];
  page.on("pageerror", (error) => problems.push(String(error)));
  page.on("console", (message) => { if (message.type() === "error") problems.push(message.text()); });
  await page.goto(`${url}/console`);
  await live(page);
  return { page, context, problems };
}

async function live(page) {
  await page.waitForFunction(() => document.getElementById("status").dataset.kind === "live", null, WAIT);
}

const text = (page, id) => page.locator(`#${id}`).innerText();
const number = async (page, id) => Number((await text(page, id)).replace(/[^\d.]/g, "")) || 0;
const used = (page) => page.evaluate(() => Number(document.querySelector("#pool-text b").textContent.replaceAll(",", "")));
const pixels = (page) => page.evaluate(() => document.getElementById("map").toDataURL());

async function until(page, what, check) {
  const end = Date.now() + WAIT.timeout;
  while (!(await check())) {
    assert.ok(Date.now() < end, `it took too long until ${what}`);
    await page.waitForTimeout(50);
  }
  say(what);
}

async function picture(page, name) {
  if (pictures) await page.screenshot({ path: join(pictures, `console-${name}.png`) });
}

async function send(page, { n = 4, maxTokens = 96, prompt } = {}) {
  if (prompt) await page.fill("#prompt", prompt);
  await page.fill("#n", String(n));
  await page.fill("#max-tokens", String(maxTokens));
  await page.click("#form button[type=submit]");
}

async function idle(page) {
  await until(page, "all is idle again", async () => (await number(page, "tile-running")) === 0 && (await page.locator("#stop-all").isDisabled()));
}

async function use() {
  const { page, context, problems } = await open();
  const empty = await pixels(page);
  await send(page, { n: 4, maxTokens: 128 });
  await until(page, "blocks of four choices are shared", async () => (await number(page, "tile-shared")) > 0);
  const shared = await findByKeys(page, /: referenced, 4 references/);
  assert.match(await text(page, "tip"), /4 references/);
  assert.equal(await page.locator("#tip li").count(), 4, "the owner chain names all four");
  say(`the keyboard finds a block of all four: ${shared.slice(0, 60)}…`);
  assert.notEqual(await pixels(page), empty);
  say("the map has changed");
  await hoverFinds(page, /referenced, 1 references/);
  await page.click("#many");
  await until(page, "eight more run beside it", async () => (await number(page, "tile-running")) >= 12);
  await until(page, "the map fills", async () => (await number(page, "tile-running")) < 4 || (await used(page)) > 120);
  await hoverFinds(page, /4 references/);
  await picture(page, "dark");
  await page.emulateMedia({ colorScheme: "light" });
  await page.waitForTimeout(700);
  await picture(page, "light");
  await page.emulateMedia({ colorScheme: "dark" });
  await followed(page);
  await idle(page);
  const answers = await page.locator(".choice p").allInnerTexts();
  assert.equal(answers.length, 12);
  assert.ok(answers.every((answer) => answer.length > 5), "every choice has its text");
  say("twelve choices came, with their texts");
  await page.click("#again");
  await page.waitForFunction(() => /cached/.test(document.querySelector(".answer header").innerText), null, WAIT);
  say("the same prompt again is found in the cache");
  await idle(page);
  await beam(page);
  await timeline(page);
  await themes(page);
  assert.deepEqual(problems, [], "the browser complains");
  await lostAndFound(page, context);
  await context.close();
  await narrow();
  await withoutKey();
  await hundredThousand();
}

// Goes from block to block by the keyboard, as fast as the page can, until one is described so.
async function findByKeys(page, wanted) {
  await page.focus("#map");
  await page.keyboard.press("Home");
  const told = await page.evaluate((source) => {
    const map = document.getElementById("map"), live = document.getElementById("map-live");
    for (let i = 0; i < 20_000 && !new RegExp(source).test(live.textContent); i++) {
      map.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
    }
    return live.textContent;
  }, wanted.source);
  assert.match(told, wanted);
  return told;
}

// Moves the mouse to a block of which the keyboard has found that it is described so.
async function hoverFinds(page, wanted) {
  const block = Number((await findByKeys(page, wanted)).match(/\d+/)[0]);
  const place = await page.locator("#map").evaluate((map, at) => {
    const { columns, cell } = map.dataset, ratio = devicePixelRatio;
    return { x: 6 + (((at % columns) + 0.5) * cell) / ratio, y: 6 + ((Math.floor(at / columns) + 0.5) * cell) / ratio };
  }, block);
  await page.locator("#map").evaluate((map) => map.blur());
  assert.ok(!(await page.locator("#tip").isVisible()));
  const box = await page.locator("#map").boundingBox();
  await page.mouse.move(box.x + place.x, box.y + place.y);
  assert.match(await text(page, "tip"), new RegExp(`^Block ${block} `));
  say(`the mouse finds block ${block}: ${wanted}`);
}

async function followed(page) {
  const before = await pixels(page);
  await page.locator("#rows tr").first().click();
  await until(page, "a sequence that is chosen stands out", async () => (await page.locator("#rows tr[aria-selected=true]").count()) === 1 && (await pixels(page)) !== before);
  await page.focus("#map");
  await page.keyboard.press("Escape");
}

async function beam(page) {
  await page.check("#beam");
  assert.ok(await page.locator("#temperature").isDisabled());
  await send(page, { n: 3, maxTokens: 12 });
  await page.waitForFunction(() => document.querySelectorAll(".answer:first-child .choice").length === 3 && /out/.test(document.querySelector(".answer header").innerText), null, WAIT);
  assert.equal(await page.locator(".answer.failed").count(), 0);
  await page.uncheck("#beam");
  say("a beam search shows its three beams");
}

async function timeline(page) {
  await page.focus("#steps");
  await page.keyboard.press("ArrowLeft");
  const told = await page.locator("#steps-live").textContent();
  assert.match(told, /^Step \d+: .*plan .*wire .*queue .*prepare .*forward .*sample /);
  say(`a step has its phases: ${told}`);
}

async function themes(page) {
  const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const seen = new Set([await background()]);
  await page.click("#theme"); // light, on a dark system
  seen.add(await background());
  assert.equal(await text(page, "theme"), "Theme: light");
  assert.equal(seen.size, 2);
  await page.click("#theme");
  await page.click("#theme");
  say("light, dark, and as the system has it");
}

async function lostAndFound(page, context) {
  await context.setOffline(true);
  await page.click("#pause");
  await page.click("#pause");
  await page.waitForFunction(() => document.getElementById("status").dataset.kind === "lost", null, WAIT);
  assert.match(await text(page, "status"), /trying again in \d+ s/);
  assert.ok(await page.locator("#trouble").isVisible());
  await picture(page, "lost");
  await context.setOffline(false);
  await live(page);
  assert.ok(!(await page.locator("#trouble").isVisible()));
  say("a lost connection is told, and made again");
}

async function narrow() {
  const { page, context, problems } = await open({ width: 390, height: 844, colorScheme: "light", reducedMotion: "reduce" });
  const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  assert.ok(overflow <= 0, `the page is ${overflow} pixels too wide for a phone`);
  await send(page, { n: 2, maxTokens: 8 });
  await idle(page);
  assert.deepEqual(problems, []);
  say("it fits a phone, and stays still where motion is not wanted");
  await context.close();
}

async function withoutKey() {
  const context = await browser.newContext({ viewport: { width: 1200, height: 800 } });
  const page = await context.newPage();
  const keys = [];
  await page.route("**/console/watch*", (route) => {
    const key = route.request().headers().authorization;
    keys.push(key);
    if (key === "Bearer octavo-good") route.continue({ headers: {} });
    else route.fulfill({ status: key ? 403 : 401, contentType: "application/json", body: JSON.stringify({ error: { message: key ? "this takes an administrator's key" : "an API key is needed" } }) });
  });
  await page.goto(`${url}/console`);
  await page.locator("#key-dialog[open]").waitFor(WAIT);
  await page.fill("#key", "octavo-users");
  await page.click("#key-form button[value=save]");
  await page.waitForFunction(() => /administrator/.test(document.getElementById("key-error").textContent), null, WAIT);
  await page.fill("#key", "octavo-good");
  await page.click("#key-form button[value=save]");
  await live(page);
  assert.deepEqual(keys.slice(0, 3), [undefined, "Bearer octavo-users", "Bearer octavo-good"]);
  say("without a key it asks for one, and says why one is not enough");
  await context.close();
}

// A frame of 100,000 blocks: no machine for tests has such a pool.
async function hundredThousand() {
  const numBlocks = 100_000, numSequences = 256, each = 320;
  const kinds = new Uint8Array(numBlocks), counts = new Uint8Array(numBlocks), tables = new Uint32Array(numSequences * each);
  for (let i = 0; i < tables.length; i++) {
    const sequence = Math.floor(i / each), logical = i % each;
    const block = logical < 16 ? Math.floor(sequence / 4) * 16 + logical : 1024 + ((i * 7919) % 90_000);
    tables[i] = block;
    kinds[block] = 2;
    counts[block] += 1;
  }
  for (let i = 95_000; i < numBlocks; i++) kinds[i] ||= 1;
  const base64 = (array) => Buffer.from(array.buffer).toString("base64");
  const { page, context, problems } = await open({ width: 1600, height: 1000 });
  const real = await page.evaluate(async () => {
    const reader = (await fetch("console/watch?interval_ms=100")).body.pipeThrough(new TextDecoderStream()).getReader();
    let line = "";
    while (!line.includes("\n")) line += (await reader.read()).value;
    await reader.cancel();
    return JSON.parse(line.split("\n")[0]);
  });
  const [executor] = real.executors;
  const sequences = Array.from({ length: numSequences }, (_, i) => ({ request_id: `request-${Math.floor(i / 4)}`, sample_index: i % 4, row: i, status: "running", num_tokens: each * 16, num_computed_tokens: each * 16, num_prompt_tokens: 256, tenant: "", priority: 0, num_blocks: each }));
  const frame = { ...real, executors: [{ ...executor, sequences, num_more_sequences: 0, tables: base64(tables), kinds: base64(kinds), ref_counts: base64(counts), pool: { ...executor.pool, num_total: numBlocks } }] };
  await page.route("**/console/watch*", (route) => route.fulfill({ status: 200, contentType: "application/x-ndjson", body: `${JSON.stringify(frame)}\n`.repeat(5) }));
  const before = await pixels(page);
  await page.click("#pause");
  await page.click("#pause");
  await until(page, "a map of 100,000 blocks is drawn", async () => (await pixels(page)) !== before && /100,000/.test(await text(page, "pool-text")));
  await page.focus("#map");
  await page.keyboard.press("End");
  assert.match(await page.locator("#map-live").textContent(), /^Block 99999: cached/);
  for (let i = 0; i < 12; i++) await page.keyboard.press("+");
  assert.ok(await page.evaluate(() => document.getElementById("scroller").scrollTop > 10_000), "larger cells scroll, and the cursor stays in sight");
  say("its last block is cached; enlarged, the map scrolls");
  assert.deepEqual(problems, []);
  await context.close();
}

async function large() {
  const { page, context, problems } = await open({ colorScheme: "dark" });
  const stop = new AbortController();
  const answers = Array.from({ length: 24 }, (_, i) => fetch(`${url}/v1/completions`, {
    method: "POST", signal: stop.signal, headers: { "content-type": "application/json" },
    body: JSON.stringify({ prompt: longPrompt(i), n: 1 + (i % 3), max_tokens: 400, temperature: 0.9, ignore_eos: true }),
  }).catch((error) => error));
  await until(page, "long prompts run in 10,000 blocks", async () => (await used(page)) > 4000);
  await hoverFinds(page, /, [23] references/);
  await picture(page, "10k");
  stop.abort();
  await Promise.all(answers);
  await idle(page);
  assert.deepEqual(problems, []);
  await context.close();
}

function longPrompt(seed) {
  const nouns = ["harbour", "engine", "garden", "letter", "mountain", "clock", "violin", "river", "market", "comet", "bridge", "castle"];
  const verbs = ["remembers", "follows", "repairs", "describes", "carries", "imagines", "measures", "paints"];
  const words = [`Story ${seed}.`];
  for (let i = 0; i < 60 + 15 * (seed % 7); i++) words.push(`The ${nouns[(i * 5 + seed * 7) % nouns.length]} ${verbs[(i * 3 + seed) % verbs.length]} the ${nouns[(i * 7 + seed * 3 + 1) % nouns.length]}.`);
  return words.join(" ");
}

browser = await chromium.launch({ executablePath, args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"] });
try {
  await (part === "large" ? large() : use());
} finally {
  await browser.close();
}
