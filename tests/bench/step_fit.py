"""From samples of steps to a cost model: what each step had to do, and the fit.

`calibrate.py` says how the samples are taken.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields

import numpy as np
from numpy.typing import NDArray
from octavo_client import StepSample
from octavo_client.bench.measure import Record

from scheduler_svc.simulator import LinearCost, StepWork

_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_MAX_PAUSE_NS = 5_000_000
_SAME_STEP_SECONDS = 0.02
_ROUNDS_OF_WEIGHTS = 4
_MIN_SUPPORT = 2.0
_MIN_STEPS = 20
_Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the executor that was measured, as `LinearCost` has them."""

    num_blocks: int
    block_size: int
    num_host_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(slots=True)
class Samples:
    """Steps whose work is known, and what is on top of steps.

    Attributes:
        works, seconds: parallel.
        wire_seconds: one way between scheduler and executor, a sample per step.
        client_seconds: of a lone request's time to its first token, what neither its steps
            nor the wire took: client, API and back.
        left_out: phases whose samples did not fit.
        moved_seconds: per moved block, a sample per phase that moved some.
    """

    works: list[StepWork] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    wire_seconds: list[float] = field(default_factory=list)
    client_seconds: list[float] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    moved_seconds: list[float] = field(default_factory=list)

    def add(self, others: Iterable[Samples]) -> Samples:
        """Take in others; returns itself."""
        for other in others:
            for name in self.__slots__:
                getattr(self, name).extend(getattr(other, name))
        return self


# -- what a step had to do ---------------------------------------------------------


def seconds_of(step: StepSample) -> float:
    """Time of a step on its executor, with the pause before it unless nothing was to be done."""
    pause = step.idle_ns if step.idle_ns <= _MAX_PAUSE_NS else 0
    return (pause + step.prepare_ns + step.forward_ns + step.sample_ns) / 1e9


def works_of(records: Sequence[Record], steps: Sequence[StepSample]) -> list[StepWork] | None:
    """Say what every step had to do; None if the samples do not fit the lengths.

    Requests of one moment may arrive in another order than they were sent; their first tokens
    tell, except for those that came in one step.
    """

    def first_token(record: Record) -> float:
        return record.sent_at + record.ttft

    sent = sorted(records, key=lambda r: r.sent_at)
    drawn = sorted(sent, key=first_token)
    rounded = sorted(sent, key=lambda r: round(first_token(r) / _SAME_STEP_SECONDS))
    for order in (sent, drawn, rounded):
        works = _replay(
            [(len(r.request.prompt), r.request.num_output_tokens) for r in order], steps
        )
        if works is not None:
            return works
    return None


def _replay(
    lengths: Iterable[tuple[int, int]], steps: Iterable[StepSample]
) -> list[StepWork] | None:
    waiting = deque(lengths)
    first = 0  # of the prompt at the head, what is prefilled
    decoding: list[list[int]] = []  # tokens known, decodes left
    works = []
    for step in steps:
        if step.num_decodes != len(decoding):
            return None
        work = StepWork(len(decoding), sum(known for known, _ in decoding), [])
        assert work.prefills is not None
        for sequence in decoding:
            sequence[0] += 1
            sequence[1] -= 1
        entering, budget = [], step.num_chunk_tokens
        while budget:
            if not waiting:
                return None
            num_prompt, num_output = waiting[0]
            count = min(budget, num_prompt - first)
            work.prefills.append((first, count))
            first, budget = first + count, budget - count
            if first == num_prompt:
                entering.append([num_prompt + 1, num_output - 1])
                waiting.popleft()
                first = 0
        work.num_sampled = work.num_decodes + len(entering)
        if work.num_sampled != step.num_sampled:
            return None
        decoding = [each for each in (*decoding, *entering) if each[1]]
        works.append(work)
    return None if waiting or decoding else works


