"""What the API asks of the engine below it.

Structural types: the engine knows nothing of this module.
"""

from __future__ import annotations

from typing import Protocol

from scheduler_svc.core.request import Request, SequenceOutput


class RequestStats(Protocol):
    """How a request fared; seconds count from its acceptance."""

    @property
    def cached_prompt_tokens(self) -> int:
        """Prompt tokens that the prefix cache had."""

    @property
    def num_preemptions(self) -> int:
        """Times that the request lost its blocks."""

    @property
    def queue_seconds(self) -> float:
        """Until it was first admitted."""

    @property
    def first_token_seconds(self) -> float:
        """Until its first token."""

    @property
    def total_seconds(self) -> float:
        """Until its end, or until now."""


class ModelLimits(Protocol):
    """What the connected executors can do together."""

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens."""

    @property
    def vocab_size(self) -> int:
        """Size of the logits in tokens."""

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that one executor's whole pool holds."""

    @property
    def dtype(self) -> str:
        """Type of weights and pool, such as "bfloat16"."""


class TokenStream(Protocol):
    """The output of one request."""

    async def receive(self) -> list[SequenceOutput]:
        """Wait for output; give all that came since the last call, coalesced.

        Gives [] once every choice has had its `finish`.
        Raises:  OctavoError: if the request was lost.
        """

    def stop(self, sample_index: int) -> None:
        """Say that a choice needs no more tokens; no further output comes for it.

        Harmless if the choice is finished.
        """

    def cancel(self) -> None:
        """Give the request up; harmless at any time, any number of times."""

    @property
    def stats(self) -> RequestStats:
        """How the request fares."""


class Engine(Protocol):
    """Runs requests on executors."""

    def check_room(self, now: float, priority: int) -> None:
        """Say early, before its prompt costs anything, whether a request would be refused.

        Raises:  QueueFull.
        """

    async def submit(self, request: Request) -> TokenStream:
        """Accept a request.

        If this call is itself cancelled, the request is given up.
        Raises:  DuplicateRequest, NeverFits, QueueFull, Unavailable.
        """

    def describe(self) -> ModelLimits | None:
        """Say what the executors can do; None while none is connected."""
