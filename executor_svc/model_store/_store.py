"""From a reference to a folder that both services can load."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from executor_svc.model_store._folder import ModelInfo, describe, missing_files
from executor_svc.model_store._lock import locked
from executor_svc.model_store._progress import Progress, Silent
from executor_svc.model_store.errors import (
    ConversionFailed,
    IncompleteModel,
    ModelStoreError,
    UnknownReference,
)

DEFAULT_MODEL = "smollm2-135m-instruct"
LOCK_DEADLINE_SECONDS = 1800.0

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_NAME = re.compile(r"[A-Za-z0-9][\w.@+-]*")

Build = Callable[[Path, Progress], None]
"""Fills an empty folder with a model's files."""


def default_store() -> Path:
    """Where models lie if neither flag nor environment says otherwise."""
    return Path.home() / ".cache" / "octavo" / "models"


def resolve(
    reference: str,
    store: Path,
    *,
    progress: Progress | None = None,
    lock_deadline_seconds: float = LOCK_DEADLINE_SECONDS,
) -> Path:
    """Give the folder of a model, fetching or converting it first if it is not there.

    Args:
        reference: a name in the store; a folder, used as it is; a .gguf file, converted
            once; the default model's name; or a hub id, org/name or org/name@revision.
        store: the store's folder, made when something is first put into it.
        progress: hears of each stage; nothing is reported if the model is there.
        lock_deadline_seconds: how long to wait for another process that is fetching the
            same model.
    Raises:  ModelStoreError: one line that says what to do.
    """
    progress = progress or Silent()
    store = store.expanduser().absolute()
    if _NAME.fullmatch(reference) and not missing_files(store / reference):
        return store / reference
    path = Path(reference).expanduser()
    if path.is_dir():
        return _existing_folder(path.absolute())
    if path.suffix.lower() == ".gguf":
        return _from_gguf(path, store, progress, lock_deadline_seconds)
    name, build = _fetcher(reference, store)
    return _obtain(name, store, build, progress, lock_deadline_seconds)


def list_models(store: Path) -> list[ModelInfo]:
    """Describe every complete model in the store, by name."""
    store = store.expanduser().absolute()
    if not store.is_dir():
        return []
    folders = [path for path in sorted(store.iterdir()) if _NAME.fullmatch(path.name)]
    return [describe(folder) for folder in folders if folder.is_dir() and not missing_files(folder)]


def _existing_folder(folder: Path) -> Path:
    missing = missing_files(folder)
    if missing:
        raise IncompleteModel(
            f"{folder} is not a complete model folder: it lacks {', '.join(missing)}"
        )
    return folder


def _from_gguf(path: Path, store: Path, progress: Progress, deadline_seconds: float) -> Path:
    if not path.is_file():
        raise UnknownReference(f"there is no file {path}: check the path")
    stem = re.sub(r"[^\w.+-]+", "-", path.stem).strip("-.") or "model"
    name = f"{stem}-{_fingerprint(path)}"

    def build(folder: Path, progress: Progress) -> None:
        from executor_svc.model_store._gguf import convert

        convert(path.absolute(), folder, progress)

    return _obtain(name, store, build, progress, deadline_seconds)


def _fetcher(reference: str, store: Path) -> tuple[str, Build]:
    """The store name and the way to fetch what is neither in the store nor on disk."""
    from executor_svc.model_store import _sources

    if reference == DEFAULT_MODEL:
        return reference, _sources.build_default
    if _HUB_ID.fullmatch(reference):
        repository, _, revision = reference.partition("@")
        name = reference.replace("/", "--")
        return name, partial(_sources.build_from_hub, repository, revision or None)
    if _NAME.fullmatch(reference) and (store / reference).is_dir():
        return reference, partial(_refuse_incomplete, store / reference)
    known = sorted({DEFAULT_MODEL, *(info.name for info in list_models(store))})
    raise UnknownReference(
        f"no model {reference!r}: give one of {', '.join(known)}, a folder, a .gguf file, "
        "or a hub id such as org/name"
    )


def _refuse_incomplete(folder: Path, _build_folder: Path, _progress: Progress) -> None:
    raise IncompleteModel(
        f"{folder} lacks {', '.join(missing_files(folder))}: remove the folder and fetch it again"
    )


def _obtain(
    name: str, store: Path, build: Build, progress: Progress, deadline_seconds: float
) -> Path:
    """Build a model beside its place and rename it there, one process at a time."""
    target = store / name
    if not missing_files(target):
        return target
    partial_folder = store / ".partial" / name
    try:
        store.mkdir(parents=True, exist_ok=True)
        waiting = partial(progress.stage, f"waiting for another process that prepares {name}")
        lock = store / ".locks" / f"{name}.lock"
        with locked(lock, deadline_seconds=deadline_seconds, on_wait=waiting):
            if not missing_files(target):
                return target
            _remove(partial_folder)  # a killed process left it; its lock died with it
            partial_folder.mkdir(parents=True)
            try:
                build(partial_folder, progress)
                _publish(partial_folder, target)
            finally:
                _remove(partial_folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelStoreError(
            f"cannot put {name} into {store}: {reason}; "
            "choose another folder with --model-store, or make room there"
        ) from error
    return target


def _publish(built: Path, target: Path) -> None:
    """Make a built folder visible under its name, complete or not at all."""
    missing = missing_files(built)
    if missing:
        raise ConversionFailed(
            f"{target.name} came out incomplete, without {', '.join(missing)}: "
            "use another format of this model (safetensors with tokenizer.json)"
        )
    mask = os.umask(0)
    os.umask(mask)
    for path in built.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    if target.exists():  # an incomplete folder, such as one with a file deleted by hand
        _remove(target)
    built.rename(target)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _fingerprint(path: Path, pieces: int = 64, piece_bytes: int = 4096) -> str:
    """Eight hex digits of a file's size and of pieces spread over it.

    The whole file would take seconds at every start; its date would make a copy look
    like another model.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        for index in range(pieces):
            stream.seek(max(0, size - piece_bytes) * index // (pieces - 1))
            digest.update(stream.read(piece_bytes))
    return digest.hexdigest()[:8]
