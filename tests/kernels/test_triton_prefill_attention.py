"""Chunked prefill in Triton, against dense attention in float64.

Every slot that must not be read holds NaN, every table entry that must not be read names
no block, and every result is written over NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from octavo_kernels.triton_ops.prefill_attention import PrefillTiles, prefill_attention
from torch import Tensor

from tests.kernels.support import TOLERANCES

FAR = 10**6
INTERPRETED = PrefillTiles(rows=64, keys=32, num_warps=4, num_stages=2)


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    dim: int


class Chunks:
    """Random chunks behind random prefixes, scattered over a poisoned pool.

    `chunks` holds (prefix, tokens) of each. Of a prefix that a window hides the slots are
    poisoned too, and their table entries name no block.
    """

    def __init__(
        self,
        chunks: list[tuple[int, int]],
        heads: Heads,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        seed: int = 0,
    ) -> None:
        random = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random).to(dtype)

        self.heads, self.window, self.chunks = heads, window, chunks
        lengths = [prefix + tokens for prefix, tokens in chunks]
        needed = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(needed) + 2, generator=random).tolist()
        # One tensor of all layers, as the executor has it; this is the second of them.
        pool = torch.full((2, 2, len(order), block_size, heads.kv, heads.dim), torch.nan)
        self.key_cache, self.value_cache = pool.to(dtype)[1]
        self.tables = torch.full((len(chunks), max(needed, default=0) + 1), FAR, dtype=torch.int32)
        self.keys = [draw(length, heads.kv, heads.dim) for length in lengths]
        self.values = [draw(length, heads.kv, heads.dim) for length in lengths]
        for index, (prefix, _) in enumerate(chunks):
            first = 0 if window is None else max(0, prefix + 1 - window)
            for position in range(first, lengths[index]):
                place = position // block_size
                if self.tables[index, place] == FAR:
                    self.tables[index, place] = order.pop()
                slot = int(self.tables[index, place]), position % block_size
                self.key_cache[slot] = self.keys[index][position]
                self.value_cache[slot] = self.values[index][position]
        counts = [tokens for _, tokens in chunks]
        self.query = draw(sum(counts), heads.query, heads.dim)
        self.starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.context_lens = torch.tensor(lengths, dtype=torch.int32)

    def attend(
        self, device: str, *, softcap: float | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Run the kernel on a device, by default into an output full of NaN."""
        query = self.query.to(device)
        return prefill_attention(
            query,
            self.key_cache.to(device),
            self.value_cache.to(device),
            self.tables.to(device),
            query_starts=self.starts.to(device),
            context_lens=self.context_lens.to(device),
            scale=0.15,
            sliding_window=self.window,
            softcap=softcap,
            max_query_len=max((tokens for _, tokens in self.chunks), default=0),
            out=torch.full_like(query, torch.nan) if out is None else out,
            # A GPU runs what it would serve with; the interpreter is slow with small tiles.
            tiles=INTERPRETED if device == "cpu" else None,
        ).cpu()

    def expected(self, *, softcap: float | None = None) -> Tensor:
        """Attend chunk by chunk and head by head, in float64."""
        results = []
        for index, (prefix, tokens) in enumerate(self.chunks):
            start = int(self.starts[index])
            query = self.query[start : start + tokens].double()
            places = torch.arange(prefix, prefix + tokens)[:, None]
            keys = torch.arange(prefix + tokens)
            hidden = keys > places
            if self.window is not None:
                hidden |= keys <= places - self.window
            result = torch.empty_like(query)
            for head in range(self.heads.query):
                group = head * self.heads.kv // self.heads.query
                scores = query[:, head] @ self.keys[index][:, group].double().T * 0.15
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
                result[:, head] = weights @ self.values[index][:, group].double()
            results.append(result)
        return torch.cat(results) if results else self.query.double()


def check(
    chunks: Chunks, device: str, *, softcap: float | None = None, tolerance: float | None = None
) -> None:
    """Compare with `expected`; a tolerance is absolute and relative, by default the dtype's."""
    got = chunks.attend(device, softcap=softcap)
    assert got.dtype == chunks.query.dtype
    allowed = TOLERANCES[got.dtype]
    if tolerance is not None:
        allowed = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(got.double(), chunks.expected(softcap=softcap), **allowed)


# A whole prompt, a chunk of one, and one that ends with its block.
LENGTHS = [(0, 37), (33, 1), (48, 16)]


@pytest.mark.parametrize(
    ("heads", "block_size", "dtype", "window", "softcap"),
    [
        (Heads(4, 4, 64), 16, torch.float32, None, None),
        (Heads(4, 2, 64), 8, torch.bfloat16, 20, None),
        (Heads(9, 3, 64), 16, torch.float16, None, None),
        (Heads(5, 1, 64), 128, torch.float32, None, 5.0),
        (Heads(14, 2, 80), 32, torch.bfloat16, None, None),
        (Heads(3, 1, 80), 64, torch.float32, 7, 5.0),
        (Heads(9, 1, 80), 8, torch.float16, 40, None),
        (Heads(3, 3, 96), 128, torch.bfloat16, 33, 5.0),
        (Heads(8, 2, 96), 8, torch.float32, None, None),
        (Heads(5, 1, 128), 16, torch.bfloat16, 16, 5.0),
        (Heads(7, 1, 128), 64, torch.float32, None, None),
        (Heads(8, 2, 128), 32, torch.float16, None, 5.0),
        (Heads(4, 2, 256), 16, torch.float32, 50, 5.0),
        (Heads(2, 2, 256), 64, torch.bfloat16, None, 5.0),
        (Heads(7, 1, 256), 32, torch.float16, 1, None),
        (Heads(3, 1, 16), 16, torch.float32, None, None),
    ],
)
def test_chunks_equal_dense_attention(
    heads: Heads,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    device: str,
) -> None:
    """Chunks with and without a prefix are causal over prefix and chunk."""
    check(Chunks(LENGTHS, heads, block_size, dtype, window), device, softcap=softcap)


