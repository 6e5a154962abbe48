"""Tests of explain, of both clients and the command, over a scripted scheduler."""

from __future__ import annotations

import json
from typing import Any

import pytest
from octavo.v1 import admin_pb2
from octavo_client import AsyncClient, Client, EventKind, NotFound
from octavo_client._admin import parse_explanation
from octavo_client._story import spans_of
from octavo_client.cli import main
from octavo_client.cli.explain import tell

BEGIN = 1_700_000_000_000_000_000
MS = 1_000_000


def story(*events: dict[str, Any], dropped: int = 0) -> admin_pb2.ExplainResponse:
    """One request's; times of events are milliseconds since its begin."""
    response = admin_pb2.ExplainResponse(
        request_id="cmpl-1.0",
        tenant="team-a",
        priority=5,
        num_prompt_tokens=32,
        num_generated_tokens=96,
        num_events_dropped=dropped,
        trace_id="0af7651916cd43dd8448eb211c80319c",
    )
    for event in events:
        kind = admin_pb2.RequestEvent.Kind.Value(f"KIND_{event['kind']}")
        at = BEGIN + event.get("ms", 0) * MS
        rest = {name: value for name, value in event.items() if name not in ("kind", "ms")}
        response.events.add(kind=kind, time_unix_ns=at, **rest)
    return response


PREEMPTED = story(
    {"kind": "QUEUED"},
    {
        "kind": "BLOCKED", "ms": 10, "detail": "12 blocks are needed, 3 are free",
        "other_request_id": "cmpl-2.0",
    },
    {"kind": "ADMITTED", "ms": 100, "executor": "e:1", "num_tokens": 16},
    {"kind": "FIRST_TOKEN", "ms": 150, "executor": "e:1"},
    {
        "kind": "PREEMPTED_RECOMPUTE", "ms": 400, "executor": "e:1", "num_tokens": 50,
        "other_request_id": "cmpl-2.0",
    },
    {"kind": "RESUMED", "ms": 700, "executor": "e:1"},
    {"kind": "FINISHED", "ms": 1000, "executor": "e:1", "num_tokens": 96, "detail": "length"},
)  # fmt: skip


@pytest.fixture
def told(fake: Any) -> Any:
    """A scheduler that knows one request."""
    fake.stories["cmpl-1.0"] = PREEMPTED
    return fake


async def test_both_clients_tell_the_same(told: Any) -> None:
    """Values, nothing of protobuf; an unknown id is NotFound."""
    async with AsyncClient(told.target) as client:
        explanation = await client.explain("cmpl-1.0")
        with pytest.raises(NotFound, match="nobody"):
            await client.explain("nobody")
    with Client(told.target) as blocking:
        assert blocking.explain("cmpl-1.0") == explanation
        with pytest.raises(NotFound, match="nobody"):
            blocking.explain("nobody")
    assert explanation.num_prompt_tokens == 32
    assert explanation.events[4].kind is EventKind.PREEMPTED_RECOMPUTE
    assert explanation.events[4].other_request_id == "cmpl-2.0"


def test_every_kind_of_the_wire_is_known() -> None:
    """And one of a newer server is not mistaken for another."""
    numbers = admin_pb2.RequestEvent.Kind.values()
    response = admin_pb2.ExplainResponse()
    for number in [*numbers, 999]:
        response.events.add(kind=number)
    kinds = [event.kind for event in parse_explanation(response).events]
    assert kinds[0] is kinds[-1] is EventKind.UNKNOWN
    assert EventKind.UNKNOWN not in kinds[1:-1]
    assert len(set(kinds)) == len(numbers)


def lines_of(response: admin_pb2.ExplainResponse) -> str:
    explanation = parse_explanation(response)
    lines = tell(explanation, spans_of(explanation.events, BEGIN + 2000 * MS))
    return "\n".join(lines)


def test_the_command_prints_the_story(told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Who it was, what happened when, who was to blame, and where the time went."""
    code = main(["explain", "cmpl-1.0", "--target", told.target])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    lines = [" ".join(line.split()) for line in captured.out.splitlines()]
    for line in (
        "cmpl-1.0",
        "tenant team-a · priority 5 · 32 prompt tokens · 96 tokens generated · "
        "trace 0af7651916cd43dd8448eb211c80319c",
        "0 queued",
        "10.0 ms blocked 12 blocks are needed, 3 are free, cmpl-2.0 holds the most",
        "100.0 ms admitted on e:1, 16 of 32 prompt tokens cached",
        "150.0 ms first token",
        "400.0 ms preempted recompute for cmpl-2.0, 50 tokens to compute again",
        "700.0 ms resumed",
        "1.00 s finished length, 96 tokens",
        "Where 1.00 s went",
        "queued 10.0 ms 1.0% waits in the queue, behind others",
        "blocked 90.0 ms 9.0% next in the queue, without room",
        "prefill 50.0 ms 5.0% its prompt is computed",
        "decode 550.0 ms 55.0% tokens are generated",
        "preempted 300.0 ms 30.0% its blocks went to others",
    ):
        assert line in lines, f"{line!r} is not in\n{captured.out}"
    assert not any("moved" in line for line in lines)


def test_the_bar_has_the_shares(told: Any) -> None:
    """Forty characters, in the order of time."""
    bar = next(line for line in lines_of(PREEMPTED).splitlines() if "▚" in line)
    letters = [letter for letter in bar if letter in "░▒▓█▚»"]
    assert len(letters) == 40
    assert letters.count("▚") == 12
    assert "".join(letters).index("▒") < "".join(letters).index("█") < letters.index("▚")


def test_a_live_request_is_told_so_far() -> None:
    """Its last phase lasts until now."""
    text = lines_of(story({"kind": "QUEUED"}, {"kind": "ADMITTED", "ms": 500}))
    assert "Where 2.00 s went so far" in text


def test_events_that_were_dropped_are_counted_where_they_are_missing() -> None:
    """In the middle, since the first and the last are kept."""
    events = [{"kind": "PREEMPTED_SWAP", "ms": ms} for ms in range(1, 11)]
    text = lines_of(story({"kind": "QUEUED"}, *events, {"kind": "FINISHED", "ms": 20}, dropped=7))
    lines = text.splitlines()
    (at,) = [number for number, line in enumerate(lines) if "7 more events in between" in line]
    assert "6.0 ms" in lines[at + 1]
    assert "events are missing" in text


def test_json_is_the_whole_story(told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With the sums, for programs."""
    code = main(["explain", "cmpl-1.0", "--target", told.target, "--json"])
    parsed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert parsed["seconds_by_phase"]["preempted"] == pytest.approx(0.3)
    assert parsed["events"][1] == {
        "kind": "blocked",
        "time_unix_ns": BEGIN + 10 * MS,
        "executor": "",
        "other_request_id": "cmpl-2.0",
        "detail": "12 blocks are needed, 3 are free",
        "num_tokens": 0,
    }


def test_an_unknown_id_is_one_line(told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """And who gives the gateway's id of an answer is told what is missing."""
    for given, hint in (("nobody", ""), ("cmpl-1", "try cmpl-1.0")):
        code = main(["explain", given, "--target", told.target])
        err = capsys.readouterr().err
        assert code == 1
        assert err.count("\n") == 1
        assert given in err
        assert hint in err
        assert ("try" in err) == bool(hint)
