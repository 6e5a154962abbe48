"""Memory of weights and pool: on huge pages, where Linux gives them to those who ask, and there.

A step reads every weight and all live K/V, far more memory than the processor holds
addresses of in pages of 4 KiB; it looks them up all the time, and in a virtual machine
each look-up is itself looked up. Pages of 2 MiB end that. Most distributions give them
only to memory that is marked ("madvise").

Memory is not there until it is first written; the kernel then clears it, while a request
waits. So the pool is made to be there at the start, and a machine that has not enough says
so then.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

_MAPS = Path("/proc/self/maps")
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_PAGE_BYTES = mmap.PAGESIZE
_HUGE_BYTES = 2 << 20
_SLAB_BYTES = 64 << 20
_LEAST_BYTES = 16 << 20
"""Smaller mappings are threads' stacks and the like, which would only grow."""
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0 +(\[heap\])?$")


def use_huge_pages() -> int:
    """Mark all large memory of this process; call it when everything is allocated.

    What is not in use yet, as the pool, comes in huge pages when it is. What is in use the
    kernel moves in the background. To have it moved here would take seconds.

    Returns: how many bytes were marked; 0 where the system knows no such thing.
    """
    if not _MAPS.exists():
        return 0
    num_bytes = 0
    for begin, size in large_mappings(_MAPS.read_text(encoding="utf-8")):
        num_bytes += _mark(begin, begin + size)
    return num_bytes


def populate(tensor: Tensor, num_threads: int) -> bool:
    """Have all memory of a tensor there, its content as it is; some GB a second.

    Args:
        tensor: contiguous, on the CPU; marked for huge pages before, if it should have them.
        num_threads: that do it side by side.
    Returns: False where the system cannot (not Linux, or one before 5.14).
    """
    if not _MAPS.exists():
        return False
    begin = -(-tensor.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // _PAGE_BYTES * _PAGE_BYTES
    share = -(-max(0, end - begin) // (num_threads * _HUGE_BYTES)) * _HUGE_BYTES
    parts = [(first, min(share, end - first)) for first in range(begin, end, max(1, share))]
    madvise = _madvise()  # which lets go of the interpreter
    with ThreadPoolExecutor(num_threads) as threads:
        results = threads.map(lambda part: madvise(part[0], part[1], _MADV_POPULATE_WRITE), parts)
        return not any(results)


def return_freed_memory() -> None:
    """Give the system back what the allocator keeps of what was freed, as after loading."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(ctypes.c_size_t(0))


class Slabs:
    """Room for many tensors that live as long as the process, in huge pages from the start.

    A tensor alone has no huge pages where it begins and ends, and a layer's weights are
    small; so they lie one after the other in slabs.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Room for a tensor.

        Args:
            numel: elements.
            dtype: of them.
        Returns: [numel], not initialised, at an address that is a multiple of 64.
        """
        num_bytes = numel * dtype.itemsize
        if len(self._free) < num_bytes:
            self._free = _huge_tensor(max(num_bytes, _SLAB_BYTES))
        taken, self._free = self._free[:num_bytes], self._free[num_bytes + -num_bytes % 64 :]
        return taken.view(dtype)


def _huge_tensor(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 from the border of a huge page on, marked before its first use."""
    whole = torch.empty(num_bytes + _HUGE_BYTES, dtype=torch.uint8)
    begin = whole.data_ptr()
    skipped = -begin % _HUGE_BYTES
    if _MAPS.exists():
        _mark(begin + skipped, begin + whole.nbytes)
    return whole[skipped:][:num_bytes]


def _mark(begin: int, end: int) -> int:
    """Ask for huge pages; returns how many bytes, 0 if the kernel was built without them."""
    size = (end - begin) // _HUGE_BYTES * _HUGE_BYTES
    return 0 if _madvise()(begin, size, _MADV_HUGEPAGE) else size


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


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
