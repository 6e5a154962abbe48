"""What the split into two processes costs: one workload, with and without the wire, in turns.

    python -P tests/bench/in_process.py --requests FILE.json --rounds 3 --json FILE

(By its path: with the repository root on sys.path transformers would find its folder
"kernels" where it looks for a library of that name.)

One process, the baseline: the scheduler core and the executor's device thread share a
process, and plans and results are handed over as values. There is no protobuf, no gRPC,
no event loop and nobody who waits for tokens; the depth is the same (plans go to the
device thread's queue while it works). That is the least that an engine which is not split
could do, so the cost is an upper bound.

Split: the scheduler's own engine and session in this process, a real executor in another,
gRPC on loopback. Requests are handed to the engine by value and their tokens are taken
when all is done, so that neither arm has clients: the API, its streams and the SDK would be
the same without the split. With --delay-ms a third arm has a proxy, a process of its own,
between the two.

All arms have the same flags, pool, prompts and lengths. All requests come at once and end by
length, so the plans, the steps and the greedy tokens must be the same; the last are compared.
Each round begins with a claim and an empty prefix cache. Arms that do not run wait without
using the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import NoReturn

from octavo_client._process import Child
from octavo_client._socket import settle_address
from octavo_client.bench.workload import Request as Wanted
from octavo_client.bench.workload import cap_lengths, read_requests

from executor_svc.__main__ import _leave, _load, _loop_factory, _prepare_environment
from executor_svc.config import read_config
from executor_svc.device_thread import DeviceThread
from executor_svc.plan import Outcome, Plan, RowStart, Sampling, TableUpdate
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.request import Request, SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import CoreConfig, Counters
from scheduler_svc.core.step import RowStart as CoreRowStart
from scheduler_svc.core.step import StepPlan, StepResult, StepTimings
from scheduler_svc.engine import Engine
from scheduler_svc.logs import configure_logging

ONE_PROCESS, SPLIT, DELAYED = "one process", "split", "split, delayed"
_POLL_SECONDS = 0.02
_WARM_UP = {"max_prompt": 64, "max_output": 8}
_SAME_LISTS = (
    "finish_rows",
    "append_rows",
    "append_blocks",
    "swap_out_device_blocks",
    "swap_out_host_blocks",
    "copy_sources",
    "copy_destinations",
    "swap_in_host_blocks",
    "swap_in_device_blocks",
    "decode_leave_rows",
    "decode_enter_rows",
    "chunk_rows",
    "chunk_counts",
)


@dataclass(frozen=True, slots=True)
class Round:
    """One arm's turn.

    Attributes:
        idle_share: of the executor's time, in which it waited for a plan.
        tokens_crc32: over all output tokens, in order of requests.
    """

    arm: str
    seconds: float
    num_output_tokens: int
    num_steps: int
    idle_share: float
    tokens_crc32: int

    @property
    def tokens_per_second(self) -> float:
        """Output tokens by time from the first request to the last token."""
        return self.num_output_tokens / self.seconds

    @classmethod
    def of(
        cls, arm: str, seconds: float, outputs: Iterable[Sequence[int]], counters: Counters
    ) -> Round:
        """Sum up a turn."""
        tokens = [token for output in outputs for token in output]
        idle, busy = counters.executor_idle_ns, counters.executor_busy_ns
        return cls(
            arm,
            seconds,
            len(tokens),
            counters.num_steps,
            idle / (idle + busy),
            zlib.crc32(repr(tokens).encode()),
        )


# -- one process -----------------------------------------------------------------------


def as_executor_plan(plan: StepPlan, epoch: int) -> Plan:
    """The executor's form of a plan; what the wire makes of it, without the wire."""
    updates = [TableUpdate(row, first, [block]) for row, first, block in plan.replacements]
    updates += [TableUpdate(row, 0, table, truncate=True) for row, table in plan.tables]
    return Plan(
        epoch=epoch,
        step_id=plan.step_id,
        starts=[_as_executor_start(start) for start in plan.starts],
        child_parents=[parent for parent, _, _ in plan.children],
        child_rows=[child for _, child, _ in plan.children],
        child_tokens=[token for _, _, token in plan.children],
        table_updates=updates,
        fork_parents=[parent for parent, _, _ in plan.forks],
        fork_rows=[child for _, child, _ in plan.forks],
        fork_sample_indices=[index for _, _, index in plan.forks],
        **{name: getattr(plan, name) for name in _SAME_LISTS},
    )


