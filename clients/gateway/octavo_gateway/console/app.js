// The page: what is watched, who is shown it, and what to say when it breaks.

import { BlockMap } from './blockmap.js';
import { Timeline } from './charts.js';
import { HUES, Slots } from './colours.js';
import { Frames, movesOf } from './decode.js';
import { StepHistory } from './history.js';
import { PoolBar, Rows, Tabs, Tiles } from './panels.js';
import { Prompts } from './prompts.js';
import { PHASES, Rates } from './rates.js';
import { Watch } from './stream.js';
import { Story } from './story.js';
import { element, swatch } from './tip.js';

const part = (id) => document.getElementById(id);
const THEMES = ['auto', 'light', 'dark'];
const SAVED_KEY = 'octavo.api-key',
  SAVED_THEME = 'octavo.theme';
const NO_MOVES = new Map();

let colours = null; // of the theme, as numbers
let snapshot = null; // the latest
let chosen = null; // address of the executor that is shown
let selected = null; // key of the sequence that is followed
let frames = new Frames();
let apiKey = sessionStorage.getItem(SAVED_KEY) ?? '';

const slots = new Slots(),
  rates = new Rates(),
  history = new StepHistory();
const styleOf = (sequence) => slots.styleOf(sequence.request_id, sequence.sample_index);
const getColours = () => colours;

const map = new BlockMap(
  {
    canvas: part('map'),
    scroller: part('scroller'),
    spacer: part('spacer'),
    tip: part('tip'),
    live: part('map-live'),
  },
  { styleOf, onSelect: select },
);
const timeline = new Timeline({
  canvas: part('steps'),
  tip: part('steps-tip'),
  live: part('steps-live'),
  legend: part('steps-legend'),
  now: part('steps-now'),
});
const tiles = new Tiles(part),
  pool = new PoolBar(part('pool-bar'), part('pool-text'));
const tabs = new Tabs(part('tabs'), (address) => {
  chosen = address;
  show(NO_MOVES);
});
const prompts = new Prompts(
  {
    form: part('form'),
    prompt: part('prompt'),
    n: part('n'),
    temperature: part('temperature'),
    maxTokens: part('max-tokens'),
    beam: part('beam'),
    again: part('again'),
    many: part('many'),
    stopAll: part('stop-all'),
    answers: part('answers'),
  },
  {
    key: () => apiKey,
    styleOf,
    colours: getColours,
    onSelect: select,
    onStory: (id) => story.show(id),
  },
);
const story = new Story(part('story'), {
  key: () => apiKey,
  isLive: (id) =>
    snapshot?.executors.some((executor) =>
      executor.sequences.some((each) => each.request_id === id),
    ),
});
const rows = new Rows(part('rows'), part('rows-empty'), part('requests-count'), {
  styleOf,
  colours: getColours,
  onSelect: (key) => select(key === selected ? null : key),
  isMine: (id) => prompts.isMine(id),
});

const watch = new Watch({
  url: 'console/watch',
  key: () => apiKey,
  interval: () => Number(part('interval').value),
  onBegin: () => {
    frames = new Frames();
  },
  onFrame,
  onStatus,
});

function onFrame(frame) {
  snapshot = frames.decode(frame);
  onStatus({ kind: 'live', message: 'live' });
  const sequences = snapshot.executors.flatMap((executor) => executor.sequences);
  const holding = sequences.filter((sequence) => sequence.num_blocks > 0);
  slots.update(
    sequences.map((sequence) => sequence.request_id),
    holding.map((sequence) => sequence.request_id),
  );
  rates.add(snapshot);
  history.add(snapshot.executors);
  part('scheduler').textContent = snapshot.scheduler_id;
  tiles.show(snapshot, rates);
  prompts.colour(sequences);
  show();
}

// Show the chosen executor; moves: what to mark, unless the latest steps say.
function show(moves) {
  const { executors } = snapshot;
  if (!executors.some((executor) => executor.address === chosen))
    chosen = executors[0]?.address ?? null;
  const executor = executors.find((each) => each.address === chosen);
  tabs.show(executors, chosen);
  const isEmpty = !executor || executor.kinds.length === 0;
  part('map-empty').hidden = !isEmpty;
  part('pool-text').parentElement.hidden = isEmpty;
  if (isEmpty) {
    part('map-empty').textContent = executor
      ? `${executor.address} is not connected: the scheduler tries again and again.`
      : 'No executor: this scheduler stands by, or waits for one to come.';
    rows.show(executor, selected);
    timeline.show([]);
    return;
  }
  if (selected !== null && !executor.sequences.some((sequence) => sequence.key === selected))
    select(null);
  pool.show(executor.pool);
  map.show(executor, moves ?? movesOf(executor.steps));
  timeline.show(history.of(executor.address));
  rows.show(executor, selected);
}

