"""Runs cases on a device: sets up pools, times what is compared in turn, keeps what failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from octavo_kernels.aot.configs import Layer
from octavo_kernels.gpu_check.cases import (
    GIB,
    Case,
    CopyCase,
    DecodeCase,
    PrefillCase,
    SwapCase,
    Yardsticks,
)
from octavo_kernels.gpu_check.suite import Budget
from octavo_kernels.gpu_check.timers import Call, Timer, alternate
from octavo_kernels.triton_ops.copy_blocks import copy_blocks
from octavo_kernels.triton_ops.paged_attention import paged_attention
from octavo_kernels.triton_ops.prefill_attention import prefill_attention
from octavo_kernels.triton_ops.splits import Scratch
from octavo_kernels.triton_ops.swap_blocks import swap_blocks

DTYPE = torch.bfloat16
CASE_SECONDS = 20.0
"""More than a case takes, its compilation included: none is begun with less time left."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What came of a case: figures, or why there are none."""

    case: Case
    seconds: dict[str, float] = field(default_factory=dict)
    """Of what was timed, by name."""
    figures: dict[str, float | int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What of the case could not be measured, and why."""
    skipped: str = ""
    """Why the case was not run; empty if it was."""
    failed: str = ""
    """The error that ended it; empty if there was none."""

    def as_row(self) -> dict[str, Any]:
        """Everything as one JSON object."""
        row = asdict(self)
        return {"kind": self.case.kind, "name": self.case.name, **row, **row.pop("figures")}


class Device:
    """A device with its timer and the yardsticks that live on it."""

    def __init__(
        self, device: torch.device, timer: Timer, yardsticks: Yardsticks, memory_bytes: int
    ) -> None:
        """Allocate what the yardsticks need.

        Args:
            device: where everything is measured.
            timer: its clock.
            yardsticks: their sizes.
            memory_bytes: how much a case may use beside them.
        """
        self.torch = device
        self.timer = timer
        self.yardsticks = yardsticks
        self.memory_bytes = memory_bytes
        self.scratch = Scratch(device)
        half, size = yardsticks.copy_bytes // 2, yardsticks.gemm_size
        source, target = torch.zeros(2, half, dtype=torch.uint8, device=device)
        left, right = torch.randn(2, size, size, dtype=DTYPE, device=device)
        product = torch.empty_like(left)
        self.copy = timer.sampler(lambda: target.copy_(source), captured=False)
        self.gemm = timer.sampler(lambda: torch.mm(left, right, out=product), captured=False)

    def random(self, *shape: int) -> Tensor:
        """Draw bf16 from a standard normal."""
        return torch.empty(shape, dtype=DTYPE, device=self.torch).normal_()

    def integers(self, values: Sequence[int]) -> Tensor:
        """Place int32 on the device."""
        return torch.tensor(values, dtype=torch.int32, device=self.torch)

    def shuffled(self, count: int) -> Tensor:
        """Order 0 … count - 1 at random, as int64."""
        return torch.randperm(count, device=self.torch)

    def pool(self, layer: Layer, num_blocks: int, block_size: int) -> Tensor:
        """Draw all layers' K/V: [num_layers, 2, num_blocks, block_size, heads, head_dim]."""
        shape = (layer.num_layers, 2, num_blocks, block_size, layer.num_kv_heads, layer.head_dim)
        return self.random(*shape)


def run(
    suite: Sequence[Case], device: Device, budget: Budget, case_seconds: float = CASE_SECONDS
) -> Iterator[Measurement]:
    """Measure cases in order; one that does not fit memory or time is skipped, with the reason.

    A case that fails does not end the run.
    """
    for case in suite:
        if not budget.allows(case_seconds):
            yield Measurement(case, skipped="no time was left")
        elif case.memory_bytes > device.memory_bytes:
            needed, free = case.memory_bytes / GIB, device.memory_bytes / GIB
            yield Measurement(case, skipped=f"needs {needed:.1f} GiB of {free:.1f} GiB")
        else:
            yield _attempt(case, device)
            device.timer.release()


def _attempt(case: Case, device: Device) -> Measurement:
    try:
        match case:
            case DecodeCase():
                return _decode(case, device)
            case PrefillCase():
                return _prefill(case, device)
            case CopyCase():
                return _copy(case, device)
            case SwapCase():
                return _swap(case, device)
    except Exception as error:
        return Measurement(case, failed=_in_one_line(error))


def _decode(case: DecodeCase, device: Device) -> Measurement:
    layer = case.layer
    pool = device.pool(_one_layer(layer), case.num_blocks, case.block_size)[0]
    keys, values = pool
    query = device.random(case.batch, layer.num_heads, layer.head_dim)
    lengths = device.integers([case.context] * case.batch)
    scattered = device.shuffled(case.num_blocks).int().view(case.batch, -1)
    in_order = torch.arange(case.num_blocks, device=device.torch).int().view(case.batch, -1)
    out = torch.empty_like(query)

    def attend(tables: Tensor, *, contiguous: bool) -> Call:
        return lambda: paged_attention(
            query,
            keys,
            values,
            tables,
            lengths,
            scale=layer.head_dim**-0.5,
            softcap=layer.softcap,
            out=out,
            max_context_len=case.context,
            scratch=device.scratch,
            contiguous=contiguous,
        )

    calls = {
        "paged": attend(scattered, contiguous=False),
        "contiguous": attend(in_order, contiguous=True),
    }
    notes: list[str] = []

    def peers() -> dict[str, Call]:
        gather, attend_gathered = _decode_peer(case, pool, scattered, query)
        return {
            "sdpa": attend_gathered,
            "gather_and_sdpa": lambda: (gather(), attend_gathered()),
        }

    if layer.softcap is not None:
        notes.append("sdpa: has no soft-cap")
    elif case.memory_bytes + case.peer_bytes > device.memory_bytes:
        notes.append("sdpa: gathered K/V do not fit beside the pool")
    else:
        _add_peers(calls, peers, notes)
    return _compare(case, device, calls, notes, yardstick="copy")


def _decode_peer(
    case: DecodeCase, pool: Tensor, tables: Tensor, query: Tensor
) -> tuple[Call, Call]:
    """Gathering the K/V of each sequence, and torch's flash attention over what was gathered."""
    layer = case.layer
    blocks = tables.flatten().long()
    gathered = torch.empty_like(pool)
    padded = tables.shape[1] * case.block_size
    key, value = (
        each.view(case.batch, padded, layer.num_kv_heads, layer.head_dim)[:, : case.context]
        for each in gathered
    )
    # Heads that share K/V pass for positions: nothing is then read twice.
    grouped = query.view(case.batch, layer.num_kv_heads, -1, layer.head_dim)

    def gather() -> None:
        for source, target in zip(pool, gathered, strict=True):
            torch.index_select(source, 0, blocks, out=target)

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(grouped, key.transpose(1, 2), value.transpose(1, 2))

    gather()
    return gather, attend


def _prefill(case: PrefillCase, device: Device) -> Measurement:
    layer = case.layer
    keys, values = device.pool(_one_layer(layer), case.num_blocks, case.block_size)[0]
    query = device.random(case.tokens, layer.num_heads, layer.head_dim)
    starts, lengths = device.integers([0, case.tokens]), device.integers([case.context])
    scattered = device.shuffled(case.num_blocks).int()[None]
    in_order = torch.arange(case.num_blocks, device=device.torch).int()[None]
    out = torch.empty_like(query)

    def attend(tables: Tensor, *, contiguous: bool) -> Call:
        return lambda: prefill_attention(
            query,
            keys,
            values,
            tables,
            query_starts=starts,
            context_lens=lengths,
            scale=layer.head_dim**-0.5,
            softcap=layer.softcap,
            max_query_len=case.tokens,
            out=out,
            contiguous=contiguous,
        )

    calls = {
        "paged": attend(scattered, contiguous=False),
        "contiguous": attend(in_order, contiguous=True),
    }
    notes: list[str] = []

    def peers() -> dict[str, Call]:
        heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        dense_query, dense_key, dense_value = (
            device.random(1, num_heads, case.tokens, layer.head_dim) for num_heads in heads
        )

        def attend_dense() -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return scaled_dot_product_attention(
                    dense_query, dense_key, dense_value, is_causal=True, enable_gqa=True
                )

        return {"sdpa": attend_dense}

    if layer.softcap is not None:
        notes.append("sdpa: has no soft-cap")
    elif case.prefix:
        notes.append("sdpa: its causal mask knows no prefix")
    else:
        _add_peers(calls, peers, notes)
    return _compare(case, device, calls, notes, yardstick="gemm")


def _copy(case: CopyCase, device: Device) -> Measurement:
    pool = device.pool(case.layer, case.num_blocks, case.block_size)
    sources, destinations = device.shuffled(case.num_blocks).view(2, -1)
    calls: dict[str, Call] = {
        "one": lambda: copy_blocks(pool, sources[:1], destinations[:1]),
        "many": lambda: copy_blocks(pool, sources, destinations),
    }
    measured = _compare(case, device, calls, [], yardstick="copy")
    for name, call in calls.items():
        launches = device.timer.launches(call)
        if launches is None:
            measured.notes.append(f"launches of {name}: the profiler saw none")
        else:
            measured.figures[f"{name}_launches"] = launches
    return measured


def _swap(case: SwapCase, device: Device) -> Measurement:
    pool = device.pool(case.layer, case.num_blocks, case.block_size)
    host = torch.empty(pool.shape, dtype=DTYPE, pin_memory=device.torch.type == "cuda")
    blocks = device.shuffled(case.num_blocks)[: case.num_swaps]
    places = torch.randperm(case.num_blocks)[: case.num_swaps]
    flat = pool.view(-1)[: case.moved_bytes // DTYPE.itemsize]
    plain = host.view(-1)[: len(flat)]
    calls: dict[str, Call] = {
        "out": lambda: swap_blocks(pool, host, blocks, places),
        "plain_out": lambda: plain.copy_(flat, non_blocking=True),
        "in": lambda: swap_blocks(host, pool, places, blocks),
        "plain_in": lambda: flat.copy_(plain, non_blocking=True),
    }
    return _compare(case, device, calls, [], captured=False)


def _compare(
    case: Case,
    device: Device,
    calls: dict[str, Call],
    notes: list[str],
    *,
    yardstick: str = "",
    captured: bool = True,
) -> Measurement:
    """Time calls, and a yardstick with them, in turn."""
    samplers = {name: device.timer.sampler(call, captured=captured) for name, call in calls.items()}
    if yardstick:
        samplers[yardstick] = {"copy": device.copy, "gemm": device.gemm}[yardstick]
    seconds = alternate(samplers)
    return Measurement(case, seconds, case.figures(seconds, device.yardsticks), notes)


def _add_peers(
    calls: dict[str, Call], make: Callable[[], dict[str, Call]], notes: list[str]
) -> None:
    """Add a peer's calls if they work here; what torch cannot do is no fault of the kernels."""
    try:
        peers = make()
        for call in peers.values():
            call()
    except RuntimeError as error:
        notes.append(f"sdpa: {_in_one_line(error)}")
    else:
        calls.update(peers)


def _one_layer(layer: Layer) -> Layer:
    return Layer(layer.num_heads, layer.num_kv_heads, layer.head_dim, num_layers=1)


def _in_one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
