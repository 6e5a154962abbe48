"""Claims and leases: one owner, higher epochs only, no plan lost or repeated."""

from __future__ import annotations

import dataclasses

import pytest

from executor_svc.errors import InvalidRequest, ModelMismatch, OutOfOrder, StaleEpoch
from executor_svc.ownership import Fence, Lease, Ownership
from executor_svc.plan import Description

DESCRIPTION = Description(
    model="m",
    fingerprint="abc",
    block_size=16,
    num_device_blocks=1,
    num_host_blocks=0,
    dtype="float32",
    max_model_len=8,
    max_num_batched_tokens=8,
    max_num_rows=1,
    vocab_size=9,
    block_bytes=1,
    device="cpu",
    attention="reference",
    octavo_version="0",
)


def claim(ownership: Ownership, name: str, epoch: int, **expected: object) -> Lease:
    values = {"fingerprint": "", "block_size": 0, **expected}
    return ownership.claim(DESCRIPTION, scheduler_id=name, epoch=epoch, **values)  # type: ignore[arg-type]


async def test_a_higher_epoch_ends_the_older_lease() -> None:
    """The older owner hears STALE_EPOCH with the new one's name; the new one owns."""
    ownership = Ownership()
    old = claim(ownership, "a", 1)
    new = claim(ownership, "b", 5)
    assert isinstance(old.end_reason, StaleEpoch)
    assert await old.wait_end() is old.end_reason
    assert "b took epoch 5" in str(old.end_reason)
    assert new.end_reason is None
    assert (ownership.owner, ownership.epoch) == ("b", 5)


@pytest.mark.parametrize("epoch", [3, 4])
async def test_an_epoch_is_never_claimed_twice(epoch: int) -> None:
    """The last epoch and an older one are refused, even after the owner left."""
    ownership = Ownership()
    ownership.release(claim(ownership, "a", 4))
    with pytest.raises(StaleEpoch, match=f"epoch {epoch} is not above 4"):
        claim(ownership, "b", epoch)
    assert ownership.owner == ""


@pytest.mark.parametrize("epoch", [0, 2**62, 2**64 - 1])
async def test_an_epoch_that_would_lock_others_out_is_refused(epoch: int) -> None:
    """Zero and absurdly high epochs are refused, and the next honest claim is served."""
    ownership = Ownership()
    with pytest.raises(InvalidRequest, match=f"epoch {epoch} is not between 1 and"):
        claim(ownership, "a", epoch)
    assert claim(ownership, "b", 1).epoch == 1


async def test_a_mismatch_names_both_and_leaves_the_owner() -> None:
    """Another model or block size is refused with both values; the owner stays."""
    ownership = Ownership()
    lease = claim(ownership, "a", 1, fingerprint="abc", block_size=16)
    with pytest.raises(ModelMismatch, match=r"xyz.*abc"):
        claim(ownership, "b", 2, fingerprint="xyz")
    with pytest.raises(ModelMismatch, match=r"blocks of 32.*blocks of 16"):
        claim(ownership, "b", 2, block_size=32)
    assert ownership.owner == "a"
    assert lease.end_reason is None


async def test_a_late_release_does_not_free_the_new_owner() -> None:
    """An old stream that ends after it lost its lease changes nothing."""
    ownership = Ownership()
    old = claim(ownership, "a", 1)
    new = claim(ownership, "b", 2)
    ownership.release(old)
    assert ownership.lease is new


async def test_plans_are_followed_in_order_only() -> None:
    """A repeated, skipped or misnumbered step is refused, and so is another epoch's."""
    lease = claim(Ownership(), "a", 7)
    lease.follow(epoch=7, step_id=1, previous_step_id=0)
    lease.follow(epoch=7, step_id=2, previous_step_id=1)
    for step_id, previous in [(2, 1), (4, 3), (4, 2), (1, 0), (3, 1)]:
        with pytest.raises(OutOfOrder, match="the last step was 2"):
            lease.follow(epoch=7, step_id=step_id, previous_step_id=previous)
    with pytest.raises(StaleEpoch):
        lease.follow(epoch=6, step_id=3, previous_step_id=2)


async def test_block_size_alone_may_be_expected() -> None:
    """An empty fingerprint and a block size of 0 expect anything."""
    other = dataclasses.replace(DESCRIPTION, block_size=32, fingerprint="zzz")
    lease = Ownership().claim(other, scheduler_id="a", epoch=1, fingerprint="", block_size=32)
    assert lease.epoch == 1


async def test_only_the_first_reason_to_end_counts() -> None:
    """A lease that was taken stays taken, whatever comes after."""
    lease = claim(Ownership(), "a", 1)
    lease.end(StaleEpoch("first"))
    lease.end(OutOfOrder("second"))
    assert str(await lease.wait_end()) == "first"


def test_the_fence_lets_only_the_last_epoch_through() -> None:
    """Neither an older nor a newer one than the one that was claimed."""
    fence = Fence()
    fence.raise_to(4)
    fence.check(4)
    for epoch in (0, 3, 5):
        with pytest.raises(StaleEpoch, match="epoch 4 was claimed meanwhile"):
            fence.check(epoch)
