"""Compile one op for one target, and read its binaries."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from octavo_kernels.aot.amdgcn import parse_amdgcn, parse_metadata
from octavo_kernels.aot.configs import LAYERS, TARGETS
from octavo_kernels.aot.launches import Launch, record
from octavo_kernels.aot.listing import Listing
from octavo_kernels.aot.sass import parse_resources, parse_sass


@dataclass(frozen=True, slots=True)
class Case:
    """One op to compile: for which target, which model's attention, which blocks."""

    op: str
    target: str
    config: str
    block_size: int
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Binary:
    """What one compiled kernel shows.

    `registers` and `stack_bytes` are a thread's, `shared_bytes` a thread block's.
    `spills` is what a thread stores to its stack for want of registers, in bytes.
    `load_bits` is the width of the loads that carry the data: in the main loop if the
    kernel has one. The loop's figures are None if it has none. Instructions are
    counted a warp (or wave), so `instructions_per_kv_byte` counts every warp's.
    """

    num_warps: int
    num_stages: int
    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    load_bits: int
    store_bits: int
    inner_loop_instructions: int | None
    kv_bytes_per_iteration: int | None
    instructions_per_kv_byte: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """One kernel of a case, and the same kernel over contiguous K/V.

    `paging_overhead` is instructions per K/V byte, paged ÷ contiguous - 1.
    """

    kernel: str
    case: Case
    binary: Binary
    contiguous: Binary | None = None

    @property
    def paging_overhead(self) -> float | None:
        """None where there is no contiguous variant."""
        paged = self.binary.instructions_per_kv_byte
        flat = self.contiguous and self.contiguous.instructions_per_kv_byte
        return round(paged / flat - 1, 4) if paged and flat else None

    def as_row(self) -> dict[str, Any]:
        """The figures as one flat JSON object, the contiguous variant's inside it."""
        return {
            "kernel": self.kernel,
            "target": self.case.target,
            "config": self.case.config,
            "dtype": self.case.dtype,
            "block_size": self.case.block_size,
            **asdict(self.binary),
            "contiguous": self.contiguous and asdict(self.contiguous),
            "paging_overhead": self.paging_overhead,
        }


def measure_all(cases: Sequence[Case], num_processes: int) -> Iterator[list[Figures]]:
    """`measure` each case, in order, in processes of their own."""
    with (
        tempfile.TemporaryDirectory() as cache_folder,
        ProcessPoolExecutor(
            min(num_processes, len(cases)), get_context("spawn"), _start_process, (cache_folder,)
        ) as pool,
    ):
        yield from pool.map(measure, cases)


def _start_process(cache_folder: str) -> None:
    # A cache that outlives the run could hide a change.
    knobs.cache.dir = cache_folder


def measure(case: Case) -> list[Figures]:
    """Compile what the case's launcher launches; return the figures of each kernel."""
    target = TARGETS[case.target]
    launches = record(
        case.op,
        LAYERS[case.config],
        case.target,
        block_size=case.block_size,
        dtype=getattr(torch, case.dtype),
    )
    figures = []
    for launch in launches:
        flat = launch.contiguous()
        figures.append(
            Figures(
                case.op if launch is launches[0] else f"{case.op}/{launch.name}",
                case,
                _compile(launch, target),
                None if flat is None else _compile(flat, target),
            )
        )
    return figures


def _compile(launch: Launch, target: GPUTarget) -> Binary:
    compiled = triton.compile(launch.source(), target=target, options=launch.options)
    read = _read_amdgcn if target.backend == "hip" else _read_cubin
    listing, registers, spills, stack_bytes = read(compiled.asm)
    loop = listing.main_loop()
    num_instructions = None if loop is None else len(loop)
    per_iteration = None if loop is None else _kv_bytes(launch, loop, target)
    num_warps = compiled.metadata.num_warps
    return Binary(
        num_warps=num_warps,
        num_stages=compiled.metadata.num_stages,
        registers=registers,
        spills=spills,
        stack_bytes=stack_bytes,
        # Shared memory is given at launch; no binary says how much.
        shared_bytes=compiled.metadata.shared,
        load_bits=(loop or listing).load_bits,
        store_bits=listing.store_bits,
        inner_loop_instructions=num_instructions,
        kv_bytes_per_iteration=per_iteration,
        instructions_per_kv_byte=(
            round(num_instructions * num_warps / per_iteration, 6)
            if num_instructions and per_iteration
            else None
        ),
    )


def _read_cubin(asm: dict[str, Any]) -> tuple[Listing, int, int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        code = _output_of(knobs.nvidia.nvdisasm.path, "--print-code", file.name)
        usage = _output_of(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
    listing, resources = parse_sass(code), parse_resources(usage)
    return listing, resources["REG"], listing.spill_bytes, resources["STACK"]


def _read_amdgcn(asm: dict[str, Any]) -> tuple[Listing, int, int, int]:
    listing, metadata = parse_amdgcn(asm["amdgcn"]), parse_metadata(asm["amdgcn"])
    # A scalar register that is parked in a lane of a vector register reaches no memory.
    spills = max(4 * metadata["vgpr_spill_count"], listing.spill_bytes)
    return listing, metadata["vgpr_count"], spills, metadata["private_segment_fixed_size"]


def _output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _kv_bytes(launch: Launch, loop: Listing, target: GPUTarget) -> int | None:
    """K/V bytes that a thread block reads in one pass of the loop in the binary.

    The kernel's constants say what one tile is. A compiler may unroll the loop: how
    often is the number of tiles whose bytes the loop's loads add up to.
    """
    tile_tokens = launch.tile_tokens
    if tile_tokens is None:
        return None
    item_bytes = 2 if "16" in launch.signature["key_cache"] else 4
    tile_bytes = 2 * tile_tokens * int(launch.constant("HEAD_DIM")) * item_bytes
    threads = int(target.warp_size * launch.options["num_warps"])
    return tile_bytes * max(1, round(loop.loaded_bytes * threads / tile_bytes))
