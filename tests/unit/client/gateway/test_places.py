"""Calls of one request take turns once the scheduler has no room for all of them."""

from __future__ import annotations

import asyncio

import pytest
from octavo_gateway.errors import ApiError
from octavo_gateway.places import Places


class Room:
    """A scheduler with so many places."""

    def __init__(self, size: int) -> None:
        self.size, self.num_running = size, 0
        self.num_refused = self.most_seen = 0

    async def call(self, number: int) -> int:
        if self.num_running >= self.size:
            self.num_refused += 1
            raise ApiError(429, "no room")
        self.num_running += 1
        self.most_seen = max(self.most_seen, self.num_running)
        await asyncio.sleep(0.01)
        self.num_running -= 1
        return number


async def run_all(places: Places, room: Room, count: int) -> list[int]:
    async with asyncio.timeout(20):
        return await asyncio.gather(*(places.run(lambda n=n: room.call(n)) for n in range(count)))


@pytest.mark.parametrize("size", [1, 2, 7])
async def test_every_call_gets_its_turn(size: int) -> None:
    """Whatever room there is; it is used, and nothing is refused for good."""
    room = Room(size)
    assert await run_all(Places(64), room, 20) == list(range(20))
    assert room.most_seen == size
    assert room.num_refused <= 20, "it learns how much room there is"


async def test_no_more_than_allowed_run() -> None:
    """Even if there is room for more."""
    room = Room(100)
    await run_all(Places(3), room, 10)
    assert room.most_seen == 3
    assert room.num_refused == 0


async def test_a_refusal_of_the_only_call_is_told() -> None:
    """There is nothing to wait for."""
    with pytest.raises(ApiError, match="no room"):
        await Places(4).run(lambda: Room(0).call(1))


async def test_another_failure_ends_its_call_at_once() -> None:
    """Only want of room is waited for."""

    async def fail() -> int:
        raise ApiError(400, "bad")

    places, room = Places(4), Room(4)
    other = asyncio.create_task(places.run(lambda: room.call(5)))
    with pytest.raises(ApiError, match="bad"):
        await places.run(fail)
    assert await other == 5
