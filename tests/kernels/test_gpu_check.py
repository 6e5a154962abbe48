"""The measurement of a GPU, without one: its arithmetic, and a tiny run in the interpreter."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from octavo_kernels.gpu_check import timers
from octavo_kernels.gpu_check.__main__ import check, environment, main
from octavo_kernels.gpu_check.cases import (
    GIB,
    Case,
    CopyCase,
    DecodeCase,
    PrefillCase,
    SwapCase,
    Yardsticks,
)
from octavo_kernels.gpu_check.measure import Device, Measurement, run
from octavo_kernels.gpu_check.report import has_passed, in_short, judge, table
from octavo_kernels.gpu_check.suite import Budget, is_judged, standard_suite
from octavo_kernels.gpu_check.timers import Call, CudaTimer, Sampler, WallTimer, alternate

LLAMA = "Llama-3.1-8B"
YARDSTICKS = Yardsticks(copy_bytes=4 * 10**9, gemm_size=1000)
TINY = Yardsticks(copy_bytes=1024, gemm_size=16)
CPU = torch.device("cpu")


def decode(batch: int = 64, context: int = 1024, **figures: float) -> Measurement:
    return Measurement(DecodeCase(LLAMA, 16, batch, context), {}, dict(figures))


def good() -> list[Measurement]:
    """One case of each kind, well within the targets."""
    return [
        decode(share_of_copy=0.9, paging_overhead=0.01),
        Measurement(PrefillCase(LLAMA, 16, 0, 1024), {}, {"paging_overhead": 0.02}),
        Measurement(CopyCase(LLAMA, 16, 1000), {}, {"many_launches": 1}),
    ]


def test_bytes_of_a_decode_are_those_of_its_keys_and_values():
    """Keys and values of 64 x 1,000 tokens, 8 heads of 128, 2 bytes each; blocks are whole."""
    case = DecodeCase(LLAMA, 16, 64, 1000)
    assert case.kv_bytes == 2 * 64 * 1000 * 8 * 128 * 2
    assert case.num_blocks == 64 * 63
    assert case.memory_bytes == case.peer_bytes == 64 * 63 * 16 * 4096


def test_a_decode_is_held_against_the_copy_and_its_peers():
    """Read bytes a second, by a copy's; then how much longer the others took."""
    case = DecodeCase(LLAMA, 16, 64, 1024)
    milliseconds = {"copy": 2, "paged": 0.2, "contiguous": 0.16, "sdpa": 0.4}
    seconds = {name: each / 1e3 for name, each in milliseconds.items()}
    figures = case.figures(seconds, YARDSTICKS)
    assert figures["gb_per_s"] == pytest.approx(268.435456 / 0.2)
    assert figures["share_of_copy"] == pytest.approx(268.435456 / 0.2 / 2000)
    assert figures["paging_overhead"] == pytest.approx(0.25)
    assert figures["faster_than_sdpa"] == pytest.approx(2)
    assert "faster_than_gather_and_sdpa" not in figures


def test_operations_of_a_prefill_are_those_under_its_mask():
    """Three queries behind two tokens see 3 + 4 + 5 keys; each costs 4 x 32 x 128."""
    case = PrefillCase(LLAMA, 16, prefix=2, tokens=3)
    assert case.flops == 12 * 4 * 32 * 128
    figures = case.figures({"paged": 1e-6, "contiguous": 1e-6, "gemm": 1e-3}, YARDSTICKS)
    assert figures["tflop_per_s"] == pytest.approx(0.196608)
    assert figures["share_of_gemm"] == pytest.approx(0.196608 / 2)
    assert figures["paging_overhead"] == 0


def test_copies_and_swaps_count_all_layers():
    """A block of 16 tokens is 2 MiB over Llama's 32 layers; a copy reads and writes it."""
    copies = CopyCase(LLAMA, 16, 1000)
    assert copies.block_bytes == 2 * 2**20
    assert copies.memory_bytes == 2000 * 2 * 2**20
    figures = copies.figures({"one": 1e-5, "many": 4e-3, "copy": 4e-3}, YARDSTICKS)
    assert figures["many_us"] == pytest.approx(4000)
    assert figures["share_of_copy"] == pytest.approx(2 * 1000 * 2 * 2**20 / 4e9)
    swaps = SwapCase(LLAMA, 16, 256)
    assert swaps.moved_bytes == 256 * 2 * 2**20
    times = {"out": 0.02, "in": 0.01, "plain_out": 0.01, "plain_in": 0.01}
    figures = swaps.figures(times, YARDSTICKS)
    assert figures["out_share_of_plain"] == pytest.approx(0.5)
    assert figures["in_gb_per_s"] == pytest.approx(53.6870912)


