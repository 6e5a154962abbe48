"""Every interleaving of a small world, not a sample of them.

Two requests, four blocks, two steps in flight. From each state that is reached every
transition is tried, and states that were seen already are not entered again. So the
statement is for all orders of arrivals, plans, results and cancels, up to the end.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable

import pytest

from scheduler_svc.core.request import BeamParams, Request, SamplingParams
from scheduler_svc.core.state import CoreConfig
from tests.support.core_harness import TOTALS, CoreHarness

_MAX_STATES = 4_000


def _request(name: str, prompt: list[int], **changes: object) -> Request:
    return Request(name, prompt, SamplingParams(), **{"max_tokens": 4, **changes})


_SINGLES = [_request("a", [3, 4, 5]), _request("b", [3, 4, 6])]
_URGENT = [_request("a", [3, 4, 5]), _request("b", [7, 8, 9], priority=1)]
_SAMPLES = [_request("a", [3], n=2, best_of=2, max_tokens=3), _request("b", [3, 4, 6])]
_SEARCH = [
    _request("a", [3], n=2, best_of=2, max_tokens=3, beam=BeamParams(2)),
    _request("b", [3, 4, 6]),
]
_WORLDS = {
    "singles-recompute": (_SINGLES, "recompute", "priority"),
    "singles-swap": (_SINGLES, "swap", "priority"),
    "urgent-recompute": (_URGENT, "recompute", "priority"),
    "urgent-swap": (_URGENT, "swap", "fair"),
    "samples-recompute": (_SAMPLES, "recompute", "fcfs"),
    "samples-swap": (_SAMPLES, "swap", "fcfs"),
    "search-recompute": (_SEARCH, "recompute", "fcfs"),
    "search-swap": (_SEARCH, "swap", "fcfs"),
}


@pytest.mark.parametrize("world", _WORLDS)
def test_every_interleaving_ends_well(world: str) -> None:
    """In whatever order requests come, steps are planned and acknowledged, and requests
    are cancelled, the invariants hold; and from every state all that is left finishes
    with the tokens of the oracle.
    """
    requests, preemption, policy = _WORLDS[world]
    config = CoreConfig(
        num_blocks=4,
        block_size=2,
        num_host_blocks=4 if preemption == "swap" else 0,
        max_num_batched_tokens=5,
        max_num_seqs=3,
        max_steps_in_flight=2,
        preemption=preemption,
        policy=policy,
    )
    transitions = _transitions(requests)
    start = pickle.dumps(CoreHarness(config))
    seen, frontier = {_fingerprint(pickle.loads(start))}, [start]
    num_preempted = 0
    while frontier and len(seen) < _MAX_STATES:
        before = frontier.pop(0)
        for transition in transitions:
            harness = pickle.loads(before)
            num_before = harness.num_transitions
            if transition(harness) and (mark := _fingerprint(harness)) not in seen:
                seen.add(mark)
                frontier.append(pickle.dumps(harness))
                num_preempted += bool(harness.core.state.preempted)
                _finish(harness)
            TOTALS.transitions += harness.num_transitions - num_before
    assert num_preempted > 0, "the pool is too large to show anything"
    complete = "all" if not frontier else "the first"
    TOTALS.notes.append(
        f"interleavings of {world}: {complete} {len(seen):,} states, {num_preempted:,} "
        "with a request preempted"
    )


def _transitions(requests: list[Request]) -> list[Callable[[CoreHarness], bool]]:
    """Each changes the harness and says whether it could."""

    def add(harness: CoreHarness, request: Request) -> bool:
        return request.request_id not in harness.requests and harness.add(request)

    def cancel(harness: CoreHarness, request: Request) -> bool:
        return harness.cancel(request.request_id)

    return [
        *(lambda h, r=request: add(h, r) for request in requests),
        *(lambda h, r=request: cancel(h, r) for request in requests),
        lambda h: h.plan() is not None,
        lambda h: h.apply() is not None,
    ]


def _finish(harness: CoreHarness) -> None:
    harness.drain()
    harness.check_finished()


def _fingerprint(harness: CoreHarness) -> Hashable:
    """All that the future depends on; step ids count from the next step."""
    state = harness.core.state
    base = state.plan.step_id
    oldest = state.in_flight[0].step_id if state.in_flight else base
    groups = tuple(
        (
            name,
            group.status,
            group.unforked,
            group.rows_promised,
            max(group.resume_after, oldest - 1) - base,
            tuple(map(_sequence, group.sequences)),
        )
        for name, group in sorted(state.groups.items())
    )
    decoding = [s for s in state.decode_set.members if s.in_decode_set]
    lists = (state.prefilling, state.ready, decoding)
    places = tuple(tuple(map(_name, members)) for members in lists)
    in_flight = tuple(
        (
            tuple(map(_name, r.sampled)),
            tuple((_name(s), p, n) for s, p, n in r.chunks),
            r.decode_set is None,
        )
        for r in state.in_flight
    )
    blocks = tuple(
        (name, tuple((step - base, tuple(held)) for step, held in value))
        for name, value in vars(state.blocks).items()
        if name.endswith("fences")
    )
    pools = tuple(
        tuple((name, _frozen(value)) for name, value in vars(pool).items())
        for pool in (state.blocks.pool, state.blocks.host_pool)
        if pool is not None
    )
    unsent = (tuple(state.plan.finish_rows), tuple(state.plan.decode_leave_rows))
    unnamed = tuple(map(_name, state.blocks.unnamed))
    ended = frozenset(harness.ends.items())
    known = frozenset(harness.requests)
    rows = tuple(state.free_rows)
    return (groups, places, in_flight, blocks, pools, unsent, unnamed, ended, known, rows)


def _name(seq) -> tuple:
    return (seq.group.request.request_id, seq.sample_index)


def _sequence(seq) -> tuple:
    return (
        tuple(seq.tokens),
        seq.num_scheduled,
        seq.num_computed,
        seq.num_registered,
        seq.row,
        seq.in_decode_set,
        seq.is_prefilled,
        seq.finish_reason,
        tuple(seq.block_table),
        tuple(seq.host_table),
        seq.share_from and seq.share_from.row,
    )


def _frozen(value: object) -> Hashable:
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value
