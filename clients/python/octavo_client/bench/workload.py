"""What is sent, and when: from a file, from a trace, or drawn."""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from octavo_client.errors import OctavoError

# Drawn token ids keep clear of the special tokens that vocabularies begin with, and are
# the same for every target, so that peers get the same prompts.
_FIRST_TOKEN_ID = 1000
DEFAULT_VOCAB_SIZE = 30_000

# ShareGPT as published: mean input 161.31 and output 337.99 tokens (Kwon et al., 2023,
# section 6.1). The spread of a log-normal with a heavy tail is chosen, not published.
_SHAREGPT_MEAN_PROMPT_TOKENS = 161.31
_SHAREGPT_MEAN_OUTPUT_TOKENS = 337.99
_SHAREGPT_SIGMA = 1.0


class WorkloadError(OctavoError):
    """A workload cannot be read; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload.

    Attributes:
        id: name in reports.
        prompt: token ids.
        num_output_tokens: exactly so many are asked for.
        arrival_seconds: when it is sent, from the start of the run.
    """

    id: str
    prompt: tuple[int, ...]
    num_output_tokens: int
    arrival_seconds: float = 0.0


def read_requests(path: Path) -> list[Request]:
    """Read `[{id, prompt: [token ids], out, arrival}]`; id and arrival may be left out.

    Raises:
        WorkloadError: naming the entry and the field that is missing or wrong.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: not valid UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise WorkloadError(
            f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    if not isinstance(entries, list) or not entries:
        raise WorkloadError(f"{path}: must be a JSON array of at least one request")
    return [_parse_entry(entry, f"{path}: request {n}", n) for n, entry in enumerate(entries)]


def _parse_entry(entry: Any, where: str, number: int) -> Request:
    if not isinstance(entry, dict):
        raise WorkloadError(f"{where}: must be an object with prompt and out")
    for name in ("prompt", "out"):
        if name not in entry:
            raise WorkloadError(f"{where}: field {name!r} is missing")
    prompt, out, arrival = entry["prompt"], entry["out"], entry.get("arrival", 0)
    if not (isinstance(prompt, list) and prompt and all(_is_count(token) for token in prompt)):
        raise WorkloadError(f"{where}: field 'prompt' must be a list of token ids, not empty")
    if not _is_count(out) or out < 1:
        raise WorkloadError(f"{where}: field 'out' must be a whole number from 1, got {out!r}")
    if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not arrival >= 0:
        raise WorkloadError(f"{where}: field 'arrival' must be seconds from 0, got {arrival!r}")
    return Request(str(entry.get("id", number)), tuple(prompt), out, float(arrival))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_trace(
    path: Path, *, max_requests: int | None, vocab_size: int, seed: int
) -> list[Request]:
    """Read a CSV trace (.gz or plain): arrival_s, prompt_tokens, output_tokens.

    Only lengths and times are in a trace: the token ids are drawn. An empty arrival is 0.

    Raises:
        WorkloadError: naming the line and the column that is missing or wrong.
    """
    draw = random.Random(seed)
    requests: list[Request] = []
    try:
        with _open_text(path) as file:
            for line, row in enumerate(_rows(path, csv.DictReader(file)), start=2):
                if max_requests is not None and len(requests) == max_requests:
                    break
                where = f"{path}: line {line}"
                length = _whole(row, "prompt_tokens", where)
                requests.append(
                    Request(
                        str(len(requests)),
                        _draw_prompt(draw, length, vocab_size),
                        _whole(row, "output_tokens", where),
                        _seconds(row, "arrival_s", where),
                    )
                )
    except (OSError, EOFError) as error:
        raise WorkloadError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path}: not a CSV file: {error}") from error
    if not requests:
        raise WorkloadError(f"{path}: has no requests")
    start = min(request.arrival_seconds for request in requests)
    return [replace(r, arrival_seconds=r.arrival_seconds - start) for r in requests]


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _rows(path: Path, reader: csv.DictReader[str]) -> Iterator[dict[str, str]]:
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        if name not in (reader.fieldnames or ()):
            raise WorkloadError(f"{path}: column {name!r} is missing")
    yield from reader


def _whole(row: dict[str, str], name: str, where: str) -> int:
    try:
        value = int(row[name])
    except (TypeError, ValueError):
        value = 0
    if value < 1:
        raise WorkloadError(
            f"{where}: column {name!r} must be a whole number from 1, got {row[name]!r}"
        )
    return value


def _seconds(row: dict[str, str], name: str, where: str) -> float:
    try:
        value = float(row[name] or 0)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise WorkloadError(f"{where}: column {name!r} must be seconds from 0, got {row[name]!r}")
    return value


def draw_sharegpt(*, num_requests: int, vocab_size: int, seed: int) -> list[Request]:
    """Draw requests with ShareGPT's published mean lengths, all at once."""
    draw = random.Random(seed)
    return [
        Request(
            str(number),
            _draw_prompt(draw, _draw_length(draw, _SHAREGPT_MEAN_PROMPT_TOKENS), vocab_size),
            _draw_length(draw, _SHAREGPT_MEAN_OUTPUT_TOKENS),
        )
        for number in range(num_requests)
    ]


def _draw_length(draw: random.Random, mean: float) -> int:
    mu = math.log(mean) - _SHAREGPT_SIGMA**2 / 2  # a log-normal's mean is exp(mu + sigma²/2)
    return max(1, round(draw.lognormvariate(mu, _SHAREGPT_SIGMA)))


def _draw_prompt(draw: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    first = _FIRST_TOKEN_ID if vocab_size > _FIRST_TOKEN_ID else 0
    return tuple(draw.choices(range(first, vocab_size), k=length))


def cap_lengths(
    requests: Iterable[Request], *, max_prompt: int | None, max_output: int | None
) -> list[Request]:
    """Cut prompts and outputs down to these many tokens."""
    return [
        replace(
            request,
            prompt=request.prompt[:max_prompt],
            num_output_tokens=min(
                request.num_output_tokens, max_output or request.num_output_tokens
            ),
        )
        for request in requests
    ]


def scale_arrivals(requests: Iterable[Request], factor: float) -> list[Request]:
    """Send so many times faster than the workload says."""
    return [replace(r, arrival_seconds=r.arrival_seconds / factor) for r in requests]


def poisson_arrivals(requests: Sequence[Request], rate: float, *, seed: int) -> list[Request]:
    """Replace the arrivals by a Poisson process of `rate` requests per second."""
    draw = random.Random(seed ^ 0x5EED)  # not the lengths' numbers again
    now = 0.0
    spaced = []
    for request in requests:
        spaced.append(replace(request, arrival_seconds=now))
        now += draw.expovariate(rate)
    return spaced