def test_the_suite_begins_with_what_the_targets_are_about():
    """All shapes, models and block sizes are in it once, Llama's judged decodes first."""
    suite = standard_suite()
    assert len(set(suite)) == len(suite)
    decodes = [case for case in suite if isinstance(case, DecodeCase)]
    assert len(decodes) == 3 * 2 * 4 * 4
    assert all(isinstance(case, DecodeCase) and is_judged(case) for case in suite[:6])
    assert {case.model for case in suite[:12]} == {LLAMA}
    kinds = [case.kind for case in suite]
    assert max(map(kinds.index, ("prefill", "copy", "swap"))) < 12


def test_the_budget_counts_from_its_making():
    """What would end too late is not allowed any more."""
    now = [100.0]
    budget = Budget(60, clock=lambda: now[0])
    assert budget.allows(60)
    now[0] = 145.0
    assert budget.spent_seconds == 45
    assert budget.allows(15)
    assert not budget.allows(16)


def test_calls_are_timed_in_turn():
    """A B A B A B, and of each the median."""
    order: list[str] = []

    def sampler(name: str, samples: list[float]) -> Sampler:
        return lambda: (order.append(name), samples.pop(0))[1]

    medians = alternate({"a": sampler("a", [3, 1, 2]), "b": sampler("b", [9, 9, 1])})
    assert medians == {"a": 2, "b": 9}
    assert order == ["a", "b"] * 3


class FakeCuda:
    """Stands in for `torch.cuda`: keeps the order of what it is asked for."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.is_capturing = False

    def synchronize(self) -> None:
        self.done.append("synchronize")

    def current_stream(self) -> FakeCuda:
        return self

    Stream = current_stream
    CUDAGraph = current_stream

    def wait_stream(self, _other: FakeCuda) -> None:
        self.done.append("wait")

    def stream(self, _stream: FakeCuda) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def graph(self, _graph: FakeCuda) -> Iterator[None]:
        self.is_capturing = True
        yield
        self.is_capturing = False

    def replay(self) -> None:
        self.done.append("replay")

    def call(self) -> None:
        self.done.append("captured" if self.is_capturing else "call")


def test_the_gpu_timer_replays_what_it_captured(monkeypatch: pytest.MonkeyPatch):
    """Called to compile, once more beside the stream, captured; then replays are timed."""
    cuda = FakeCuda()
    monkeypatch.setattr(timers.torch, "cuda", cuda)

    def do_bench(call: Call, **options: Any) -> float:
        assert options["return_mode"] == "median"
        call()
        return 2.0  # milliseconds

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    sample = CudaTimer().sampler(cuda.call)
    assert cuda.done == ["call", "synchronize", "wait", "call", "wait", "captured"]
    assert sample() == 0.002
    assert cuda.done[-1] == "replay"
    plain = CudaTimer().sampler(cuda.call, captured=False)
    assert plain() == 0.002
    assert cuda.done[-1] == "call"


def test_the_gpu_timer_counts_kernels_only(monkeypatch: pytest.MonkeyPatch):
    """Not what the host does, nor copies and fills of memory; none at all is not known."""
    on_gpu, on_host = SimpleNamespace(name="CUDA"), SimpleNamespace(name="CPU")
    events = [
        SimpleNamespace(name="attend_split", device_type=on_gpu),
        SimpleNamespace(name="merge_splits", device_type=on_gpu),
        SimpleNamespace(name="Memcpy HtoD", device_type=on_gpu),
        SimpleNamespace(name="cudaLaunchKernel", device_type=on_host),
    ]

    def profile(activities: list[Any]) -> contextlib.nullcontext[SimpleNamespace]:
        return contextlib.nullcontext(SimpleNamespace(events=lambda: events))

    monkeypatch.setattr(timers.torch, "cuda", FakeCuda())
    monkeypatch.setattr(timers, "profile", profile)
    assert CudaTimer().launches(lambda: None) == 2
    del events[:2]
    assert CudaTimer().launches(lambda: None) is None


def test_targets_that_are_met():
    """A run within all targets passes."""
    verdicts = judge(good())
    assert [verdict.met for verdict in verdicts] == [True] * 4
    assert has_passed(good(), verdicts)


@pytest.mark.parametrize(
    ("worse", "said"),
    [
        (decode(share_of_copy=0.84, paging_overhead=0.0), "of copy bandwidth"),
        (decode(share_of_copy=0.9, paging_overhead=0.06), "paging costs decode"),
        (
            Measurement(PrefillCase(LLAMA, 16, 0, 1024), {}, {"paging_overhead": 0.06}),
            "paging costs prefill",
        ),
        (Measurement(CopyCase(LLAMA, 16, 1000), {}, {"many_launches": 3}), "one launch"),
    ],
)
def test_one_case_can_miss_a_target(worse: Measurement, said: str):
    """The worst case decides, and is named."""
    measured = [*good(), worse]
    verdicts = judge(measured)
    (missed,) = [verdict for verdict in verdicts if not verdict.met]
    assert said in missed.target
    assert missed.num_cases == 2
    assert missed.worst_case == worse.case.name
    assert not has_passed(measured, verdicts)
    assert f"MISSED  {missed.target}" in table(measured, verdicts)


def test_small_batches_and_short_contexts_are_not_judged():
    """The targets are about large ones."""
    measured = [*good(), decode(16, share_of_copy=0.1), decode(context=128, share_of_copy=0.1)]
    assert has_passed(measured, judge(measured))


def test_what_was_not_measured_is_not_met():
    """A run that left a target's cases out, or in which one failed, does not pass."""
    skipped = Measurement(DecodeCase(LLAMA, 16, 64, 1024), skipped="no time was left")
    verdicts = judge([skipped])
    assert [verdict.met for verdict in verdicts] == [None] * 4
    assert not has_passed([skipped], verdicts)
    assert "not measured" in table([skipped], verdicts)
    broken = [*good(), Measurement(DecodeCase(LLAMA, 16, 1, 128), failed="RuntimeError: no")]
    assert not has_passed(broken, judge(broken))
    assert "FAILED, RuntimeError: no" in table(broken, judge(broken))


