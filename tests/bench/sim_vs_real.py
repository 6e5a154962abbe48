"""The simulator against reality: the same requests on both, one right after the other.

    python -P tests/bench/sim_vs_real.py --requests W1.json --trace TRACE.csv.gz --rounds 3
        --json FILE.json --plot FILE.png --calibration FILE.json

Three workloads, on real services on this machine and in the simulator:

    W1  the file's requests, all at once
    W2  the trace's first rows, lengths cut to 1,024 and 256 tokens, its own arrivals, slowed
        down to 0.7 of the rate that the simulator says can be served
    W8  W1 in a pool of a quarter of the blocks that it took at its peak

The speed of a shared machine drifts by more than what is looked for here, so the load of
`calibrate.py` runs before and after every workload, in the same services, and the cost model of
that workload is fitted to these two. None of the workloads' own steps is used. What is between
client and scheduler is a constant, measured on lone requests, and added to every simulated TTFT
and latency; the time on the wire is measured too. Sizes and flags are the same on both sides, and
simulated requests arrive when the real ones were sent.

Printed: for each measure real, simulated and the ratio, medians over the rounds, and how far the
real rounds are apart. `--after FILE.json` counts the rounds of an earlier run as well, as a machine
is seldom quiet for as long as many rounds take. Exit code 1 if a ratio is off by more than
`--tolerance`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from octavo_client.bench.measure import Record, percentile
from octavo_client.bench.workload import (
    Request,
    cap_lengths,
    read_requests,
    read_trace,
    scale_arrivals,
)

from scheduler_svc.simulator import LinearCost, Report, SimRequest, SimulationConfig, simulate

sys.path.append(str(Path(__file__).parents[2]))

from tests.bench.calibrate import (
    Stack,
    add_stack_options,
    machine_name,
    measure_moves,
    measure_steps,
    show,
)
from tests.bench.sim_vs_real_table import ASIDE, MEASURES, Pair, Side, plot, rows_of, table
from tests.bench.step_fit import (
    Samples,
    Sizes,
    as_json,
    client_seconds,
    fit,
    seconds_of,
    wire_seconds,
)

_UTILIZATION = 0.7
_SHARE_OF_PEAK = 0.25
_MAX_PROMPT, _MAX_OUTPUT = 1024, 256
_VOCABULARY = 30_000
_COMMAND = "python -P tests/bench/sim_vs_real.py"


# -- one side and the other --------------------------------------------------------


async def run_real(stack: Stack, requests: Sequence[Request]) -> tuple[list[Record], Side]:
    """Send a workload to the services."""
    before = (await stack.client.snapshot()).executors[0].counters
    records, steps = await stack.run(requests)
    after = (await stack.client.snapshot()).executors[0].counters
    gaps = [gap for record in records for gap in record.gaps]
    ttft, e2e = [r.ttft for r in records], [r.e2e for r in records]
    begin = min(r.sent_at for r in records)
    seconds = max(r.ended_at for r in records) - begin
    return records, _side(
        sum(r.num_received for r in records) / seconds,
        ttft,
        (percentile(gaps, 50), percentile(gaps, 99)),
        e2e,
        steps=len(steps),
        busy=sum(map(seconds_of, steps)),
        preemptions=after.num_recompute_preemptions
        + after.num_swap_preemptions
        - before.num_recompute_preemptions
        - before.num_swap_preemptions,
    )


def run_simulated(
    cost: LinearCost, requests: Sequence[SimRequest], *, wire: float, client: float
) -> Side:
    """Simulate it, on the sizes that `cost` was measured with and the services' defaults."""
    config = SimulationConfig.of_calibration(
        cost, preemption="auto", policy="priority", max_queue=1024, wire_seconds=wire
    )
    report = simulate(config, requests)
    if report.num_finished != len(requests):
        raise RuntimeError(f"{report.num_finished} of {len(requests)} were served")
    table = report.requests
    ttft = [b - a + client for a, b in zip(table.arrival, table.first_token, strict=True)]
    e2e = [b - a + client for a, b in zip(table.arrival, table.end, strict=True)]
    return _side(
        report.num_output_tokens / (report.seconds + client),
        ttft,
        (report.itl.p50, report.itl.p99),
        e2e,
        steps=report.num_steps,
        busy=report.busy_seconds,
        preemptions=_preemptions(report),
    )


