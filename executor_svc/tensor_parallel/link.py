"""What rank 0 tells the others: one message at a time, in order, to all of them.

A message is its kind, its length and its bytes. Short ones, such as a steady step's plan, are
one broadcast; of a longer one the rest follows in a second.
"""

from __future__ import annotations

import enum
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import distributed

from executor_svc.tensor_parallel.ranks import Ranks, lost

INLINE_BYTES = 1024
_HEADER_BYTES = 16


class Kind(enum.IntEnum):
    """What a message asks for."""

    RESET = 1
    """Forget every row: another owner."""
    STEP = 2
    """Carry out a step; its bytes are a StepPlan."""
    AUDIT = 3
    """Compare the row tables."""
    BEAT = 4
    """Nothing: rank 0 is alive and idle."""
    STOP = 5
    """The executor ends."""


class Message(NamedTuple):
    """One message."""

    kind: Kind
    data: bytes = b""


class Link:
    """The connection from rank 0 to the others; each rank has one end."""

    def __init__(self, ranks: Ranks, seconds: float) -> None:
        """Made by all ranks at once.

        Args:
            ranks: the group.
            seconds: for how long the others wait for a message.
        """
        self._group = ranks.new_group(seconds)

    def send(self, message: Message) -> None:
        """Tell the others. Only rank 0 does.

        Raises:
            DeviceLost: if one of them is gone.
        """
        data = torch.frombuffer(bytearray(message.data or b"\0"), dtype=torch.uint8)
        length = len(message.data)
        short = torch.zeros(_HEADER_BYTES + INLINE_BYTES, dtype=torch.uint8)
        short[:_HEADER_BYTES].view(torch.int64)[:] = torch.tensor([message.kind, length])
        inline = min(length, INLINE_BYTES)
        short[_HEADER_BYTES : _HEADER_BYTES + inline] = data[:inline]
        self._broadcast(short)
        if length > INLINE_BYTES:
            self._broadcast(data[INLINE_BYTES:].contiguous())

    def receive(self) -> Message:
        """Wait for rank 0.

        Raises:
            DeviceLost: if it is gone.
        """
        short = torch.zeros(_HEADER_BYTES + INLINE_BYTES, dtype=torch.uint8)
        self._broadcast(short)
        kind, length = short[:_HEADER_BYTES].view(torch.int64).tolist()
        data = short[_HEADER_BYTES : _HEADER_BYTES + min(length, INLINE_BYTES)]
        if length > INLINE_BYTES:
            rest = torch.zeros(length - INLINE_BYTES, dtype=torch.uint8)
            self._broadcast(rest)
            data = torch.cat((data, rest))
        return Message(Kind(kind), data.numpy().tobytes())

    def meet(self, seconds: float | None = None) -> None:
        """Wait until all ranks have come here; whoever is gone by then needs not.

        Args:
            seconds: at most so many; None waits as long as for a message.
        """
        try:
            timeout = None if seconds is None else timedelta(seconds=seconds)
            distributed.monitored_barrier(self._group, timeout, wait_all_ranks=False)
        except RuntimeError:
            return

    def _broadcast(self, data: torch.Tensor) -> None:
        try:
            distributed.broadcast(data, src=0, group=self._group)
        except RuntimeError as error:
            raise lost(error) from error
