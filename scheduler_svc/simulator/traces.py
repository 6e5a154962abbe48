"""Read recorded workloads: lengths and times of real requests.

    arrival_s,prompt_tokens,output_tokens[,block_hashes][,client]   CSV; gzip if named .gz
    TIMESTAMP,ContextTokens,GeneratedTokens                         Azure's own CSV, 2023 and 2024
    {"timestamp", "input_length", "output_length", "hash_ids"}      Mooncake's own JSON lines

`arrival_s` are seconds and may be empty (0: draw arrivals with `workload.at_rate`); `client`
becomes the tenant. Block hashes are ids of 512-token blocks in order, where `a-b` is the run
a..b: equal leading ids are equal leading tokens. Rows are sorted by arrival.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import IO

from scheduler_svc.simulator.workload import SimRequest, WorkloadError

_MOST_SECONDS = 1e8
_HASHED_TOKENS = 512
_MAX_TRACE_ID = 1 << 30

_Row = dict[str, str]


def read(path: Path, max_requests: int | None = None) -> list[SimRequest]:
    """Read a trace.

    Args:
        path: of the file; what it is is told by its header.
        max_requests: the first so many; None: all.
    Returns: requests by arrival, of which the first is at 0.
    Raises:  WorkloadError: naming the line and the column that is missing or wrong.
    """
    try:
        with _open_text(path) as file:
            first = file.readline()
            lines = chain([first], file)
            rows = _json_rows(path, lines) if first.startswith("{") else _csv_rows(path, lines)
            requests = list(islice(rows, max_requests))
    except (OSError, EOFError) as error:
        raise WorkloadError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path}: not a trace: {error}") from error
    if not requests:
        raise WorkloadError(f"{path}: has no requests")
    requests.sort(key=lambda request: request.arrival)
    start = requests[0].arrival
    return [replace(r, arrival=r.arrival - start) for r in requests] if start else requests


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _csv_rows(path: Path, lines: Iterator[str]) -> Iterator[SimRequest]:
    reader = csv.DictReader(lines)
    names = reader.fieldnames or ()
    is_azure = "TIMESTAMP" in names
    needed = (
        ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
        if is_azure
        else ("arrival_s", "prompt_tokens", "output_tokens")
    )
    for name in needed:
        if name not in names:
            raise WorkloadError(f"{path}: column {name!r} is missing")
    time: Callable[[_Row, str, str], float] = _timestamp if is_azure else _seconds
    for line, row in enumerate(reader, start=2):
        where = f"{path}: line {line}"
        hashes = _hashes(row.get("block_hashes") or "", where)
        yield SimRequest(
            time(row, needed[0], where),
            _whole(row, needed[1], where),
            _whole(row, needed[2], where),
            prefix_ids=hashes,
            prefix_tokens=_HASHED_TOKENS if hashes else 0,
            tenant=row.get("client") or "",
        )


def _json_rows(path: Path, lines: Iterator[str]) -> Iterator[SimRequest]:
    for line, text in enumerate(lines, start=1):
        where = f"{path}: line {line}"
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WorkloadError(f"{where}: not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise WorkloadError(f"{where}: must be a JSON object")
        hashes = entry.get("hash_ids") or []
        if not isinstance(hashes, list) or not all(_is_whole(each) for each in hashes):
            raise WorkloadError(f"{where}: field 'hash_ids' must be whole numbers from 0")
        milliseconds = entry.get("timestamp")
        if (
            not isinstance(milliseconds, int | float)
            or not 0 <= milliseconds <= 1e3 * _MOST_SECONDS
        ):
            raise WorkloadError(
                f"{where}: field 'timestamp' must be milliseconds from 0 to "
                f"{1e3 * _MOST_SECONDS:g}, got {milliseconds!r}"
            )
        yield SimRequest(
            milliseconds / 1e3,
            _length(entry, "input_length", where),
            _length(entry, "output_length", where),
            prefix_ids=tuple(hashes),
            prefix_tokens=_HASHED_TOKENS if hashes else 0,
        )


def _length(entry: dict[str, object], name: str, where: str) -> int:
    value = entry.get(name)
    if not isinstance(value, int) or not _is_whole(value):
        raise WorkloadError(f"{where}: field {name!r} must be a whole number from 0, got {value!r}")
    return max(1, value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_TRACE_ID


def _whole(row: _Row, name: str, where: str) -> int:
    try:
        value = int(row[name])
    except (TypeError, ValueError):
        value = -1
    if value < 0:
        raise WorkloadError(
            f"{where}: column {name!r} must be a whole number from 0, got {row[name]!r}"
        )
    return max(1, value)


def _seconds(row: _Row, name: str, where: str) -> float:
    try:
        value = float(row[name] or 0)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST_SECONDS:
        raise WorkloadError(
            f"{where}: column {name!r} must be seconds from 0 to {_MOST_SECONDS:g}, "
            f"got {row[name]!r}"
        )
    return value


def _timestamp(row: _Row, name: str, where: str) -> float:
    text = row[name] or ""
    try:
        # Azure writes 7 digits of a second's fraction, and sometimes a zone.
        day, _, rest = text.partition(".")
        fraction = float("0." + (rest.split("+")[0].rstrip("Z") or "0"))
        zone = "" if "+" in day else "+00:00"
        return datetime.fromisoformat(day + zone).timestamp() + fraction
    except ValueError as error:
        raise WorkloadError(f"{where}: column {name!r} must be a time, got {text!r}") from error


def _hashes(text: str, where: str) -> tuple[int, ...]:
    ids: list[int] = []
    for part in text.split():
        first, _, last = part.partition("-")
        try:
            low, high = int(first), int(last or first)
        except ValueError:
            low, high = 0, -1
        if not 0 <= low <= high < _MAX_TRACE_ID or high - low > 1_000_000:
            raise WorkloadError(f"{where}: column 'block_hashes' must hold ids or runs, got {part}")
        ids += range(low, high + 1)
    return tuple(ids)
