"""How the decode kernel is laid out on each card: a table, and what fills it.

`tuning.json` holds what was fastest on a card that could be measured; where it has no
entry, `default_tuning` serves. On a GPU,

    python -m octavo_kernels.triton_ops.tuning --write

measures that card and rewrites its entries; without `--write` it prints them only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

import torch

_TABLE_PATH = Path(__file__).with_name("tuning.json")
_TABLE_DTYPE = torch.bfloat16
_TILE_BYTES = 16 * 1024

# What is measured, at a batch and a context where memory is the limit.
_SWEEP_MODELS = ((64, 3), (64, 1), (128, 1), (128, 4), (128, 7), (128, 8), (256, 2))
_SWEEP_BLOCK_SIZES = (8, 16, 32, 64, 128)
_SWEEP_LAYOUTS = tuple(itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 5)))
_SWEEP_SEQS = 64
_SWEEP_KV_HEADS = 8
_SWEEP_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a kernel is laid out; `tile_tokens` is a power of two, at least 16."""

    tile_tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class TuningKey:
    """What a layout was measured for: a card, and the shape of a model's K/V."""

    arch: str
    head_dim: int
    block_size: int
    group: int


def tuning_for(
    key: TuningKey, dtype: torch.dtype, table: Mapping[TuningKey, Tuning] | None = None
) -> Tuning:
    """Look up the layout for a card and a model, or fall back on `default_tuning`.

    The table, by default the committed one, holds for 16-bit pools only.
    """
    known = (read_table() if table is None else table).get(key)
    if known is not None and dtype.itemsize == _TABLE_DTYPE.itemsize:
        return known
    return default_tuning(key.arch, key.head_dim, dtype.itemsize)


def default_tuning(arch: str, head_dim: int, itemsize: int) -> Tuning:
    """Choose tiles of up to 16 KiB of keys, so that several programs share a processor.

    On NVIDIA five stages are two for the table and two for a tile: while one is attended
    to, the next is on its way. The programs that fit have 64 to 96 KiB in flight, more
    than the fastest memory needs to be busy. AMD's processors have 64 KiB of shared
    memory, and hide latency by their number of waves: two stages, which is one tile.

    Args:
        arch: as `arch_of` names it.
        head_dim: elements of a head.
        itemsize: bytes of an element.
    """
    row_bytes = 1 << (head_dim * itemsize - 1).bit_length()
    return Tuning(
        tile_tokens=min(64, _TILE_BYTES // row_bytes),
        num_warps=2 if row_bytes * 64 < _TILE_BYTES else 4,
        num_stages=2 if arch.startswith("gfx") else 5,
    )


@cache
def arch_of(device: torch.device) -> str:
    """Name a device's architecture: sm_90, gfx942, or cpu under the interpreter."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@cache
def read_table(path: Path = _TABLE_PATH) -> dict[TuningKey, Tuning]:
    """Read what was measured, as `--write` wrote it."""
    return {
        TuningKey(**{field.name: entry[field.name] for field in fields(TuningKey)}): Tuning(
            **{field.name: entry[field.name] for field in fields(Tuning)}
        )
        for entry in json.loads(path.read_text())
    }


def _measure(key: TuningKey) -> dict[Tuning, float]:
    """Time every layout that fits the card, in milliseconds a call."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    from octavo_kernels.triton_ops.paged_attention import paged_attention

    blocks = -(-_SWEEP_CONTEXT // key.block_size)
    num_blocks = _SWEEP_SEQS * blocks
    shape = (num_blocks, key.block_size, _SWEEP_KV_HEADS, key.head_dim)
    heads = (_SWEEP_SEQS, _SWEEP_KV_HEADS * key.group, key.head_dim)
    query, keys, values = (
        torch.randn(size, dtype=_TABLE_DTYPE, device="cuda") for size in (heads, shape, shape)
    )
    tables = torch.randperm(num_blocks, device="cuda").int().view(_SWEEP_SEQS, blocks)
    lens = torch.full((_SWEEP_SEQS,), _SWEEP_CONTEXT, dtype=torch.int32, device="cuda")
    out = torch.empty_like(query)

    def call(tuning: Tuning) -> None:
        paged_attention(
            query, keys, values, tables, lens, scale=key.head_dim**-0.5, out=out, tuning=tuning
        )

    times = {}
    default = default_tuning(key.arch, key.head_dim, _TABLE_DTYPE.itemsize)
    for tuning in (default, *itertools.starmap(Tuning, _SWEEP_LAYOUTS)):
        try:
            times[tuning] = do_bench(lambda tuning=tuning: call(tuning), return_mode="median")
        except OutOfResources:
            continue
    return times


def _sweep(arch: str) -> Iterator[dict[str, object]]:
    for (head_dim, group), block_size in itertools.product(_SWEEP_MODELS, _SWEEP_BLOCK_SIZES):
        key = TuningKey(arch, head_dim, block_size, group)
        times = _measure(key)
        best = min(times, key=times.__getitem__)
        usual = times[default_tuning(arch, head_dim, _TABLE_DTYPE.itemsize)]
        sys.stderr.write(f"{key} {best}: {times[best]:.4f} ms, by default {usual:.4f} ms\n")
        yield asdict(key) | asdict(best)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure this machine's GPU, one line of the table for each model and block size."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--write", action="store_true", help="replace the card's entries in tuning.json"
    )
    write = parser.parse_args(arguments).write
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure")
    arch = arch_of(torch.device("cuda", torch.cuda.current_device()))
    measured = list(_sweep(arch))
    others = [entry for entry in json.loads(_TABLE_PATH.read_text()) if entry["arch"] != arch]
    lines = ",\n".join(json.dumps(entry) for entry in others + measured)
    if write:
        _TABLE_PATH.write_text(f"[\n{lines}\n]\n")
    else:
        sys.stdout.write(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
