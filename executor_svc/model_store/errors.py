"""The model store's errors. Each message is one line that says what to do.

ModelStoreError
├── UnknownReference    names nothing in the store, on disk or on the hub
├── IncompleteModel     a folder lacks files that every model needs
├── FetchFailed         the network, the index or the hub did not give it
├── ConversionFailed    a GGUF file could not become a model folder
└── StoreBusy           another process held the lock past the deadline
"""

from __future__ import annotations


class ModelStoreError(Exception):
    """Base of all; shown to the user as it is."""


class UnknownReference(ModelStoreError):
    """The reference names nothing."""


class IncompleteModel(ModelStoreError):
    """A folder lacks files that every model needs."""


class FetchFailed(ModelStoreError):
    """A download did not succeed."""


class ConversionFailed(ModelStoreError):
    """A GGUF file could not become a model folder."""


class StoreBusy(ModelStoreError):
    """Another process holds the model's lock."""


def one_line(error: BaseException | str, limit_chars: int = 300) -> str:
    """The first line of an error's text, for a message that must stay one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= limit_chars else text[: limit_chars - 1] + "…"