@pytest.mark.parametrize("chunk", [(0, 1), (1, 1), (15, 1), (16, 1), (0, 16), (127, 2), (0, 129)])
def test_one_chunk_at_the_edges_of_tiles_and_blocks(chunk: tuple[int, int], device: str) -> None:
    """A context of one, of one block, and of one token more or less than a tile."""
    check(Chunks([chunk], Heads(3, 1, 32), 16, seed=sum(chunk)), device)


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 64, 500])
def test_windows_at_the_edges_of_tiles(window: int, device: str) -> None:
    """Tiles before the window, across its edge, inside it, and windows wider than all."""
    check(Chunks([(90, 40), (0, 130)], Heads(2, 1, 32), 16, window=window), device)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_large_score_does_not_overflow(sign: int, device: str) -> None:
    """Scores of hundreds, all of one sign, still weigh against each other.

    A score of 500 has a rounding of 3e-5 in float32, and so have the weights.
    """
    chunks = Chunks([(40, 9)], Heads(2, 1, 32), 16)
    chunks.query = chunks.query.abs() * sign * 100
    chunks.key_cache.abs_()
    chunks.keys = [key.abs() for key in chunks.keys]
    check(chunks, device, tolerance=1e-3)


def test_chunks_may_share_a_prefix(device: str) -> None:
    """Two chunks whose tables name the same blocks for what they have in common."""
    heads = Heads(4, 2, 32)
    chunks = Chunks([(32, 9), (32, 12)], heads, 16)
    chunks.tables[1, :2] = chunks.tables[0, :2]
    chunks.keys[1][:32], chunks.values[1][:32] = chunks.keys[0][:32], chunks.values[0][:32]
    check(chunks, device)


def test_a_chunk_does_not_feel_the_others(device: str) -> None:
    """Beside chunks of other lengths a chunk gets the same result as alone, bit for bit."""
    together = Chunks([(20, 40), (100, 60), (0, 45)], Heads(3, 1, 32), 16)
    whole = together.attend(device)
    together.query, together.chunks = together.query[:40], together.chunks[:1]
    together.tables, together.starts = together.tables[:1], together.starts[:2]
    together.context_lens = together.context_lens[:1]
    assert torch.equal(whole[:40], together.attend(device))


def test_padding_reads_nothing_and_gives_zeros(device: str) -> None:
    """A chunk without tokens leaves no trace; rows of an empty context become zeros."""
    chunks = Chunks([(20, 5), (0, 3), (0, 0)], Heads(4, 2, 32), 16)
    chunks.context_lens[1] = 0
    chunks.tables[1:] = FAR
    got = chunks.attend(device)
    expected = chunks.expected()
    torch.testing.assert_close(got[:5].double(), expected[:5], **TOLERANCES[torch.float32])
    assert torch.equal(got[5:], torch.zeros_like(got[5:]))


def test_an_empty_batch_is_no_launch(device: str) -> None:
    """No chunks, or none with a token, give no rows."""
    empty = Chunks([], Heads(4, 2, 32), 16)
    assert empty.attend(device).shape == (0, 4, 32)
    idle = Chunks([(20, 0)], Heads(4, 2, 32), 16)
    assert idle.attend(device).shape == (0, 4, 32)


def test_queries_and_results_may_be_strided(device: str) -> None:
    """Heads that lie apart, and rows of a wider result: what lies between stays."""
    chunks = Chunks([(20, 5), (0, 40)], Heads(4, 2, 32), 16)
    chunks.query = chunks.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not chunks.query.is_contiguous()
    target = torch.full((45, 6, 32), torch.nan, device=device)
    chunks.attend(device, out=target[:, 1:5])
    got = target[:, 1:5].cpu().double()
    torch.testing.assert_close(got, chunks.expected(), **TOLERANCES[torch.float32])
    assert target[:, [0, 5]].isnan().all()


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("query", {"query": torch.empty(5, 4, 64)[:, :, ::2]}),
        ("query_starts", {"query_starts": torch.tensor([0, 5])}),
        ("query_starts", {"query_starts": torch.tensor([0, 5, 5], dtype=torch.int32)}),
        ("query_starts", {"query_starts": torch.tensor([0, 9, 5], dtype=torch.int32)[::2]}),
        ("context_lens", {"context_lens": torch.tensor([25])}),
        ("context_lens", {"context_lens": torch.tensor([25, 1], dtype=torch.int32)}),
        ("scale", {"scale": 0.0}),
        ("sliding_window", {"sliding_window": 0}),
        ("softcap", {"softcap": -1.0}),
        ("out", {"out": torch.empty(5, 4, 32, dtype=torch.float16)}),
        ("out", {"out": torch.empty(4, 4, 32)}),
    ],
)
def test_a_wrong_argument_is_named(name: str, broken: dict[str, object]) -> None:
    """What does not fit is refused before a kernel runs, by its name."""
    chunks = Chunks([(20, 5)], Heads(4, 2, 32), 16)
    arguments = {
        "query": chunks.query,
        "key_cache": chunks.key_cache,
        "value_cache": chunks.value_cache,
        "block_tables": chunks.tables,
        "query_starts": chunks.starts,
        "context_lens": chunks.context_lens,
        "scale": 0.15,
        **broken,
    }
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        prefill_attention(**arguments)  # type: ignore[arg-type]
