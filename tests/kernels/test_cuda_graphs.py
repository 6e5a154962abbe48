"""Decode steps from graphs, against the same steps launched one kernel at a time.

Without a GPU a stand-in keeps what it is given, under the guard against all that a graph
cannot hold, and runs it again on the same buffers for a replay. Under `-m gpu` the same
tests record and replay CUDA graphs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from octavo_kernels.triton_ops.splits import Scratch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from executor_svc import attention
from executor_svc.attention_choice import Attention
from executor_svc.batch import StepBatch, build_batch
from executor_svc.capture_guard import CaptureGuard, NotCapturable
from executor_svc.cuda_graphs import CudaRecorder, DecodeGraphs, Recorder, Run, record_decodes
from executor_svc.model_loader import LoadedModel
from executor_svc.model_runner import ModelRunner
from executor_svc.plan import Plan, RowStart
from executor_svc.pool import KvPool, KvShape
from executor_svc.rows import Limits, RowTable
from executor_svc.triton_attention import TritonStep

# The interpreter's logarithm of an empty split.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    # Soft-capped scores, and a sliding window in every other layer.
    "gemma2": Gemma2Config(**SHAPE, sliding_window=6, attn_logit_softcapping=20.0),
    "mistral": MistralConfig(**SHAPE, sliding_window=5),
    "qwen2": Qwen2Config(**SHAPE),
}
LIMITS = Limits(
    max_num_rows=5,
    max_model_len=512,
    block_size=8,
    num_device_blocks=40,
    num_host_blocks=0,
    vocab_size=97,
    max_num_batched_tokens=128,
)


class StandIn:
    """Replays by running again what was recorded; recording it runs it under the guard."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free_bytes = 100 << 20

    def rehearse(self, run: Run) -> None:
        run()

    def record(self, run: Run) -> Run:
        with CaptureGuard(self._device):
            run()
        self._free_bytes -= 3 << 20
        return run

    def free_bytes(self) -> int:
        return self._free_bytes

    def release(self) -> None:
        """There is nothing to give back."""


class Counted:
    """A recorder that tells what was asked of it."""

    def __init__(self, inner: Recorder) -> None:
        self._inner = inner
        self.calls: list[str] = []

    def rehearse(self, run: Run) -> None:
        self.calls.append("rehearse")
        self._inner.rehearse(run)

    def record(self, run: Run) -> Run:
        self.calls.append("record")
        replay = self._inner.record(run)

        def counted() -> None:
            self.calls.append("replay")
            replay()

        return counted

    def free_bytes(self) -> int:
        return self._inner.free_bytes()

    def release(self) -> None:
        self.calls.append("release")
        self._inner.release()


def recorder_for(device: str) -> Counted:
    where = torch.device(device)
    return Counted(CudaRecorder(where) if where.type == "cuda" else StandIn(where))


def load(config: PreTrainedConfig, device: str) -> LoadedModel:
    """Make a random model, the same each time, with logits that differ clearly."""
    attention.register()
    torch.manual_seed(7)
    with torch.device("meta" if device == "meta" else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.ATTENTION_NAME
        )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    return LoadedModel(
        model=model.eval().requires_grad_(False).to(device),
        device=torch.device(device),
        dtype=torch.float32,
        num_layers=2,
        vocab_size=97,
        max_model_len=LIMITS.max_model_len,
        layer_types=None,
        keeps_logits=True,
    )


