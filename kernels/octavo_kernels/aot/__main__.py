"""`python -m octavo_kernels.aot`: compile, read, and hold against the table."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import triton
from triton import knobs

from octavo_kernels.aot.bar import TABLE, Bar, Row, changes, compare, key_of
from octavo_kernels.aot.configs import BLOCK_SIZES, LAYERS, TARGETS
from octavo_kernels.aot.launches import OPS
from octavo_kernels.aot.measure import Case, Figures, measure_all

_COLUMNS = (
    ("kernel", "kernel", "<28"),
    ("target", "target", "<7"),
    ("config", "model", "<21"),
    ("block_size", "block", ">5"),
    ("num_warps", "warps", ">5"),
    ("num_stages", "stages", ">6"),
    ("registers", "regs", ">5"),
    ("spills", "spills", ">6"),
    ("shared_bytes", "shared", ">7"),
    ("load_bits", "load", ">5"),
    ("inner_loop_instructions", "loop", ">5"),
    ("instructions_per_kv_byte", "per KV byte", ">11"),
    ("paging_overhead", "paging", ">7"),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m octavo_kernels.aot",
        description="Compile every kernel for GPUs that are not here; read the binaries; "
        "fail if they spill, load narrowly, or are worse than the committed table.",
    )
    add = parser.add_argument
    add("--target", action="append", choices=tuple(TARGETS), help="only this one (repeatable)")
    add("--kernel", action="append", choices=tuple(OPS), help="only this one (repeatable)")
    add("--config", action="append", choices=tuple(LAYERS), help="only this model (repeatable)")
    add("--block-size", action="append", type=int, choices=BLOCK_SIZES, help="only this one")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (%(default)s)")
    add("--json-lines", action="store_true", help="JSON lines on a terminal, too")
    add("--json", metavar="FILE", help="write the JSON lines there; - is standard output")
    add("--write", action="store_true", help=f"make these figures the table, {TABLE.name}")
    return parser


def _cases(options: argparse.Namespace) -> list[Case]:
    return [
        Case(op, target, config, block_size)
        for op, target, config, block_size in itertools.product(
            options.kernel or OPS,
            options.target or TARGETS,
            options.config or LAYERS,
            options.block_size or BLOCK_SIZES,
        )
    ]


def _with_progress(all_figures: Iterable[list[Figures]], num_cases: int) -> Iterator[Row]:
    started = time.monotonic()
    on_terminal = sys.stderr.isatty()
    for done, figures in enumerate(all_figures, start=1):
        if on_terminal:
            seconds = time.monotonic() - started
            sys.stderr.write(f"\rcompiled {done} of {num_cases} in {seconds:.0f} s\033[K")
        yield from (each.as_row() for each in figures)
    if on_terminal:
        sys.stderr.write("\r\033[K")


def _table(rows: Sequence[Row]) -> str:
    lines = ["  ".join(f"{title:{form}}" for _, title, form in _COLUMNS)]
    for row in rows:
        cells = []
        for field, _, form in _COLUMNS:
            value = row[field]
            if field == "paging_overhead" and value is not None:
                value = f"{value:+.1%}"
            cells.append(f"{'-' if value is None else value:{form}}")
        lines.append("  ".join(cells))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0: as good as the table, 1: not, 2: it could not run."""
    options = _parser().parse_args(argv)
    if knobs.runtime.interpret:
        sys.stderr.write("TRITON_INTERPRET is set: the interpreter compiles nothing; unset it\n")
        return 2
    cases = _cases(options)
    complete = len(cases) == len(OPS) * len(TARGETS) * len(LAYERS) * len(BLOCK_SIZES)
    to_file = options.json not in (None, "-")
    as_lines = not to_file and (options.json or options.json_lines or not sys.stdout.isatty())
    rows = []
    for row in _with_progress(measure_all(cases, options.jobs), len(cases)):
        rows.append(row)
        if as_lines:
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    if to_file:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        Path(options.json).write_text(lines, encoding="utf-8")
    elif not as_lines:
        sys.stdout.write(_table(rows) + "\n")
    return _write(rows, complete) if options.write else _judge(rows, complete)


def _write(rows: Sequence[Row], complete: bool) -> int:
    before = Bar.read() if TABLE.exists() else Bar(triton.__version__, {})
    for change in changes(rows, before):
        sys.stderr.write(change + "\n")
    kept = {} if complete else before.rows
    Bar(triton.__version__, {**kept, **{key_of(row): row for row in rows}}).write()
    sys.stderr.write(f"wrote {TABLE}\n")
    return 0


def _judge(rows: Sequence[Row], complete: bool) -> int:
    try:
        bar = Bar.read()
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"the table cannot be read: {error}; make aot ARGS=--write makes it\n")
        return 2
    if triton.__version__ != bar.triton:
        sys.stderr.write(
            f"triton {triton.__version__} is here and the table is of {bar.triton}: "
            "only spills and load widths are checked\n"
        )
    problems = compare(rows, bar, triton=triton.__version__, complete=complete)
    for problem in problems:
        sys.stderr.write(problem + "\n")
    sys.stderr.write(
        f"{len(rows)} binaries, {len(problems)} problems"
        + (
            ": if meant, make aot ARGS=--write moves the bar (not for spills, narrow loads)\n"
            if problems
            else "\n"
        )
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
