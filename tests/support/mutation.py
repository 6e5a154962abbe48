"""Messages that were broken on their way: what a fuzzer without a grammar sends."""

from __future__ import annotations

import random
from collections.abc import Sequence

_LENGTHS = (0x00, 0x01, 0x7F, 0x80, 0xFF)


def mutate(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Break a message in one to four ways.

    Args:
        data: a sound message.
        others: more of them, to splice with.
        rng: decides.
    """
    broken = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice(_WAYS)(broken, others, rng)
    return bytes(broken)


def _flip_bit(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set_byte(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice(_LENGTHS)


def _cut(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _drop(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    first = rng.randrange(len(data) + 1)
    del data[first : first + rng.randint(1, 8)]


def _insert(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    place = rng.randrange(len(data) + 1)
    data[place:place] = rng.randbytes(rng.randint(1, 8))


def _repeat(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    first = rng.randrange(len(data) + 1)
    part = data[first : first + rng.randint(1, 32)]
    data[first:first] = part * rng.randint(1, 64)


def _splice(data: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    other = rng.choice(others)
    data[rng.randrange(len(data) + 1) :] = other[rng.randrange(len(other) + 1) :]


_WAYS = (_flip_bit, _flip_bit, _set_byte, _cut, _drop, _insert, _repeat, _splice)