def new_pool(device: torch.device) -> KvPool:
    """Make a pool of NaN."""
    pool = KvPool(
        KvShape(num_layers=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        block_size=LIMITS.block_size,
        num_device_blocks=LIMITS.num_device_blocks,
        num_host_blocks=0,
        device=device,
    )
    pool.device_blocks.fill_(torch.nan)
    return pool


@pytest.fixture(autouse=True)
def _many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that small batches do not fill, so that contexts are cut into parts."""
    monkeypatch.setattr(
        "octavo_kernels.triton_ops.paged_attention._num_processors", lambda device: 16
    )


class Pair:
    """The same rows on two runners, with graphs and without, each over a pool of its own."""

    def __init__(self, loaded: LoadedModel, recorder: Recorder) -> None:
        self.rows = RowTable(LIMITS)
        self.free_blocks = np.random.default_rng(5).permutation(LIMITS.num_device_blocks).tolist()
        self.eager = self._runner(loaded, None)
        pool = new_pool(loaded.device)
        self.graphs = DecodeGraphs(loaded, pool, LIMITS, recorder)
        self.graphed = self._runner(loaded, pool)

    def _runner(self, loaded: LoadedModel, graphed_pool: KvPool | None) -> ModelRunner:
        pool = graphed_pool or new_pool(loaded.device)
        make = partial(self._step, pool, Scratch(loaded.device))
        graphs = self.graphs if graphed_pool else None
        return ModelRunner(loaded, pool, Attention("triton", make), graphs)

    @staticmethod
    def _step(pool: KvPool, scratch: Scratch, batch: StepBatch) -> TritonStep:
        return TritonStep(pool, batch, pool.device_blocks.device, scratch)

    def start(self, row: int, length: int) -> RowStart:
        """Make a row of a prompt that is its own."""
        prompt = [(row * 31 + place * 7) % 97 for place in range(length)]
        blocks = [self.free_blocks.pop() for _ in range(-(-length // LIMITS.block_size))]
        return RowStart(row, prompt, length, blocks)

    def step(self, **fields: Any) -> None:
        """Run a plan on both: the same logits, the same tokens; tables grow by themselves."""
        going = {*self.rows.decode_rows.tolist(), *fields.get("decode_enter_rows", ())}
        going -= {*fields.get("decode_leave_rows", ()), *fields.get("finish_rows", ())}
        full = [
            row
            for row in sorted(going)
            if self.rows.num_computed[row] == self.rows.num_blocks[row] * LIMITS.block_size
        ]
        plan = Plan(
            append_rows=full, append_blocks=[self.free_blocks.pop() for _ in full], **fields
        )
        self.rows.apply(plan)
        batch = build_batch(self.rows, plan)
        expected = self.eager.forward(batch)
        got = self.graphed.forward(batch)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        tokens = expected.argmax(dim=-1)
        assert torch.equal(got.argmax(dim=-1), tokens)
        drawn = tokens.cpu().numpy()[batch.sample_logits]
        self.rows.append_tokens(batch.sample_rows, drawn)


def serve(pair: Pair) -> None:
    """Rows join, grow over the borders of blocks and splits, leave and are replaced."""
    starts = [pair.start(row, length) for row, length in enumerate([62, 16, 1])]
    pair.step(starts=starts, chunk_rows=[0, 1, 2], chunk_counts=[62, 16, 1])
    pair.step(decode_enter_rows=[0, 1, 2])  # 3 rows in a graph of 4
    pair.step()
    pair.step()
    pair.step(finish_rows=[1], starts=[pair.start(3, 9)], chunk_rows=[3], chunk_counts=[5])
    starts = [pair.start(row, 3 + row) for row in (1, 4)]
    pair.step(decode_leave_rows=[0, 2], starts=starts, chunk_rows=[3, 1, 4], chunk_counts=[4, 4, 7])
    pair.step(decode_enter_rows=[0, 1, 2, 3, 4])  # 5 rows in a graph of 8
    pair.step(decode_leave_rows=[0, 1], finish_rows=[4])  # 2 rows where 5 were
    pair.step(finish_rows=[3])
    pair.step(decode_enter_rows=[1, 0])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_replayed_steps_equal_those_launched_one_by_one(name: str, device: str) -> None:
    """Logits, greedy tokens and every slot of the pool, that of no row included."""
    recorder = recorder_for(device)
    pair = Pair(load(CONFIGS[name], device), recorder)
    assert pair.graphs.batch_sizes == (1, 2, 4, 8)
    assert recorder.calls == ["rehearse"] * 4 + ["record"] * 4
    recorder.calls.clear()
    serve(pair)
    # 10 steps, of which 3 have chunks; nothing is recorded again.
    assert recorder.calls == ["replay"] * 7
    torch.testing.assert_close(
        pair.graphed.pool.device_blocks, pair.eager.pool.device_blocks,
        atol=1e-4, rtol=1e-4, equal_nan=True,
    )  # fmt: skip


@pytest.mark.gpu
def test_a_replayed_step_does_not_wait_for_the_gpu() -> None:
    """From the batch to the logits, as torch itself sees it."""
    pair = Pair(load(CONFIGS["llama"], "cuda"), recorder_for("cuda"))
    rows, plan = pair.rows, Plan(decode_enter_rows=[0, 1])
    pair.step(starts=[pair.start(0, 5), pair.start(1, 9)], chunk_rows=[0, 1], chunk_counts=[5, 9])
    rows.apply(plan)
    batch = build_batch(rows, plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pair.graphed.forward(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class NoLaunch:
    """A kernel that is asked for and not run."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: object, **options: object) -> None:
        self.count += 1


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, NoLaunch]:
    """Kernels that do not run, so that tensors need not have values."""
    names = {
        "attend": "paged_attention.attend_split",
        "merge": "paged_attention.merge_splits",
        "write": "reshape_and_cache._reshape_and_cache_kernel",
    }
    stubs = {name: NoLaunch() for name in names}
    for name, path in names.items():
        monkeypatch.setattr(f"octavo_kernels.triton_ops.{path}", stubs[name])
    return stubs


