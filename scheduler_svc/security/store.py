"""Where a running scheduler has its keys from: a file that may change, or a fixed text."""

from __future__ import annotations

from pathlib import Path

from octavo.reloading import Reloading

from scheduler_svc.security.keys import MAX_TEXT_BYTES, KeyRing, KeysError, parse_keys


class KeyStore:
    """The keys in force now.

    A key is gone for the first call after its file has changed. A file that is broken or
    gone changes nothing, so that a slip of an editor shuts nobody out; to revoke all keys,
    leave an empty file.
    """

    def __init__(self, path: Path | None, text: str = "") -> None:
        """Read the keys.

        Args:
            path: the file; None: `text` holds the keys.
            text: what a file would hold.
        Raises:  KeysError: if either is not what it must be.
        """
        self._fixed = parse_keys(text) if path is None else None
        self._file = None if path is None else Reloading((path,), lambda: read_ring(path))

    def current(self) -> KeyRing:
        """Give the keys."""
        if self._file is not None:
            return self._file.current()
        assert self._fixed is not None
        return self._fixed


def read_ring(path: Path) -> KeyRing:
    """Read a file of keys.

    Raises:  KeysError: naming the file and what is wrong with it.
    """
    return parse_keys(read_text(path))


def read_text(path: Path) -> str:
    """Read the text of a file of keys.

    Raises:  KeysError: if it cannot be read, is too large or no UTF-8.
    """
    try:
        if path.exists() and not path.is_file():
            raise KeysError(f"{path} is no regular file")  # to open a pipe would wait
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise KeysError(f"{path} must be at most {MAX_TEXT_BYTES} bytes")
        return content.decode()
    except OSError as error:
        raise KeysError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeysError(f"{path} is no UTF-8 text") from None
