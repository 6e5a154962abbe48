"""Which cases `make gpu-check` runs, the most telling first, and how long they may take."""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo_kernels.gpu_check.cases import Case, CopyCase, DecodeCase, PrefillCase, SwapCase

_DEFAULT = "Llama-3.1-8B"
_OTHERS = ("SmolLM2-135M", "Gemma-2-9B")
_BATCHES = (1, 16, 64, 256)
_CONTEXTS = (128, 1024, 8192, 32768)
# Prefix and tokens.
_CHUNKS = ((0, 4096), (0, 1024), (0, 16384), (7680, 512))
# A target stands for batches and contexts from these on.
JUDGED_BATCH = 64
JUDGED_CONTEXT = 1024


def is_judged(case: DecodeCase) -> bool:
    """Whether the targets of decodes hold for a case."""
    return case.batch >= JUDGED_BATCH and case.context >= JUDGED_CONTEXT


def standard_suite() -> list[Case]:
    """List all cases: what the targets are about, then the rest, model by model."""
    first, *rest = [
        (model, block_size) for block_size in (16, 64) for model in (_DEFAULT, *_OTHERS)
    ]
    return [
        *_decodes(*first, judged=True),
        *(PrefillCase(*first, prefix, tokens) for prefix, tokens in _CHUNKS),
        CopyCase(*first, num_copies=1000),
        SwapCase(*first, num_swaps=256),
        *(case for each in rest for case in _decodes(*each, judged=True)),
        *_decodes(*first, judged=False),
        *(PrefillCase(*each, prefix, tokens) for each in rest for prefix, tokens in _CHUNKS),
        *(case for each in rest for case in _decodes(*each, judged=False)),
    ]


def _decodes(model: str, block_size: int, *, judged: bool) -> list[DecodeCase]:
    every = [
        DecodeCase(model, block_size, batch, context) for batch in _BATCHES for context in _CONTEXTS
    ]
    return [case for case in every if is_judged(case) == judged]


class Budget:
    """Seconds that a run may take, counted from its making."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._seconds = seconds

    @property
    def spent_seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._start

    def allows(self, seconds: float) -> bool:
        """Whether something that takes `seconds` would still end in time."""
        return self.spent_seconds + seconds <= self._seconds
