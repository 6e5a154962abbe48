"""What the baselines have in common: one executor, a queue, and one step after the other."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.simulator.hardware import Setup
from scheduler_svc.simulator.meter import Meter
from scheduler_svc.simulator.report import Report, Sample
from scheduler_svc.simulator.roofline import Roofline
from scheduler_svc.simulator.work import StepCost, StepWork
from scheduler_svc.simulator.workload import SimRequest, WorkloadError

_RESERVES = ("oracle", "pow2", "max")
_PROGRESS_STEPS = 2048


@dataclass(frozen=True, slots=True)
class BaselineConfig:
    """One executor of a baseline.

    Attributes:
        cost: of a step.
        num_slots: tokens of K/V that fit.
        max_len: longest sequence.
        reserve: "oracle", "pow2" or "max"; static batching always reserves the most.
        max_batch: sequences in a step at most; None: what fits.
        beam_copy_share: of Orca's beams, how many continue another beam at each step, so that
            all of its K/V are copied; 0: such copies are free.
        copy_block_size: tokens of a block whose copies `cost` counts.
        sample_seconds: between two samples of the timeline.
        stop_after_seconds: simulated; None: when every request has ended.
    Raises:  ValueError: naming the field and the bound.
    """

    cost: StepCost
    num_slots: int
    max_len: int = 2048
    reserve: str = "oracle"
    max_batch: int | None = None
    beam_copy_share: float = 0.0
    copy_block_size: int = 16
    sample_seconds: float = 10.0
    stop_after_seconds: float | None = None

    def __post_init__(self) -> None:
        """Check the bounds."""
        if self.reserve not in _RESERVES:
            raise ValueError(f"reserve must be one of {', '.join(_RESERVES)}, got {self.reserve}")
        if self.max_len < 2:
            raise ValueError(f"max_len must be at least 2, got {self.max_len}")
        if self.num_slots < self.max_len:
            raise ValueError(
                f"num_slots must be at least max_len ({self.max_len}), got {self.num_slots}"
            )
        if self.max_batch is not None and self.max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {self.max_batch}")
        if not 0 <= self.beam_copy_share <= 1:
            raise ValueError(f"beam_copy_share must be from 0 to 1, got {self.beam_copy_share}")
        if self.copy_block_size < 1:
            raise ValueError(f"copy_block_size must be at least 1, got {self.copy_block_size}")
        if not 0 < self.sample_seconds < math.inf:
            raise ValueError(f"sample_seconds must be above 0, got {self.sample_seconds}")

    @classmethod
    def of_setup(cls, setup: Setup, **changes: Any) -> BaselineConfig:
        """Serve a model with the K/V slots that the paper states for it, contiguous."""
        values: dict[str, Any] = {
            "cost": Roofline(setup.model, setup.device, setup.num_gpus, block_overhead_tokens=0.0),
            "num_slots": setup.num_slots,
            "max_len": setup.model.max_len,
        }
        return cls(**{**values, **changes})


@dataclass(slots=True, eq=False)
class Job:
    """A request with its place in memory."""

    index: int
    request: SimRequest
    num_sequences: int
    reserved: int
    addresses: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of one sequence at its end."""
        return self.request.num_prompt + self.request.num_output


class Baseline(ABC):
    """What both have: a clock, a queue, and one step after the other."""

    name = ""

    def __init__(
        self,
        config: BaselineConfig,
        requests: Iterable[SimRequest],
        progress: Callable[[int], None] | None,
    ) -> None:
        self._config = config
        self._coming: Iterator[SimRequest] = iter(requests)
        self._upcoming = next(self._coming, None)
        self._progress = progress
        self._meter = Meter()
        self._waiting: deque[Job] = deque()
        self._now = 0.0
        self._next_sample = config.sample_seconds
        self._num_running = 0
        self._num_tokens = 0

    def run(self) -> Report:
        """Serve until everybody is done."""
        stop = self._config.stop_after_seconds
        while self._upcoming is not None or self._waiting or self._num_running:
            if stop is not None and self._now >= stop:
                break
            self._take_arrivals()
            if not self._waiting and not self._num_running:
                if self._upcoming is not None:
                    self._now = max(self._now, self._upcoming.arrival)
                continue
            self._serve()
        self._meter.executor_seconds = self._now
        return self._meter.report(self.name, now=self._now)

    @abstractmethod
    def _serve(self) -> None:
        """Run a step, or a batch."""

    def _reservation(self, request: SimRequest) -> int:
        """Slots that one sequence of the request is promised."""
        if self._config.reserve == "oracle":
            return request.num_prompt + request.num_output
        if self._config.reserve == "pow2":
            output = 1 << (request.num_output - 1).bit_length()
            return min(request.num_prompt + output, self._config.max_len)
        return self._config.max_len

    @abstractmethod
    def _can_ever_hold(self, job: Job) -> bool:
        """Whether an empty pool has room for it."""

    def _take_arrivals(self) -> None:
        table, upcoming = self._meter.requests, self._upcoming
        while upcoming is not None and upcoming.arrival <= self._now:
            if len(table) and upcoming.arrival < table.arrival[-1]:
                raise WorkloadError(f"requests must come by arrival, got {upcoming.arrival:g}")
            index = table.add(
                upcoming.arrival, upcoming.num_prompt, upcoming.num_output, upcoming.tenant
            )
            width = upcoming.beam_width or upcoming.n
            job = Job(index, upcoming, width, self._reservation(upcoming))
            if job.length <= self._config.max_len and self._can_ever_hold(job):
                self._waiting.append(job)
            else:
                self._meter.num_refused += 1
            upcoming = self._upcoming = next(self._coming, None)

    def _step(self, work: StepWork, num_requests: int, num_sequences: int) -> float:
        """Let a step happen; returns how long it took."""
        seconds = self._config.cost.seconds(work).forward
        self._now += seconds
        num_tokens = work.num_decodes + sum(count for _, count in work.prefills or ())
        self._meter.note_step(seconds, num_requests, num_sequences, num_tokens)
        while self._now >= self._next_sample:
            self._meter.timeline.append(self._sample(self._next_sample))
            self._next_sample += self._config.sample_seconds
        if self._progress is not None and self._meter.num_steps % _PROGRESS_STEPS == 0:
            self._progress(self._meter.num_finished + self._meter.num_refused)
        return seconds

    def _sample(self, when: float) -> Sample:
        use = self._num_allocated / self._config.num_slots
        return Sample(when, len(self._waiting), self._num_running, use, 1, self._num_tokens)

    @property
    @abstractmethod
    def _num_allocated(self) -> int:
        """Slots that are reserved, used or not."""

    def _note_end(self, job: Job) -> None:
        self._meter.note_end(job.index, self._now, job.request.n * job.request.num_output)
