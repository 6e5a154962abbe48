"""Serve requests with the real scheduler core, on executors that are modelled.

Arrivals come from an iterator and are never all in memory at once; everything else that will
happen is on an agenda: ends of steps, failures, looks of the autoscaler, samples. The
simulation is over when every request has ended, or at `stop_after_seconds`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler_svc.core.request import BeamParams, Request, SamplingParams
from scheduler_svc.core.state import CoreConfig
from scheduler_svc.simulator.agenda import Agenda
from scheduler_svc.simulator.beams import FITTED_OPENNESS, BeamCandidates
from scheduler_svc.simulator.calibration import LinearCost
from scheduler_svc.simulator.executor import SchedulerCpu, SimExecutor
from scheduler_svc.simulator.faults import Autoscale, Failures
from scheduler_svc.simulator.fleet import SimFleet
from scheduler_svc.simulator.hardware import Device, Setup, slots_beside_weights
from scheduler_svc.simulator.meter import Meter
from scheduler_svc.simulator.models import ModelShape
from scheduler_svc.simulator.report import Report
from scheduler_svc.simulator.roofline import Roofline
from scheduler_svc.simulator.routing import ROUTERS
from scheduler_svc.simulator.work import StepCost
from scheduler_svc.simulator.workload import SimRequest, WorkloadError, prompt_tokens

UNBOUNDED_QUEUE = 10**9
_GREEDY = SamplingParams(temperature=0.0)
_PROGRESS_ACTS = 2048
_MAX_IDLE_SAMPLES = 100_000


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """What serves.

    Attributes:
        cost: of the steps of each executor.
        num_blocks: of each executor's pool; what is not named here is as in `CoreConfig`.
        num_executors: at the start.
        num_schedulers: that share them.
        router: a name of `routing.ROUTERS`.
        slowdowns: factors on the step times of executors, by index; 1.0 beyond.
        failures: of executors; None: none.
        autoscale: of executors; None: as many as at the start.
        wire_seconds: one way between scheduler and executor.
        scheduler_seconds: CPU time of a step in a scheduler process, which does one thing at
            a time; 0: none.
        sample_seconds: between two samples of the timeline.
        stop_after_seconds: simulated; None: when every request has ended.
        seed: of failures and of beams' candidates.
        beam_openness: see beams.py.
    Raises:  ValueError: naming the field and the bound.
    """

    cost: StepCost
    num_blocks: int
    block_size: int = 16
    num_host_blocks: int = 0
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_queue: int = UNBOUNDED_QUEUE
    max_queue_seconds: float = 0.0
    watermark: float = 0.01
    max_steps_in_flight: int = 2
    preemption: str = "recompute"
    policy: str = "fcfs"
    prefix_cache: bool = True
    num_executors: int = 1
    num_schedulers: int = 1
    router: str = "placement"
    slowdowns: tuple[float, ...] = ()
    failures: Failures | None = None
    autoscale: Autoscale | None = None
    wire_seconds: float = 0.0
    scheduler_seconds: float = 0.0
    sample_seconds: float = 10.0
    stop_after_seconds: float | None = None
    seed: int = 0
    beam_openness: float = FITTED_OPENNESS
    core: CoreConfig = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the bounds."""
        lowest = {
            "num_blocks": 1,
            "block_size": 1,
            "num_host_blocks": 0,
            "max_num_seqs": 1,
            "max_steps_in_flight": 1,
            "num_executors": 1,
            "num_schedulers": 1,
            "wire_seconds": 0,
            "scheduler_seconds": 0,
        }
        for name, low in lowest.items():
            if not low <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not 0 < self.sample_seconds < math.inf:
            raise ValueError(f"sample_seconds must be above 0, got {self.sample_seconds}")
        if self.num_schedulers > self.num_executors:
            raise ValueError(
                f"num_schedulers must be at most num_executors ({self.num_executors}), "
                f"got {self.num_schedulers}"
            )
        if self.router not in ROUTERS:
            raise ValueError(f"router must be one of {', '.join(ROUTERS)}, got {self.router}")
        if not 0 <= self.beam_openness <= 1:
            raise ValueError(f"beam_openness must be from 0 to 1, got {self.beam_openness}")
        if any(not 0 < factor < math.inf for factor in self.slowdowns):
            raise ValueError(f"slowdowns must be above 0, got {self.slowdowns}")
        if self.failures is not None:
            for _, index in self.failures.at:
                if index >= self.num_executors:
                    raise ValueError(
                        f"failures.at: index must be below num_executors ({self.num_executors}), "
                        f"got {index}"
                    )
        core = CoreConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_host_blocks=self.num_host_blocks,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_queue=self.max_queue,
            max_queue_seconds=self.max_queue_seconds,
            watermark=self.watermark,
            max_steps_in_flight=self.max_steps_in_flight,
            preemption=self.preemption,
            policy=self.policy,
            prefix_cache=self.prefix_cache,
        )
        object.__setattr__(self, "core", core)

    @classmethod
    def of_setup(cls, setup: Setup, **changes: Any) -> SimulationConfig:
        """Serve a model with the K/V slots that the paper states for it."""
        block_size = changes.get("block_size", 16)
        values: dict[str, Any] = {
            "cost": Roofline(setup.model, setup.device, setup.num_gpus, block_size),
            "num_blocks": setup.num_slots // block_size,
        }
        return cls(**{**values, **changes})

    @classmethod
    def of_machine(
        cls,
        model: ModelShape,
        device: Device,
        num_gpus: int = 1,
        memory_share: float = 0.9,
        **changes: Any,
    ) -> SimulationConfig:
        """Serve a model with the K/V slots that fit beside its weights.

        Raises:  ValueError: if the weights alone do not fit.
        """
        num_slots = slots_beside_weights(model, device, num_gpus, memory_share)
        return cls.of_setup(Setup(model.name, model, device, num_gpus, num_slots), **changes)

    @classmethod
    def of_calibration(cls, cost: LinearCost, **changes: Any) -> SimulationConfig:
        """Serve as the measured executor did."""
        values: dict[str, Any] = {
            "cost": cost,
            "num_blocks": cost.num_blocks,
            "block_size": cost.block_size,
            "num_host_blocks": cost.num_host_blocks,
            "max_num_seqs": cost.max_num_seqs,
            "max_num_batched_tokens": cost.max_num_batched_tokens,
            "policy": "priority",
        }
        return cls(**{**values, **changes})

    def with_changes(self, **changes: Any) -> SimulationConfig:
        """The same with other values; the cost is not made anew."""
        return replace(self, **changes)