@pytest.fixture
def site(device: str, request: pytest.FixtureRequest) -> str:
    """Where steps are recorded whose results are of no interest: the GPU, or nowhere."""
    if device == "cuda":
        return device
    request.getfixturevalue("kernels")
    return "meta"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_holds_nothing_that_a_graph_cannot(name: str, kernels: dict[str, NoLaunch]) -> None:
    """Models and launchers, where host and device are told apart."""
    loaded = load(CONFIGS[name], "meta")
    graphs = DecodeGraphs(loaded, new_pool(loaded.device), LIMITS, StandIn(loaded.device))
    assert graphs.batch_sizes == (1, 2, 4, 8)
    # Checked once; then each size is rehearsed and recorded, in two layers.
    assert kernels["attend"].count == kernels["write"].count == (1 + 4 + 4) * 2


OFFENCES: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "index.Tensor": lambda x: x[x > 0],
    "lift_fresh": lambda x: x + torch.from_numpy(np.zeros(32, np.float32)),
}


def plant(loaded: LoadedModel, offence: Callable[[Tensor], object]) -> None:
    """Let the model do something beside its work, in its last norm."""
    norm: Any = loaded.model.model.norm
    norm.register_forward_hook(lambda module, args, output: (offence(output), output)[1])


@pytest.mark.parametrize("name", OFFENCES)
def test_a_model_that_no_graph_can_hold_is_served_without(name: str, site: str) -> None:
    """It is found before a recording begins, and one line names what it does."""
    loaded = load(CONFIGS["llama"], site)
    plant(loaded, OFFENCES[name])
    recorder = recorder_for(site)
    with capture_logs() as logs:
        graphs = record_decodes(loaded, new_pool(loaded.device), LIMITS, recorder)
    assert graphs is None
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("cuda_graphs_given_up", "warning")
    ]
    assert logs[0]["reason"].startswith(f"NotCapturable: aten.{name}")
    assert recorder.calls == ["release"] * 2


