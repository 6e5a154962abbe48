"""`python -m octavo_kernels.gpu_check`: measure the kernels on this machine's GPU."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from octavo_kernels.gpu_check.cases import STANDARD_YARDSTICKS, Case, Yardsticks
from octavo_kernels.gpu_check.measure import CASE_SECONDS, Device, Measurement, run
from octavo_kernels.gpu_check.report import as_json, has_passed, in_short, judge, table
from octavo_kernels.gpu_check.suite import Budget, standard_suite
from octavo_kernels.gpu_check.timers import CudaTimer, Timer

_BUDGET_SECONDS = 330.0
_MEMORY_SHARE = 0.9
_NO_GPU = "there is no GPU here: nothing was checked"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the JSON, and print a table.

    Returns: 0 if every target is met; 1 if one is missed or was not measured, or a case
        failed; 2 if there is no GPU.
    """
    options = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write(f"gpu-check: {_NO_GPU}\n")
        return 2
    budget = Budget(options.seconds)
    device = torch.device("cuda", torch.cuda.current_device())
    where = environment(torch.cuda.get_device_name(device))
    _say(f"{where['device']}, driver {where['driver']}, torch {where['torch']}")
    free_bytes = int(torch.cuda.mem_get_info(device)[0] * _MEMORY_SHARE)
    passed = check(
        standard_suite(),
        device,
        CudaTimer(),
        STANDARD_YARDSTICKS,
        budget,
        memory_bytes=free_bytes - STANDARD_YARDSTICKS.memory_bytes,
        where=where,
        path=options.json,
    )
    return 0 if passed else 1


def check(
    suite: Sequence[Case],
    device: torch.device,
    timer: Timer,
    yardsticks: Yardsticks,
    budget: Budget,
    *,
    memory_bytes: int,
    where: dict[str, Any],
    path: Path | None,
    case_seconds: float = CASE_SECONDS,
) -> bool:
    """Measure a suite with a line for each case, write the JSON, print the table.

    Args:
        suite: what to measure, in order.
        device: where.
        timer: the device's clock.
        yardsticks: what to hold the cases against.
        budget: how long it may take.
        memory_bytes: what a case may use on the device.
        where: goes into the JSON as it is.
        path: of the JSON; None: none is written.
        case_seconds: with less time left no case is begun.
    Returns: whether nothing failed and every target is met.
    """
    lent = Device(device, timer, yardsticks, memory_bytes)
    where = {**where, "copy_gb_per_s": yardsticks.copy_bytes / lent.copy() / 1e9}
    where["gemm_tflop_per_s"] = yardsticks.gemm_flops / lent.gemm() / 1e12
    _say(f"copy {where['copy_gb_per_s']:.0f} GB/s, GEMM {where['gemm_tflop_per_s']:.0f} TFLOP/s")
    measured: list[Measurement] = []
    for number, measurement in enumerate(run(suite, lent, budget, case_seconds), 1):
        measured.append(measurement)
        _say(f"[{number}/{len(suite)}, {budget.spent_seconds:.0f} s] {in_short(measurement)}")
    verdicts = judge(measured)
    where["seconds"] = round(budget.spent_seconds, 1)
    if path is not None:
        document = as_json(where, measured, verdicts)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"\n{table(measured, verdicts)}\n")
    return has_passed(measured, verdicts)


def environment(device_name: str) -> dict[str, Any]:
    """Say where and when a run took place."""
    import triton

    return {
        "device": device_name,
        "driver": _driver_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _driver_version() -> str:
    """Ask the vendor's own tool; without it the version is not known."""
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return asked.stdout.split("\n", 1)[0].strip() or "unknown"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m octavo_kernels.gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    parser.add_argument(
        "--seconds",
        type=float,
        default=_BUDGET_SECONDS,
        metavar="SECONDS",
        help="how long the run may take; what does not fit is left out and named "
        "(default: %(default)g)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
