// Streams over fetch, which unlike EventSource can carry a key. No DOM in here.

const FIRST_WAIT_MS = 500,
  LONGEST_WAIT_MS = 15_000;
const SILENCE_MS = 20_000; // beyond the interval: then the connection counts as lost
const MAX_LINE = 64 * 1024 * 1024;

export class HttpError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// The error in an answer that is none: OpenAI's form, or whatever a proxy says.
export async function errorOf(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // no JSON: the status has to do
  }
  const message = body?.error?.message ?? `the gateway answered ${response.status}`;
  return new HttpError(response.status, message, body?.error?.code ?? null);
}

// Cuts what comes in chunks into pieces that `end` ends; the rest waits for more.
export class Cutter {
  #parts = [];
  #length = 0;

  constructor(end) {
    this.end = end;
  }

  add(text) {
    const pieces = [];
    let begin = 0;
    // An end may be split over two chunks only where it has two characters.
    if (this.end.length > 1 && this.#parts.length > 0) {
      text = this.#parts.join('') + text;
      this.#parts = [];
      this.#length = 0;
    }
    for (let at = text.indexOf(this.end); at >= 0; at = text.indexOf(this.end, begin)) {
      pieces.push(this.#parts.join('') + text.slice(begin, at));
      this.#parts = [];
      this.#length = 0;
      begin = at + this.end.length;
    }
    if (begin < text.length) this.#parts.push(text.slice(begin));
    this.#length += text.length - begin;
    if (this.#length > MAX_LINE) throw new Error('a line is too long');
    return pieces;
  }
}

export async function* piecesOf(response, end) {
  const cutter = new Cutter(end);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* cutter.add(value);
    }
  } finally {
    reader.cancel().catch(() => {}); // it is over in any case
  }
}

export function headersOf(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

// How long to wait after so many failures in a row: twice as long each time, a little apart
// from others who lost the same server.
export function waitAfter(numFailures, random = Math.random) {
  const longest = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** (numFailures - 1));
  return longest * (0.75 + random() / 2);
}

// Follows /console/watch, and goes on doing so: what breaks is begun anew.
//
// onFrame(frame): one line's JSON; what it throws counts as a broken connection.
// onStatus({kind, message, retryAt}): "wait", "live", "lost" (retryAt: when it will be tried
// again), "key" (it waits for a key), "paused".
export class Watch {
  #abort = null;
  #wake = null;
  #turn = 0; // of start(): the loop of an earlier one ends
  #isRunning = false;

  constructor({ url, key, interval, onBegin, onFrame, onStatus }) {
    Object.assign(this, { url, key, interval, onBegin, onFrame, onStatus });
  }

  start() {
    if (this.#isRunning) return;
    this.#isRunning = true;
    this.#run(++this.#turn);
  }

  // Stop, and say so with this status.
  stop(status = { kind: 'paused', message: 'paused' }) {
    this.#isRunning = false;
    this.#turn++;
    this.#abort?.abort();
    this.#wake?.();
    this.onStatus(status);
  }

  // Begin anew at once: another interval, another key, or somebody does not want to wait.
  restart() {
    if (!this.#isRunning) return;
    this.#abort?.abort();
    this.#wake?.();
  }

  async #run(turn) {
    let numFailures = 0;
    while (turn === this.#turn) {
      const abort = (this.#abort = new AbortController());
      let isSilent = false;
      try {
        this.onStatus({ kind: 'wait', message: 'connecting…' });
        await this.#follow(
          abort,
          () => {
            numFailures = 0;
          },
          () => {
            isSilent = true;
          },
        );
      } catch (error) {
        if (turn !== this.#turn) return;
        if (error.isRestart && !isSilent) continue;
        if (error.status === 401 || error.status === 403) {
          this.onStatus({ kind: 'key', message: error.message, status: error.status });
          await this.#pause(null);
          continue;
        }
        numFailures++;
        const wait = waitAfter(numFailures);
        const message = isSilent
          ? 'nothing came for a while'
          : error instanceof HttpError
            ? error.message
            : 'the connection is lost';
        this.onStatus({ kind: 'lost', message, retryAt: Date.now() + wait });
        await this.#pause(wait);
      }
    }
  }

  async #follow(abort, onGood, onSilence) {
    let watchdog = 0,
      numLines = 0;
    const feed = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => {
        onSilence();
        abort.abort();
      }, this.interval() + SILENCE_MS);
    };
    try {
      feed();
      const response = await fetch(`${this.url}?interval_ms=${this.interval()}`, {
        headers: headersOf(this.key()),
        signal: abort.signal,
        cache: 'no-store',
      });
      if (!response.ok) throw await errorOf(response);
      this.onBegin();
      for await (const line of piecesOf(response, '\n')) {
        feed();
        const frame = JSON.parse(line);
        if (frame.error)
          throw new HttpError(
            frame.error.code === 'invalid_api_key' ? 401 : 503,
            frame.error.message,
            frame.error.code,
          );
        onGood();
        this.onFrame(frame);
        numLines++;
      }
      // After an hour the gateway ends a watch in good order; one without a line is none.
      if (numLines === 0) throw new Error('nothing came');
    } catch (error) {
      error.isRestart = abort.signal.aborted;
      throw error;
    } finally {
      clearTimeout(watchdog);
      abort.abort();
    }
  }

  // Wait so many milliseconds, or until somebody stops or restarts; null: only that.
  async #pause(milliseconds) {
    let timer = 0;
    await new Promise((resolve) => {
      this.#wake = resolve;
      if (milliseconds !== null) timer = setTimeout(resolve, milliseconds);
    });
    clearTimeout(timer);
    this.#wake = null;
  }
}
