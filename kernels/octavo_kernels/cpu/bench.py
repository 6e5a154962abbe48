"""`octavo bench attention`: compiled attention against the memory's speed and the reference.

Everything alternates in one run, on data that no cache holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.cpu.build import KernelsUnavailable
from octavo_kernels.cpu.library import library
from octavo_kernels.cpu.plans import plan_decode, plan_prefill

_METHOD = """\
Decode: one token for each sequence, contexts evenly spaced from --shortest to --longest,
blocks in random order, over as many layers as make the K/V at least --mib MiB: more than
the caches hold. gb_per_s is the K and V bytes of the contexts over the time of all layers.
stream_gb_per_s is a sum of all 32-bit words of the same pool, by the same threads.
reference_ratio is the time of gather and torch's SDPA over ours.

Prefill: one chunk of --chunk queries that ends a context of as many, or of four times as
many. gflop_per_s counts the scores that causality allows, twice 2 * head_dim operations
each; gemm_gflop_per_s is torch's fp32 product of two 1024 x 1024 matrices.

The contestants take turns, --rounds times. Speeds are medians, and a ratio is the median
of the rounds' own ratios, so that other load hits both sides; best_ratio is of the
fastest rounds of each.
"""


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """What decode attention reached with one dtype."""

    dtype: str
    batch: int
    kv_mib: float
    gb_per_s: float
    stream_gb_per_s: float
    ratio: float
    best_ratio: float
    reference_ratio: float


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """What prefill attention reached with one dtype and context."""

    dtype: str
    chunk: int
    context: int
    gflop_per_s: float
    gemm_gflop_per_s: float
    ratio: float
    best_ratio: float
    reference_ratio: float


class _Pool:
    """Contexts of given lengths in random blocks of `num_layers` layers."""

    def __init__(
        self, heads: Heads, lengths: list[int], num_layers: int, dtype: torch.dtype
    ) -> None:
        needed = [-(-length // heads.block_size) for length in lengths]
        shape = (num_layers, 2, sum(needed), heads.block_size, heads.num_kv_heads, heads.head_dim)
        self.blocks = torch.empty(shape, dtype=dtype)
        for layer in self.blocks:
            layer.normal_()
        self.tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
        order = torch.randperm(sum(needed), dtype=torch.int32)
        for table, blocks in zip(self.tables, torch.split(order, needed), strict=True):
            table[: len(blocks)] = blocks
        self.lengths = torch.tensor(lengths, dtype=torch.int32)


def measure_decode(
    heads: Heads, lengths: list[int], dtype: torch.dtype, *, least_bytes: int, rounds: int
) -> DecodeFigures:
    """Let the compiled kernel, a plain read and the reference take turns."""
    size = 2 * heads.num_kv_heads * heads.head_dim * dtype.itemsize
    num_layers = -(-least_bytes // (sum(lengths) * size))
    pool = _Pool(heads, lengths, num_layers, dtype)
    num_bytes = sum(lengths) * size * num_layers
    scale = heads.head_dim**-0.5
    query = torch.randn(len(lengths), heads.num_heads, heads.head_dim).to(dtype)
    out = torch.empty_like(query)
    plan = plan_decode(
        pool.tables, pool.lengths, key_cache=pool.blocks[0, 0], num_heads=heads.num_heads
    )
    buckets = reference.bucket_contexts(
        pool.tables, lengths, block_size=heads.block_size, dtype=dtype
    )

    def compiled() -> None:
        for layer in pool.blocks:
            plan.run(query, layer[0], layer[1], out, scale=scale)

    def gathered() -> None:
        for layer in pool.blocks:
            reference.attend_buckets(
                query, layer[0], layer[1], buckets, scale=scale, softcap=None, out=out
            )

    ours, stream, theirs = _take_turns([compiled, lambda: _read(pool.blocks), gathered], rounds)
    read_bytes = pool.blocks.numel() * dtype.itemsize
    return DecodeFigures(
        dtype=_name(dtype),
        batch=len(lengths),
        kv_mib=round(num_bytes / 2**20, 1),
        gb_per_s=_round(num_bytes / statistics.median(ours) / 1e9),
        stream_gb_per_s=_round(read_bytes / statistics.median(stream) / 1e9),
        ratio=_round(num_bytes / read_bytes * _median_ratio(stream, ours)),
        best_ratio=_round(num_bytes / read_bytes * min(stream) / min(ours)),
        reference_ratio=_round(_median_ratio(theirs, ours)),
    )


def measure_prefill(
    heads: Heads, chunk: int, context: int, dtype: torch.dtype, *, rounds: int
) -> PrefillFigures:
    """Let the compiled kernel, a product of matrices and the reference take turns."""
    pool = _Pool(heads, [context], 1, dtype)
    keys, values = pool.blocks[0]
    scale = heads.head_dim**-0.5
    query = torch.randn(chunk, heads.num_heads, heads.head_dim).to(dtype)
    out = torch.empty_like(query)
    plan = plan_prefill(
        pool.tables,
        pool.lengths,
        query_starts=torch.tensor([0, chunk]),
        key_cache=keys,
        num_heads=heads.num_heads,
    )
    layout = reference.chunk_context(
        pool.tables[0], chunk, context, block_size=heads.block_size, dtype=dtype
    )
    matrix = torch.randn(1024, 1024)
    ours, gemm, theirs = _take_turns(
        [
            lambda: plan.run(query, keys, values, out, scale=scale),
            lambda: torch.mm(matrix, matrix),
            lambda: reference.attend_chunk(
                query, keys, values, layout, scale=scale, softcap=None, out=out
            ),
        ],
        rounds,
    )
    scores = heads.num_heads * (chunk * context - chunk * (chunk - 1) // 2)
    ops, gemm_ops = 4 * heads.head_dim * scores, 2 * 1024**3
    return PrefillFigures(
        dtype=_name(dtype),
        chunk=chunk,
        context=context,
        gflop_per_s=_round(ops / statistics.median(ours) / 1e9),
        gemm_gflop_per_s=_round(gemm_ops / statistics.median(gemm) / 1e9),
        ratio=_round(ops / gemm_ops * _median_ratio(gemm, ours)),
        best_ratio=_round(ops / gemm_ops * min(gemm) / min(ours)),
        reference_ratio=_round(_median_ratio(theirs, ours)),
    )


def main(argv: list[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: flags; the process's own if None.
    Returns: exit status.
    """
    options = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        library()
    except KernelsUnavailable as error:
        sys.stderr.write(f"octavo bench attention: {error}\n")
        return 1
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    heads = Heads(options.heads, options.kv_heads, options.head_dim, options.block_size)
    step = (options.longest - options.shortest) / max(1, options.batch - 1)
    lengths = [round(options.shortest + step * place) for place in range(options.batch)]
    dtypes = [getattr(torch, name) for name in options.dtypes.split(",")]
    with torch.inference_mode():
        decode = [
            measure_decode(
                heads, lengths, dtype, least_bytes=options.mib << 20, rounds=options.rounds
            )
            for dtype in dtypes
        ]
        prefill = [
            measure_prefill(heads, options.chunk, context, dtype, rounds=4 * options.rounds)
            for dtype in dtypes
            for context in (options.chunk, 4 * options.chunk)
        ]
    report = {
        **asdict(decode[0]),
        "heads": asdict(heads),
        "num_threads": torch.get_num_threads(),
        "other_dtypes": [asdict(each) for each in decode[1:]],
        "prefill": [asdict(each) for each in prefill],
    }
    if options.json == "-":
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return 0
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(_table(decode, prefill)) + "\n")
    return 0