def simulate(
    config: SimulationConfig,
    requests: Iterable[SimRequest],
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Serve all requests.

    Args:
        config: what serves.
        requests: by arrival; may be a generator.
        progress: called now and then with the number of requests that have ended.
    Returns: what was measured.
    Raises:  WorkloadError: if arrivals are not in order.
    """
    return _Simulation(config, progress).run(requests)


class _Simulation:
    """One run."""

    def __init__(self, config: SimulationConfig, progress: Callable[[int], None] | None) -> None:
        self._config = config
        self._progress = progress
        self._agenda = Agenda()
        self._meter = Meter()
        self._draw = random.Random(config.seed ^ 0xFA11)
        self._cpus = [SchedulerCpu(config.scheduler_seconds) for _ in range(config.num_schedulers)]
        self._fleet = SimFleet(
            config.num_executors,
            config.num_schedulers,
            self._new_executor,
            ROUTERS[config.router],
            self._meter,
        )
        self._num_coming = 0
        self._wishes: list[tuple[float, int]] = []
        self._is_open = True
        self._num_idle_samples = 0
        self._last_num_steps = 0

    def _new_executor(self, index: int, scheduler: int) -> SimExecutor:
        config = self._config
        slowdown = config.slowdowns[index] if index < len(config.slowdowns) else 1.0
        return SimExecutor(
            index,
            config.core,
            config.cost,
            agenda=self._agenda,
            meter=self._meter,
            beams=BeamCandidates(config.beam_openness, config.seed * 65_537 + index),
            note_end=self._note_end,
            cpu=self._cpus[scheduler] if config.scheduler_seconds else None,
            slowdown=slowdown,
            wire_seconds=config.wire_seconds,
        )

    def _note_end(self) -> None:
        self._fleet.note_end()

    # -- the loop ------------------------------------------------------------------

    def run(self, requests: Iterable[SimRequest]) -> Report:
        """Let everything happen."""
        agenda, fleet, config = self._agenda, self._fleet, self._config
        self._book_all()
        stop = math.inf if config.stop_after_seconds is None else config.stop_after_seconds
        coming = iter(requests)
        upcoming = next(coming, None)
        num_acts = 0
        while upcoming is not None or fleet.num_live:
            if upcoming is not None and upcoming.arrival <= agenda.next_time:
                if upcoming.arrival > stop:
                    break
                self._arrive(upcoming)
                upcoming = next(coming, None)
                self._is_open = upcoming is not None
                continue
            if agenda.next_time > stop:
                break
            agenda.advance()
            num_acts += 1
            if self._progress is not None and num_acts % _PROGRESS_ACTS == 0:
                self._progress(self._num_ended)
        is_over = fleet.num_live == 0 and upcoming is None
        now = agenda.now if is_over else min(stop, agenda.next_time)
        if self._progress is not None:
            self._progress(self._num_ended)
        return self._meter.report("octavo", now=now, **fleet.close(now))

    @property
    def _num_ended(self) -> int:
        meter = self._meter
        return meter.num_finished + meter.num_failed + meter.num_refused

    def _arrive(self, request: SimRequest) -> None:
        agenda = self._agenda
        if request.arrival < agenda.now:
            raise WorkloadError(
                f"requests must come by arrival, got {request.arrival:g} after {agenda.now:g}"
            )
        agenda.now = now = request.arrival
        table = self._meter.requests
        index = table.add(now, request.num_prompt, request.num_output, request.tenant)
        beam = BeamParams(request.beam_width) if request.beam_width else None
        self._fleet.add(
            Request(
                str(index),
                prompt_tokens(request, index),
                _GREEDY,
                max_tokens=request.num_output,
                n=request.n,
                best_of=1 if beam is not None else request.n,
                beam=beam,
                priority=request.priority,
                tenant=request.tenant,
                arrival=now,
            ),
            now,
        )

    # -- what happens by itself ----------------------------------------------------

    def _book_all(self) -> None:
        config, agenda = self._config, self._agenda
        agenda.book(config.sample_seconds, self._sample)
        if config.autoscale is not None:
            agenda.book(config.autoscale.period_seconds, self._scale)
        if config.failures is not None:
            for when, index in config.failures.at:
                agenda.book(when, self._fail, index)
            self._book_failure()

    def _sample(self, now: float, _: int) -> None:
        self._meter.timeline.append(self._fleet.sample(now))
        self._agenda.book(now + self._config.sample_seconds, self._sample)
        is_idle = self._meter.num_steps == self._last_num_steps and not self._is_open
        self._num_idle_samples = self._num_idle_samples + 1 if is_idle else 0
        self._last_num_steps = self._meter.num_steps
        if self._num_idle_samples > _MAX_IDLE_SAMPLES:
            raise RuntimeError(f"{self._fleet.num_live} requests are left and no step runs")

    def _book_failure(self) -> None:
        """Draw the next failure of any executor: the sum of independent Poisson processes."""
        assert self._config.failures is not None
        hourly = self._config.failures.per_executor_hour * max(1, self._fleet.num_takers)
        if hourly > 0:
            pause = self._draw.expovariate(hourly / 3600)
            self._agenda.book(self._agenda.now + pause, self._fail_any)

    def _fail_any(self, now: float, _: int) -> None:
        alive = [each.index for each in self._fleet.executors.values() if each.is_alive]
        if alive:
            self._fail(now, self._draw.choice(alive))
        self._book_failure()

    def _fail(self, now: float, index: int) -> None:
        failures, executor = self._config.failures, self._fleet.executors.get(index)
        assert failures is not None
        if executor is None or not executor.is_alive:
            return
        executor.die(now)
        self._meter.num_deaths += 1
        self._agenda.book(now + failures.detect_seconds, self._notice, index)
        self._agenda.book(now + failures.down_seconds, self._return, index)

    def _notice(self, now: float, index: int) -> None:
        self._fleet.note_death(self._fleet.executors[index], now)

    def _return(self, now: float, index: int) -> None:
        self._fleet.note_return(self._fleet.executors[index], now)

    def _scale(self, now: float, _: int) -> None:
        """Look how many executors there should be, as an autoscaler does."""
        scale, fleet = self._config.autoscale, self._fleet
        assert scale is not None
        # Dead ones are there too: they come back.
        present = len(fleet.executors) + self._num_coming
        wish = scale.wanted(present, fleet.longest_wait(now), fleet.block_use())
        self._wishes = [w for w in self._wishes if w[0] > now - scale.calm_seconds]
        self._wishes.append((now, wish))
        if wish > present:
            for _ in range(wish - present):
                self._num_coming += 1
                self._agenda.book(now + scale.start_seconds, self._start)
        elif now >= scale.calm_seconds:
            for _ in range(present - max(count for _, count in self._wishes)):
                if not fleet.retire(now):
                    break
        self._agenda.book(now + scale.period_seconds, self._scale)

    def _start(self, now: float, _: int) -> None:
        self._num_coming -= 1
        self._fleet.enlarge(now)
