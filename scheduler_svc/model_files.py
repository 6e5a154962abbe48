"""From a model reference to what the scheduler needs of it, without torch.

The scheduler reads the configuration and the tokenizer; weights are the executor's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler_svc.config import DEFAULT_MODEL
from scheduler_svc.errors import StartupError
from scheduler_svc.fingerprint import fingerprint

_NAME = re.compile(r"[A-Za-z0-9][\w.@+-]*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_HUB_FILES = ["*.json", "*.jinja"]
_HUB_IGNORED = ["*/*", "*.safetensors.index.json"]
_HUB_TIMEOUT_SECONDS = 15
_REQUIRED = ("config.json", "tokenizer.json")
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_UNBOUNDED = 10**9  # tokenizers without a limit say 1e30


@dataclass(frozen=True)
class SamplingDefaults:
    """The model's own sampling parameters; what it does not name is neutral."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class ModelFiles:
    """A model as the scheduler sees it.

    Attributes:
        name: what clients call it.
        fingerprint: of configuration and weights; "" where there are no weights here.
        max_model_len: longest context in tokens; None if the model names none.
        vocab_size: of the logits, in tokens.
        eos_token_ids: end a choice unless the client ignores them.
        chat_template: Jinja source; None if the model has none.
        special_tokens: "bos_token" and so on to their texts.
        add_bos_token: as tokenizer_config.json says; None if it does not.
        add_eos_token: the same.
    """

    name: str
    folder: Path
    fingerprint: str
    max_model_len: int | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults = SamplingDefaults()
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None


def load_model(reference: str, store: Path) -> ModelFiles:
    """Find a model and read what the scheduler needs of it.

    Raises:  StartupError: one line that says what to do.
    """
    folder = resolve(reference, store)
    name = reference if _is_public_name(reference, store) else folder.name
    try:
        return _read(name, folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise StartupError(f"the model in {folder} cannot be read: {reason}") from error


def resolve(reference: str, store: Path) -> Path:
    """Give the folder of a reference: a name in the store, a folder, or a hub id.

    Raises:  StartupError: if it is none of these or incomplete; where the executor's
        command would fetch or convert it, the message names that.
    """
    store = store.expanduser()
    if _NAME.fullmatch(reference) and _is_complete(store / reference):
        return store / reference
    path = Path(reference).expanduser()
    if path.is_dir():
        if not _is_complete(path):
            missing = [name for name in _REQUIRED if not (path / name).is_file()]
            raise StartupError(f"the model folder {path} lacks {' and '.join(missing)}")
        return path.absolute()
    if path.suffix.lower() == ".gguf":
        raise StartupError(
            f"{reference} must be converted first: run `octavo model fetch {reference}` and give "
            "--model the name that it prints"
        )
    if _HUB_ID.fullmatch(reference):
        stored = store / reference.replace("/", "--")
        return stored if _is_complete(stored) else _from_hub(reference)
    if reference == DEFAULT_MODEL:
        raise _fetch_first(reference, f"model {reference} is not in {store}")
    raise StartupError(
        f"no model {reference!r} in {store}: give a folder, a hub id (org/name) or a .gguf file, "
        "or see `octavo model list`"
    )


def _is_public_name(reference: str, store: Path) -> bool:
    if _NAME.fullmatch(reference):
        return _is_complete(store.expanduser() / reference)
    return bool(_HUB_ID.fullmatch(reference)) and not Path(reference).is_dir()


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _REQUIRED)


def _fetch_first(reference: str, reason: str) -> StartupError:
    return StartupError(f"{reason}: run `octavo model fetch {reference}`")


def _from_hub(reference: str) -> Path:
    """Download configuration and tokenizer, not the weights."""
    from huggingface_hub import snapshot_download

    # public there, but not in its __all__
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    repository, _, revision = reference.partition("@")
    disable_progress_bars()
    try:
        folder = Path(
            snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_IGNORED,
                etag_timeout=_HUB_TIMEOUT_SECONDS,
            )
        )
    except Exception as error:  # the hub's client raises its own, httpx's and OSError's
        reason = f"{repository} cannot be had from the hub ({type(error).__name__})"
        raise _fetch_first(reference, reason) from error
    if not _is_complete(folder):
        raise _fetch_first(reference, f"{repository} has no tokenizer.json on the hub")
    return folder


def _read(name: str, folder: Path) -> ModelFiles:
    config = _json(folder / "config.json")
    text_config = config.get("text_config") or config
    generation = _json(folder / "generation_config.json", optional=True)
    tokenizer = _json(folder / "tokenizer_config.json", optional=True)
    special = _special_tokens(folder, tokenizer)
    return ModelFiles(
        name=name,
        folder=folder,
        fingerprint=fingerprint(folder),
        max_model_len=_context_length(text_config, tokenizer),
        vocab_size=int(text_config["vocab_size"]),
        eos_token_ids=_eos_token_ids(folder, [generation, text_config, config], special),
        sampling=_sampling_defaults(generation),
        chat_template=_chat_template(folder, tokenizer),
        special_tokens=special,
        add_bos_token=tokenizer.get("add_bos_token"),
        add_eos_token=tokenizer.get("add_eos_token"),
    )


def _json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} must hold a JSON object")
    return value


def _context_length(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> int | None:
    for key in _CONTEXT_KEYS:
        if isinstance(config.get(key), int) and config[key] > 0:
            return int(config[key])
    limit = tokenizer.get("model_max_length")
    return int(limit) if isinstance(limit, int | float) and 0 < limit < _UNBOUNDED else None


def _sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    temperature = generation.get("temperature")
    return SamplingDefaults(
        temperature=1.0 if temperature is None else float(temperature),
        top_k=int(generation.get("top_k") or 0),
        top_p=float(generation.get("top_p") or 1.0),
    )


def _special_tokens(folder: Path, tokenizer: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens; tokenizer_config.json wins over the older map."""
    older = _json(folder / "special_tokens_map.json", optional=True)
    found: dict[str, str] = {}
    for key in _NAMED_TOKENS:
        token = tokenizer.get(key) or older.get(key)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[key] = token
    return found


def _eos_token_ids(
    folder: Path, sources: list[Mapping[str, Any]], special: Mapping[str, str]
) -> tuple[int, ...]:
    """End-of-sequence ids from the first file that names any."""
    for source in sources:
        ids = source.get("eos_token_id")
        if ids is not None:
            return tuple(dict.fromkeys(ids if isinstance(ids, list) else [ids]))
    if "eos_token" not in special:
        return ()
    added = _json(folder / "tokenizer.json").get("added_tokens") or []
    return tuple(token["id"] for token in added if token["content"] == special["eos_token"])


def _chat_template(folder: Path, tokenizer: Mapping[str, Any]) -> str | None:
    """The template's own file, or the one named "default" in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
