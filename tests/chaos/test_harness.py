"""The judge of the chaos tests: every kind of wrong answer is called wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from octavo_client import (
    Choice,
    Completion,
    FinishReason,
    PositionLogprobs,
    TokenLogprob,
    Usage,
)

from tests.chaos.catalogue import Entry, difference
from tests.chaos.faults import Kind, Pace, draw_plan
from tests.chaos.ledger import Ledger, StreamRecord, quantile
from tests.chaos.rest import FDS_SLACK, RSS_SLACK_BYTES, Footprint, growth_problems, read_events
from tests.chaos.stack import Layout, Stack


def position(token_id: int, logprob: float, best: float = -0.5) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(token_id, logprob), (TokenLogprob(9, best),))


CHOICE = Choice(
    index=0,
    text="abc",
    token_ids=(5, 6, 7),
    finish_reason=FinishReason.LENGTH,
    logprobs=(position(5, -1.0), position(6, -2.0), position(7, -3.0)),
)
ANSWER = Completion("r", "m", 1, (CHOICE,), Usage())
ENTRY = Entry("greedy", (3, 4), answer=ANSWER)


def test_the_same_answer_is_the_same() -> None:
    """Its id, and what it cost, may differ."""
    other = replace(ANSWER, request_id="other", usage=Usage(num_preemptions=3))
    assert difference(ENTRY, other) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"token_ids": (5, 8, 7)}, "token 1"),
        ({"token_ids": (5, 6)}, "2 tokens instead of 3"),
        ({"token_ids": (5, 6, 7, 7)}, "4 tokens instead of 3"),
        ({"text": "abd"}, "text"),
        ({"finish_reason": FinishReason.STOP}, "finish_reason"),
        ({"stopped_by": "c"}, "stopped_by"),
        ({"logprobs": CHOICE.logprobs[:2]}, "logprobs"),
        ({"logprobs": (position(5, -1.01), *CHOICE.logprobs[1:])}, "logprob 0"),
        ({"logprobs": (position(5, -1.0, -0.51), *CHOICE.logprobs[1:])}, "likeliest"),
        ({"logprobs": (replace(CHOICE.logprobs[0], top=()), *CHOICE.logprobs[1:])}, "likeliest"),
    ],
)
def test_another_answer_is_called_so(change: dict[str, object], why: str) -> None:
    """Each part of a choice counts."""
    choice = replace(CHOICE, **change)  # type: ignore[arg-type]  # fields of several types
    other = replace(ANSWER, choices=(choice,))
    assert why in (difference(ENTRY, other) or "")


def test_a_missing_choice_is_called_so() -> None:
    """An answer has all its choices."""
    assert difference(ENTRY, replace(ANSWER, choices=())) is not None


def test_a_plan_comes_from_its_seed_and_has_every_kind(tmp_path: Path) -> None:
    """The same seed breaks the same; nothing is killed in the second phase."""
    stack = Stack(Layout(model=tmp_path, folder=tmp_path))
    pace = Pace(60, 100.0)
    deadly, harmless = draw_plan(5, pace, stack)
    assert (deadly, harmless) == draw_plan(5, pace, stack)
    assert (deadly, harmless) != draw_plan(6, pace, stack)
    assert len(deadly) + len(harmless) == 60
    assert Kind.KILL not in {fault.kind for fault in harmless}
    happened = {(f.kind, f.service.partition("-")[0]) for f in (*deadly, *harmless)}
    assert happened == {
        (kind, name) for kind in Kind for name in ("executor", "scheduler", "gateway")
    }


def test_the_pause_that_a_death_made() -> None:
    """It begins with the last token, or with one that was on its way."""
    record = StreamRecord("r", "greedy", 0.0, times=[1.0, 2.0, 2.25, 9.0, 9.5])
    assert record.longest_pause == 6.75
    assert record.pause_after(2.125) == 6.75
    assert record.pause_after(9.25) == 0.5
    assert record.pause_after(10.0) is None


def test_a_resumed_call_is_still_its_stream() -> None:
    """The SDK gives each further call an id of its own."""
    ledger = Ledger()
    record = ledger.open("c1-2", "greedy")
    ledger.note_death({"c1-2.r3", "c1-22"}, is_another_up=True)
    assert len(record.deaths) == 1


def test_quantiles() -> None:
    """Of none, one and many."""
    assert quantile([], 0.5) == 0.0
    assert quantile([2.0], 0.99) == 2.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_growth_and_restarts_are_seen() -> None:
    """A process that grew beyond the slack, and one that is not the same any more."""
    before = {name: Footprint(1, 100 << 20, 20) for name in ("a", "b", "c", "d")}
    after = {
        "a": Footprint(1, (100 << 20) + RSS_SLACK_BYTES, 20 + FDS_SLACK),
        "b": Footprint(1, (101 << 20) + RSS_SLACK_BYTES, 20),
        "c": Footprint(1, 100 << 20, 21 + FDS_SLACK),
        "d": Footprint(2, 100 << 20, 20),
    }
    assert [problem[0] for problem in growth_problems(before, after)] == ["b", "c", "d"]


def test_what_no_log_should_have(tmp_path: Path) -> None:
    """The sanitizer's finding, and an exception that nobody expected."""
    log = tmp_path / "executor-0-1.log"
    log.write_text(
        '{"kv_check": true, "event": "executor_ready"}\n'
        '{"kind": "kv_check", "event": "step_failed"}\n'
        '{"num_requests": 3, "event": "requests_moved"}\n'
        "Traceback (most recent call last):\n"
        '{"event": "cut o'
    )
    events, bad = read_events([log])
    assert events["executor_ready"] == 1
    assert events["requests_moved"] == 3
    assert len(bad) == 2
