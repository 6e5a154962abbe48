"""The committed table that every compilation is held against.

Two rules hold whatever compiler made the binaries: no spills, and 128-bit loads where
K/V bytes are moved. The rest is compared with the table, which one version of Triton
wrote: another's registers and instruction counts are its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Key = tuple[Any, ...]

TABLE = Path(__file__).with_name("table.json")

WIDE_BITS = 128
# What a rewrite may cost without being a regression.
REGISTER_SLACK = 8
OVERHEAD_SLACK = 0.005

# Reads partial results of its own, not K/V.
_NO_KV = {"paged_attention/merge_splits"}


@dataclass(frozen=True, slots=True)
class Bar:
    """The table: rows by key, and the version of Triton whose binaries they describe."""

    triton: str
    rows: dict[Key, Row]

    @classmethod
    def read(cls, path: Path = TABLE) -> Bar:
        """Read the committed table.

        Raises:
            OSError: if there is none.
            ValueError: if it is not one.
        """
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(content["triton"], {key_of(row): row for row in content["rows"]})

    def write(self, path: Path = TABLE) -> None:
        """Write it, one row a line, so that a difference shows what changed."""
        lines = ",\n".join(json.dumps(row) for row in self.rows.values())
        path.write_text(f'{{"triton": "{self.triton}", "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def key_of(row: Row) -> Key:
    """What tells a row from every other."""
    return tuple(row[name] for name in ("kernel", "target", "config", "dtype", "block_size"))


def broken_rules(row: Row) -> Iterator[str]:
    """Say where a binary breaks what holds for every compiler."""
    if row["spills"]:
        yield f"spills {row['spills']} bytes"
    if row["kernel"] not in _NO_KV and row["load_bits"] < WIDE_BITS:
        yield f"loads {row['load_bits']} bits at a time, not {WIDE_BITS}"


def regressions(row: Row, before: Row) -> Iterator[str]:
    """Say where a binary is worse than the table has it."""
    if row["load_bits"] < before["load_bits"]:
        yield f"load_bits {before['load_bits']} -> {row['load_bits']}"
    if row["registers"] > before["registers"] + REGISTER_SLACK:
        yield f"registers {before['registers']} -> {row['registers']}"
    was, now = before["paging_overhead"], row["paging_overhead"]
    if was is not None and (now is None or now > was + OVERHEAD_SLACK):
        yield f"paging_overhead {was} -> {now}"


def compare(rows: Iterable[Row], bar: Bar, *, triton: str, complete: bool) -> list[str]:
    """List everything that is wrong with these rows, one line each.

    Args:
        rows: what was compiled now.
        bar: the committed table.
        triton: the version that compiled; another than the bar's: hard rules alone.
        complete: whether all cases ran, so that a row of the table may not be missing.
    """
    problems = []
    seen = set()
    for row in rows:
        key = key_of(row)
        seen.add(key)
        found = list(broken_rules(row))
        if triton == bar.triton:
            before = bar.rows.get(key)
            found += ["not in the table"] if before is None else regressions(row, before)
        problems += [f"{_name(key)}: {each}" for each in found]
    if complete and triton == bar.triton:
        problems += [f"{_name(key)}: in the table alone" for key in bar.rows if key not in seen]
    return problems


def changes(rows: Iterable[Row], bar: Bar) -> list[str]:
    """List what got better or worse against the table, one line each."""
    lines = []
    for row in rows:
        before = bar.rows.get(key_of(row))
        if before is None:
            lines.append(f"new     {_name(key_of(row))}")
            continue
        for field, sign in _DIRECTION.items():
            was, now = before[field], row[field]
            if was != now and was is not None and now is not None:
                word = "worse " if sign * (now - was) > 0 else "better"
                lines.append(f"{word}  {_name(key_of(row))}: {field} {was} -> {now}")
    return lines


# +1: less is better; -1: more is.
_DIRECTION = {
    "spills": 1,
    "registers": 1,
    "stack_bytes": 1,
    "shared_bytes": 1,
    "load_bits": -1,
    "instructions_per_kv_byte": 1,
    "paging_overhead": 1,
}


def _name(key: Sequence[Any]) -> str:
    kernel, target, config, dtype, block_size = key
    return f"{kernel} on {target}, {config}, {dtype}, blocks of {block_size}"
