"""The pool of physical blocks."""

from __future__ import annotations

import pytest

from scheduler_svc.core.block_pool import BlockPool


def _released(pool: BlockPool, *names: bytes) -> list[int]:
    """Allocate and name a block for each name, then release them in this order."""
    blocks = [pool.allocate() for _ in names]
    for block, name in zip(blocks, names, strict=True):
        pool.register(block, name)
    for block in blocks:
        pool.release(block)
    return blocks


def test_empty_blocks_are_handed_out_before_cached_ones() -> None:
    """Content that may be hit again lives as long as an empty block is left."""
    pool = BlockPool(3)
    (cached,) = _released(pool, b"a")
    assert {pool.allocate(), pool.allocate()} == {0, 1, 2} - {cached}
    assert pool.lookup(b"a") == cached


def test_the_block_released_longest_ago_is_evicted_first() -> None:
    """Eviction is LRU, and the evicted content is no longer found."""
    pool = BlockPool(2)
    first, second = _released(pool, b"a", b"b")
    assert pool.allocate() == first
    assert pool.lookup(b"a") is None
    assert pool.lookup(b"b") == second


def test_a_hit_takes_a_block_out_of_the_middle_of_the_order() -> None:
    """A block that is used again counts from its new release on."""
    pool = BlockPool(3)
    first, second, third = _released(pool, b"a", b"b", b"c")
    pool.share(second)
    assert (pool.num_cached, pool.num_referenced) == (2, 1)
    pool.release(second)
    assert [pool.allocate() for _ in range(3)] == [first, third, second]


def test_a_block_is_free_only_after_its_last_release() -> None:
    """Each holder releases once."""
    pool = BlockPool(1)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert pool.num_available == 0
    pool.release(block)
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_releasing_too_often_is_an_error() -> None:
    """It would hand the block out twice."""
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(block)


def test_of_two_blocks_with_one_content_the_first_stays_the_hit() -> None:
    """The second has no name and so is empty when it is released."""
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, b"a")
    pool.register(second, b"a")
    assert pool.lookup(b"a") == first
    pool.release(second)
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_every_block_is_free_cached_or_referenced() -> None:
    """The three add up to the total, wherever blocks are."""
    pool = BlockPool(5)
    _released(pool, b"a", b"b")
    pool.allocate()
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (2, 2, 1)


def test_check_finds_a_reference_without_a_holder() -> None:
    """The pool's own invariants can fail."""
    pool = BlockPool(2)
    block = pool.allocate()
    pool.check([block])
    with pytest.raises(AssertionError):
        pool.check([])


def test_a_pool_needs_a_block() -> None:
    """Nothing could run in an empty one."""
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)
