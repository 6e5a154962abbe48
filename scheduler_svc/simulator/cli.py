"""`octavo simulate`: what would a model on some devices do under a load."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from scheduler_svc.simulator import bounds, traces, workload
from scheduler_svc.simulator.baselines import BaselineConfig, simulate_orca, simulate_static
from scheduler_svc.simulator.calibration import CalibrationError, LinearCost
from scheduler_svc.simulator.faults import Autoscale, Failures
from scheduler_svc.simulator.hardware import DEVICES, PAPER_SETUPS, Setup, slots_beside_weights
from scheduler_svc.simulator.models import MODELS
from scheduler_svc.simulator.report import Report, Spread
from scheduler_svc.simulator.routing import ROUTERS
from scheduler_svc.simulator.simulation import SimulationConfig, simulate
from scheduler_svc.simulator.workload import SimRequest

_SYSTEMS = ("octavo", "static", "orca-oracle", "orca-pow2", "orca-max")
_WORKLOADS = ("sharegpt", "alpaca", "wmt-1shot", "wmt-5shot", "chat")
_DEFAULT_GPU = "h200"
_FLAGS = {
    "num_gpus": "--tp",
    "memory_share": "--memory-share",
    "min_executors": "--autoscale: MIN",
    "max_executors": "MAX",
    "failures.at": "--fail-at",
    "num_executors": "--executors",
    "num_blocks": "--num-blocks",
    "num_host_blocks": "--host-blocks",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
}
"""What the configuration's fields are called here."""
_OF_OCTAVO = (
    *("executors", "schedulers", "router", "policy", "preemption", "block_size", "num_blocks"),
    *("host_blocks", "max_num_seqs", "max_num_batched_tokens", "no_prefix_cache", "calibration"),
    *("failures_per_hour", "fail_at", "autoscale"),
)
"""Flags that say nothing of the paper's other systems."""
_ABOUT = """\
The real scheduler core serves the load on executors whose step times are modelled; static
batching and Orca, as the PagedAttention paper defines them, run on the same step times.
Without --gpu a model runs on the devices that the paper gives it, or else on one H200.
docs/simulator.md says what is modelled and what is left out.
"""

Progress = Callable[[int], None]


def main(argv: list[str] | None = None) -> int:
    """Simulate and print.

    Args:
        argv: flags; the process's own if None.
    Returns: exit status.
    """
    parser = _parser()
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        _check_conflicts(options, parser)
        with _open_json(options.json) as out:
            setup = None if options.calibration else _setup(options)
            requests = _requests(options, setup)
            with _progress(len(requests)) as progress:
                report = _run(options, setup, requests, progress)
            if options.json != "-":
                sys.stdout.write("\n".join(table(report)) + "\n")
            if out is not None:
                out.write(json.dumps(report.as_dict(), indent=2) + "\n")
    except (ValueError, OSError) as error:
        sys.stderr.write(f"octavo simulate: {_in_flags(error)}\n")
        return 2
    if not report.num_finished:
        shortest = min(request.num_prompt + request.num_output for request in requests)
        sys.stderr.write(
            f"octavo simulate: no request could be served, {report.num_refused:,} were refused; "
            f"the shortest takes {shortest:,} tokens, which the pool must hold\n"
        )
        return 1
    return 0


def _in_flags(error: Exception) -> str:
    """Say it with flags for the configuration's fields; what is wrong in a file keeps its names."""
    if isinstance(error, CalibrationError | workload.WorkloadError | OSError):
        return str(error)
    return re.sub(r"[a-z][a-z_.]+", lambda match: _FLAGS.get(match[0], match[0]), str(error))


