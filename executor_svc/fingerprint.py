"""Which model this is, computed from its folder without torch.

Both services compute it and compare: equal fingerprints mean equal configuration and
equal names and shapes of weights. Names, versions and dtypes are left out, so a copy
saved by another version of transformers is the same model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_NOT_THE_MODEL = {"transformers_version", "_name_or_path", "dtype", "torch_dtype"}
_DIGITS = 16


def fingerprint(folder: Path) -> str:
    """Hash a Hugging Face model folder's config.json and its safetensors' layout.

    The hash is SHA-256 over the configuration as canonical JSON (sorted keys, no
    spaces, ASCII), followed by the sorted list of [name, shape] of all tensors as such.

    Returns: the first 16 hexadecimal digits; "" if the folder holds no safetensors.

    Raises:
        OSError, ValueError: if config.json or a safetensors header cannot be read.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        return ""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    essential = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    layout: list[tuple[str, list[int]]] = []
    for path in weights:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        layout.extend((name, entry["shape"]) for name, entry in header.items())
    digest = hashlib.sha256(_canonical(essential) + _canonical(sorted(layout)))
    return digest.hexdigest()[:_DIGITS]


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
