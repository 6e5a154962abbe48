"""Chunked prefill: decodes first, long prompts in parts, forks at the end."""

from __future__ import annotations

import pytest

from tests.support.core_builders import finish, make_harness, make_request


def _decoding(harness, name: str, **changes: object) -> None:
    """Add a request and bring it into the decode set."""
    harness.add(make_request(name, 4, max_tokens=30, **changes))
    harness.step()
    harness.step()


def test_decodes_go_first_and_a_prompt_takes_what_is_left_of_the_budget() -> None:
    """No prompt, however long, stalls a stream."""
    harness = make_harness(max_num_batched_tokens=10)
    _decoding(harness, "a")
    _decoding(harness, "b")
    harness.add(make_request("long", 40))
    for _ in range(5):
        plan = harness.step()
        assert (plan.num_decodes, plan.chunk_counts) == (2, [8])
    finish(harness)


def test_a_partial_prefill_goes_on_before_anything_new_is_admitted() -> None:
    """What was begun is finished first: short prompts that come later share the rest."""
    harness = make_harness(max_num_batched_tokens=10)
    harness.add(make_request("long", 24))
    harness.step()
    harness.add(make_request("short", 3))
    assert harness.step().chunk_counts == [10]
    assert harness.step().chunk_counts == [4, 3]
    finish(harness)


def test_a_stream_of_short_requests_does_not_starve_a_long_prompt() -> None:
    """It gets its first token although a new request comes with every step."""
    harness = make_harness(max_num_batched_tokens=9, max_num_seqs=8, num_blocks=200)
    harness.add(make_request("long", 60))
    for count in range(40):
        harness.add(make_request(f"s{count}", 6, max_tokens=3, arrival=float(count + 1)))
        harness.step()
        if harness.tokens.get(("long", 0)):
            break
    assert harness.tokens[("long", 0)]
    assert count < 20
    finish(harness)


def test_the_budget_goes_to_the_more_urgent_prompt_first() -> None:
    """The other gets what is left, and goes on with the next step."""
    harness = make_harness(max_num_batched_tokens=20)
    harness.add(make_request("low", 15))
    harness.add(make_request("high", 15, priority=1))
    plan = harness.step()
    assert [start.sequence.group.request.request_id for start in plan.starts] == ["high", "low"]
    assert plan.chunk_counts == [15, 5]
    assert harness.step().chunk_counts == [10]
    finish(harness)


@pytest.mark.parametrize("best_of", [2, 3, 5])
def test_samples_of_a_prompt_are_computed_once_and_copied_on_write(best_of: int) -> None:
    """N samples copy the last partial block n - 1 times, in one plan, and nothing else."""
    harness = make_harness()
    harness.add(make_request("r", 6, best_of=best_of))
    first = harness.step()
    assert first.chunk_counts == [6]
    assert len(first.forks) == best_of - 1
    second = harness.step()
    assert second.num_decodes == best_of
    assert len(second.copy_sources) == best_of - 1
    assert len(set(second.copy_sources)) == 1
    assert len(set(second.copy_destinations)) == best_of - 1
    finish(harness)
    assert harness.core.state.counters.num_copied_blocks == best_of - 1


@pytest.mark.parametrize("best_of", [2, 5])
def test_samples_of_a_prompt_that_ends_at_a_border_copy_nothing(best_of: int) -> None:
    """Full blocks are shared for good."""
    harness = make_harness()
    harness.add(make_request("r", 8, best_of=best_of))
    finish(harness)
    assert harness.core.state.counters.num_copied_blocks == 0


def test_samples_that_come_back_share_the_prompt_again() -> None:
    """After a preemption by recompute the prompt's full blocks are computed once."""
    harness = make_harness(prefix_cache=False)
    harness.add(make_request("r", 12, best_of=4, max_tokens=6))
    for _ in range(3):
        harness.step()
    harness.restart()
    plan = harness.plan()
    assert sum(plan.chunk_counts) < 12 + 4 * 4
    tables = [seq.block_table for seq in harness.core.state.groups["r"].live]
    assert len({tuple(table[:3]) for table in tables}) == 1
    finish(harness)


def test_samples_share_the_prompt_also_when_the_first_is_over() -> None:
    """Any sibling that holds the prompt's blocks will do, or the pool would be outgrown."""
    harness = make_harness(prefix_cache=False, max_num_batched_tokens=13, num_blocks=8)
    harness.add(make_request("r", 12, best_of=3, max_tokens=5))
    harness.step()
    harness.step()
    harness.restart()
    harness.step()
    assert harness.stop("r", 0)
    finish(harness)
    assert harness.core.state.counters.num_recompute_preemptions == 0


def test_a_prefix_hit_is_not_computed_again() -> None:
    """Only what follows the cached blocks is."""
    harness = make_harness()
    harness.add(make_request("a", [*range(200, 210)], max_tokens=1))
    finish(harness)
    harness.add(make_request("b", [*range(200, 210), 1, 2], max_tokens=1))
    plan = harness.step()
    assert plan.chunk_counts == [4]
    assert plan.starts[0].num_computed_tokens == 8
    finish(harness)
