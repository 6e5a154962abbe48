"""Which model this is: a hash of its configuration and of its weights' layout.

The executor computes the same from the same files; a scheduler refuses an executor with
another fingerprint. Defined as the first 16 hex digits of the SHA-256 over

1. config.json as canonical JSON, without the keys that do not change what the model
   computes, followed by
2. the list [[tensor name, shape], ...] over all *.safetensors files, sorted by name.

Canonical JSON has sorted keys, no spaces, and non-ASCII characters escaped.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

_IGNORED_KEYS = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype"})
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound


def fingerprint(folder: Path) -> str:
    """Give the fingerprint of a model's folder, or "" if it holds no weights.

    Raises:  OSError, ValueError: if a file cannot be read or is not what its name says.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        return ""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} must hold a JSON object")
    kept = {key: value for key, value in config.items() if key not in _IGNORED_KEYS}
    layout = sorted(entry for path in weights for entry in tensor_shapes(path))
    digest = hashlib.sha256(_canonical(kept))
    digest.update(_canonical(layout))
    return digest.hexdigest()[:16]


def tensor_shapes(path: Path) -> list[list[Any]]:
    """List [name, shape] of every tensor from a safetensors header alone.

    Raises:  ValueError: if the file has no such header.
    Source:  the format's description: 8 bytes of little-endian length, then JSON.
    """
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file")
        header = json.loads(stream.read(length))
    return [[name, entry["shape"]] for name, entry in header.items() if name != "__metadata__"]


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
