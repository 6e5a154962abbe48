"""Tests of octavo_gateway.gate."""

from __future__ import annotations

import asyncio

import pytest
from octavo_gateway.errors import ApiError
from octavo_gateway.gate import Gate


async def test_no_more_than_the_bound_are_let_in() -> None:
    """The next one is refused with a delay, and let in once one has left, however it left."""
    gate = Gate(1)
    with pytest.raises(ZeroDivisionError), gate.entry():
        with pytest.raises(ApiError) as caught, gate.entry():
            pass
        assert caught.value.status == 429
        assert caught.value.headers["retry-after"]
        assert gate.num_inside == 1
        raise ZeroDivisionError
    with gate.entry():
        assert gate.num_inside == 1
    assert gate.num_inside == 0


async def test_draining_waits_for_those_inside() -> None:
    """They finish, nobody else is let in, and nothing is cut off."""
    gate = Gate(5)
    entered, finish = asyncio.Event(), asyncio.Event()

    async def request() -> None:
        with gate.entry():
            entered.set()
            await finish.wait()

    inside = asyncio.create_task(request())
    await entered.wait()
    draining = asyncio.create_task(gate.drain(60))
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught, gate.entry():
        pass
    assert caught.value.status == 503
    assert not draining.done()
    finish.set()
    assert await draining == 0
    await inside
    assert not gate.cut_off.is_set()


async def test_what_takes_longer_is_cut_off() -> None:
    """They are told to end, and counted."""
    gate = Gate(5)

    async def request() -> None:
        with gate.entry():
            await gate.cut_off.wait()

    inside = asyncio.create_task(request())
    await asyncio.sleep(0)
    assert await gate.drain(0) == 1
    await inside


async def test_an_empty_gate_drains_at_once() -> None:
    """Even without any grace."""
    assert await Gate(1).drain(0) == 0