def test_the_table_lines_its_columns_up():
    """Titles over figures, a kind at a time, without columns that nobody fills."""
    lines = table([decode(share_of_copy=0.912, paging_overhead=-0.01)], []).splitlines()
    assert lines[0].endswith("of copy  paging")
    assert lines[1].endswith("64 x 1024 tokens    91.2%   -1.0%")
    assert len(lines[0]) == len(lines[1])
    assert in_short(decode(share_of_copy=0.5)).endswith("tokens: of copy 50.0%")


class Broken(WallTimer):
    """A timer on whose device nothing runs."""

    def sampler(self, call: Call, *, captured: bool = True) -> Sampler:
        if captured:
            raise RuntimeError("misaligned address\nand more")
        return super().sampler(call)


def test_what_does_not_fit_is_skipped_and_what_fails_is_kept():
    """Neither ends the run."""
    large, small = DecodeCase(LLAMA, 16, 256, 32768), DecodeCase("SmolLM2-135M", 16, 1, 16)
    device = Device(CPU, Broken(), TINY, memory_bytes=GIB)
    measured = list(run([large, small], device, Budget(1000)))
    assert measured[0].skipped == "needs 32.0 GiB of 1.0 GiB"
    assert measured[1].failed == "RuntimeError: misaligned address"
    late = list(run([small], device, Budget(10), case_seconds=11))
    assert late[0].skipped == "no time was left"


SMOKE: list[Case] = [
    DecodeCase("SmolLM2-135M", 16, 2, 24),
    DecodeCase("Gemma-2-9B", 64, 1, 70),
    PrefillCase("SmolLM2-135M", 16, 0, 20),
    PrefillCase("SmolLM2-135M", 64, 30, 5),
    CopyCase("SmolLM2-135M", 16, 2),
    SwapCase("SmolLM2-135M", 16, 2),
]


def test_a_tiny_run_in_the_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Everything that a run does but the GPU's clock: each kind of case, the JSON, the table."""
    path = tmp_path / "gpu-check.json"
    passed = check(
        SMOKE,
        CPU,
        WallTimer(),
        TINY,
        Budget(3600),
        memory_bytes=GIB,
        where=environment("interpreter"),
        path=path,
    )
    assert not passed  # nothing is large enough to be judged
    document: dict[str, Any] = json.loads(path.read_text())
    assert document["device"] == "interpreter"
    assert document["torch"] == torch.__version__
    rows = document["measurements"]
    assert [row["failed"] + row["skipped"] for row in rows] == [""] * len(SMOKE)
    assert all(each > 0 for row in rows for each in row["seconds"].values())
    first, gemma, dense, behind, *_ = rows
    assert {"paged", "contiguous", "sdpa", "gather_and_sdpa", "copy"} == set(first["seconds"])
    assert gemma["notes"] == ["sdpa: has no soft-cap"]
    assert set(dense["seconds"]) == {"paged", "contiguous", "sdpa", "gemm"}
    assert behind["notes"] == ["sdpa: its causal mask knows no prefix"]
    assert rows[0]["case"]["model"] == "SmolLM2-135M"
    shown = capsys.readouterr()
    assert f"[{len(SMOKE)}/{len(SMOKE)}," in shown.err
    assert "not measured  decode >= 85% of copy bandwidth" in shown.out


def test_without_a_gpu_nothing_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One line says so, and the status is not that of a pass."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert capsys.readouterr().err == "gpu-check: there is no GPU here: nothing was checked\n"
