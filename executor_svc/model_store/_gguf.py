"""Convert a GGUF file into an ordinary model folder, once.

The weights are unpacked to bfloat16 safetensors by transformers' own reader; the
tokenizer is its too, with what that reader drops put back (`_gguf_tokenizer`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_svc.model_store import _gguf_tokenizer
from executor_svc.model_store._progress import Progress, no_bars
from executor_svc.model_store.errors import ConversionFailed, ModelStoreError, one_line

_MAX_SHARD = "10GB"


@dataclass(frozen=True)
class GgufMetadata:
    """What a conversion needs from a GGUF file's key-value section.

    Attributes:
        pre_tokenizer: llama.cpp's name of the rule that splits text before BPE.
        special_ids: bos, eos, eot, unk and pad, those that the file names.
        num_tokens: of the vocabulary.
    """

    architecture: str
    tokenizer_model: str
    pre_tokenizer: str
    add_bos: bool
    special_ids: dict[str, int]
    has_chat_template: bool
    num_tokens: int


def convert(
    gguf_file: Path, folder: Path, progress: Progress, *, require_chat_template: bool = False
) -> None:
    """Write config, weights, tokenizer and generation settings into the folder.

    Args:
        gguf_file: absolute path.
        folder: exists; files of the same names are overwritten.
        progress: hears of each stage.
        require_chat_template: refuse a file without one instead of warning.
    Raises:  ConversionFailed: if the file is not GGUF, of an architecture that
        transformers does not read, or does not tokenize as it should afterwards; or if
        the executor's packages are not installed.
    """
    progress.stage("reading the GGUF file")
    try:
        metadata = read_metadata(gguf_file)
        if not metadata.has_chat_template:
            _without_chat_template(gguf_file, progress, require_chat_template)
        progress.stage("loading torch and transformers")
        with _quiet_transformers():
            config = _convert_weights(gguf_file, folder, metadata, progress)
            progress.stage("converting the tokenizer")
            _gguf_tokenizer.convert(gguf_file, folder, metadata, config, progress)
    except ModelStoreError:
        raise
    except ImportError as error:
        raise ConversionFailed(
            f"converting {gguf_file.name} needs {error.name or error}: "
            "pip install 'octavo[executor]', or give a model folder"
        ) from error
    except OSError as error:
        if error.errno is not None:  # the disk's fault, not the file's
            raise
        raise _failed(gguf_file, error) from error
    except Exception as error:  # whatever the readers raise on a file they can't read
        raise _failed(gguf_file, error) from error


def read_metadata(gguf_file: Path) -> GgufMetadata:
    """Read the few keys that matter here; weights and vocabulary stay on disk."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf_file).fields

    def value(key: str, default: Any = None) -> Any:
        return fields[key].contents() if key in fields else default

    named = {
        "bos": "bos_token_id",
        "eos": "eos_token_id",
        "eot": "eot_token_id",
        "unk": "unknown_token_id",
        "pad": "padding_token_id",
    }
    model = value("tokenizer.ggml.model", "")
    return GgufMetadata(
        architecture=value("general.architecture", "unknown"),
        tokenizer_model=model,
        pre_tokenizer=value("tokenizer.ggml.pre", "default"),
        # llama.cpp's default: SentencePiece vocabularies begin with bos, BPE ones do not.
        add_bos=bool(value("tokenizer.ggml.add_bos_token", model == "llama")),
        special_ids={
            name: int(value(f"tokenizer.ggml.{key}"))
            for name, key in named.items()
            if f"tokenizer.ggml.{key}" in fields
        },
        has_chat_template="tokenizer.chat_template" in fields,
        num_tokens=len(fields["tokenizer.ggml.tokens"].data),
    )


def _convert_weights(
    gguf_file: Path, folder: Path, metadata: GgufMetadata, progress: Progress
) -> dict[str, Any]:
    """Write config.json, model.safetensors, generation_config.json; give the config."""
    import torch
    from transformers import AutoModelForCausalLM

    progress.stage("unpacking the weights to bfloat16")
    # Unpacked in float32 and rounded once: the packed scales are finer than bfloat16.
    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32, **_dequantize()
    )
    model.bfloat16()
    progress.stage("writing the weights")
    model.save_pretrained(folder, max_shard_size=_MAX_SHARD)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    generation = {
        f"{name}_token_id": token_id
        for name, token_id in metadata.special_ids.items()
        if name in ("bos", "pad")
    }
    ends = [metadata.special_ids[name] for name in ("eos", "eot") if name in metadata.special_ids]
    ends = list(dict.fromkeys(ends))
    if ends:
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends  # type: ignore[assignment]  # the format has both
    write_json(folder / "generation_config.json", generation)
    return config


def _dequantize() -> dict[str, Any]:
    """Ask for plain weights, where this version of transformers would keep them packed."""
    try:
        from transformers import GgufConfig
    except ImportError:  # older releases always unpack
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _without_chat_template(gguf_file: Path, progress: Progress, required: bool) -> None:
    if required:
        raise ConversionFailed(f"{gguf_file.name} has no chat template: use an instruct model")
    progress.warn(f"{gguf_file.name} has no chat template: chat requests will be refused")


def _failed(gguf_file: Path, error: Exception) -> ConversionFailed:
    return ConversionFailed(
        f"cannot convert {gguf_file} ({one_line(error, 160)}): "
        "check that it is a GGUF file of a decoder-only model that transformers reads"
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars and notes off the terminal; put its settings back after."""
    from transformers.utils.logging import get_verbosity, set_verbosity

    verbosity = get_verbosity()
    set_verbosity(logging.ERROR)
    try:
        with no_bars():
            yield
    finally:
        set_verbosity(verbosity)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file the way the folder's other JSON files are written."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