def test_the_stand_in_catches_what_only_a_recording_does(kernels: dict[str, NoLaunch]) -> None:
    """The double is no weaker than the check before it: an offence that comes later."""
    loaded = load(CONFIGS["llama"], "meta")
    calls: list[int] = []
    # One pass is checked, four are rehearsed.
    plant(loaded, lambda x: calls.append(1) or (x.sum().item() if len(calls) > 5 else None))
    with pytest.raises(NotCapturable, match="item"):
        DecodeGraphs(loaded, new_pool(loaded.device), LIMITS, StandIn(loaded.device))


def test_memory_that_runs_out_is_given_back(site: str) -> None:
    """One line says so, and nothing of what was recorded is left when memory is released."""
    left: list[weakref.ref[Any]] = []

    class Short(Counted):
        def record(self, run: Run) -> Run:
            left.append(weakref.ref(run.func.__self__))  # type: ignore[attr-defined]  # a partial
            if len(left) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
            return super().record(run)

        def release(self) -> None:
            super().release()
            self.calls += ["held" for ref in left if ref() is not None]

    loaded = load(CONFIGS["llama"], site)
    recorder = Short(recorder_for(site))
    gc.disable()
    try:
        with capture_logs() as logs:
            graphs = record_decodes(loaded, new_pool(loaded.device), LIMITS, recorder)
    finally:
        gc.enable()
    assert graphs is None
    assert [line["reason"] for line in logs] == ["OutOfMemoryError: CUDA out of memory."]
    assert recorder.calls == ["release", *["rehearse"] * 4, *["record"] * 2, "release"]


def test_what_was_recorded_is_one_line(site: str) -> None:
    """How many graphs, how long it took, and what they keep."""
    loaded = load(CONFIGS["llama"], site)
    with capture_logs() as logs:
        graphs = record_decodes(loaded, new_pool(loaded.device), LIMITS, recorder_for(site))
    assert graphs is not None
    assert [(line["event"], line["count"]) for line in logs] == [("cuda_graphs_recorded", 4)]
    assert 0 <= logs[0]["seconds"] < 60
    assert logs[0]["mib"] == 12 if site == "meta" else logs[0]["mib"] >= 0


def test_scratch_memory_has_grown_before_anything_is_recorded(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No recording takes more of it than a rehearsal did."""
    recorder = recorder_for(site)
    taken: dict[str, int] = {}

    class Watched(Scratch):
        def reserve(self, *sizes: int) -> None:
            phase = recorder.calls[-1] if recorder.calls else "check"
            taken[phase] = max(taken.get(phase, 0), int(np.prod(sizes)))
            super().reserve(*sizes)

    monkeypatch.setattr("executor_svc.cuda_graphs.Scratch", Watched)
    loaded = load(CONFIGS["llama"], site)
    DecodeGraphs(loaded, new_pool(loaded.device), LIMITS, recorder)
    assert 0 < taken["record"] <= taken["rehearse"]


@pytest.mark.parametrize(
    ("max_num_rows", "max_num_batched_tokens", "sizes"),
    [
        (1, 64, [1]),
        (3, 64, [1, 2, 4]),
        (20, 64, [1, 2, 4, 8, 16, 24]),
        (256, 512, [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16)]),
        (256, 33, [1, 2, 4, 8, 16, 24, 32, 40]),
        (65536, 65536, [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32)]),
    ],
)
def test_batch_sizes(
    max_num_rows: int,
    max_num_batched_tokens: int,
    sizes: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to the largest step of decodes that can be, and no further than 512."""
    logits = torch.empty(1, 97, device="meta")
    monkeypatch.setattr("executor_svc.cuda_graphs.forward", lambda *_: logits)
    limits = replace(
        LIMITS, max_num_rows=max_num_rows, max_num_batched_tokens=max_num_batched_tokens
    )
    loaded = load(CONFIGS["llama"], "meta")
    graphs = DecodeGraphs(loaded, new_pool(loaded.device), limits, StandIn(loaded.device))
    assert list(graphs.batch_sizes) == sizes
