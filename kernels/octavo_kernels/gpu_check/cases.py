"""What is measured: how many bytes and operations each case is, and what follows from times.

Everything here is arithmetic. A case says what it costs before it is run, and turns the
seconds of what was timed, by name, into its figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from octavo_kernels.aot.configs import LAYERS, Layer

ITEM_BYTES = 2  # bf16
GIB = 2**30

Seconds = Mapping[str, float]
Figures = dict[str, float | int]


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """What the device is held against, timed beside every case.

    The copy reads and writes `copy_bytes` / 2 each; the product is of two square bf16
    matrices with `gemm_size` rows.
    """

    copy_bytes: int
    gemm_size: int

    @property
    def gemm_flops(self) -> int:
        """Floating-point operations of the product."""
        return 2 * self.gemm_size**3

    @property
    def memory_bytes(self) -> int:
        """Bytes that the yardsticks occupy on the device."""
        return self.copy_bytes + 3 * self.gemm_size**2 * ITEM_BYTES


STANDARD_YARDSTICKS = Yardsticks(copy_bytes=4 * GIB, gemm_size=8192)


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One token for each of `batch` sequences, all of `context` tokens."""

    model: str
    block_size: int
    batch: int
    context: int
    kind: ClassVar[str] = "decode"

    @property
    def layer(self) -> Layer:
        """The model's attention."""
        return LAYERS[self.model]

    @property
    def name(self) -> str:
        """The case in words."""
        return (
            f"decode {self.model}, blocks of {self.block_size}, "
            f"{self.batch} x {self.context} tokens"
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of all sequences."""
        return self.batch * -(-self.context // self.block_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K/V that attention must read."""
        layer = self.layer
        return 2 * self.batch * self.context * layer.num_kv_heads * layer.head_dim * ITEM_BYTES

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory without those of a peer."""
        layer = self.layer
        token_bytes = 2 * layer.num_kv_heads * layer.head_dim * ITEM_BYTES
        return self.num_blocks * self.block_size * token_bytes

    @property
    def peer_bytes(self) -> int:
        """Bytes more that a peer takes, which attends to gathered K/V."""
        return self.memory_bytes

    def figures(self, seconds: Seconds, yardsticks: Yardsticks) -> Figures:
        """Bandwidth, its share of a copy's, what paging costs, and how much faster than peers."""
        copied = yardsticks.copy_bytes / seconds["copy"]
        read = self.kv_bytes / seconds["paged"]
        return {
            "kv_bytes": self.kv_bytes,
            "gb_per_s": read / 1e9,
            "share_of_copy": read / copied,
            "paging_overhead": seconds["paged"] / seconds["contiguous"] - 1,
            **_speedups(seconds),
        }


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """A chunk of one prompt: `tokens` of it behind a cached prefix."""

    model: str
    block_size: int
    prefix: int
    tokens: int
    kind: ClassVar[str] = "prefill"

    @property
    def layer(self) -> Layer:
        """The model's attention."""
        return LAYERS[self.model]

    @property
    def name(self) -> str:
        """The case in words."""
        behind = f" behind {self.prefix}" if self.prefix else ""
        return f"prefill {self.model}, blocks of {self.block_size}, {self.tokens} tokens{behind}"

    @property
    def context(self) -> int:
        """Tokens of prefix and chunk."""
        return self.prefix + self.tokens

    @property
    def num_blocks(self) -> int:
        """Blocks of the context."""
        return -(-self.context // self.block_size)

    @property
    def flops(self) -> int:
        """Operations of the scores that a query may see and of the values they weigh."""
        seen = self.tokens * self.prefix + self.tokens * (self.tokens + 1) // 2
        return 4 * self.layer.num_heads * self.layer.head_dim * seen

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory: the pool, a peer's K/V, queries and two results."""
        layer = self.layer
        cached = 4 * self.num_blocks * self.block_size * layer.num_kv_heads
        return (cached + 3 * self.tokens * layer.num_heads) * layer.head_dim * ITEM_BYTES

    def figures(self, seconds: Seconds, yardsticks: Yardsticks) -> Figures:
        """TFLOP/s, their share of a matrix product's, and the same as for decodes."""
        rate = self.flops / seconds["paged"]
        return {
            "flops": self.flops,
            "tflop_per_s": rate / 1e12,
            "share_of_gemm": rate * seconds["gemm"] / yardsticks.gemm_flops,
            "paging_overhead": seconds["paged"] / seconds["contiguous"] - 1,
            **_speedups(seconds),
        }


@dataclass(frozen=True, slots=True)
class CopyCase:
    """Copies of blocks over all layers, as copy-on-write asks for: one, and many."""

    model: str
    block_size: int
    num_copies: int
    kind: ClassVar[str] = "copy"

    @property
    def layer(self) -> Layer:
        """The model's attention."""
        return LAYERS[self.model]

    @property
    def name(self) -> str:
        """The case in words."""
        return f"copy {self.model}, blocks of {self.block_size}, 1 and {self.num_copies}"

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool: every source and every destination is another."""
        return 2 * self.num_copies

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return _block_bytes(self.layer, self.block_size)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_blocks * self.block_bytes

    def figures(self, seconds: Seconds, yardsticks: Yardsticks) -> Figures:
        """Time of one copy and of many, and the share of a plain copy's bandwidth."""
        rate = 2 * self.num_copies * self.block_bytes / seconds["many"]
        return {
            "one_us": seconds["one"] * 1e6,
            "many_us": seconds["many"] * 1e6,
            "gb_per_s": rate / 1e9,
            "share_of_copy": rate * seconds["copy"] / yardsticks.copy_bytes,
        }


@dataclass(frozen=True, slots=True)
class SwapCase:
    """Scattered blocks to a pinned host pool and back."""

    model: str
    block_size: int
    num_swaps: int
    kind: ClassVar[str] = "swap"

    @property
    def layer(self) -> Layer:
        """The model's attention."""
        return LAYERS[self.model]

    @property
    def name(self) -> str:
        """The case in words."""
        return f"swap {self.model}, blocks of {self.block_size}, {self.num_swaps} each way"

    @property
    def num_blocks(self) -> int:
        """Blocks of each pool: twice those moved, so that they lie scattered."""
        return 2 * self.num_swaps

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross the bus one way."""
        return self.num_swaps * _block_bytes(self.layer, self.block_size)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device's pool."""
        return self.num_blocks * _block_bytes(self.layer, self.block_size)

    def figures(self, seconds: Seconds, yardsticks: Yardsticks) -> Figures:  # noqa: ARG002 - as the others
        """GB/s each way, and the share of a plain copy of as many contiguous pinned bytes."""
        return {
            "moved_bytes": self.moved_bytes,
            "out_gb_per_s": self.moved_bytes / seconds["out"] / 1e9,
            "in_gb_per_s": self.moved_bytes / seconds["in"] / 1e9,
            "out_share_of_plain": seconds["plain_out"] / seconds["out"],
            "in_share_of_plain": seconds["plain_in"] / seconds["in"],
        }


Case = DecodeCase | PrefillCase | CopyCase | SwapCase


def _block_bytes(layer: Layer, block_size: int) -> int:
    tokens = 2 * layer.num_layers * block_size
    return tokens * layer.num_kv_heads * layer.head_dim * ITEM_BYTES


def _speedups(seconds: Seconds) -> Figures:
    peers = [name for name in ("sdpa", "gather_and_sdpa") if name in seconds]
    return {f"faster_than_{peer}": seconds[peer] / seconds["paged"] for peer in peers}
