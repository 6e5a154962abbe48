"""When and what is recorded of decode steps, and what happens where nothing can be.

Results are of no interest here: without a GPU, tensors are on torch's meta device and the
kernels do not run.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from octavo_kernels.triton_ops.splits import Scratch
from structlog.testing import capture_logs
from torch import Tensor

from executor_svc.capture_guard import NotCapturable
from executor_svc.cuda_graphs import DecodeGraphs, Run, record_decodes
from executor_svc.model_loader import LoadedModel
from tests.kernels.graph_support import (
    CONFIGS,
    LIMITS,
    Counted,
    NoLaunch,
    StandIn,
    load,
    new_pool,
    recorder_for,
)


@pytest.fixture(autouse=True)
def _many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that small batches do not fill, so that contexts are cut into parts."""
    monkeypatch.setattr(
        "octavo_kernels.triton_ops.paged_attention._num_processors", lambda device: 16
    )


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
