"""Clocks for what a device does: the GPU's own, and one that needs no GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]
Sampler = Callable[[], float]

_ROUNDS = 3
_WARMUP_MS = 5
_SAMPLE_MS = 20


class Timer(Protocol):
    """Measures calls on one device."""

    def sampler(self, call: Call, *, captured: bool = True) -> Sampler:
        """Make ready to time a call.

        Args:
            call: launches work; it is called at least once here.
            captured: the call may be recorded once and replayed, so that the time the host
                takes to launch does not count.
        Returns: what measures anew each time, in seconds a call.
        """

    def launches(self, call: Call) -> int | None:
        """How many kernels a call launches; None if that cannot be seen."""

    def release(self) -> None:
        """Give memory back that nothing uses any more."""


def alternate(samplers: Mapping[str, Sampler], rounds: int = _ROUNDS) -> dict[str, float]:
    """Time several calls in turn, A B C A B C …, so that drift falls on all alike.

    Returns: the median of each one's rounds, in seconds.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sampler in samplers.items():
            samples[name].append(sampler())
    return {name: median(each) for name, each in samples.items()}


class CudaTimer:
    """Times by the GPU's events, each call with a cold second-level cache."""

    def sampler(self, call: Call, *, captured: bool = True) -> Sampler:
        """See `Timer`."""
        from triton.testing import do_bench

        call()  # compiles
        torch.cuda.synchronize()
        launch = capture(call) if captured else call

        def sample() -> float:
            milliseconds: float = do_bench(
                launch, warmup=_WARMUP_MS, rep=_SAMPLE_MS, return_mode="median"
            )
            return milliseconds / 1e3

        return sample

    def launches(self, call: Call) -> int | None:
        """See `Timer`."""
        call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        kernels = [
            event
            for event in profiler.events()
            if event.device_type.name == "CUDA" and not event.name.startswith("Mem")
        ]
        return len(kernels) or None

    def release(self) -> None:
        """See `Timer`."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class WallTimer:
    """Times by the host's clock, one call each: for trying a run out where there is no GPU."""

    def sampler(self, call: Call, *, captured: bool = True) -> Sampler:  # noqa: ARG002 - nothing to capture
        """See `Timer`."""
        call()

        def sample() -> float:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin

        return sample

    def launches(self, call: Call) -> int | None:
        """See `Timer`."""
        call()
        return None

    def release(self) -> None:
        """See `Timer`."""


def capture(call: Call) -> Call:
    """Record what a call launches as a CUDA graph; the result launches the same again."""
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped there
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Call = graph.replay
    return replay