def _check_conflicts(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse flags that would be without effect.

    Raises:  ValueError: naming both.
    """

    def refuse(names: Sequence[str], beside: str) -> None:
        for name in names:
            if getattr(options, name) != parser.get_default(name):
                raise ValueError(f"--{name.replace('_', '-')} has no effect with {beside}")

    if options.system != "octavo":
        refuse(_OF_OCTAVO, f"--system {options.system}")
    if options.trace is not None:
        refuse(["workload"], "--trace")
    if options.calibration is not None:
        refuse(["model", "gpu", "tp", "memory_share"], "--calibration")


@contextlib.contextmanager
def _open_json(target: str | None) -> Iterator[TextIO | None]:
    """Where the JSON goes, opened before the work begins.

    Raises:  ValueError: if it cannot be written.
    """
    if target is None:
        yield None
    elif target == "-":
        yield sys.stdout
    else:
        try:
            out = Path(target).open("w", encoding="utf-8")  # noqa: SIM115  # closed below
        except OSError as error:
            raise ValueError(f"--json {target}: {error.strerror}") from error
        with out:
            yield out


def table(report: Report) -> list[str]:
    """Lines for people."""
    kv = report.kv
    counts = [f"{report.num_finished:,} of {report.num_requests:,} requests finished"]
    for name in ("failed", "refused", "unfinished"):
        number = getattr(report, f"num_{name}")
        if number:
            counts.append(f"{number:,} {name}")
    preempted = report.num_recompute_preemptions, report.num_swap_preemptions
    lines = [
        f"{report.system}: {', '.join(counts)}, in {report.seconds:,.1f} simulated seconds "
        f"({report.wall_seconds:.1f} s here)",
        f"{'rate':<22}{report.requests_per_second:,.3f} requests/s, "
        f"{report.output_tokens_per_second:,.1f} output tokens/s",
        f"{'in a step':<22}{report.mean_batched_requests:,.2f} requests hold K/V, "
        f"{report.mean_batched_sequences:,.2f} sequences compute; {report.num_steps:,} steps",
        f"{'K/V slots':<22}tokens {kv.token_states:.1%}, internal {kv.internal:.1%}, "
        f"reserved {kv.reserved:.1%}, external {kv.external:.1%}, free {kv.free:.1%}; "
        f"{kv.of_allocated:.1%} of allocated hold a token",
        f"{'preempted':<22}{preempted[0]:,} by recompute, {preempted[1]:,} by swap",
        f"{'sharing':<22}{report.saved_by_sharing:.1%} of blocks saved, "
        f"{report.num_copied_blocks:,} copied; prefix cache "
        f"{report.num_prefix_hit_tokens / max(1, report.num_prefix_query_tokens):.1%} of tokens",
    ]
    if report.max_executors > 1 or report.num_deaths:
        lines.append(
            f"{'executors':<22}{report.mean_executors:,.2f} on average, "
            f"{report.max_executors:,} at most, {report.num_deaths:,} died; "
            f"{report.num_moved:,} requests moved"
        )
    lines.append(f"{'':<22}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}")
    for label, spread, unit in (
        ("normalized s/token", report.normalized_latency, 1.0),
        ("end to end s", report.e2e, 1.0),
        ("first token s", report.ttft, 1.0),
        ("between tokens ms", report.itl, 1e3),
        ("queue wait s", report.queue_wait, 1.0),
    ):
        lines.append(f"{label:<22}{_cells(spread, unit)}")
    return lines


def _cells(spread: Spread, unit: float) -> str:
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    return "".join(f"{value * unit:>10.4g}" for value in values)


# -- from flags --------------------------------------------------------------------


def _setup(options: argparse.Namespace) -> Setup:
    """Devices and slots, before anything is said of blocks."""
    paper = PAPER_SETUPS.get(options.model)
    if paper is not None and options.gpu is None and options.tp is None:
        return paper
    model, device = MODELS[options.model], DEVICES[options.gpu or _DEFAULT_GPU]
    num_gpus = options.tp or 1
    num_slots = slots_beside_weights(model, device, num_gpus, options.memory_share)
    return Setup(model.name, model, device, num_gpus, num_slots)


def _requests(options: argparse.Namespace, setup: Setup | None) -> list[SimRequest]:
    num = options.requests
    if options.trace is not None:
        found = traces.read(options.trace, num)
        if options.rate is not None:
            found = workload.at_rate(found, options.rate, options.seed)
        found = workload.scale_rate(found, options.speed)
    else:
        rate = 1.0 if options.rate is None else options.rate
        if num is None:
            # More than will come in the time, as a Poisson process may bring more than its mean.
            num = round(1.2 * rate * options.seconds) + 20 if options.seconds else 1000
        draw: dict[str, Callable[..., list[SimRequest]]] = {
            "sharegpt": workload.sharegpt,
            "alpaca": workload.alpaca,
            "chat": workload.chat,
            "wmt-1shot": lambda num, **more: workload.wmt(num, shots=1, **more),
            "wmt-5shot": lambda num, **more: workload.wmt(num, shots=5, **more),
        }
        found = draw[options.workload](num, rate=rate, seed=options.seed)
    if options.samples > 1 or options.beam_width:
        n = 1 if options.beam_width else options.samples
        found = workload.with_samples(found, n=n, beam_width=options.beam_width)
    max_len = setup.model.max_len + 1 if setup is not None else None
    kept = workload.capped(
        found, max_prompt=options.max_prompt, max_output=options.max_output, max_len=max_len
    )
    if len(kept) < len(found):
        sys.stderr.write(f"{len(found) - len(kept):,} requests are too long: left out\n")
    if options.seconds is not None:
        kept = [request for request in kept if request.arrival <= options.seconds]
    if not kept:
        raise workload.WorkloadError("no request is left to simulate")
    return kept


def _run(
    options: argparse.Namespace,
    setup: Setup | None,
    requests: list[SimRequest],
    progress: Progress | None,
) -> Report:
    if options.system == "octavo":
        return simulate(_config(options, setup), requests, progress)
    if setup is None:
        raise ValueError("calibration: must be used with --system octavo")
    if options.system == "static":
        return simulate_static(BaselineConfig.of_setup(setup), requests, progress)
    reserve = options.system.removeprefix("orca-")
    return simulate_orca(BaselineConfig.of_setup(setup, reserve=reserve), requests, progress)


def _config(options: argparse.Namespace, setup: Setup | None) -> SimulationConfig:
    named = {
        "block_size": options.block_size,
        "num_blocks": options.num_blocks,
        "num_host_blocks": options.host_blocks,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
    }
    changes: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if options.failures_per_hour or options.fail_at:
        changes["failures"] = Failures(
            options.failures_per_hour, options.down_seconds, at=tuple(options.fail_at)
        )
    if options.autoscale is not None:
        changes["autoscale"] = Autoscale(*options.autoscale)
    changes.update(
        preemption=options.preemption,
        policy=options.policy,
        prefix_cache=not options.no_prefix_cache,
        num_executors=options.executors,
        num_schedulers=options.schedulers,
        router=options.router,
        seed=options.seed,
    )
    if setup is None:
        config = SimulationConfig.of_calibration(LinearCost.load(options.calibration), **changes)
    else:
        config = SimulationConfig.of_setup(setup, **changes)
    if config.preemption != "recompute" and options.host_blocks is None:
        # As in the paper: what is swapped out never exceeds the pool.
        config = config.with_changes(num_host_blocks=config.num_blocks)
    return config


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Progress | None]:
    """A bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda count: bar.update(task, completed=count)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="octavo simulate",
        description="Simulate a model on executors under a load.",
        epilog=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_machine(parser.add_argument_group("what serves"))
    _add_policy(parser.add_argument_group("how"))
    _add_load(parser.add_argument_group("load"))
    _add_events(parser.add_argument_group("events"))
    parser.add_argument("--seed", type=bounds.whole, default=0, help="of all that is drawn [0]")
    parser.add_argument("--json", metavar="FILE|-", help="write JSON; - is stdout, no table")
    return parser


def _add_machine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--system", choices=_SYSTEMS, default="octavo", help="[octavo]")
    add("--model", choices=tuple(MODELS), default="llama-3.1-8b", help="[llama-3.1-8b]")
    add("--gpu", choices=tuple(DEVICES), help="device [the paper's for the model, else h200]")
    add(
        "--tp",
        type=bounds.count,
        metavar="N",
        help="devices that share a model [1, or the paper's]",
    )
    add(
        "--memory-share",
        type=bounds.share,
        default=0.9,
        metavar="X",
        help="of device memory used [0.9]",
    )
    add("--calibration", type=Path, metavar="FILE", help="measured step times, instead of a device")
    add(
        "--executors", type=bounds.executors, default=1, metavar="N", help="copies of the model [1]"
    )
    add("--schedulers", type=bounds.executors, default=1, metavar="N", help="that share them [1]")


def _add_policy(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--router", choices=tuple(ROUTERS), default="placement", help="[placement: the service's]")
    add("--policy", choices=("fcfs", "priority", "fair"), default="fcfs", help="[fcfs]")
    add(
        "--preemption",
        choices=("recompute", "swap", "auto"),
        default="recompute",
        help="how blocks are taken back; auto: what costs less [recompute]",
    )
    add("--block-size", type=bounds.count, metavar="TOKENS", help="[16, or the calibration's]")
    add("--num-blocks", type=bounds.blocks, metavar="N", help="of the pool [what fits]")
    add(
        "--host-blocks",
        type=bounds.host_blocks,
        metavar="N",
        help="of the host pool, for swapping [as many as the pool has]",
    )
    add("--max-num-seqs", type=bounds.count, metavar="N", help="sequences at once [256]")
    add("--max-num-batched-tokens", type=bounds.count, metavar="N", help="budget of a step [2048]")
    add("--no-prefix-cache", action="store_true", help="share nothing between requests")


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--workload", choices=_WORKLOADS, default="sharegpt", help="drawn lengths [sharegpt]")
    add("--trace", type=Path, metavar="FILE", help="recorded lengths and arrivals instead")
    add(
        "--rate",
        type=bounds.per_second,
        metavar="REQ/S",
        help="Poisson arrivals [1, or the trace's own]",
    )
    add(
        "--speed",
        type=bounds.per_second,
        default=1.0,
        metavar="X",
        help="of the trace's arrivals [1]",
    )
    add(
        "--requests",
        type=bounds.requests_at_most,
        metavar="N",
        help="at most [1000 drawn, or the whole trace]",
    )
    add("--seconds", type=bounds.seconds, metavar="S", help="of arrivals, simulated [no bound]")
    add("--samples", type=bounds.samples, default=1, metavar="N", help="of each request [1]")
    add(
        "--beam-width",
        type=bounds.whole,
        default=0,
        metavar="W",
        help="beam search instead [0: none]",
    )
    add("--max-prompt", type=bounds.count, metavar="TOKENS", help="cut prompts [no]")
    add("--max-output", type=bounds.count, metavar="TOKENS", help="cut outputs [no]")


def _add_events(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--failures-per-hour", type=bounds.rate, default=0.0, metavar="X", help="per executor [0]")
    add(
        "--fail-at",
        type=bounds.failure,
        action="append",
        default=[],
        metavar="SECONDS:EXECUTOR",
        help="an executor, from 0, that dies then; repeat it",
    )
    add("--down-seconds", type=bounds.seconds, default=60.0, metavar="S", help="of a failure [60]")
    add(
        "--autoscale",
        type=bounds.span,
        metavar="MIN:MAX",
        help="executors by queue wait and block use",
    )


if __name__ == "__main__":
    sys.exit(main())
