"""Names of blocks, and who may share them."""

from __future__ import annotations

import pytest

from scheduler_svc.core import prefix_cache
from tests.support.core_builders import finish, make_harness, make_request, make_sequence

_PROMPT = list(range(100, 113))


def _hashes(tokens: list[int], **changes: object) -> list[bytes]:
    return prefix_cache.extend_hashes(make_sequence(tokens, **changes), len(tokens) // 4, 4)


def test_equal_prefixes_have_equal_names_up_to_where_they_differ() -> None:
    """A name stands for all tokens up to the block's end."""
    a, b = _hashes([1, 2, 3, 4, 5, 6, 7, 8]), _hashes([1, 2, 3, 4, 5, 6, 7, 9])
    assert a[0] == b[0]
    assert a[1] != b[1]


def test_the_same_tokens_after_another_prefix_have_another_name() -> None:
    """K/V depend on everything before."""
    a, b = _hashes([1, 2, 3, 4, 5, 6, 7, 8]), _hashes([9, 2, 3, 4, 5, 6, 7, 8])
    assert a[1] != b[1]


def test_hashing_goes_on_where_it_stopped() -> None:
    """In parts or at once, the names are the same."""
    seq = make_sequence([1, 2, 3, 4, 5, 6, 7, 8])
    prefix_cache.extend_hashes(seq, 1, 4)
    assert prefix_cache.extend_hashes(seq, 2, 4) == _hashes([1, 2, 3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"tenant": "a", "cache_salt": "bc"}, {"tenant": "ab", "cache_salt": "c"}),
        ({"tenant": "a"}, {"cache_salt": "a"}),
        ({"cache_salt": ""}, {"cache_salt": "0"}),
        ({"tenant": "1:salt:1"}, {"tenant": "1", "cache_salt": "1"}),
    ],
)
def test_blocks_are_never_shared_across_tenants_or_salts(one, other) -> None:
    """Whatever their names look like: no hit, and other tags on the slots."""
    assert _hashes(_PROMPT, **one)[0] != _hashes(_PROMPT, **other)[0]
    harness = make_harness()
    harness.add(make_request("one", _PROMPT, **one))
    finish(harness)
    group = harness.core.add(make_request("other", _PROMPT, **other))
    mine = harness.core.add(make_request("mine", _PROMPT, **one))
    harness.core.plan(0.0)
    assert group.cached_prompt_tokens == 0
    assert mine.cached_prompt_tokens == 12
    assert group.lineage != mine.lineage


@pytest.mark.parametrize("changes", [{"use_cache": False}, {"num_prompt_logprobs": 0}])
def test_a_request_that_stays_out_of_the_cache_neither_reads_nor_fills_it(changes) -> None:
    """Log-probabilities of a prompt need every position computed."""
    harness = make_harness()
    harness.add(make_request("out", _PROMPT, **changes))
    finish(harness)
    assert harness.core.state.blocks.pool.num_cached == 0
    harness.add(make_request("in", _PROMPT))
    finish(harness)
    harness.add(make_request("out2", _PROMPT, **changes))
    finish(harness)
    assert harness.core.state.counters.num_prefix_hit_tokens == 0


def test_only_settled_blocks_are_hits() -> None:
    """A prompt that is still being computed in a step in flight cannot be shared yet."""
    harness = make_harness(max_steps_in_flight=2)
    harness.add(make_request("a", _PROMPT))
    harness.plan()
    group = harness.core.add(make_request("b", _PROMPT))
    harness.plan()
    assert group.cached_prompt_tokens == 0


def test_without_a_cache_nothing_is_kept() -> None:
    """The setting turns it off for everyone."""
    harness = make_harness(prefix_cache=False)
    harness.add(make_request("a", _PROMPT))
    finish(harness)
    pool = harness.core.state.blocks.pool
    assert (pool.num_cached, pool.num_free) == (0, pool.num_total)
