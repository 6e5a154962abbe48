// The prompt box: sends to /v1/completions, any number side by side, and shows the choices.

import { errorOf, headersOf, piecesOf } from './stream.js';
import { element, sequenceSwatch } from './tip.js';
import { keyOf } from './decode.js';
import { count } from './rates.js';

const MAX_ANSWERS = 24;
// A browser opens six connections to a server: one is the watch's, one is left for the rest.
const MAX_STREAMS = 4;
const MAX_SHOWN_CHARACTERS = 20_000; // of one choice
const EIGHT = [
  'Once upon a time, in a village below a glacier, there lived a clockmaker who',
  'The three most important things to know about volcanoes are',
  'Dear neighbour, I am writing to you about the tree that',
  'To bake a loaf of rye bread, begin by',
  'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
  'The history of the printing press begins in',
  'A short list of animals that sleep through the winter: the hedgehog,',
  'When the train finally arrived, the platform was empty except for',
];

export class Prompts {
  #parts;
  #key;
  #styleOf;
  #colours;
  #onSelect;
  #onStory;
  #running = new Set();
  #waiting = [];
  #answers = [];
  #last = null;

  // parts: {form, prompt, n, temperature, maxTokens, beam, again, many, stopAll, answers}.
  constructor(parts, { key, styleOf, colours, onSelect, onStory }) {
    this.#parts = parts;
    this.#key = key;
    this.#styleOf = styleOf;
    this.#colours = colours;
    this.#onSelect = onSelect;
    this.#onStory = onStory;
    parts.form.addEventListener('submit', (event) => {
      event.preventDefault();
      this.#send((this.#last = parts.prompt.value));
    });
    parts.prompt.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) parts.form.requestSubmit();
    });
    parts.again.addEventListener('click', () => {
      if (parts.form.reportValidity()) this.#send((this.#last ??= parts.prompt.value));
    });
    parts.many.addEventListener('click', () => {
      if (parts.form.reportValidity()) this.#send(EIGHT, { n: 1, use_beam_search: undefined });
    });
    parts.beam.addEventListener('change', () => this.#fitFields());
    parts.stopAll.addEventListener('click', () => {
      for (const answer of [...this.#waiting, ...this.#running]) answer.abort.abort();
    });
    this.#fitFields();
  }

  // The ids, at the scheduler, of what this page has sent and runs.
  isMine(requestId) {
    return this.#answers.some((answer) => answer.callOf(requestId) >= 0);
  }

  // Choices get the colours that their sequences have on the map, and keep them.
  colour(sequences) {
    for (const sequence of sequences) {
      const answer = this.#answers.find((each) => each.callOf(sequence.request_id) >= 0);
      const choice = answer?.choiceOf(sequence.request_id, sequence.sample_index);
      const style = choice && !choice.style ? this.#styleOf(sequence) : null;
      if (style) choice.colour(style, this.#colours());
    }
  }

  recolour() {
    for (const answer of this.#answers)
      for (const choice of answer.choices.values())
        if (choice.style) choice.colour(choice.style, this.#colours());
  }

  #fitFields() {
    const { beam, temperature, n } = this.#parts;
    temperature.disabled = beam.checked;
    n.min = beam.checked ? 2 : 1; // a beam is 2 to 16 wide
    if (beam.checked && n.valueAsNumber < 2) n.value = 4;
  }

  #body(prompt, changes) {
    const { n, temperature, maxTokens, beam } = this.#parts;
    const drawn = beam.checked
      ? { use_beam_search: true }
      : { temperature: temperature.valueAsNumber };
    return {
      prompt,
      n: n.valueAsNumber,
      max_tokens: maxTokens.valueAsNumber,
      ...drawn,
      stream: true,
      stream_options: { include_usage: true },
      ...changes,
    };
  }

  #send(prompt, changes = {}) {
    const answer = new Answer(
      this.#body(prompt, changes),
      (key) => this.#onSelect(key),
      (id) => this.#onStory(id),
    );
    this.#answers.unshift(answer);
    this.#parts.answers.prepend(answer.root);
    this.#waiting.push(answer);
    while (this.#answers.length > MAX_ANSWERS && this.#answers.at(-1).isOver)
      this.#answers.pop().root.remove();
    this.#next();
  }

  // Begin what waits for a connection, as far as there are any.
  #next() {
    while (this.#waiting.length > 0 && this.#running.size < MAX_STREAMS) {
      const answer = this.#waiting.shift();
      this.#running.add(answer);
      answer.follow(this.#key()).finally(() => {
        this.#running.delete(answer);
        this.#next();
      });
    }
    this.#parts.stopAll.disabled = this.#running.size === 0;
  }
}

// One request, of one prompt or of several; the scheduler knows each prompt under an id of its own.
class Answer {
  abort = new AbortController();
  choices = new Map();
  isOver = false;
  #id = null;
  #state = element('span', {}, 'waits for a connection');
  #begin = performance.now();
  #first = 0;
  #onSelect;

  #body;
  #prompts;