def _as_executor_start(start: CoreRowStart) -> RowStart:
    seq = start.sequence
    request, group = seq.group.request, seq.group
    sampling = {f.name: getattr(request.sampling, f.name) for f in fields(request.sampling)}
    sampling["allowed_token_ids"] = list(request.sampling.allowed_token_ids)
    return RowStart(
        row=start.row,
        tokens=start.tokens,
        num_prompt_tokens=seq.num_prompt_tokens,
        blocks=start.blocks,
        num_computed_tokens=start.num_computed_tokens,
        sampling=Sampling(**sampling),
        sample_index=seq.sample_index,
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        num_beam_candidates=group.beam.num_candidates if group.beam else 0,
        min_tokens=request.min_tokens,
        stop_token_ids=sorted(request.stop_token_ids) if request.min_tokens else [],
        lineage=group.lineage,
    )


def as_core_result(outcome: Outcome) -> StepResult:
    """The core's form of the result of a greedy step.

    Raises:  RuntimeError: if the step failed.
    """
    if outcome.error is not None:
        raise RuntimeError(f"step {outcome.step_id}: {outcome.error.message}")
    t = outcome.timings
    timings = StepTimings(t.queue_ns, t.idle_ns, t.prepare_ns, t.forward_ns, t.sample_ns, t.move_ns)
    return StepResult(outcome.step_id, list(outcome.tokens), timings=timings)


class OneProcess:
    """A device thread, driven by a core without anything between them."""

    def __init__(self, device: DeviceThread, config: CoreConfig) -> None:
        self._device = device
        self._config = config
        self._epoch = 0

    def run(self, workload: Sequence[Wanted]) -> Round:
        """Run a workload from an empty executor."""
        self._epoch += 1
        core = Scheduler(self._config)
        self._device.claim(self._epoch).result()
        begin = time.monotonic()
        groups = [core.add(request) for request in _requests(workload, begin)]
        in_flight = deque()
        while core.has_requests or in_flight:
            while (plan := core.plan(time.monotonic())) is not None:
                in_flight.append(self._device.submit(as_executor_plan(plan, self._epoch)))
            core.name_blocks()
            core.apply(as_core_result(in_flight.popleft().result()))
            core.take_outcome()
        seconds = time.monotonic() - begin
        ended = [group.sequences[0] for group in groups]
        outputs = [seq.tokens[seq.num_prompt_tokens :] for seq in ended]
        return Round.of(ONE_PROCESS, seconds, outputs, core.state.counters)


# -- split -----------------------------------------------------------------------------


class Split:
    """The scheduler's engine, and an executor that may be behind a proxy."""

    def __init__(self, arm: str, address: str, executor: Child, flags: Sequence[str]) -> None:
        self._arm = arm
        self._executor = executor
        self._flags = [*flags, "--executors", address]

    async def run(self, workload: Sequence[Wanted]) -> tuple[Round, CoreConfig]:
        """Run a workload from an empty executor; also gives the limits of the core."""
        engine = Engine(SchedulerConfig.from_args(self._flags), "")
        await engine.start()
        try:
            await self._until(lambda: engine.is_healthy)
            core = engine.sessions[0].core
            assert core is not None
            begin = time.monotonic()
            streams = [await engine.submit(request) for request in _requests(workload, begin)]
            await self._until(lambda: not engine.num_requests)
            seconds = max(stream.stats.total_seconds for stream in streams)
            outputs = [(await stream.receive())[0] for stream in streams]
        finally:
            await engine.stop()
        tokens = [output.tokens for output in outputs]
        return Round.of(self._arm, seconds, tokens, core.state.counters), core.state.config

    async def _until(self, is_so: Callable[[], object]) -> None:
        while not is_so():
            if self._executor.has_ended:
                raise self._executor.error()
            await asyncio.sleep(_POLL_SECONDS)