def _preemptions(report: Report) -> int:
    return report.num_recompute_preemptions + report.num_swap_preemptions


def _side(
    rate: float,
    ttft: list[float],
    itl: tuple[float, float],
    e2e: list[float],
    *,
    steps: int,
    busy: float,
    preemptions: int,
) -> Side:
    values = (rate, percentile(ttft, 50), percentile(ttft, 99), *itl)
    values += (percentile(e2e, 50), percentile(e2e, 99))
    measures = dict(zip(MEASURES, values, strict=True))
    aside = dict(zip(ASIDE, (steps, busy, preemptions), strict=True))
    return Side(measures | aside, sorted(ttft), sorted(e2e))


def as_simulated(records: Sequence[Record]) -> list[SimRequest]:
    """The same requests for the simulator, as they were sent."""
    begin = min(record.sent_at for record in records)
    found = [
        SimRequest(r.sent_at - begin, len(r.request.prompt), r.request.num_output_tokens)
        for r in records
    ]
    return sorted(found, key=lambda each: each.arrival)


# -- rounds ------------------------------------------------------------------------


class Comparison:
    """All rounds: what was seen, and what later rounds have of earlier ones.

    Attributes:
        pairs: in order.
        samples: of all calibrations.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._seed = 0
        self._w1 = cap_lengths(
            read_requests(options.requests)[: options.max_requests],
            max_prompt=None,
            max_output=options.max_output,
        )
        self._w1 = [Request(r.id, r.prompt, r.num_output_tokens) for r in self._w1]
        rows = read_trace(
            options.trace, max_requests=options.rows, vocab_size=_VOCABULARY, seed=options.seed
        )
        cap = min(_MAX_OUTPUT, options.max_output or _MAX_OUTPUT)
        self._w2 = cap_lengths(rows, max_prompt=_MAX_PROMPT, max_output=cap)
        self._is_slowed = False
        self._tight_blocks: int | None = None
        self.pairs: list[Pair] = []
        self.samples = Samples()
        self.sizes: Sizes | None = None

    async def run_round(self) -> None:
        """W1 and W2 in the default pool, W8 in a small one."""
        options = self._options
        async with Stack(options) as roomy:
            self.sizes = roomy.sizes
            before = await self._calibrate(roomy)
            roomy.peak_blocks = 0
            records, real = await run_real(roomy, self._w1)
            if self._tight_blocks is None:
                largest = max(len(r.prompt) + r.num_output_tokens for r in self._w1)
                least = -(-largest // roomy.sizes.block_size) + 2
                self._tight_blocks = max(round(_SHARE_OF_PEAK * roomy.peak_blocks), least)
            between = await self._calibrate(roomy)
            self._compare("W1", records, real, roomy.sizes, [before, between])
            self._slow_down(roomy.sizes, [before, between])
            records, real = await run_real(roomy, self._w2)
            after = await self._calibrate(roomy)
            self._compare("W2", records, real, roomy.sizes, [between, after])
        async with Stack(options, num_blocks=self._tight_blocks) as tight:
            before = await self._calibrate(tight)
            cost = fit(before, tight.sizes, "").cost
            moves = await measure_moves(tight, cost, seed=10_000 + self._seed)
            self.samples.add([moves])
            before.add([moves])
            records, real = await run_real(tight, self._w1)
            after = await self._calibrate(tight)
            self._compare("W8", records, real, tight.sizes, [before, after])

    async def _calibrate(self, stack: Stack) -> Samples:
        self._seed += 1
        seed = 1_000 * self._options.seed + self._seed
        found = await measure_steps(stack, seed=seed, scale=self._options.scale)
        self.samples.add([found])
        return found

    def _compare(
        self,
        workload: str,
        records: Sequence[Record],
        real: Side,
        sizes: Sizes,
        calibrations: Sequence[Samples],
    ) -> None:
        both = Samples().add(calibrations)
        fitted = fit(both, sizes, workload)
        show(fitted, both)
        simulated = run_simulated(
            fitted.cost,
            as_simulated(records),
            wire=wire_seconds(both),
            client=client_seconds(both),
        )
        self.pairs.append(Pair(workload, real, simulated))
        sys.stderr.write("\n".join(table(self.pairs[-1:])) + "\n")

    def _slow_down(self, sizes: Sizes, calibrations: Sequence[Samples]) -> None:
        """Stretch W2's arrivals, once, so that later rounds ask for the same."""
        if self._is_slowed:
            return
        self._is_slowed = True
        both = Samples().add(calibrations)
        at_once = [SimRequest(0.0, len(r.prompt), r.num_output_tokens) for r in self._w2]
        config = SimulationConfig.of_calibration(fit(both, sizes, "").cost)
        rate = _UTILIZATION * simulate(config, at_once).requests_per_second
        span = max(r.arrival_seconds for r in self._w2)
        self._w2 = scale_arrivals(self._w2, rate * span / len(self._w2))
        sys.stderr.write(f"W2 at {rate:.3f} requests/s\n")


