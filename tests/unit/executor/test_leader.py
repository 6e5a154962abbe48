"""Rank 0: tells the others first, and does not trust ranks that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from octavo.v1 import executor_pb2 as pb

from executor_svc.errors import DeviceLost
from executor_svc.plan import Outcome, Plan, RowDigest
from executor_svc.tensor_parallel import leader as module
from executor_svc.tensor_parallel.leader import Leader, summary
from executor_svc.tensor_parallel.link import Kind, Message
from executor_svc.wire import read_plan
from tests.support.in_turn import InTurn

ROWS = [RowDigest(0, 5, 5, 123), RowDigest(3, 7, 6, 99)]


class Shard(InTurn):
    """Rank 0's executor: notes what it is asked."""

    description: Any = None
    num_rows = 2

    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    def run(self, plan: Plan) -> Outcome:
        self._seen.append(("step", plan.step_id))
        return Outcome(plan.epoch, plan.step_id)

    def reset(self) -> None:
        self._seen.append("reset")

    def audit(self) -> list[RowDigest]:
        self._seen.append("audit")
        return ROWS


class Others:
    """The other ranks, whose rows are `rows`."""

    def __init__(self, rows: list[RowDigest]) -> None:
        self._rows = rows

    def gather(self, data: bytes) -> list[bytes]:
        return [data, data, summary(self._rows)]


@pytest.fixture
def lead(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[RowDigest]], tuple[Leader, list[Any]]]:
    """A leader of ranks with these rows, and what happens in order."""

    def make(rows: list[RowDigest]) -> tuple[Leader, list[Any]]:
        seen: list[Any] = []

        class Sent:
            def __init__(self, *_: object) -> None:
                pass

            def send(self, message: Message) -> None:
                seen.append(message)

            def meet(self, seconds: float) -> None:
                seen.append("meet")

        monkeypatch.setattr(module, "Link", Sent)
        return Leader(Shard(seen), Others(rows), 5.0), seen  # type: ignore[arg-type]

    return make


def test_plans_go_on_as_they_came(lead: Any) -> None:
    """To the others first, as the same bytes; also one that breaks the protocol."""
    whole = pb.StepPlan(epoch=4, step_id=9, finish_rows=[1])
    broken = pb.StepPlan(epoch=4, step_id=10, starts=[pb.RowStart(row=1)])
    leader, seen = lead(ROWS)
    for message in (whole, broken):
        leader.collect(leader.launch(read_plan(message)))
    assert read_plan(broken).broken is not None
    assert seen == [
        Message(Kind.STEP, whole.SerializeToString()),
        ("step", 9),
        Message(Kind.STEP, broken.SerializeToString()),
        ("step", 10),
    ]


def test_everything_else_goes_on_too(lead: Any) -> None:
    """A new owner, an idle moment, the end."""
    leader, seen = lead(ROWS)
    leader.reset()
    leader.beat()
    leader.close()
    assert seen == [Message(Kind.RESET), "reset", Message(Kind.BEAT), Message(Kind.STOP), "meet"]


def test_an_audit_compares_all_ranks(lead: Any) -> None:
    """Equal rows are told; others end the executor."""
    leader, seen = lead(ROWS)
    assert leader.audit() == ROWS
    assert seen == [Message(Kind.AUDIT), "audit"]
    leader, _ = lead([ROWS[0], RowDigest(3, 7, 6, 98)])
    with pytest.raises(DeviceLost, match="the rows of rank 2 are not those of rank 0"):
        leader.audit()
