"""Who owns this executor: one scheduler at a time, fenced by epochs.

The executor is the lock: schedulers need no consensus of their own, because a claim
with a higher epoch ends the older owner's stream and forgets its rows.
"""

from __future__ import annotations

import asyncio

from executor_svc.errors import (
    ClaimRefused,
    InvalidRequest,
    ModelMismatch,
    OutOfOrder,
    StaleEpoch,
)
from executor_svc.plan import Description

_EPOCH_LIMIT = 1 << 62
"""Claiming the largest epoch would lock out everybody after; no honest count gets here."""


class Lease:
    """One scheduler's ownership, from its claim until it ends or is taken.

    Invariant: plans are followed only in the order of their steps, without a gap.
    """

    def __init__(self, scheduler_id: str, epoch: int) -> None:
        self.scheduler_id = scheduler_id
        self.epoch = epoch
        self.last_step_id = 0
        self.end_reason: ClaimRefused | None = None
        self._has_ended = asyncio.Event()

    def follow(self, *, epoch: int, step_id: int, previous_step_id: int) -> None:
        """Accept the next plan.

        Raises:
            StaleEpoch: if it is another epoch's.
            OutOfOrder: if a plan before it is missing, or it came before.
        """
        if epoch != self.epoch:
            raise StaleEpoch(f"the plan has epoch {epoch}, the stream has {self.epoch}")
        if previous_step_id != self.last_step_id or step_id != previous_step_id + 1:
            raise OutOfOrder(
                f"step {step_id} follows step {previous_step_id}, but the last step was "
                f"{self.last_step_id}"
            )
        self.last_step_id = step_id

    def end(self, reason: ClaimRefused) -> None:
        """End the owner's stream with a reason; only the first one counts."""
        if self.end_reason is None:
            self.end_reason = reason
            self._has_ended.set()

    async def wait_end(self) -> ClaimRefused:
        """Wait for the reason to end; an owner that leaves by itself has none."""
        await self._has_ended.wait()
        assert self.end_reason is not None
        return self.end_reason


class Fence:
    """Lets plans of the epoch that was claimed last through to the rows, and no others.

    A claim raises it at once. The rows are forgotten in their turn, after the step that
    is being computed; plans of older epochs that still wait behind that step do not run.
    """

    def __init__(self) -> None:
        self.epoch = 0

    def raise_to(self, epoch: int) -> None:
        """Refuse plans of other epochs from now on."""
        self.epoch = epoch

    def check(self, epoch: int) -> None:
        """Pass a plan, just before it changes anything.

        Raises:
            StaleEpoch: if its epoch is not the one claimed last.
        """
        if epoch != self.epoch:
            raise StaleEpoch(f"epoch {self.epoch} was claimed meanwhile")


class Ownership:
    """The current lease, and the highest epoch ever claimed."""

    def __init__(self) -> None:
        self.epoch = 0
        self.lease: Lease | None = None

    @property
    def owner(self) -> str:
        """Scheduler id of the owner; empty if there is none."""
        return "" if self.lease is None else self.lease.scheduler_id

    def claim(
        self,
        description: Description,
        *,
        scheduler_id: str,
        epoch: int,
        fingerprint: str,
        block_size: int,
    ) -> Lease:
        """Take the executor over, ending the older owner's stream.

        Raises:
            InvalidRequest: if the epoch is 0, or so high that few could come after it.
            StaleEpoch: if the epoch is not above every one before.
            ModelMismatch: if the claimant expects another model or block size.
        """
        if not 1 <= epoch < _EPOCH_LIMIT:
            raise InvalidRequest(f"epoch {epoch} is not between 1 and {_EPOCH_LIMIT - 1}")
        if epoch <= self.epoch:
            raise StaleEpoch(
                f"epoch {epoch} is not above {self.epoch}, last claimed"
                + (f" by {self.owner}" if self.owner else "")
            )
        if fingerprint and fingerprint != description.fingerprint:
            raise ModelMismatch(
                f"the claim expects model {fingerprint}, this executor has "
                f"{description.fingerprint} ({description.model})"
            )
        if block_size and block_size != description.block_size:
            raise ModelMismatch(
                f"the claim expects model {description.fingerprint} with blocks of {block_size} "
                f"tokens, this executor has blocks of {description.block_size}"
            )
        if self.lease is not None:
            self.lease.end(StaleEpoch(f"{scheduler_id} took epoch {epoch}"))
        self.epoch = epoch
        self.lease = Lease(scheduler_id, epoch)
        return self.lease

    def release(self, lease: Lease) -> None:
        """Free the executor, unless another scheduler has it by now."""
        if self.lease is lease:
            self.lease = None