async def compare(options: argparse.Namespace) -> Comparison:
    """Run all rounds."""
    comparison = Comparison(options)
    for number in range(options.rounds):
        sys.stderr.write(f"round {number + 1} of {options.rounds}\n")
        await comparison.run_round()
    return comparison


def main() -> int:
    """Print the table; write JSON, plot and calibration if asked."""
    options = _parser().parse_args()
    comparison = asyncio.run(compare(options))
    pairs = [*_earlier(options.after), *comparison.pairs]
    sys.stdout.write("\n".join(table(pairs)) + "\n")
    if options.json:
        report = {
            "command": _COMMAND,
            "rounds": [pair.to_json() for pair in pairs],
            "medians": [asdict(row) for row in rows_of(pairs)],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        plot(pairs, options.plot, options.tolerance)
    if options.calibration and comparison.sizes is not None:
        name = options.name or machine_name(options.dtype)
        fitted = fit(comparison.samples, comparison.sizes, name)
        show(fitted, comparison.samples)
        text = as_json(fitted, comparison.samples, _COMMAND)
        options.calibration.write_text(text + "\n", encoding="utf-8")
    judged = [row for row in rows_of(pairs) if row.measure in MEASURES]
    return 1 if any(abs(row.ratio - 1) > options.tolerance for row in judged) else 0


def _earlier(path: Path | None) -> list[Pair]:
    if path is None:
        return []
    rounds = json.loads(path.read_text(encoding="utf-8"))["rounds"]
    return [Pair.from_json(each) for each in rounds]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_stack_options(parser)
    add = parser.add_argument
    add("--requests", type=Path, required=True, metavar="FILE.json", help="W1")
    add("--trace", type=Path, required=True, metavar="FILE", help="W2")
    add("--rows", type=int, default=60, metavar="N", help="of the trace [60]")
    add("--rounds", type=int, default=3, metavar="N", help="[3]")
    add("--max-requests", type=int, metavar="N", help="of W1, to try it out")
    add("--max-output", type=int, metavar="TOKENS", help="cut outputs, to try it out")
    add("--tolerance", type=float, default=0.1, metavar="SHARE", help="[0.1]")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write everything")
    add("--after", type=Path, metavar="FILE.json", help="earlier rounds to count as well")
    add("--plot", type=Path, metavar="FILE.png", help="draw it")
    add("--calibration", type=Path, metavar="FILE", help="write the fit of all rounds together")
    return parser


if __name__ == "__main__":
    sys.exit(main())
