import assert from 'node:assert/strict';
import { test } from 'node:test';
import {
  Rates,
  lengthOf,
  median,
  milliseconds,
  niceCeiling,
} from '../../../clients/gateway/octavo_gateway/console/rates.js';
import { StepHistory, scaleOf } from '../../../clients/gateway/octavo_gateway/console/history.js';

const NAMES = [
  'num_generated_tokens',
  'num_prompt_tokens',
  'num_recompute_preemptions',
  'num_swap_preemptions',
  'num_copied_blocks',
  'num_prefix_hit_tokens',
  'num_prefix_query_tokens',
  'num_finished',
];
const counters = (changes) => ({
  ...Object.fromEntries(NAMES.map((name) => [name, 0])),
  ...changes,
});
const at = (seconds, ...executors) => ({
  time_ms: seconds * 1000,
  executors: executors.map((each) => ({ counters: counters(each) })),
});

test('a rate is what the counters of all executors grew by, per second', () => {
  const rates = new Rates(5);
  rates.add(at(10, { num_generated_tokens: 100 }, { num_generated_tokens: 50 }));
  assert.equal(rates.perSecond('num_generated_tokens'), null);
  rates.add(at(12, { num_generated_tokens: 120 }, { num_generated_tokens: 90 }));
  assert.equal(rates.perSecond('num_generated_tokens'), 30);
});

test('only the last seconds count', () => {
  const rates = new Rates(5);
  for (let second = 0; second <= 20; second++)
    rates.add(at(second, { num_generated_tokens: second < 10 ? second * 100 : 900 }));
  assert.equal(rates.perSecond('num_generated_tokens'), 0);
});

test("counters that fell are another scheduler's", () => {
  const rates = new Rates(5);
  rates.add(at(1, { num_generated_tokens: 1000 }));
  rates.add(at(2, { num_generated_tokens: 3 }));
  assert.equal(rates.perSecond('num_generated_tokens'), null);
  rates.add(at(3, { num_generated_tokens: 10 }));
  assert.equal(rates.perSecond('num_generated_tokens'), 7);
});

test('the hit rate is of all prompt tokens', () => {
  const rates = new Rates();
  rates.add(at(1, {}));
  assert.equal(rates.hitRate(), null);
  rates.add(at(2, { num_prefix_query_tokens: 80, num_prefix_hit_tokens: 20 }));
  assert.equal(rates.hitRate(), 0.25);
});

test('a step is as long as its phases', () => {
  const step = {
    plan_ns: 1e6,
    wire_ns: 2e6,
    queue_ns: 0,
    prepare_ns: 3e6,
    forward_ns: 4e6,
    sample_ns: 5e6,
    idle_ns: 9e9,
  };
  assert.equal(lengthOf(step), 15);
});

test('a scale ends at a round number, and one slow step does not flatten the rest', () => {
  assert.equal(niceCeiling(0.3), 0.5);
  assert.equal(niceCeiling(11), 20);
  assert.equal(niceCeiling(50), 50);
  assert.equal(niceCeiling(0), 1);
  assert.equal(scaleOf([...Array(99).fill(10), 5000]), 20);
  assert.equal(scaleOf([]), 1);
  assert.equal(scaleOf([3, 4]), 5);
});

test('the history goes on over a new watch, and over a new scheduler', () => {
  const history = new StepHistory();
  const steps = (from, to, time) =>
    Array.from({ length: to - from }, (_, i) => ({ step_id: from + i, planned_unix_ns: time + i }));
  history.add([{ address: 'e', steps: steps(1, 200, 1000) }]);
  history.add([{ address: 'e', steps: steps(150, 300, 1149) }]);
  assert.deepEqual(
    history.of('e').map((step) => step.step_id),
    steps(44, 300, 0).map((step) => step.step_id),
  );
  history.add([{ address: 'e', steps: steps(1, 3, 9000) }]);
  assert.deepEqual(
    history
      .of('e')
      .slice(-3)
      .map((step) => step.step_id),
    [299, 1, 2],
  );
  assert.deepEqual(history.of('other'), []);
});

test('medians and times are as people write them', () => {
  assert.equal(median([5, 1, 3]), 3);
  assert.equal(median([4, 1, 3, 2]), 2.5);
  assert.equal(median([]), 0);
  assert.deepEqual([0, 0.0123, 1.26, 123.4, 1234, 12345].map(milliseconds), [
    '0 ms',
    '12 µs',
    '1.3 ms',
    '123 ms',
    '1.23 s',
    '12.3 s',
  ]);
});
