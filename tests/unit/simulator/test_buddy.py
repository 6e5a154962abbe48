"""Contiguous memory: chunks never overlap, and come together again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.simulator.buddy import BuddyAllocator

sizes = st.integers(1, 5000)


def test_a_pool_of_15_700_slots_has_seven_places_of_2048() -> None:
    """As many requests as Orca (Max) serves at once in the paper: 7."""
    memory = BuddyAllocator(15_700)
    assert [memory.allocate(2048) is not None for _ in range(8)] == [True] * 7 + [False]


def test_sizes_are_rounded_up_to_a_power_of_two() -> None:
    """33 slots take 64."""
    memory = BuddyAllocator(1024)
    memory.allocate(33)
    assert memory.num_allocated == 64


def test_free_space_in_pieces_is_of_no_use() -> None:
    """Half of the slots are free, and yet no place for a quarter of them."""
    memory = BuddyAllocator(1024)
    places = [memory.allocate(128) for _ in range(8)]
    for address in places[::2]:
        memory.free(address)
    assert memory.num_allocated == 512
    assert memory.allocate(256) is None
    assert memory.allocate(128) is not None


@given(sizes, st.lists(st.tuples(st.booleans(), st.integers(1, 3000)), max_size=60))
def test_chunks_cover_the_pool_without_overlap(
    num_slots: int, acts: list[tuple[bool, int]]
) -> None:
    """Whatever is taken and given back; and in the end the pool is as it was."""
    memory = BuddyAllocator(num_slots)
    fresh = memory.chunks()
    held: list[int] = []
    for gives_back, number in acts:
        if gives_back and held:
            memory.free(held.pop(number % len(held)))
        else:
            address = memory.allocate(number)
            if address is None:
                assert all(taken or size < number for _, size, taken in memory.chunks())
            else:
                held.append(address)
        position = 0
        for address, size, _ in memory.chunks():
            assert address == position
            assert address % size == 0
            position += size
        assert position == num_slots
        taken = [(a, size) for a, size, is_taken in memory.chunks() if is_taken]
        assert sorted(held) == [a for a, _ in taken]
        assert memory.num_allocated == sum(size for _, size in taken)
    for address in held:
        memory.free(address)
    assert memory.chunks() == fresh