function select(key) {
  selected = key;
  map.select(key);
  if (key !== null) story.show(key.slice(0, key.lastIndexOf('/')));
  const executor = snapshot?.executors.find((each) => each.address === chosen);
  if (executor) rows.show(executor, selected);
}

let countdown = 0;

function onStatus(status) {
  clearInterval(countdown);
  const say = (text) => {
    if (part('status').textContent !== text) part('status').textContent = text;
  };
  part('status').dataset.kind = status.kind;
  part('retry').hidden = status.kind !== 'lost';
  document.body.classList.toggle('stale', status.kind === 'lost');
  if (status.kind === 'lost') {
    const tick = () =>
      say(`trying again in ${Math.max(0, Math.ceil((status.retryAt - Date.now()) / 1000))} s`);
    tick();
    countdown = setInterval(tick, 500);
    trouble(`Not connected: ${status.message}. What is shown is old; the page goes on by itself.`);
  } else if (status.kind === 'key') {
    say('needs a key');
    trouble(
      status.status === 403
        ? `This key does not open the console: ${status.message}`
        : apiKey
          ? `The key was refused: ${status.message}`
          : "This scheduler asks for an API key: give an administrator's by the button “API key”.",
    );
    openKeyDialog(status);
  } else {
    say(status.message);
    if (status.kind !== 'wait') trouble('');
  }
}

function trouble(text) {
  const box = part('trouble');
  if (box.textContent !== text) box.textContent = text;
  box.hidden = text === '';
}

function openKeyDialog(status) {
  const dialog = part('key-dialog');
  part('key').value = apiKey;
  part('key-error').textContent = status && apiKey ? status.message : '';
  if (!dialog.open) dialog.showModal();
}

part('key-button').addEventListener('click', () => openKeyDialog(null));
part('key-form').addEventListener('submit', (event) => {
  const action = event.submitter?.value;
  if (action === 'cancel') return;
  apiKey = action === 'forget' ? '' : part('key').value.trim();
  if (apiKey) sessionStorage.setItem(SAVED_KEY, apiKey);
  else sessionStorage.removeItem(SAVED_KEY);
  watch.restart();
});

part('interval').addEventListener('change', () => watch.restart());
part('retry').addEventListener('click', () => watch.restart());
part('zoom-in').addEventListener('click', () => map.zoom(1));
part('zoom-out').addEventListener('click', () => map.zoom(-1));
part('zoom-fit').addEventListener('click', () => map.zoom(0));

let isPaused = false;
part('pause').addEventListener('click', () => {
  isPaused = !isPaused;
  part('pause').setAttribute('aria-pressed', String(isPaused));
  part('pause').textContent = isPaused ? 'Go on' : 'Pause';
  if (isPaused) watch.stop();
  else watch.start();
});
// Nobody looks: the watch is for somebody else.
document.addEventListener('visibilitychange', () => {
  if (document.hidden) watch.stop({ kind: 'paused', message: 'paused while hidden' });
  else if (!isPaused) watch.start();
});

// Themes. A custom property is not resolved by itself: a colour that uses it is.
function readColours() {
  const probe = element('span', { hidden: true });
  document.body.append(probe);
  const read = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const numbers = (name) =>
    read(name)
      .match(/[\d.]+/g)
      .slice(0, 3)
      .map(Number);
  const cells = Object.fromEntries(
    ['board', 'free', 'cached', 'held', 'fenced', 'ink'].map((name) => [name, numbers(name)]),
  );
  colours = { ...cells, copy: cells.ink, in: numbers('sample'), out: cells.fenced };
  const lines = Object.fromEntries(
    [...PHASES, 'text', 'dim', 'line'].map((name) => [name, read(name)]),
  );
  probe.remove();
  map.setColours(colours);
  timeline.setColours(lines);
  rows.recolour();
  prompts.recolour();
  showLegend();
  if (snapshot) show(NO_MOVES);
}

function showLegend() {
  const { board, free, cached, fenced, ink } = colours;
  const looks = [
    ['a sequence', { fill: HUES[0] }],
    ['its siblings', { fill: HUES[0], pattern: 1 }],
    ['shared', { fill: HUES[0], ring: ink }],
    ['cached', { fill: cached }],
    ['free', { fill: free }],
    ['fenced', { fill: fenced, cross: ink }],
  ];
  part('legend').replaceChildren(
    ...looks.map(([name, look]) => element('span', {}, swatch(look, board), name)),
    element('span', {}, 'flash: copied or swapped'),
  );
}

let theme = localStorage.getItem(SAVED_THEME) ?? 'auto';
function setTheme(name) {
  theme = THEMES.includes(name) ? name : 'auto';
  if (theme === 'auto') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  part('theme').textContent = `Theme: ${theme}`;
  localStorage.setItem(SAVED_THEME, theme);
  readColours();
}
part('theme').addEventListener('click', () =>
  setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]),
);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', readColours);

setTheme(theme);
watch.start();
