"""How the decode kernel is laid out on each card: a table, and what fills it.

`tuning.json` holds what was fastest on a card that could be measured; where it has no
entry, `default_tuning` serves.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

_TABLE_PATH = Path(__file__).with_name("tuning.json")
_TILE_BYTES = 16 * 1024
_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tokens of a tile (a power of two; at least a block is taken), warps, pipeline stages."""

    tile_tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class _Place:
    arch: str
    head_dim: int
    block_size: int
    group: int


def tuning_for(arch: str, head_dim: int, block_size: int, group: int, itemsize: int) -> Tuning:
    """Look up the layout for a card and a model, or fall back on `default_tuning`.

    Args:
        arch: as `arch_of` names it.
        head_dim: elements of a head.
        block_size: tokens of a block.
        group: query heads that share a KV head.
        itemsize: bytes of an element; the table holds for 16-bit pools only.
    """
    known = _table().get(_Place(arch, head_dim, block_size, group))
    if known is not None and itemsize == _HALF_BYTES:
        return known
    return default_tuning(head_dim, itemsize)


def default_tuning(head_dim: int, itemsize: int) -> Tuning:
    """Choose a tile of about 16 KiB of keys: small enough for three programs per processor.

    Three programs with one tile of keys and one of values on the way keep 96 KiB in
    flight, twice what the fastest card here needs to hide its memory's latency.
    """
    row_bytes = itemsize * 2 ** math.ceil(math.log2(head_dim))
    tile_tokens = min(128, max(64, _TILE_BYTES // row_bytes))
    return Tuning(tile_tokens=tile_tokens, num_warps=4, num_stages=3)


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
def _table() -> dict[_Place, Tuning]:
    table = {}
    for entry in json.loads(_TABLE_PATH.read_text()):
        tuning = Tuning(*(entry.pop(name) for name in Tuning.__dataclass_fields__))
        table[_Place(**entry)] = tuning
    return table