  constructor(body, onSelect, onStory) {
    this.#body = body;
    this.#prompts = [body.prompt].flat();
    this.#onSelect = onSelect;
    const title = this.#prompts.length > 1 ? `${this.#prompts.length} prompts` : body.prompt;
    this.stopButton = element('button', { type: 'button', title: 'Stop this request' }, 'stop');
    this.stopButton.addEventListener('click', () => this.abort.abort());
    this.storyButton = element(
      'button',
      {
        type: 'button',
        hidden: true,
        title: 'What happened to this request, and where its time went',
      },
      'story',
    );
    this.storyButton.addEventListener('click', () => onStory(`${this.#id}.0`));
    this.head = element(
      'header',
      {},
      element('span', { className: 'title', title }, title),
      this.#state,
      this.storyButton,
      this.stopButton,
    );
    this.root = element('article', { className: 'answer' }, this.head);
  }

  // Which of its prompts the scheduler has under this id; -1 if it is none of them.
  callOf(requestId) {
    if (this.#id === null || !requestId.startsWith(`${this.#id}.`)) return -1;
    return Number(requestId.slice(this.#id.length + 1));
  }

  choiceOf(requestId, sampleIndex) {
    return this.choices.get(this.callOf(requestId) * this.#body.n + sampleIndex);
  }

  async follow(key) {
    const body = this.#body;
    this.#state.textContent = body.use_beam_search
      ? 'searching; beams are shown at the end'
      : 'sent';
    try {
      this.abort.signal.throwIfAborted();
      const response = await fetch('v1/completions', {
        method: 'POST',
        body: JSON.stringify(body),
        signal: this.abort.signal,
        headers: { 'content-type': 'application/json', ...headersOf(key) },
      });
      if (!response.ok) throw await errorOf(response);
      for (let index = 0; index < body.n * this.#prompts.length; index++) this.#choice(index);
      for await (const event of piecesOf(response, '\n\n')) {
        const data = event.replace(/^data: /, '');
        if (data !== '[DONE]') this.#take(JSON.parse(data));
      }
      if (!this.usage) throw new Error('the answer broke off');
    } catch (error) {
      this.#fail(this.abort.signal.aborted ? 'stopped' : error.message);
    } finally {
      this.isOver = true;
      this.stopButton.remove();
    }
  }

  #take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (this.#id === null) {
      this.#id = chunk.id;
      this.#state.title = this.#id;
      this.storyButton.hidden = this.#prompts.length > 1; // each of them has its own
    }
    if (chunk.usage) this.#end(chunk.usage);
    for (const { index, text, finish_reason: reason } of chunk.choices) {
      this.#first ||= text ? performance.now() : 0;
      this.#choice(index).add(text, reason);
    }
    if (!chunk.usage && this.#first)
      this.#state.textContent = `first token ${Math.round(this.#first - this.#begin)} ms`;
  }

  #end(usage) {
    this.usage = usage;
    const seconds = (performance.now() - this.#begin) / 1000;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const prompt = `${usage.prompt_tokens} in${cached ? `, ${cached} cached` : ''}`;
    this.#state.textContent = `${prompt} · ${count(usage.completion_tokens)} out · ${seconds.toFixed(1)} s`;
  }

  #fail(message) {
    this.root.classList.toggle('failed', message !== 'stopped');
    this.#state.textContent = message === 'stopped' ? 'stopped' : '';
    if (message !== 'stopped')
      this.root.append(element('p', { className: 'error', role: 'alert' }, message));
  }

  #choice(index) {
    let choice = this.choices.get(index);
    if (choice === undefined) {
      const call = Math.floor(index / this.#body.n),
        sample = index % this.#body.n;
      const prefix = this.#prompts.length > 1 ? this.#prompts[call] : '';
      choice = new Choice(
        prefix,
        () => this.#id && this.#onSelect(keyOf(`${this.#id}.${call}`, sample)),
      );
      this.choices.set(index, choice);
      this.root.append(choice.root);
    }
    return choice;
  }
}

class Choice {
  style = null;
  #text = document.createTextNode('');
  #end = element('span', { className: 'end' });
  #length = 0;
  #onClick;

  constructor(prefix, onClick) {
    this.#onClick = onClick;
    this.square = element('span', { className: 'swatch' });
    this.body = element(
      'p',
      {},
      ...(prefix ? [element('span', { className: 'dim' }, prefix)] : []),
      this.#text,
      this.#end,
    );
    this.root = element('div', { className: 'choice' }, this.square, this.body);
  }

  colour(style, colours) {
    this.style = style;
    const square = sequenceSwatch(style, colours);
    square.title = 'Follow on the map';
    square.addEventListener('click', this.#onClick);
    this.square.replaceWith(square);
    this.square = square;
  }

  add(text, reason) {
    if (text && this.#length < MAX_SHOWN_CHARACTERS) {
      const isAtEnd = this.body.scrollTop + this.body.clientHeight >= this.body.scrollHeight - 4;
      this.#text.appendData(text);
      this.#length += text.length;
      if (isAtEnd) this.body.scrollTop = this.body.scrollHeight;
    }
    if (reason) this.#end.textContent = ` · ${reason}`;
  }
}
