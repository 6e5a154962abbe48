"""The scheduler's engine against a real executor server whose model is a small function."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from executor_svc.executor import Executor
from executor_svc.plan import Description, Outcome, Plan, RowDigest, StepError, StepErrorKind
from executor_svc.server import ExecutorServer
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.request import FinishReason, Request, SamplingParams, SequenceOutput
from scheduler_svc.engine import Engine
from scheduler_svc.errors import DuplicateRequest, NeverFits, Unavailable
from scheduler_svc.stream import TokenStream
from tests.integration.executor_rig import config
from tests.support.in_turn import InTurn

WAIT = 20.0


def next_token(tokens: list[int]) -> int:
    """Return the token that the modelled model draws."""
    return (sum(tokens) * 31 + len(tokens)) % 90 + 2


def expected(prompt: list[int], count: int) -> list[int]:
    """Return what it draws after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class FakeEngine(InTurn):
    """Rows without K/V; fails steps as it is told to."""

    description: Description = field(
        default_factory=lambda: Description(
            model="fake", fingerprint="", block_size=8, num_device_blocks=40, num_host_blocks=0,
            dtype="float32", max_model_len=256, max_num_batched_tokens=64, max_num_rows=16,
            vocab_size=97, block_bytes=1, device="none", attention="none", octavo_version="0",
        )
    )  # fmt: skip
    fault: Callable[[list[list[int]], int], StepError | None] = lambda *_: None
    rows: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    decoding: set[int] = field(default_factory=set)
    step_sizes: list[int] = field(default_factory=list)
    failure: StepError | None = None

    @property
    def num_rows(self) -> int:
        """How many rows exist."""
        return len(self.rows)

    def reset(self) -> None:
        """Forget everything."""
        self.rows, self.decoding, self.failure = {}, set(), None

    def audit(self) -> list[RowDigest]:
        """Show nothing."""
        return []

    def run(self, plan: Plan) -> Outcome:
        """Carry out one step."""
        for row in plan.finish_rows:
            del self.rows[row]
            self.decoding.discard(row)
        for start in plan.starts:
            self.rows[start.row] = (list(start.tokens), start.num_computed_tokens)
        self.decoding -= set(plan.decode_leave_rows)
        self.decoding |= set(plan.decode_enter_rows)
        counts = dict(zip(plan.chunk_rows, plan.chunk_counts, strict=True))
        counts.update(dict.fromkeys(self.decoding, 1))
        self.step_sizes.append(sum(counts.values()))
        failure = self.failure or self.fault(
            [self.rows[r][0] for r in counts], sum(counts.values())
        )
        if failure is not None:
            self.failure = failure
            return Outcome(plan.epoch, plan.step_id, error=failure)
        drawn = []
        for row, count in sorted(counts.items()):
            tokens, computed = self.rows[row]
            computed += count
            if computed == len(tokens):
                drawn.append(next_token(tokens))
                tokens.append(drawn[-1])
            self.rows[row] = (tokens, computed)
        return Outcome(plan.epoch, plan.step_id, tokens=drawn)


@dataclass
class Rig:
    """An engine claimed over the wire, and the fake below it."""

    engine: Engine
    fake: FakeEngine

    async def submit(self, name: str, prompt: list[int], count: int) -> TokenStream:
        """Submit a greedy request."""
        request = Request(name, prompt, SamplingParams(temperature=0.0), count, arrival=0.0)
        return await self.engine.submit(request)


async def read_all(stream: TokenStream) -> SequenceOutput:
    """Read the only choice to its end."""
    whole = SequenceOutput(0, [])
    async with asyncio.timeout(WAIT):
        while outputs := await stream.receive():
            for output in outputs:
                whole.tokens += output.tokens
                whole.finish = output.finish or whole.finish
                whole.error = output.error or whole.error
    return whole


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """Both sides, connected."""
    fake = FakeEngine()
    server = ExecutorServer(config(), lambda: fake)
    await server.start()
    await server.wait_ready()
    settings = SchedulerConfig(executors=(server.address,), max_num_seqs=8)
    engine = Engine(settings, "")
    await engine.start()
    async with asyncio.timeout(WAIT):
        while not engine.is_healthy:
            await asyncio.sleep(0.01)
    yield Rig(engine, fake)
    await engine.stop()
    await server.stop()


async def test_requests_run_over_the_wire(rig: Rig) -> None:
    """Many requests at once get the model's tokens, and leave nothing behind."""
    prompts = [[5 + i, 7, 11 * (i + 1) % 90] * (1 + i % 5) for i in range(20)]
    streams = [await rig.submit(f"r{i}", p, 12) for i, p in enumerate(prompts)]
    outputs = await asyncio.gather(*map(read_all, streams))
    assert [o.tokens for o in outputs] == [expected(p, 12) for p in prompts]
    assert rig.engine.num_requests == 0
    core = rig.engine.sessions[0].core
    assert core is not None and core.state.blocks.pool.num_referenced == 0


