"""Beam search inside the engine, against a plain search over the whole vocabulary."""

from __future__ import annotations

import itertools

import pytest

from scheduler_svc.core.beam import BeamSearch
from scheduler_svc.core.request import BeamParams, FinishReason, TokenLogprob
from tests.support.core_builders import finish, make_group, make_harness, make_request


@pytest.mark.parametrize(
    ("width", "penalty", "early_stopping"),
    list(itertools.product([2, 3, 5], [0.0, 1.0, 2.0, -1.0], [False, True])),
)
def test_hypotheses_are_those_of_a_plain_search(width, penalty, early_stopping) -> None:
    """Tokens, order, scores and reasons, for several prompts and stop tokens."""
    harness = make_harness(num_blocks=200, max_queue=100)
    beam = BeamParams(width, penalty, early_stopping)
    for index in range(12):
        stops = frozenset(range(index % 4 * 3))
        prompt = [index, *range(1, 2 + index)]
        harness.add(
            make_request(
                f"r{index}",
                prompt,
                n=width,
                best_of=width,
                beam=beam,
                max_tokens=1 + index % 7,
                stop_token_ids=stops,
            )
        )
    finish(harness)
    assert len(harness.hypotheses) == 12


def test_no_more_hypotheses_are_returned_than_asked_for() -> None:
    """The best n of the width."""
    harness = make_harness()
    harness.add(make_request("r", 5, n=1, best_of=1, beam=BeamParams(4), max_tokens=5))
    finish(harness)
    (best,) = harness.hypotheses["r"]
    wide = make_harness()
    wide.add(make_request("r", 5, n=4, best_of=4, beam=BeamParams(4), max_tokens=5))
    finish(wide)
    assert best.score == max(h.score for h in wide.hypotheses["r"])


def test_beams_share_their_blocks() -> None:
    """A wide search over a long prompt holds it once, and common output as well."""
    harness = make_harness(num_blocks=64)
    harness.add(make_request("r", 40, n=4, best_of=4, beam=BeamParams(4), max_tokens=8))
    most = 0
    while harness.core.has_requests:
        harness.step()
        most = max(most, harness.core.state.blocks.pool.num_referenced)
    finish(harness)
    assert most <= 10 + 4 * 3, "4 separate sequences would hold 48"


def test_a_search_plans_no_step_before_the_last_ones_result() -> None:
    """What comes next is known only then; others go on meanwhile."""
    harness = make_harness(max_steps_in_flight=2)
    harness.add(make_request("search", 4, best_of=2, beam=BeamParams(2)))
    assert harness.plan() is not None
    assert harness.plan() is None
    harness.apply()
    assert harness.plan() is not None
    assert harness.plan() is None
    finish(harness)


def test_cancelling_a_search_frees_every_beam() -> None:
    """In the middle, with beams that have no row yet."""
    harness = make_harness()
    harness.add(make_request("r", 6, best_of=3, beam=BeamParams(3), max_tokens=9))
    harness.step()
    assert any(seq.row is None for seq in harness.core.state.groups["r"].live)
    assert harness.cancel("r")
    finish(harness)
    assert "r" not in harness.hypotheses


def _search(early_stopping: bool) -> BeamSearch:
    request = make_request(
        "r",
        [1],
        n=2,
        best_of=2,
        beam=BeamParams(2, 1.0, early_stopping),
        stop_token_ids=frozenset({0}),
        max_tokens=9,
    )
    return BeamSearch(request)


def _report(search: BeamSearch, *beams: tuple[list[int], float, dict[int, float]]) -> None:
    group = make_group("r", [1])
    for output, total, candidates in beams:
        seq = type(group.sequences[0])(group, 0, [1, *output])
        seq.cumulative_logprob = total
        search.candidates[seq] = tuple(TokenLogprob(t, p) for t, p in candidates.items())


def test_with_early_stopping_all_ends_of_the_last_step_compete() -> None:
    """A better one that ends in the step that fills the list replaces a worse one of before,
    as in Hugging Face's search.
    """
    search = _search(early_stopping=True)
    _report(search, ([], 0.0, {5: -0.1, 0: -3.0, 6: -4.0}))
    assert len(search.select()) == 2
    assert [h.tokens for h in search.finished] == [[0]]
    search.candidates.clear()
    _report(search, ([5], -0.1, {0: -0.1, 7: -5.0}), ([6], -0.2, {0: -0.2, 7: -5.0}))
    assert search.select() == []
    assert [h.tokens for h in search.finished] == [[5, 0], [6, 0]]


def test_an_end_below_the_first_width_ranks_is_no_hypothesis() -> None:
    """It would not have been a beam."""
    search = _search(early_stopping=False)
    _report(search, ([], 0.0, {5: -0.1, 6: -0.2, 0: -0.3}))
    assert [c.token for c in search.select()] == [5, 6]
    assert search.finished == []


def test_without_early_stopping_it_goes_on_while_a_beam_can_still_win() -> None:
    """Judged at the present length, as in Hugging Face's search."""
    search = _search(early_stopping=False)
    _report(search, ([5], -2.0, {0: -0.1, 7: -0.15}), ([6], -2.0, {0: -0.12, 7: -0.2}))
    assert search.select() == [], "-2.15 / 2 is not better than -2.12 / 2"
    assert [h.reason for h in search.finished] == [FinishReason.STOP] * 2
    search = _search(early_stopping=False)
    _report(search, ([5], -2.0, {7: -0.05, 0: -0.1}), ([6], -3.0, {0: -0.1, 7: -0.2}))
    assert [c.token for c in search.select()] == [7, 7], "the list is not full yet"
