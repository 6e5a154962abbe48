"""Changes to a file of API keys.

Comments and order stay. A reader sees all of a change or nothing of it, whoever else
changes the file waits, and no change leaves a file that a scheduler would refuse.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT

from scheduler_svc.security.keys import KeysError, hash_of, new_key, parse_keys
from scheduler_svc.security.store import read_text

_LOCK_SECONDS = 10.0
_POLL_SECONDS = 0.05
_NEW_FILE = """\
# API keys of an Octavo scheduler: hashes only, a key is shown once, when it is made.
# Limits of a tenant go into [tenants.NAME], those of all others into [tenants.default].
"""


def add_key(path: Path, *, name: str, tenant: str, admin: bool) -> str:
    """Make a key and add its hash to a file, which is made if it is not there.

    Returns: the key, which is kept nowhere.
    Raises:  KeysError: if the name is taken, a field is out of bounds, or the file is broken.
             OSError: if the file cannot be written.
    """
    key = new_key()
    entry = {"name": name, "tenant": tenant, "hash": hash_of(key), "admin": admin}
    with _changing(path) as document:
        keys = document.setdefault("keys", tomlkit.aot())
        if isinstance(keys, AoT):
            keys.append(tomlkit.item(entry))
        else:  # keys = [{...}], as somebody wrote it by hand
            inline = tomlkit.inline_table()
            inline.update(entry)
            keys.append(inline)
    return key


def revoke_key(path: Path, name: str) -> None:
    """Take a key out of a file.

    Raises:  KeysError: if no key has the name, or the file is broken.
             OSError: if the file cannot be read or written.
    """
    with _changing(path) as document:
        keys = document.get("keys", [])
        found = [index for index, entry in enumerate(keys) if entry.get("name") == name]
        if not found:
            raise KeysError(f"{path} has no key named {name!r}: see octavo keys list")
        del keys[found[0]]
        if not keys:
            document.remove("keys")


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[Any]:
    """Give the parsed file to be changed, and put what it then is in its place."""
    path = path.resolve()  # a symbolic link stays one
    with _locked(path.parent):
        text = read_text(path) if path.exists() else _NEW_FILE
        try:
            parse_keys(text)
            document = tomlkit.parse(text)
        except (KeysError, TOMLKitError) as error:
            raise KeysError(f"{path} cannot be changed: {error}") from None
        yield document
        changed = tomlkit.dumps(document)
        parse_keys(changed)
        _replace(path, changed)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock: the file itself is replaced, so its own would lock nobody out."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise KeysError(f"{folder} is locked by another octavo keys") from None
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(handle)


def _replace(path: Path, text: str) -> None:
    """Put a text into a file's place, with its owner and mode; a new one is its owner's alone."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            if path.exists():
                before = path.stat()
                os.fchmod(file.fileno(), before.st_mode & 0o777)
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
