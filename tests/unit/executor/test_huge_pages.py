"""Which memory is put on huge pages."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from executor_svc import huge_pages
from executor_svc.huge_pages import (
    Slabs,
    large_mappings,
    populate,
    return_freed_memory,
    use_huge_pages,
)

MAPS = """\
00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/python
00e03000-0e524000 rw-p 00000000 00:00 0           [heap]
7f0000000000-7f0040100000 rw-p 00000000 00:00 0 
7f1000000000-7f1000800000 rw-p 00000000 00:00 0 
7f2000000000-7f2040000000 r--p 00000000 08:02 173 /models/model.safetensors
7f3000000000-7f3040000000 rw-s 00000000 00:05 9   /dev/shm/shared
7f4000000000-7f4004000000 ---p 00000000 00:00 0 
7ffc00000000-7ffc08000000 rw-p 00000000 00:00 0   [stack]
"""  # noqa: W291  as the kernel writes it
MIB = 1 << 20


def test_large_private_memory_is_taken_and_nothing_else() -> None:
    """No code, no file, nothing shared, no stack, nothing small; borders are whole pages."""
    assert large_mappings(MAPS) == [
        (0x1000000, 0xE400000 - 0x1000000),
        (0x7F0000000000, 1025 * MIB - MIB),
    ]


def test_memory_is_marked_and_keeps_its_content() -> None:
    """As the kernel tells of this very process."""
    block = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block[: len(b"K/V")] = b"K/V"
    num_bytes = use_huge_pages()
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert num_bytes == 0
        return
    assert num_bytes >= 62 * MIB
    assert block[: len(b"K/V")] == b"K/V"
    assert not any(block[MIB : 64 * MIB])
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    assert re.search(r"^VmFlags:.* hg\b", smaps, re.MULTILINE)


def test_without_proc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another system."""
    monkeypatch.setattr(huge_pages, "_MAPS", Path("/nowhere/maps"))
    assert use_huge_pages() == 0


def test_slabs_hold_tensors_apart() -> None:
    """Aligned, none on another, of every size: none, odd, and more than a slab."""
    slabs = Slabs()
    sizes = [1, 17, 0, 1 << 16, 3, (64 << 20) // 4 + 5, 100]
    dtypes = [torch.float32, torch.bfloat16] * 4
    tensors = [slabs.take(size, dtype) for size, dtype in zip(sizes, dtypes, strict=False)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    for value, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert tensor.shape == (size,)
        assert tensor.data_ptr() % 64 == 0
        assert torch.equal(tensor, torch.full((size,), float(value), dtype=tensor.dtype))


def test_a_slab_begins_on_a_huge_page_that_is_marked() -> None:
    """As the kernel tells of the mapping."""
    tensor = Slabs().take(16, torch.float32)
    assert tensor.data_ptr() % (2 * MIB) == 0
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        return
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    mapping = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:([^\n]*)", re.MULTILINE | re.DOTALL)
    for begin, end, flags in mapping.findall(smaps):
        if int(begin, 16) <= tensor.data_ptr() < int(end, 16):
            assert "hg" in flags.split()
            return
    raise AssertionError("the tensor is in no mapping")


def resident_mib() -> float:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]  # it is there


@pytest.mark.parametrize("num_threads", [1, 3])
def test_populated_memory_is_there_and_keeps_its_content(num_threads: int) -> None:
    """All of it, before anyone writes to it."""
    tensor = torch.empty(100 << 18)  # 100 MiB
    tensor[:1000], tensor[-1000:] = 1.0, 2.0
    before = resident_mib()
    assert populate(tensor, num_threads)
    assert resident_mib() - before > 95
    assert tensor[:1000].eq(1).all()
    assert tensor[-1000:].eq(2).all()
    assert tensor[1000:-1000].eq(0).all()


@pytest.mark.parametrize("numel", [0, 1, 5000])
def test_small_tensors_are_populated_too(numel: int) -> None:
    """Less than a page of them may be all there is."""
    assert populate(torch.ones(numel), 2)


def test_freed_memory_goes_back() -> None:
    """What the allocator keeps of many pieces, with one in use after them all."""
    pieces = [torch.ones(20_000) for _ in range(1000)]  # 76 MiB
    last = torch.ones(20_000)
    del pieces
    before = resident_mib()
    return_freed_memory()
    assert resident_mib() <= before
    assert last.eq(1).all()
