"""Figure 19: recomputation and swapping."""

from __future__ import annotations

from dataclasses import replace

from scheduler_svc.simulator import PAPER_SETUPS, Device, Report, Roofline, StepWork
from scheduler_svc.simulator.reports.findings import (
    Check,
    Claim,
    Findings,
    Line,
    Panel,
    Row,
    Table,
    at_most,
)
from scheduler_svc.simulator.reports.study import Context, Study
from scheduler_svc.simulator.reports.systems import SHAREGPT, Job, Load, run_all

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKENS = 256
_RATE = 2.6
_SETUP = PAPER_SETUPS["opt-13b"]
_RECOMPUTE, _SWAP = "recompute", "swap"


def run(context: Context) -> Findings:
    """Compare both for one sequence by the cost model, and in a service that preempts."""
    sizes = context.pick(_SIZES, (1, 16, 256))
    seconds = context.pick(600.0, 60.0)
    jobs = {
        (how, size): Job(
            Load(SHAREGPT, _RATE, seconds, context.seed),
            changes=(
                ("block_size", size),
                ("preemption", how),
                ("num_host_blocks", _SETUP.num_slots // size if how == _SWAP else 0),
            ),
        )
        for how in (_RECOMPUTE, _SWAP)
        for size in sizes
    }
    found = run_all(context, jobs)
    costs = {size: _Times(size) for size in sizes}
    overhead = max(costs[size].recompute / costs[size].swap for size in sizes)
    half = replace(_SETUP.device, host_bandwidth=_SETUP.device.host_bandwidth / 2)
    slow_link = max(each.recompute / each.swap for each in (_Times(size, half) for size in sizes))
    middle = [size for size in sizes if 16 <= size <= 64]
    return Findings(
        setup=(
            "OPT-13B on one A100-40GB with a host link of 25 GB/s; every block is moved in 80 "
            "transfers, keys and values of 40 layers. One sequence of "
            f"{_TOKENS} tokens by the cost model; and ShareGPT's lengths at {_RATE:g} requests/s "
            f"for {seconds / 60:g} minutes, more than can be served, so that the core preempts."
        ),
        rows=[
            Row(
                "recompute ÷ swap out and in, one sequence, the worst block size",
                overhead,
                at_most(1.2),
                "x",
                "With large blocks it is the host link alone that counts. Here all of the 25 GB/s "
                "that PCIe 4.0 reaches are used in both directions; the paper does not say what "
                "its copies reached.",
                [Check(slow_link, "half of that")],
            ),
            *(
                Row(
                    f"normalized latency, recompute ÷ swap, blocks of {size}",
                    _latency(found, _RECOMPUTE, size) / _latency(found, _SWAP, size),
                    None,
                    "x",
                )
                for size in sizes
            ),
        ],
        claims=_claims(found, costs, middle),
        tables=[_table(found, costs)],
        panels=_panels(found, costs),
        notes=[
            "The paper says that recomputation's overhead is \"never higher than 20% of "
            "swapping's latency\". Its plot shows both at about the same height for large "
            "blocks, so this is read as: recomputing takes at most 1.2 times as long.",
        ],
    )


class _Times:
    """What it takes to bring one sequence back, seconds by the cost model.

    Attributes:
        recompute: a step with the whole prompt instead of one decode.
        swap: its blocks out and in again, as the paper moves them.
        swap_at_once: the same with one copy a block.
    """

    def __init__(self, size: int, device: Device = _SETUP.device) -> None:
        """Ask the cost model."""
        num_blocks = -(-_TOKENS // size)
        cost = Roofline(_SETUP.model, device, 1, size)
        batched = Roofline(_SETUP.model, device, 1, size, transfers_per_block=1)
        work = StepWork(0, 0, [(0, _TOKENS)], 1)
        self.recompute = cost.seconds(work).forward
        moved = StepWork(num_swapped_blocks=2 * num_blocks)
        self.swap = cost.seconds(moved).move
        self.swap_at_once = batched.seconds(moved).move


_Found = dict[tuple[str, int], Report]


def _latency(found: _Found, how: str, size: int) -> float:
    return found[how, size].normalized_latency.mean


def _claims(found: _Found, costs: dict[int, _Times], middle: list[int]) -> list[Claim]:
    sizes = sorted(costs)
    ratios = [_latency(found, _RECOMPUTE, size) / _latency(found, _SWAP, size) for size in middle]
    return [
        Claim(
            "recomputing takes the same whatever the block size; swapping small blocks is slow",
            costs[sizes[0]].swap > 3 * costs[sizes[-1]].swap,
            f"swap {costs[sizes[0]].swap * 1000:.0f} ms with blocks of {sizes[0]}, "
            f"{costs[sizes[-1]].swap * 1000:.0f} ms with {sizes[-1]}; recompute "
            f"{costs[16].recompute * 1000:.0f} ms",
        ),
        Claim(
            "with blocks of 16 to 64 both serve about equally well",
            all(0.8 <= ratio <= 1.25 for ratio in ratios),
            "recompute ÷ swap " + ", ".join(f"{ratio:.2f}" for ratio in ratios),
        ),
        Claim(
            "with the smallest blocks recomputing serves better",
            _latency(found, _RECOMPUTE, sizes[0]) <= _latency(found, _SWAP, sizes[0]),
            f"{_latency(found, _RECOMPUTE, sizes[0]):.3g} against "
            f"{_latency(found, _SWAP, sizes[0]):.3g} s/token",
        ),
        Claim(
            "the runs do preempt, each in its way",
            all(
                found[_RECOMPUTE, size].num_recompute_preemptions
                and found[_SWAP, size].num_swap_preemptions
                for size in sizes
            ),
            ", ".join(
                f"{size}: {found[_RECOMPUTE, size].num_recompute_preemptions} and "
                f"{found[_SWAP, size].num_swap_preemptions}"
                for size in sizes
            ),
        ),
    ]


def _table(found: _Found, costs: dict[int, _Times]) -> Table:
    return Table(
        "By block size: one sequence, ms; a service, normalized latency in s/token",
        ("block size", "recompute", "swap", "swap at once", "with recompute", "with swap"),
        [
            (
                f"{size}",
                f"{each.recompute * 1000:.1f}",
                f"{each.swap * 1000:.1f}",
                f"{each.swap_at_once * 1000:.1f}",
                f"{_latency(found, _RECOMPUTE, size):.3f}",
                f"{_latency(found, _SWAP, size):.3f}",
            )
            for size, each in costs.items()
        ],
    )


def _panels(found: _Found, costs: dict[int, _Times]) -> list[Panel]:
    sizes = list(costs)
    return [
        Panel(
            title=f"one sequence of {_TOKENS} tokens",
            x_label="block size, tokens",
            y_label="time, ms",
            lines=[
                Line(_RECOMPUTE, sizes, [costs[size].recompute * 1000 for size in sizes]),
                Line(_SWAP, sizes, [costs[size].swap * 1000 for size in sizes]),
                Line(
                    "swap, one copy a block",
                    sizes,
                    [costs[size].swap_at_once * 1000 for size in sizes],
                ),
            ],
            log_x=True,
        ),
        Panel(
            title=f"ShareGPT, {_RATE:g} requests/s",
            x_label="block size, tokens",
            y_label="normalized latency, s/token",
            lines=[
                Line(how, sizes, [_latency(found, how, size) for size in sizes])
                for how in (_RECOMPUTE, _SWAP)
            ],
            log_x=True,
        ),
    ]


STUDY = Study(
    name="fig19",
    title="Recomputation and swapping (figure 19)",
    question=(
        "A sequence that has to give its blocks up can be computed again later, or be moved to "
        "host memory and back. Which costs less, by block size?"
    ),
    run=run,
)