async def test_out_of_memory_makes_steps_smaller(rig: Rig) -> None:
    """A step that does not fit is made again with a smaller budget, and nobody notices."""
    out_of_memory = StepError(StepErrorKind.OUT_OF_MEMORY, "no room")
    rig.fake.fault = lambda _, num_tokens: out_of_memory if num_tokens > 20 else None
    prompts = [[3 + i] * 50 for i in range(3)]
    streams = [await rig.submit(f"r{i}", p, 5) for i, p in enumerate(prompts)]
    outputs = await asyncio.gather(*map(read_all, streams))
    assert [o.tokens for o in outputs] == [expected(p, 5) for p in prompts]
    assert max(rig.fake.step_sizes) == 64 and rig.fake.step_sizes[-1] <= 16


async def test_a_poison_request_fails_alone(rig: Rig) -> None:
    """The one request that breaks every step it is in ends with an error; others go on."""
    broken = StepError(StepErrorKind.INTERNAL, "this prompt breaks the model")
    rig.fake.fault = lambda rows, _: broken if any(66 in row[:3] for row in rows) else None
    good = [[4 + i, 8, 9] for i in range(4)]
    streams = [await rig.submit(f"r{i}", p, 10) for i, p in enumerate(good)]
    poison = await rig.submit("poison", [66, 1, 2], 10)
    outputs = await asyncio.gather(*map(read_all, [*streams, poison]))
    assert outputs[-1].finish is FinishReason.ERROR
    assert "breaks the model" in outputs[-1].error
    assert [o.tokens for o in outputs[:-1]] == [expected(p, 10) for p in good]


async def test_refusals_touch_no_one_else(rig: Rig) -> None:
    """A duplicate id and a request larger than the pool are refused; the first goes on."""
    first = await rig.submit("same", [5, 6], 30)
    with pytest.raises(DuplicateRequest):
        await rig.submit("same", [1], 1)
    with pytest.raises(NeverFits):
        await rig.submit("huge", [1] * 200, 200)
    assert (await read_all(first)).tokens == expected([5, 6], 30)


async def test_cancel_frees_rows_and_blocks(rig: Rig) -> None:
    """Cancelled requests, queued and running, leave the executor without their rows."""
    streams = [await rig.submit(f"r{i}", [i + 3] * 9, 100) for i in range(12)]
    begun = [token for output in await streams[0].receive() for token in output.tokens]
    for stream in streams[1:]:
        stream.cancel()
        stream.cancel()
    assert rig.engine.num_requests == 1
    assert begun + (await read_all(streams[0])).tokens == expected([3] * 9, 100)
    last = await rig.submit("last", [9], 2)
    await read_all(last)
    assert len(rig.fake.rows) <= 1


async def test_draining_refuses_new_work_and_ends_the_old(rig: Rig) -> None:
    """After drain begins nothing is accepted; what runs finishes within the grace."""
    running = await rig.submit("running", [5, 5], 40)
    draining = asyncio.create_task(rig.engine.drain(WAIT))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await rig.submit("late", [1], 1)
    assert (await read_all(running)).tokens == expected([5, 5], 40)
    assert await draining == 0


async def test_a_live_owner_is_not_robbed(rig: Rig) -> None:
    """A second scheduler waits while the first lives, and takes over when it has gone."""
    address = rig.engine.sessions[0].address
    second = Engine(SchedulerConfig(executors=(address,), scheduler_id="second"), "")
    await second.start()
    stream = await rig.submit("first", [5, 6], 60)
    await asyncio.sleep(0.5)
    assert not second.is_healthy and "is owned by" in second.sessions[0].last_error
    assert rig.engine.sessions[0].epoch == 1
    assert (await read_all(stream)).tokens == expected([5, 6], 60)
    await rig.engine.stop()
    async with asyncio.timeout(WAIT):
        while not second.is_healthy:
            await asyncio.sleep(0.02)
    assert second.sessions[0].epoch == 2
    await second.stop()


async def test_a_fault_of_our_own_ends_the_engine(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an exception that nobody expected the engine says that it died, and why."""
    core = rig.engine.sessions[0].core

    def break_down(_: float) -> None:
        raise AssertionError("an invariant does not hold")

    monkeypatch.setattr(core, "plan", break_down)
    await rig.submit("any", [5], 3)
    async with asyncio.timeout(WAIT):
        error = await asyncio.shield(rig.engine.died)
    assert "an invariant" in str(error)


def test_the_fake_is_an_engine_of_the_executor() -> None:
    """The stand-in has what the executor's own engine has."""
    for name in ("run", "reset", "audit", "num_rows"):
        assert hasattr(Executor, name) and hasattr(FakeEngine, name)
