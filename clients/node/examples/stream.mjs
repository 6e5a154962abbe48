// Stream a text to the terminal:
//   node examples/stream.mjs "Once upon a time" [HOST:PORT]
// OCTAVO_API_KEY is sent, if it is set. Ctrl-C cancels, and frees the request's blocks.

import { OctavoClient, OctavoError } from '@octavo/client';

const [prompt = 'Once upon a time', target = '127.0.0.1:50051'] = process.argv.slice(2);
const client = new OctavoClient(target, { apiKey: process.env.OCTAVO_API_KEY });
const interrupt = new AbortController();
process.once('SIGINT', () => interrupt.abort());

try {
  const events = client.generate({
    text: prompt,
    sampling: { temperature: 0.8, seed: 7 },
    stopping: { max_tokens: 64 },
    signal: interrupt.signal,
  });
  process.stdout.write(prompt);
  for await (const event of events) {
    if (event.type === 'delta') process.stdout.write(event.text);
    else if (event.type === 'finished') process.stdout.write(`\n[${event.reason}]\n`);
  }
} catch (error) {
  if (interrupt.signal.aborted) {
    process.stdout.write('\n[cancelled]\n');
    process.exitCode = 130;
  } else if (error instanceof OctavoError) {
    process.stderr.write(`\n${error.name}: ${error.message}\n`);
    process.exitCode = 1;
  } else {
    throw error;
  }
} finally {
  client.close();
}