@contextmanager
def _delay_proxy(target: str, delay_ms: float) -> Iterator[str]:
    """Run the proxy in a process of its own; gives its address."""
    program = Path(__file__).parents[1] / "support" / "delay_proxy.py"
    command = [sys.executable, "-P", program, "--target", target, "--delay-ms", str(delay_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def _requests(workload: Sequence[Wanted], now: float) -> list[Request]:
    """Greedy requests whose end is their length."""
    return [
        Request(
            wanted.id,
            list(wanted.prompt),
            SamplingParams(temperature=0.0),
            wanted.num_output_tokens,
            arrival=now,
        )
        for wanted in workload
    ]


# -- the comparison --------------------------------------------------------------------


def summarize(rounds: Sequence[Round]) -> dict[str, object]:
    """Medians of each arm, and what the split costs.

    Raises:  ValueError: if an arm made other tokens, or more steps, than another.
    """
    work = {(r.num_output_tokens, r.num_steps, r.tokens_crc32) for r in rounds}
    if len(work) > 1:
        raise ValueError(f"the arms did not do the same work: {sorted(work)}")
    by_arm: dict[str, list[Round]] = {}
    for each in rounds:
        by_arm.setdefault(each.arm, []).append(each)
    speeds = {arm: [r.tokens_per_second for r in turns] for arm, turns in by_arm.items()}
    medians = {arm: statistics.median(found) for arm, found in speeds.items()}
    baseline = medians[ONE_PROCESS]
    return {
        "tokens_per_second": medians,
        "idle_share": {
            arm: statistics.median(r.idle_share for r in turns) for arm, turns in by_arm.items()
        },
        "ratio": {arm: found / baseline for arm, found in medians.items()},
        "ratio_by_round": {
            arm: [a / b for a, b in zip(found, speeds[ONE_PROCESS], strict=True)]
            for arm, found in speeds.items()
        },
    }


def table(summary: dict[str, dict[str, float]]) -> list[str]:
    """The summary for people."""
    lines = [f"{'arm':<16} tokens/s   ratio   cost  executor idle"]
    for arm, speed in summary["tokens_per_second"].items():
        ratio, idle = summary["ratio"][arm], summary["idle_share"][arm]
        lines.append(f"{arm:<16} {speed:8.1f}  {ratio:6.4f} {1 - ratio:6.2%}  {idle:13.2%}")
    return lines


async def compare(options: argparse.Namespace, log_dir: Path) -> list[Round]:
    """Start everything, warm it up, and let the arms take turns."""
    requests = read_requests(options.requests)[: options.max_requests]
    requests = cap_lengths(requests, max_prompt=None, max_output=options.max_output)
    warm_up = cap_lengths(requests[:8], **_WARM_UP)
    scheduler_flags = shlex.split(options.scheduler_args)
    executor_flags = ["--model", options.model, *shlex.split(options.executor_args)]
    async with AsyncExitStack() as stack:
        address = settle_address("127.0.0.1:0", "--listen")
        executor = Child("executor", log_dir / "executor.log", echo=False)
        stack.push_async_callback(executor.stop, 10.0)
        await executor.start("executor_svc", [*executor_flags, "--listen", address])
        arms = [Split(SPLIT, address, executor, scheduler_flags)]
        if options.delay_ms:
            proxy = stack.enter_context(_delay_proxy(address, options.delay_ms))
            arms.append(Split(DELAYED, proxy, executor, scheduler_flags))
        for arm in arms:
            _, core_config = await arm.run(warm_up)
        # Both pools have the same size, whatever memory the first one has left.
        pool = ["--num-blocks", str(core_config.num_blocks)]
        pool += ["--num-host-blocks", str(core_config.num_host_blocks)]
        device = DeviceThread(partial(_load, read_config([*executor_flags, *pool])))
        stack.callback(device.stop)
        device.start()
        device.ready.result()
        one_process = OneProcess(device, core_config)
        one_process.run(warm_up)
        rounds = []
        for _ in range(options.rounds):
            rounds.append(_show(one_process.run(requests)))
            rounds += [_show((await arm.run(requests))[0]) for arm in arms]
        return rounds


def _show(each: Round) -> Round:
    sys.stderr.write(
        f"{each.arm:<16} {each.tokens_per_second:8.1f} tokens/s, {each.num_steps} steps, "
        f"executor idle {each.idle_share:.2%}\n"
    )
    return each


def main(argv: list[str] | None = None) -> NoReturn:
    """Measure, print, and write JSON if asked; ends the process."""
    options = _parser().parse_args(argv)
    _prepare_environment()
    configure_logging("error", "console")
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        rounds = runner.run(compare(options, Path(folder)))
    summary = summarize(rounds)
    sys.stdout.write("\n".join(table(summary)) + "\n")
    if options.json:
        report = {
            "config": {name: str(value) for name, value in vars(options).items()},
            "rounds": [{**asdict(r), "tokens_per_second": r.tokens_per_second} for r in rounds],
            **summary,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _leave(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure what the split costs.",
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--requests", type=Path, required=True, metavar="FILE.json", help="the workload")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each arm [3]")
    add("--max-requests", type=int, metavar="N", help="at most so many of them")
    add("--max-output", type=int, metavar="TOKENS", help="cut outputs to this length")
    add("--delay-ms", type=float, metavar="MS", help="also measure with this delay each way")
    add("--model", default="smollm2-135m-instruct", metavar="NAME", help="as of the executor")
    add("--executor-args", default="", metavar="FLAGS", help="flags of the executor, both arms")
    add("--scheduler-args", default="", metavar="FLAGS", help="flags of the scheduler, both arms")
    add("--json", type=Path, metavar="FILE", help="write everything")
    return parser


if __name__ == "__main__":
    main()
