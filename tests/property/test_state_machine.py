"""The whole core as a Hypothesis state machine: what random driving finds, this shrinks."""

from __future__ import annotations

import os

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler_svc.core.request import BeamParams, Request, SamplingParams
from scheduler_svc.core.state import CoreConfig
from scheduler_svc.core.step import StepErrorKind
from tests.support.core_harness import CoreHarness

_BLOCK_SIZE = 2
_PREFIX = [11, 12, 13, 14, 15, 16, 17]


@st.composite
def configs(draw: st.DrawFn) -> CoreConfig:
    max_num_seqs = draw(st.integers(4, 8))
    return CoreConfig(
        num_blocks=draw(st.integers(8, 24)),
        block_size=_BLOCK_SIZE,
        num_host_blocks=draw(st.sampled_from([0, 4, 16])),
        max_num_batched_tokens=max_num_seqs + draw(st.integers(1, 12)),
        max_num_seqs=max_num_seqs,
        max_queue=6,
        watermark=draw(st.sampled_from([0.0, 0.1])),
        max_steps_in_flight=draw(st.integers(1, 3)),
        preemption=draw(st.sampled_from(["recompute", "swap", "auto"])),
        policy=draw(st.sampled_from(["fcfs", "priority", "fair"])),
        prefix_cache=draw(st.booleans()),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A request without id and arrival, which the machine sets."""
    shared = draw(st.integers(0, len(_PREFIX)))
    prompt = [*_PREFIX[:shared], *draw(st.lists(st.integers(0, 49), min_size=1, max_size=6))]
    max_tokens = draw(st.integers(0, 8))
    best_of = draw(st.integers(1, 4))
    stops = draw(st.frozensets(st.integers(0, 49), max_size=3))
    beam = None
    resumed: dict[int, tuple[int, ...]] = {}
    if max_tokens and best_of > 1 and draw(st.booleans()):
        penalty = draw(st.sampled_from([0.0, 1.0, 2.0]))
        beam = BeamParams(best_of, penalty, draw(st.booleans()))
    elif max_tokens:
        running = st.integers(0, 49).filter(lambda token: token not in stops)
        history = st.lists(running, max_size=min(3, max_tokens)).map(tuple)
        resumed = draw(st.dictionaries(st.integers(0, best_of - 1), history, max_size=best_of))
    return Request(
        request_id="",
        prompt_tokens=prompt,
        sampling=SamplingParams(),
        max_tokens=max_tokens,
        stop_token_ids=stops,
        n=best_of,
        best_of=best_of,
        beam=beam,
        num_logprobs=draw(st.sampled_from([None, 1])) if beam is None else None,
        num_prompt_logprobs=draw(st.sampled_from([None, None, 0])) if beam is None else None,
        priority=draw(st.integers(0, 2)),
        tenant=draw(st.sampled_from(["", "a", "b"])),
        cache_salt=draw(st.sampled_from(["", "a"])),
        use_cache=draw(st.booleans()),
        resumed=resumed,
    )


class CoreMachine(RuleBasedStateMachine):
    """Every rule is one or more transitions of the harness, which checks each."""

    @initialize(config=configs(), ns_per_block=st.sampled_from([100, 100_000]))
    def begin(self, config: CoreConfig, ns_per_block: int) -> None:
        self.harness = CoreHarness(config)
        self.harness.model.ns_per_block = ns_per_block
        self.num_added = 0

    @rule(request=requests(), seconds_left=st.sampled_from([None, None, None, 3]))
    def add(self, request: Request, seconds_left: int | None) -> None:
        harness = self.harness
        deadline = None if seconds_left is None else harness.now + seconds_left
        harness.add(
            _with(
                request,
                request_id=f"r{self.num_added}",
                arrival=harness.now,
                deadline=deadline,
            )
        )
        self.num_added += 1

    @rule(count=st.integers(1, 6))
    def plan(self, count: int) -> None:
        for _ in range(count):
            self.harness.plan()

    @precondition(lambda self: self.harness.pending)
    @rule(count=st.integers(1, 6))
    def apply(self, count: int) -> None:
        for _ in range(count):
            self.harness.apply()

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.plan()
            self.harness.apply()

    @rule(number=st.integers(0, 8))
    def cancel(self, number: int) -> None:
        """Also of what never was, or is over."""
        self.harness.cancel(f"r{number}")

    @precondition(lambda self: self.harness.tokens)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.harness.stop(*data.draw(st.sampled_from(sorted(self.harness.tokens))))

    @rule(seconds=st.integers(1, 4))
    def advance(self, seconds: int) -> None:
        self.harness.advance(seconds)

    @rule()
    def lose_the_executor(self) -> None:
        self.harness.restart()

    @precondition(lambda self: self.harness.pending)
    @rule(kind=st.sampled_from([StepErrorKind.INTERNAL, StepErrorKind.OUT_OF_MEMORY]))
    def fail_a_step(self, kind: StepErrorKind) -> None:
        self.harness.fail(kind)

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()
            self.harness.check_finished()
            self.harness.report()


def _with(request: Request, **changes: object) -> Request:
    values = {name: getattr(request, name) for name in Request.__slots__}
    return Request(**{**values, **changes})


CoreMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("OCTAVO_EXAMPLES", "200")),
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class TestCore(CoreMachine.TestCase):
    """All rules in any order keep the invariants, and every output is the oracle's."""
