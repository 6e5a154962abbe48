"""`octavo bench core --rate`: how much of a CPU one scheduler takes at a given pace.

Two levels, chosen by --wire:

    cores    each core's results come by a clock, as bytes: decoded, applied, the next step
             planned and encoded. No network, no event loop.
    engine   the scheduler's own engine and sessions over gRPC on loopback, with simulated
             executors in another process, whose CPU time is not counted. With --readers
             every stream also has a reader, woken at every token as the API would be.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from octavo.v1 import executor_pb2 as pb

from scheduler_svc import runtime
from scheduler_svc.bench import BLOCK_SIZE, WARM_UP_STEPS, Load, Spread, steady_core
from scheduler_svc.bench_executors import StepCounts
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.request import Request, SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import Engine
from scheduler_svc.logs import configure_logging
from scheduler_svc.stream import TokenStream
from scheduler_svc.translation import plan_to_proto, result_from_proto

_WARM_UP_SECONDS = 1.0
_START_SECONDS = 60.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Pace:
    """What one scheduler process took to keep its executors busy.

    Attributes:
        rate: steps a second of each executor that were asked for.
        wire: through engine, sessions and gRPC; otherwise cores and translation alone.
        readers: every stream had a reader.
        seconds: measured.
        steps: of all executors.
        late_steps: those whose plan was not ready when the executor's step before ended.
        cpu_share: CPU time of this process ÷ time: share of one core.
        executors_cpu_share: the same of the simulated executors' process; if it comes near a
            whole core, they are late by themselves. None without the wire.
        plan_apply_us, plan_bytes: of a step; None over the wire.
    """

    running: int
    context: int
    executors: int
    rate: float
    wire: bool
    readers: bool
    seconds: float
    steps: int
    late_steps: int
    cpu_share: float
    executors_cpu_share: float | None = None
    plan_apply_us: Spread | None = None
    plan_bytes: Spread | None = None

    def table(self) -> list[str]:
        """Two lines for people."""
        cells = {
            "running": f"{self.running:,}",
            "context": f"{self.context:,}",
            "executors": f"{self.executors:,}",
            "steps/s each": f"{self.steps / self.seconds / self.executors:.2f}",
            "of": f"{self.rate:g}",
            "late steps": f"{self.late_steps:,} of {self.steps:,}",
            "share of a core": f"{self.cpu_share:.2%}",
        }
        if self.executors_cpu_share is not None:
            cells["theirs"] = f"{self.executors_cpu_share:.2%}"
        if self.plan_apply_us is not None:
            cells["plan+apply us p50"] = f"{self.plan_apply_us.p50:,}"
            cells["p99"] = f"{self.plan_apply_us.p99:,}"
        widths = {title: max(len(title), len(text)) for title, text in cells.items()}
        return [
            "  ".join(f"{title:>{widths[title]}}" for title in cells),
            "  ".join(f"{text:>{widths[title]}}" for title, text in cells.items()),
        ]


# -- cores -----------------------------------------------------------------------------


class _PacedCore:
    """A core whose results come as bytes."""

    def __init__(self, load: Load, num_steps: int) -> None:
        self._core = steady_core(load, num_steps)
        self._core.plan(now=1.0)
        timings = pb.StepTimings(forward_ns=1, prepare_ns=1, sample_ns=1)
        # Messages may be concatenated: the step's id goes before what is always the same.
        self._rest = pb.StepResult(tokens=[1] * load.running, timings=timings).SerializeToString()

    def step(self) -> tuple[float, int]:
        """Take a result and plan a step; microseconds of the core, and bytes of the plan."""
        core, clock = self._core, time.perf_counter_ns
        head = pb.StepResult(epoch=1, step_id=core.state.in_flight[0].step_id)
        data = head.SerializeToString() + self._rest
        result = result_from_proto(pb.StepResult.FromString(data))
        begin = clock()
        core.apply(result)
        core.take_outcome()
        plan = core.plan(now=1.0)
        end = clock()
        assert plan is not None, "a steady core always has a step to plan"
        size = len(plan_to_proto(plan, 1).SerializeToString())
        core.name_blocks()
        return (end - begin) / 1e3, size


def pace_cores(load: Load, rate: float, seconds: float) -> Pace:
    """Step each core `rate` times a second by the clock, evenly spread over the period.

    A step is late if its plan is ready more than a period after the result was: the executor
    has one more plan, and then nothing to do.
    """
    cores = [_PacedCore(load, math.ceil(rate * seconds)) for _ in range(load.executors)]
    for core in cores:
        for _ in range(WARM_UP_STEPS):
            core.step()
    clock, period = time.perf_counter, 1 / rate
    samples: list[tuple[float, int]] = []
    num_late = 0
    begin, cpu_before = clock(), time.process_time()
    due = [(begin + period * index / len(cores), index) for index in range(len(cores))]
    while due[0][0] < begin + seconds and clock() < begin + seconds:
        when, index = due[0]
        if (early := when - clock()) > 0:
            time.sleep(early)
        samples.append(cores[index].step())
        num_late += clock() - when > period
        heapq.heapreplace(due, (when + period, index))
    measured, cpu = clock() - begin, time.process_time() - cpu_before
    plan_apply, sizes = zip(*samples, strict=True)
    return Pace(
        running=load.running,
        context=load.context,
        executors=load.executors,
        rate=rate,
        wire=False,
        readers=False,
        seconds=measured,
        steps=len(samples),
        late_steps=num_late,
        cpu_share=cpu / measured,
        plan_apply_us=Spread.of(plan_apply),
        plan_bytes=Spread.of(sizes),
    )


# -- engine ----------------------------------------------------------------------------


class _Executors:
    """The process of the simulated executors."""

    def __init__(self, process: asyncio.subprocess.Process, addresses: list[str]) -> None:
        self._process = process
        self.addresses = addresses

    @classmethod
    async def start(cls, load: Load, rate: float, max_tokens: int) -> _Executors:
        num_tokens = load.context + max_tokens + BLOCK_SIZE
        description = {
            "model": "simulated",
            "block_size": BLOCK_SIZE,
            "num_device_blocks": load.running * (num_tokens // BLOCK_SIZE + 2),
            "max_model_len": num_tokens,
            "max_num_batched_tokens": load.running * num_tokens,
            "max_num_rows": load.running,
            "vocab_size": 2,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "scheduler_svc.bench_executors"),
            *(json.dumps(description), str(load.executors), str(rate)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        return cls(process, json.loads(await process.stdout.readline()))

    async def counts(self) -> StepCounts:
        """What they have done so far."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return StepCounts(**json.loads(await self._process.stdout.readline()))

    async def stop(self) -> None:
        """End the process."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()


async def pace_engine(load: Load, rate: float, seconds: float, *, readers: bool) -> Pace:
    """Keep simulated executors busy through the real engine.

    Raises:  TimeoutError: if they cannot all be claimed and filled within a minute.
    """
    max_tokens = math.ceil(rate * (seconds + _START_SECONDS))
    executors = await _Executors.start(load, rate, max_tokens)
    flags = {
        "executors": ",".join(executors.addresses),
        "max-num-seqs": load.running,
        "max-num-batched-tokens": load.running * (load.context + BLOCK_SIZE) + 1,
        "max-queue": load.running,
        "watermark": 0.0,
    }
    config = SchedulerConfig.from_args([f"--{name}={value}" for name, value in flags.items()])
    engine = Engine(config, "")
    runtime.look_for_garbage_seldom()
    await engine.start()
    try:
        await _until(lambda: all(session.connected for session in engine.sessions))
        streams = [await engine.submit(request) for request in _requests(load, max_tokens)]
        reading = [asyncio.create_task(_read(stream)) for stream in streams if readers]
        cores = [session.core for session in engine.sessions if session.core is not None]
        await _until(lambda: all(_is_full(core, load) for core in cores))
        await asyncio.sleep(_WARM_UP_SECONDS)
        before = await executors.counts()
        begin, cpu_before = time.perf_counter(), time.process_time()
        await asyncio.sleep(seconds)
        measured, cpu = time.perf_counter() - begin, time.process_time() - cpu_before
        after = await executors.counts()
        for task in reading:
            task.cancel()
    finally:
        await engine.stop()
        await executors.stop()
    return Pace(
        running=load.running,
        context=load.context,
        executors=load.executors,
        rate=rate,
        wire=True,
        readers=readers,
        seconds=measured,
        steps=after.steps - before.steps,
        late_steps=after.late - before.late,
        cpu_share=cpu / measured,
        executors_cpu_share=(after.cpu_seconds - before.cpu_seconds) / measured,
    )


def _requests(load: Load, max_tokens: int) -> list[Request]:
    """As many for each executor; each is as long as the others, so that all get the same share.

    Their prompts differ by up to a block, so in every step one in sixteen needs a block.
    """
    requests = []
    for index in range(load.running * load.executors):
        more = index // load.executors % BLOCK_SIZE
        prompt = [1, index + 2, *[3] * (load.context + more - 2)]
        requests.append(Request(f"r{index}", prompt, SamplingParams(), max_tokens - more))
    return requests


async def _read(stream: TokenStream) -> None:
    while await stream.receive():
        pass


async def _until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(_START_SECONDS):
        while True:
            if is_so():
                return
            await asyncio.sleep(_POLL_SECONDS)


def _is_full(core: Scheduler, load: Load) -> bool:
    return len(core.state.decode_set.members) == load.running


def run_engine(load: Load, rate: float, seconds: float, *, readers: bool) -> Pace:
    """Run `pace_engine` on the event loop that the service uses."""
    configure_logging("error", "json")
    return runtime.run(pace_engine(load, rate, seconds, readers=readers))


def to_json(pace: Pace) -> dict[str, object]:
    """The figures by name; those that were not measured are left out."""
    return {name: value for name, value in asdict(pace).items() if value is not None}