# -- the fit -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost model, and how well it tells the steps that it was fitted to.

    Attributes:
        bias: seconds told ÷ seconds seen, of all steps together.
        error_p50, error_p90: of single steps, relative.
    """

    cost: LinearCost
    num_steps: int
    bias: float
    error_p50: float
    error_p90: float


def fit(samples: Samples, sizes: Sizes, name: str) -> Fit:
    """Fit the cost model to samples.

    Raises:  RuntimeError: if there are too few.
    """
    if len(samples.works) < _MIN_STEPS:
        raise RuntimeError(f"only {len(samples.works)} steps: left out {samples.left_out}")
    terms = np.array([LinearCost.terms(work) for work in samples.works], dtype=np.float64)
    seen = np.array(samples.seconds)
    knots = _supported_knots(terms[:, 1])
    names = [n for n in LinearCost.TERMS if n.startswith(("per_sequence", "per_decode", "per_pre"))]
    hats = np.array([[_hat(knots, k, x) for k in range(len(knots))] for x in terms[:, 1]])
    columns = np.hstack([hats, terms[:, [LinearCost.TERMS.index(n) for n in names]]])
    told = seen
    for _ in range(_ROUNDS_OF_WEIGHTS):  # by what is told: by what is seen, slow steps count less
        solution = nonnegative_least_squares(columns / told[:, None], seen / told)
        told = np.maximum(columns @ solution, 1e-6)
    coefficients = dict(zip(names, solution[len(knots) :].tolist(), strict=True))
    if samples.moved_seconds:
        moved = statistics.median(samples.moved_seconds)
        # A copy on the device of a CPU is the same copy in memory.
        coefficients |= {"per_moved_block": moved, "per_copied_block": moved}
    cost = LinearCost(
        name,
        coefficients,
        token_curve=tuple(zip(map(float, knots), solution[: len(knots)].tolist(), strict=True)),
        **asdict(sizes),
    )
    errors = np.abs(told / seen - 1)
    return Fit(
        cost,
        len(seen),
        float(told.sum() / seen.sum()),
        float(np.percentile(errors, 50)),
        float(np.percentile(errors, 90)),
    )


def nonnegative_least_squares(a: _Matrix, b: _Matrix) -> _Matrix:
    """Minimize |a x - b| over x at least 0 (Lawson and Hanson, 1974, chapter 23)."""
    norms = np.linalg.norm(a, axis=0)
    norms[norms == 0] = 1.0
    a = a / norms
    x = np.zeros(a.shape[1])
    is_free = np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * a.shape[1]):
        slope = np.where(is_free, -np.inf, a.T @ (b - a @ x))
        best = int(np.argmax(slope))
        if slope[best] <= 1e-9:
            break
        is_free[best] = True
        while is_free.any():
            trial = np.zeros_like(x)
            trial[is_free] = np.linalg.lstsq(a[:, is_free], b, rcond=None)[0]
            if (trial[is_free] > 0).all():
                x = trial
                break
            low = is_free & (trial <= 0)
            x = x + (x[low] / np.maximum(x[low] - trial[low], 1e-300)).min() * (trial - x)
            is_free &= x > 1e-12
            x[~is_free] = 0.0
    return x / norms


def _supported_knots(num_tokens: _Matrix) -> list[int]:
    """Points of the curve that steps lie near; the ends are the smallest and largest step."""
    low, high = int(num_tokens.min()), int(num_tokens.max())
    knots = [low, *(k for k in _KNOTS if low < k < high), high]
    for inner in knots[1:-1]:
        index = knots.index(inner)
        if sum(_hat(knots, index, x) for x in num_tokens) < _MIN_SUPPORT:
            knots.remove(inner)
    return knots


def _hat(knots: Sequence[int], index: int, x: float) -> float:
    """Weight of a knot in the piecewise linear value at x."""
    here = knots[index]
    if x < here:
        before = knots[index - 1] if index else here - 1
        return float(max(0.0, (x - before) / (here - before)))
    after = knots[index + 1] if index + 1 < len(knots) else here + 1
    return float(max(0.0, (after - x) / (after - here)))


def as_json(found: Fit, samples: Samples, command: str) -> str:
    """Write the calibration as `LinearCost.load` reads it, and how it was found."""
    cost = found.cost
    return json.dumps(
        {
            "name": cost.name,
            **{each.name: getattr(cost, each.name) for each in fields(Sizes)},
            "seconds": {each: _short(value) for each, value in cost.coefficients.items()},
            "token_curve": [[tokens, _short(value)] for tokens, value in cost.token_curve],
            "measured": {
                "by": command,
                "num_steps": found.num_steps,
                "bias": _short(found.bias),
                "error_p50": _short(found.error_p50),
                "error_p90": _short(found.error_p90),
                "wire_seconds": _short(wire_seconds(samples)),
                "client_seconds": _short(client_seconds(samples)),
            },
        },
        indent=1,
    )


def wire_seconds(samples: Samples) -> float:
    """One way between scheduler and executor, in the middle."""
    return statistics.median(samples.wire_seconds)


def client_seconds(samples: Samples) -> float:
    """Of a request's time to its first token, what is the client's and the API's."""
    return statistics.median(samples.client_seconds or [0.0])


def _short(value: float) -> float:
    return float(f"{value:.5g}")
