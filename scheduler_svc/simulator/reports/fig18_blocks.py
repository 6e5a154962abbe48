"""Figure 18: the block size."""

from __future__ import annotations

from typing import Any

from scheduler_svc.simulator import PAPER_SETUPS, Report, Roofline, StepWork
from scheduler_svc.simulator.reports.findings import (
    Claim,
    Findings,
    Line,
    Panel,
    Row,
    Table,
    between,
)
from scheduler_svc.simulator.reports.study import Context, Study
from scheduler_svc.simulator.reports.systems import ALPACA, NAMES, SHAREGPT, Job, Load, run_all

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_RATES = {SHAREGPT: 2.0, ALPACA: 60.0}
_GOOD = {SHAREGPT: (16, 32, 64, 128), ALPACA: (16, 32)}
_PAPER_OVERHEAD = (1.20, 1.26)


def run(context: Context) -> Findings:
    """Serve both data sets at one rate each with every block size."""
    sizes = context.pick(_SIZES, (1, 16, 256))
    seconds = {SHAREGPT: context.pick(900.0, 30.0), ALPACA: context.pick(90.0, 4.0)}
    jobs = {
        (kind, size): Job(
            Load(kind, rate, seconds[kind], context.seed), changes=(("block_size", size),)
        )
        for kind, rate in _RATES.items()
        for size in sizes
    }
    found = run_all(context, jobs)
    kernel = {size: _kernel_ratio(size) for size in sizes}
    return Findings(
        setup=(
            "OPT-13B on one A100-40GB, ShareGPT's lengths at "
            f"{_RATES[SHAREGPT]:g} requests/s and Alpaca's at {_RATES[ALPACA]:g}; the pool has "
            "15,700 slots whatever the block size. Attention over blocks of B tokens takes "
            "1 + 4/B times as long as over contiguous K/V."
        ),
        rows=[
            Row(
                "attention over blocks of 16 ÷ contiguous (put in)",
                kernel[16],
                between(*_PAPER_OVERHEAD),
                "x",
            ),
            *(
                Row(
                    f"normalized latency ÷ best, {NAMES[kind]}, blocks of {size}",
                    _latency(found, kind, size) / _best(found, kind, sizes),
                    None,
                    "x",
                )
                for kind in _RATES
                for size in sizes
                if size in (1, 16, 128, 256)
            ),
        ],
        claims=_claims(found, sizes),
        tables=[_table(found, sizes)],
        panels=[
            Panel(
                title=f"{NAMES[kind]}, {_RATES[kind]:g} requests/s",
                x_label="block size, tokens",
                y_label="normalized latency, s/token",
                lines=[Line("end to end", sizes, [_latency(found, kind, size) for size in sizes])],
                log_x=True,
            )
            for kind in _RATES
        ],
        notes=[
            "The cost of small blocks to attention is an assumption with the paper's figure for "
            "16 tokens in it; what large blocks waste, and what waiting follows from both, comes "
            "out."
        ],
    )


_Found = dict[tuple[str, int], Report]


def _kernel_ratio(size: int) -> float:
    """Attention over blocks ÷ over contiguous K/V, of a steady step."""
    setup = PAPER_SETUPS["opt-13b"]
    seconds = []
    for overhead in (None, 0.0):
        changes: dict[str, Any] = {} if overhead is None else {"block_overhead_tokens": overhead}
        cost = Roofline(setup.model, setup.device, 1, size, **changes)
        long, short = (
            cost.seconds(StepWork(8, context, None, 8)).forward for context in (8_000, 0)
        )
        seconds.append(long - short)
    return seconds[0] / seconds[1]


def _latency(found: _Found, kind: str, size: int) -> float:
    return found[kind, size].normalized_latency.mean


def _best(found: _Found, kind: str, sizes: tuple[int, ...]) -> float:
    return min(_latency(found, kind, size) for size in sizes)


def _claims(found: _Found, sizes: tuple[int, ...]) -> list[Claim]:
    claims = []
    for kind, good in _GOOD.items():
        latencies = {size: _latency(found, kind, size) for size in sizes}
        best = min(latencies, key=lambda size: latencies[size])
        worst = max(latencies[size] for size in good if size in latencies)
        claims.append(
            Claim(
                f"{NAMES[kind]}: blocks of {good[0]} to {good[-1]} serve best",
                best in good and worst <= 1.25 * latencies[best],
                f"best {best}; the worst of these {worst / latencies[best]:.2f} times as slow",
            )
        )
        claims.append(
            Claim(
                f"{NAMES[kind]}: blocks of 1 are slower, as attention cannot use the device",
                latencies[1] > 1.1 * latencies[best],
                f"{latencies[1] / latencies[best]:.2f} times as slow as the best",
            )
        )
    small, large = (_latency(found, ALPACA, size) for size in (16, 256))
    claims.append(
        Claim(
            "Alpaca: sequences are shorter than blocks of 256, which waste most of what they hold",
            large > 1.1 * small,
            f"{large / small:.2f} times as slow as with 16",
        )
    )
    return claims


def _table(found: _Found, sizes: tuple[int, ...]) -> Table:
    rows = []
    for size in sizes:
        cells = [f"{size}"]
        for kind in _RATES:
            report = found[kind, size]
            cells += [
                f"{report.normalized_latency.mean * 1000:.0f}",
                f"{report.kv.of_allocated:.1%}",
                f"{report.mean_batched_requests:.1f}",
            ]
        rows.append(tuple(cells))
    header = ["block size"]
    for kind in _RATES:
        header += [f"{NAMES[kind]}: ms a token", "slots in use", "batched"]
    return Table("By block size", tuple(header), rows)


STUDY = Study(
    name="fig18",
    title="The block size (figure 18)",
    question=(
        "Small blocks keep attention from using the device, large ones waste the end of every "
        "sequence's last block. Which size serves best?"
    ),
    run=run,
)
