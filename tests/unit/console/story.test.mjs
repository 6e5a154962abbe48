import assert from 'node:assert/strict';
import { test } from 'node:test';
import { sumsOf, wordsOf } from '../../../clients/gateway/octavo_gateway/console/story.js';

const event = (kind, rest = {}) => ({
  kind,
  executor: 'e:1',
  other_request_id: '',
  detail: '',
  num_tokens: 7,
  ...rest,
});

test('spans of a phase are added up, in the order in which phases came', () => {
  const spans = [
    ['queued', 0, 5],
    ['decode', 5, 9],
    ['preempted', 9, 10],
    ['decode', 10, 16],
  ].map(([phase, begin_ms, end_ms]) => ({ phase, begin_ms, end_ms }));
  assert.deepEqual(
    [...sumsOf(spans)],
    [
      ['queued', 5],
      ['decode', 10],
      ['preempted', 1],
    ],
  );
});

test('an event says who, where and how much', () => {
  const story = { num_prompt_tokens: 32 };
  assert.equal(wordsOf(event('admitted'), story), 'on e:1, 7 of 32 prompt tokens cached');
  assert.equal(
    wordsOf(event('preempted_recompute', { other_request_id: 'b' }), story),
    'for b, 7 tokens to compute again',
  );
  assert.equal(
    wordsOf(event('blocked', { other_request_id: 'b', executor: '' }), story),
    'b holds the most',
  );
  assert.equal(
    wordsOf(event('blocked', { detail: 'no blocks', executor: '' }), story),
    'no blocks',
  );
  assert.equal(wordsOf(event('finished', { detail: 'stop' }), story), 'stop, 7 tokens');
  assert.equal(wordsOf(event('of a newer server'), story), 'on e:1');
  assert.equal(wordsOf(event('of a newer server'), story, 'e:1'), '', 'which is known already');
});
