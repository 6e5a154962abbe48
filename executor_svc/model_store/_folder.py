"""What is in a model's folder, read without torch or transformers."""

from __future__ import annotations

import json
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# config.json may keep the language model's settings one level down.
_NESTED_CONFIG = "text_config"
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_MAX_SAFETENSORS_HEADER_BYTES = 100_000_000  # the format's own bound
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class ModelInfo:
    """One model as `octavo model list` shows it.

    Attributes:
        size_bytes: all files of the folder.
        context_tokens: longest context the configuration allows; None if it names none.
        num_parameters: elements of all stored weights.
        dtype: of most of the weights.
    """

    name: str
    path: Path
    size_bytes: int
    dtype: str
    architecture: str
    context_tokens: int | None
    num_parameters: int


def missing_files(folder: Path) -> list[str]:
    """What a folder lacks to be served, in words; empty if it is complete.

    Only names and one index are read, so that a start with everything present costs
    milliseconds. Shards named by the index count as missing when they are not there.
    """
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(_read_json(index).get("weight_map", {}).values())
        missing += sorted(name for name in shards if not (folder / name).is_file())
    elif not (folder / "model.safetensors").is_file():
        missing.append("model.safetensors")
    return missing


def describe(folder: Path) -> ModelInfo:
    """Read a complete folder's configuration and the headers of its weights.

    Raises:  OSError, ValueError: if a file is absent or not what its name says.
    """
    config = _read_json(folder / "config.json")
    text_config = config.get(_NESTED_CONFIG, config)
    context = next((text_config[key] for key in _CONTEXT_KEYS if key in text_config), None)
    elements: Counter[str] = Counter()
    for weights in sorted(folder.glob("*.safetensors")):
        elements.update(_elements_by_dtype(weights))
    stored = elements.most_common(1)[0][0] if elements else "none"
    return ModelInfo(
        name=folder.name,
        path=folder,
        size_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        dtype=_DTYPES.get(stored, stored.lower()),
        architecture=(config.get("architectures") or [config.get("model_type", "unknown")])[0],
        context_tokens=context,
        num_parameters=elements.total(),
    )


def _elements_by_dtype(weights: Path) -> Counter[str]:
    """Count stored elements per dtype from a safetensors header.

    Source:  the format's description: 8 bytes of little-endian length, then JSON.
    """
    with weights.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{weights} is not a safetensors file: it is too short")
        (length,) = struct.unpack("<Q", prefix)
        if length > _MAX_SAFETENSORS_HEADER_BYTES:
            raise ValueError(f"{weights} is not a safetensors file: its header is too long")
        header = json.loads(stream.read(length))
    counts: Counter[str] = Counter()
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        num_elements = 1
        for extent in tensor["shape"]:
            num_elements *= extent
        counts[tensor["dtype"]] += num_elements
    return counts


def _read_json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value
