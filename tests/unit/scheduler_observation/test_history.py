"""Stories of requests: kept in order, and bounded both ways."""

from __future__ import annotations

from itertools import pairwise

import pytest

from scheduler_svc.core.events import EventKind
from scheduler_svc.core.request import Request, SamplingParams
from scheduler_svc.observation.history import Happening, RequestHistory


def request(name: str) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(), max_tokens=4, tenant="t", priority=7)


def happening(number: int, kind: EventKind = EventKind.BLOCKED) -> Happening:
    return Happening(kind, number, "executor", num_tokens=number)


def test_a_story_has_who_asked_and_what_happened_in_order() -> None:
    history = RequestHistory()
    history.open(request("a"), "0" * 32)
    for number in range(5):
        history.note("a", happening(number))
    story = history.find("a")
    assert story is not None
    assert (story.tenant, story.priority, story.num_prompt_tokens) == ("t", 7, 3)
    assert [event.num_tokens for event in story] == [0, 1, 2, 3, 4]
    assert story.num_dropped == 0


def test_tokens_of_all_choices_count() -> None:
    history = RequestHistory()
    history.open(request("a"), "")
    history.note("a", happening(3, EventKind.FINISHED))
    history.note("a", happening(4, EventKind.FINISHED))
    story = history.find("a")
    assert story is not None and story.num_generated_tokens == 7


@pytest.mark.parametrize("count", [128, 129, 1000])
def test_a_long_story_loses_its_middle_only(count: int) -> None:
    history = RequestHistory()
    history.open(request("a"), "")
    for number in range(count):
        history.note("a", happening(number))
    story = history.find("a")
    assert story is not None
    kept = [event.num_tokens for event in story]
    assert kept == [*range(64), *range(count - 64, count)]
    assert story.num_dropped == count - 128


def test_of_requests_with_one_id_the_latest_is_told() -> None:
    """Nothing of the others, which may have been somebody else's; and nothing is counted twice."""
    history = RequestHistory(max_events=10)
    for number in range(20):
        history.open(request("a"), f"{number:032x}")
        history.note("a", happening(number, EventKind.FINISHED))
    story = history.find("a")
    assert story is not None
    assert [event.num_tokens for event in story] == [19]
    assert (story.trace_id, story.num_generated_tokens) == (f"{19:032x}", 19)


def test_only_the_latest_stories_are_kept() -> None:
    history = RequestHistory(max_stories=3)
    for name in "abcd":
        history.open(request(name), "")
    assert history.find("a") is None
    assert all(history.find(name) is not None for name in "bcd")
    history.note("a", happening(1))  # it is forgotten, and that is no fault
    history.open(request("b"), "")
    history.open(request("e"), "")
    assert history.find("b") is not None, "it came again, so it is among the latest"
    assert history.find("c") is None


def test_events_of_all_together_are_bounded() -> None:
    history = RequestHistory(max_stories=1000, max_events=500)
    for number in range(100):
        history.open(request(f"r{number}"), "")
        for step in range(20):
            history.note(f"r{number}", happening(step))
        stories = [history.find(f"r{known}") for known in range(number + 1)]
        assert sum(len(story) for story in stories if story is not None) <= 500
    assert len(history) == 25
    known = [history.find(f"r{number}") is not None for number in range(100)]
    assert all(later >= earlier for earlier, later in pairwise(known)), "the oldest went"


def test_one_story_alone_never_outgrows_everything() -> None:
    history = RequestHistory(max_stories=2, max_events=100)
    history.open(request("a"), "")
    for number in range(300):
        history.note("a", happening(number))
    assert len(history) <= 1