def _read(blocks: Tensor) -> None:
    num_bytes = blocks.numel() * blocks.element_size()
    library().octavo_read(blocks.data_ptr(), num_bytes, torch.get_num_threads())


def _take_turns(contestants: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each contestant in each round, after one that does not count."""
    times: list[list[float]] = [[] for _ in contestants]
    for turn in range(rounds + 1):
        for run, seconds in zip(contestants, times, strict=True):
            begin = time.perf_counter()
            run()
            if turn:
                seconds.append(time.perf_counter() - begin)
    return times


def _median_ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _table(decode: list[DecodeFigures], prefill: list[PrefillFigures]) -> list[str]:
    lines = ["decode      GB/s   read GB/s   of read   best   gather+SDPA takes"]
    lines += [
        f"{each.dtype:10}{each.gb_per_s:6.1f}{each.stream_gb_per_s:12.1f}"
        f"{each.ratio:10.0%}{each.best_ratio:7.0%}{each.reference_ratio:12.1f} x"
        for each in decode
    ]
    lines += ["", "prefill   queries  context  GFLOP/s   of GEMM   best   gather+SDPA takes"]
    lines += [
        f"{each.dtype:10}{each.chunk:7}{each.context:9}{each.gflop_per_s:9.1f}"
        f"{each.ratio:10.0%}{each.best_ratio:7.0%}{each.reference_ratio:12.1f} x"
        for each in prefill
    ]
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo bench attention",
        description=__doc__,
        epilog=_METHOD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag, default, text in (
        ("--batch", 32, "sequences that decode"),
        ("--shortest", 320, "least context, in tokens"),
        ("--longest", 2048, "greatest context, in tokens"),
        ("--heads", 9, "query heads; the defaults are SmolLM2-135M's"),
        ("--kv-heads", 3, "K/V heads"),
        ("--head-dim", 64, "elements of a head"),
        ("--block-size", 16, "tokens of a block"),
        ("--chunk", 512, "queries of the prefill"),
        ("--mib", 128, "least MiB of K/V in decode, all layers together"),
        ("--rounds", 7, "turns of each contestant"),
        ("--threads", 0, "CPU threads; 0: torch's number"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--dtypes",
        default="bfloat16,float32",
        help="of K/V, by commas; the first is the report's own (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report there; -: to stdout")
    return parser


if __name__ == "__main__":
    sys.exit(main())
