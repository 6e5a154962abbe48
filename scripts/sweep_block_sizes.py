"""Sweep the block size: what larger blocks gain in the kernels, and what they waste.

Runs `octavo bench attention` and `octavo bench memory` once for every block size and round,
sizes in turn, so that other load on the machine hits all of them. Prints a table, and
writes a plot and the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

BLOCK_SIZES = (8, 16, 32, 64, 128)


def main(argv: list[str] | None = None) -> int:
    """Sweep, print, write."""
    options = _parser().parse_args(argv)
    runs: dict[int, list[dict[str, Any]]] = {size: [] for size in BLOCK_SIZES}
    for turn in range(options.rounds):
        for size in BLOCK_SIZES:
            sys.stderr.write(f"round {turn + 1} of {options.rounds}: blocks of {size}\n")
            runs[size].append(_bench("attention", size, "--dtypes", options.dtype, "--rounds", "3"))
    rows = [_row(size, runs[size], _memory(size, options)) for size in BLOCK_SIZES]
    header = ("block size", "decode GB/s", "of a plain read", "prefill GFLOP/s", "slots unused")
    sys.stdout.write("  ".join(header) + "\n")
    for row in rows:
        cells = (
            f"{row['block_size']}",
            f"{row['decode_gb_per_s']:.1f}",
            f"{row['decode_ratio']:.0%}",
            f"{row['prefill_gflop_per_s']:.0f}",
            f"{row['unused_slots']:.1%}",
        )
        line = "  ".join(f"{c:>{len(name)}}" for c, name in zip(cells, header, strict=True))
        sys.stdout.write(line + "\n")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        _plot(rows, options.plot)
    return 0


def _memory(size: int, options: argparse.Namespace) -> dict[str, Any]:
    trace = ["--trace", str(options.trace)] if options.trace else []
    return _bench("memory", size, *trace)


def _bench(name: str, block_size: int, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "octavo_client", "bench", name]
    command += ["--block-size", str(block_size), *arguments, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _row(size: int, attention: list[dict[str, Any]], memory: dict[str, Any]) -> dict[str, float]:
    return {
        "block_size": size,
        "decode_gb_per_s": statistics.median(run["gb_per_s"] for run in attention),
        "decode_ratio": statistics.median(run["ratio"] for run in attention),
        "prefill_gflop_per_s": statistics.median(
            run["prefill"][-1]["gflop_per_s"] for run in attention
        ),
        "unused_slots": 1 - memory["kv_use"],
    }


def _plot(rows: list[dict[str, float]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    sizes = [str(int(row["block_size"])) for row in rows]
    figure, (speed, waste) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for key, label, color in (
        ("decode_gb_per_s", "decode", "tab:blue"),
        ("prefill_gflop_per_s", "prefill", "tab:orange"),
    ):
        best = max(row[key] for row in rows)
        speed.plot(sizes, [row[key] / best for row in rows], "o-", label=label, color=color)
    speed.set(xlabel="tokens of a block", ylabel="speed, of the fastest size", ylim=(0, 1.08))
    speed.legend(frameon=False)
    waste.bar(sizes, [100 * row["unused_slots"] for row in rows], color="tab:gray")
    waste.set(xlabel="tokens of a block", ylabel="allocated slots unused, %")
    for axes in (speed, waste):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="lengths for the waste")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns [3]")
    parser.add_argument("--dtype", default="bfloat16", help="of K/V [bfloat16]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
