"""Writing, copying and swapping blocks in Triton, to the bit.

What is moved is compared as bytes, over pools whose every other byte must stay.
"""

from __future__ import annotations

import mmap

import pytest
import torch
from octavo_kernels import reference
from octavo_kernels.triton_ops.copy_blocks import copy_blocks
from octavo_kernels.triton_ops.prefill_attention import prefill_attention
from octavo_kernels.triton_ops.reshape_and_cache import reshape_and_cache
from octavo_kernels.triton_ops.swap_blocks import swap_blocks
from torch import Tensor
from triton import knobs

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def random_bytes(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Fill a tensor with any bits, NaN and infinity among them."""
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=random)
    return words.view(dtype).squeeze(-1).to(device)


def same_bytes(got: Tensor, expected: Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size"),
    [(3, 64, 16), (1, 80, 8), (5, 96, 32), (8, 128, 128), (12, 256, 16), (1, 8, 8)],
)
def test_writes_touch_their_slots_only(
    num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: str
) -> None:
    """New K/V land in the named slots of one layer, and those of slot -1 nowhere."""
    pool = random_bytes(2, 2, 5, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)
    expected = pool.clone()
    slots = torch.tensor([5 * block_size - 1, -1, 0, block_size + 3, -1], device=device)
    key, value = random_bytes(2, 5, num_kv_heads, head_dim, dtype=dtype, device=device, seed=1)
    for token in (0, 2, 3):
        place = int(slots[token]) // block_size, int(slots[token]) % block_size
        expected[1, 0][place], expected[1, 1][place] = key[token], value[token]
    reshape_and_cache(key, value, pool[1, 0], pool[1, 1], slots)
    assert same_bytes(pool, expected)


def test_sources_are_read_where_they_lie(device: str) -> None:
    """Keys of [heads, tokens, dim] and values of a wider projection, each transposed."""
    key = torch.randn(1, 3, 7, 64, device=device)[0].transpose(0, 1)
    value = torch.randn(7, 9 * 64, device=device)[:, 3 * 64 : 6 * 64].view(7, 3, 64)
    assert not key.is_contiguous()
    assert not value.is_contiguous()
    slots = torch.tensor([3, 9, 1, 30, 31, 16, 0], device=device)
    got, expected = torch.zeros(2, 2, 2, 16, 3, 64, device=device)
    reshape_and_cache(key, value, got[0], got[1], slots)
    reference.reshape_and_cache(key, value, expected[0], expected[1], slots)
    assert torch.equal(got, expected)


def test_nothing_to_write_is_no_launch(device: str) -> None:
    """A step without tokens leaves the pool as it was."""
    pool = torch.ones(2, 2, 16, 3, 64, device=device)
    none, no_slots = pool[0, 0, :0], torch.empty(0, dtype=torch.int64, device=device)
    reshape_and_cache(none, none, pool[0], pool[1], no_slots)
    assert torch.equal(pool, torch.ones_like(pool))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("key", {"key": torch.zeros(2, 3, 32)}),
        ("key", {"key": torch.zeros(2, 3, 64, dtype=torch.float16)}),
        ("key", {"key": torch.zeros(2, 3, 128)[:, :, ::2]}),
        ("value", {"value": torch.zeros(3, 3, 64)}),
        ("value", {"value": torch.zeros(2, 3, 64, dtype=torch.float16)}),
        ("slot_mapping", {"slot_mapping": torch.zeros(3, dtype=torch.int64)}),
        ("slot_mapping", {"slot_mapping": torch.zeros(2, dtype=torch.int32)}),
        ("slot_mapping", {"slot_mapping": torch.zeros(4, dtype=torch.int64)[::2]}),
        ("key_cache", {"key_cache": torch.zeros(2, 12, 3, 64)}),
        ("value_cache", {"value_cache": torch.zeros(3, 16, 3, 64)}),
    ],
)
def test_a_wrong_argument_of_a_write_is_named(name: str, broken: dict[str, Tensor]) -> None:
    """What does not fit is refused before a kernel runs, by its name."""
    arguments = {
        "key": torch.zeros(2, 3, 64),
        "value": torch.zeros(2, 3, 64),
        "key_cache": torch.zeros(2, 16, 3, 64),
        "value_cache": torch.zeros(2, 16, 3, 64),
        "slot_mapping": torch.zeros(2, dtype=torch.int64),
        **broken,
    }
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        reshape_and_cache(**arguments)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
@pytest.mark.parametrize("block", [(8, 1, 8), (16, 3, 64), (8, 5, 96), (128, 2, 80)])
def test_copies_cover_all_layers_and_nothing_else(
    block: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """Two copies of one block and one of another, in every layer, keys and values."""
    pool = random_bytes(3, 2, 6, *block, dtype=dtype, device=device)
    expected = pool.clone()
    for source, destination in [(0, 1), (0, 5), (4, 2)]:
        expected[:, :, destination] = pool[:, :, source]
    sources, destinations = torch.tensor([[0, 0, 4], [1, 5, 2]], device=device)
    copy_blocks(pool, sources, destinations)
    assert same_bytes(pool, expected)


@pytest.mark.parametrize("num_copies", [0, 1, 200])
def test_any_number_of_copies(num_copies: int, device: str) -> None:
    """None, one, and two hundred copies to shuffled places."""
    pool = random_bytes(1, 2, 2 * num_copies + 2, 8, 1, 8, dtype=torch.float16, device=device)
    order = torch.randperm(2 * num_copies + 2, generator=torch.Generator().manual_seed(2)).to(
        device
    )
    sources, destinations = order[:num_copies], order[num_copies : 2 * num_copies]
    expected = pool.clone()
    expected[:, :, destinations] = pool[:, :, sources]
    copy_blocks(pool, sources, destinations)
    assert same_bytes(pool, expected)


def test_a_pool_within_a_larger_tensor_is_copied_in_place(device: str) -> None:
    """Layers, and blocks within a layer, may lie apart."""
    whole = random_bytes(4, 2, 12, 8, 2, 8, dtype=torch.bfloat16, device=device)
    expected = whole.clone()
    expected[1::2, :, 2] = whole[1::2, :, 8]
    source, destination = torch.tensor([[4], [1]], device=device)
    copy_blocks(whole[1::2, :, ::2], source, destination)
    assert same_bytes(whole, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swaps_between_pools_of_different_size(dtype: torch.dtype, device: str) -> None:
    """Blocks go out to their places in the host's pool, and come back the same."""
    pool = random_bytes(3, 2, 6, 16, 3, 64, dtype=dtype, device=device)
    host = random_bytes(3, 2, 9, 16, 3, 64, dtype=dtype, device="cpu", seed=1)
    if device == "cuda":
        host = host.pin_memory()
    before, expected = pool.clone(), host.clone()
    expected[:, :, [8, 0]] = pool[:, :, [2, 5]].cpu()
    swap_blocks(pool, host, torch.tensor([2, 5], device=device), torch.tensor([8, 0]))
    assert same_bytes(pool, before)  # the comparison waits for the device
    assert same_bytes(host, expected)
    swap_blocks(host, pool, torch.tensor([8, 0]), torch.tensor([5, 2], device=device))
    before[:, :, [5, 2]] = before[:, :, [2, 5]]
    assert same_bytes(pool, before)


def test_on_a_cpu_the_reference_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU and outside the interpreter, where no kernel can run, blocks still move."""
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    pool, host = torch.randn(3, 2, 6, 8, 2, 8), torch.zeros(3, 2, 4, 8, 2, 8)
    swap_blocks(pool, host, torch.tensor([5]), torch.tensor([1]))
    assert torch.equal(host[:, :, 1], pool[:, :, 5])
    assert not host[:, :, [0, 2, 3]].any()


@pytest.mark.gpu
def test_a_host_pool_must_be_pinned() -> None:
    """Pageable memory, which a kernel cannot address, is refused by its name."""
    pool, host = torch.zeros(3, 2, 6, 8, 2, 8, device="cuda"), torch.zeros(3, 2, 6, 8, 2, 8)
    on_device, on_host = torch.tensor([0], device="cuda"), torch.tensor([0])
    with pytest.raises(ValueError, match=r"^destination_pool\b"):
        swap_blocks(pool, host, on_device, on_host)
    with pytest.raises(ValueError, match=r"^source_pool\b"):
        swap_blocks(host, pool, on_host, on_device)


POOL = torch.zeros(3, 2, 6, 8, 2, 8)


@pytest.mark.parametrize(
    ("name", "pool", "sources", "destinations"),
    [
        ("destinations", POOL, torch.tensor([0, 1]), torch.tensor([2])),
        ("destinations", POOL, torch.tensor([0]), torch.tensor([2], dtype=torch.int32)),
        ("sources", POOL, torch.tensor([0], dtype=torch.int32), torch.tensor([2])),
        ("sources", POOL, torch.tensor([[0]]), torch.tensor([[2]])),
        ("pool", POOL[:, :1], torch.tensor([0]), torch.tensor([2])),
        ("pool", POOL[:, 0, :, 0, 0], torch.tensor([0]), torch.tensor([2])),
        ("pool", POOL[:, :, :, :, :1], torch.tensor([0]), torch.tensor([2])),
        ("pool", torch.zeros(3, 2, 6, 7, dtype=torch.uint8), torch.tensor([0]), torch.tensor([2])),
    ],
)
def test_a_wrong_argument_of_a_copy_is_named(
    name: str, pool: Tensor, sources: Tensor, destinations: Tensor
) -> None:
    """What does not fit is refused before a kernel runs, by its name."""
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        copy_blocks(pool, sources, destinations)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 2, 6, 8, 2, 8),
        torch.zeros(3, 2, 6, 8, 2, 16),
        torch.zeros(3, 2, 6, 8, 2, 8, dtype=torch.float16),
        torch.zeros(3, 2, 6, 8, 2, 16, dtype=torch.float16),
    ],
)
def test_pools_that_differ_are_not_swapped(other: Tensor) -> None:
    """Layers, blocks and dtype must be the same on both sides."""
    with pytest.raises(ValueError, match=r"^destination_pool\b"):
        swap_blocks(POOL, other, torch.tensor([0]), torch.tensor([2]))


class SparsePools:
    """Two blocks 2^32 elements apart, each of two KV heads of 8, and nothing between.

    A product of a block's id and its stride in 32 bits would wrap to 0: block 4 would
    be block 0. On a CPU only the pages that are touched exist; a GPU needs 8 GiB.
    """

    STRIDE = 2**30
    BLOCK = (8, 2, 8)

    def __init__(self, device: str) -> None:
        elements = 4 * self.STRIDE + 2 * 128
        if device == "cuda":
            self.elements = torch.zeros(elements, dtype=torch.float16, device=device)
        else:
            self.elements = self._reserve(elements)
        self.key_cache = self._view(0)
        self.value_cache = self._view(128)

    def _reserve(self, elements: int) -> Tensor:
        reserve_nothing = 0x4000  # MAP_NORESERVE, which the module does not name
        memory = mmap.mmap(
            -1, elements * 2, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve_nothing
        )
        return torch.frombuffer(memory, dtype=torch.float16)

    def _view(self, offset: int) -> Tensor:
        return self.elements.as_strided((5, *self.BLOCK), (self.STRIDE, 16, 8, 1), offset)

    def pool(self) -> Tensor:
        """Return both as [1, 2, 5, ...]."""
        return self.elements.as_strided((1, 2, 5, *self.BLOCK), (0, 128, self.STRIDE, 16, 8, 1))


def test_writes_reach_past_two_to_the_31(device: str) -> None:
    """A slot of a block that lies 2^32 elements in is written there."""
    pools = SparsePools(device)
    key, value = torch.randn(2, 1, 2, 8, device=device).half()
    slots = torch.tensor([4 * 8 + 3], device=device)
    reshape_and_cache(key, value, pools.key_cache, pools.value_cache, slots)
    assert torch.equal(pools.key_cache[4, 3], key[0])
    assert torch.equal(pools.value_cache[4, 3], value[0])
    assert not pools.key_cache[0].any()


def test_copies_reach_past_two_to_the_31(device: str) -> None:
    """A block that lies 2^32 elements in is copied from and to."""
    pools = SparsePools(device)
    pools.key_cache[4], pools.value_cache[4] = 1.0, 2.0
    source, destination = torch.tensor([[4], [1]], device=device)
    copy_blocks(pools.pool(), source, destination)
    assert (pools.key_cache[1] == 1).all()
    assert (pools.value_cache[1] == 2).all()


def test_prefill_reaches_past_two_to_the_31(device: str) -> None:
    """A block that lies 2^32 elements in is attended to."""
    pools = SparsePools(device)
    pools.value_cache[4] = 3.0
    got = prefill_attention(
        torch.ones(5, 2, 8, dtype=torch.float16, device=device),
        pools.key_cache,
        pools.value_cache,
        torch.tensor([[4]], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, 5], dtype=torch.int32, device=device),
        context_lens=torch.tensor([8], dtype=torch.int32, device=device),
        scale=1.0,
    )
    torch.testing.assert_close(got, torch.full_like(got, 3.0))
