"""Weights and pool on huge pages, where Linux gives them to those who ask.

A step reads every weight and all live K/V, far more memory than the processor holds
addresses of in pages of 4 KiB; it looks them up all the time, and in a virtual machine
each look-up is itself looked up. Pages of 2 MiB end that. Most distributions give them
only to memory that is marked ("madvise").
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_MADV_HUGEPAGE = 14
_HUGE_BYTES = 2 << 20
_LEAST_BYTES = 16 << 20
"""Smaller mappings are threads' stacks and the like, which would only grow."""
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0 +(\[heap\])?$")


def use_huge_pages() -> int:
    """Mark all large memory of this process; call it when everything is allocated.

    What is not in use yet, as the pool, comes in huge pages when it is. What is in use, as
    the weights, the kernel moves in the background. To have it moved here takes seconds.

    Returns: how many bytes were marked; 0 where the system knows no such thing.
    """
    if not _MAPS.exists():
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_bytes = 0
    for begin, size in large_mappings(_MAPS.read_text(encoding="utf-8")):
        if madvise(begin, size, _MADV_HUGEPAGE):
            return num_bytes  # the kernel was built without them
        num_bytes += size
    return num_bytes


def large_mappings(maps: str) -> list[tuple[int, int]]:
    """The large anonymous mappings of a process.

    Args:
        maps: as of /proc/PID/maps.
    Returns: address and bytes of the part of each that whole huge pages fill.
    """
    found = []
    for line in maps.splitlines():
        match = _ANONYMOUS.match(line)
        if match is None:
            continue
        begin, end = int(match[1], 16), int(match[2], 16)
        begin = -(-begin // _HUGE_BYTES) * _HUGE_BYTES
        end = end // _HUGE_BYTES * _HUGE_BYTES
        if end - begin >= _LEAST_BYTES:
            found.append((begin, end - begin))
    return found
