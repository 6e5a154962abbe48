import assert from 'node:assert/strict';
import { createServer } from 'node:http';
import { test } from 'node:test';
import {
  Cutter,
  Watch,
  errorOf,
  piecesOf,
  waitAfter,
} from '../../../clients/gateway/octavo_gateway/console/stream.js';

test('lines are cut wherever the network cut them before', () => {
  const text = '{"a":1}\n{"b":2}\n{"c":';
  for (let size = 1; size < text.length; size++) {
    const cutter = new Cutter('\n'),
      lines = [];
    for (let i = 0; i < text.length; i += size) lines.push(...cutter.add(text.slice(i, i + size)));
    assert.deepEqual(lines, ['{"a":1}', '{"b":2}']);
  }
});

test('so are events, whose end has two characters', () => {
  const text = 'data: 1\n\ndata: 2\n\n';
  for (let size = 1; size < text.length; size++) {
    const cutter = new Cutter('\n\n'),
      events = [];
    for (let i = 0; i < text.length; i += size) events.push(...cutter.add(text.slice(i, i + size)));
    assert.deepEqual(events, ['data: 1', 'data: 2'], `by ${size}`);
  }
});

test('a character that is split over two chunks is whole again', async () => {
  const bytes = new TextEncoder().encode('é😀\n');
  const stream = new ReadableStream({
    start(controller) {
      for (const byte of bytes) controller.enqueue(Uint8Array.of(byte));
      controller.close();
    },
  });
  const lines = [];
  for await (const line of piecesOf(new Response(stream), '\n')) lines.push(line);
  assert.deepEqual(lines, ['é😀']);
});

test('waits double, up to a bound, and are not all the same', () => {
  assert.deepEqual(
    [1, 2, 3, 4, 5, 6, 60].map((n) => waitAfter(n, () => 0.5)),
    [500, 1000, 2000, 4000, 8000, 15000, 15000],
  );
  assert.equal(
    waitAfter(1, () => 0),
    375,
  );
});

test('an error says what the gateway says, and else its status', async () => {
  const told = await errorOf(
    Response.json({ error: { message: 'no', code: 'c' } }, { status: 503 }),
  );
  assert.deepEqual([told.status, told.message, told.code], [503, 'no', 'c']);
  const bare = await errorOf(new Response('<html>', { status: 502 }));
  assert.deepEqual([bare.status, bare.message], [502, 'the gateway answered 502']);
});

async function serving(handler) {
  const server = createServer(handler);
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  return {
    url: `http://127.0.0.1:${server.address().port}/watch`,
    close: () => {
      server.closeAllConnections();
      server.close();
    },
  };
}

// Watch until `enough(seen)`; returns what was seen, in order.
async function watched(handler, enough, { key = () => '' } = {}) {
  const server = await serving(handler),
    seen = [];
  let watch,
    isEnough = false;
  await new Promise((resolve) => {
    const note = (what) => {
      if (isEnough) return;
      seen.push(what);
      isEnough = enough(seen, watch);
      if (isEnough) resolve();
    };
    watch = new Watch({
      url: server.url,
      key,
      interval: () => 100,
      onBegin: () => note('begin'),
      onFrame: (frame) => note(frame),
      onStatus: ({ kind }) => note(kind),
    });
    watch.start();
  });
  watch.stop();
  server.close();
  return seen;
}

test('a watch goes on after the connection broke, and says so', async () => {
  let numCalls = 0;
  const seen = await watched(
    (request, response) => {
      numCalls++;
      assert.equal(request.url, '/watch?interval_ms=100');
      response.write(`{"n":${numCalls}}\n`, () => {
        if (numCalls === 1) response.destroy();
      });
    },
    (all) => all.some((each) => each.n === 2),
  );
  assert.deepEqual(seen.slice(0, 7), [
    'wait',
    'begin',
    { n: 1 },
    'lost',
    'wait',
    'begin',
    { n: 2 },
  ]);
});

test('a last line with an error is a lost connection, or a key that is no good any more', async () => {
  const answer = (code) => (_, response) =>
    response.end(`{"n":1}\n{"error":{"message":"m","code":"${code}"}}\n`);
  const ends = (all) => ['lost', 'key'].includes(all.at(-1));
  assert.equal((await watched(answer('unavailable'), ends)).at(-1), 'lost');
  assert.equal((await watched(answer('invalid_api_key'), ends)).at(-1), 'key');
});

test('without a good key it waits for one, and then shows it', async () => {
  let key = 'bad';
  const keys = [];
  const seen = await watched(
    (request, response) => {
      keys.push(request.headers.authorization);
      if (keys.length > 1) response.write('{"n":1}\n');
      else response.writeHead(401).end('{"error":{"message":"unknown key"}}');
    },
    (all, watch) => {
      if (all.at(-1) === 'key') {
        key = 'good';
        setTimeout(() => watch.restart(), 50);
      }
      return all.some((each) => each.n);
    },
    { key: () => key },
  );
  assert.deepEqual(keys, ['Bearer bad', 'Bearer good']);
  assert.deepEqual(seen, ['wait', 'key', 'wait', 'begin', { n: 1 }]);
});

test('an answer that ends without a line is no watch: it waits before the next', async () => {
  let numCalls = 0;
  const seen = await watched(
    (_, response) => {
      numCalls++;
      response.end();
    },
    (all) => all.filter((each) => each === 'lost').length === 2,
  );
  assert.deepEqual(seen, ['wait', 'begin', 'lost', 'wait', 'begin', 'lost']);
  assert.equal(numCalls, 2);
});

test('stopped and started at once it runs once', async () => {
  let numOpen = 0,
    most = 0,
    again = false;
  await watched(
    (request, response) => {
      most = Math.max(most, ++numOpen);
      request.on('close', () => numOpen--);
      const timer = setInterval(() => response.write('{"n":1}\n'), 20);
      response.on('close', () => clearInterval(timer));
    },
    (all, watch) => {
      if (all.length > 4 && !again) {
        again = true;
        setTimeout(() => {
          for (let i = 0; i < 5; i++) {
            watch.stop();
            watch.start();
          }
        }, 0);
      }
      return all.filter((each) => each.n).length > 12;
    },
  );
  assert.ok(again);
  assert.equal(numOpen <= 1 && most <= 2, true, `${most} at once`);
});
