"""The one thread that owns the device.

Work goes in by a bounded queue and comes back as futures. The thread loads the model,
then runs jobs in order until it is told to stop, or dies; who waits on `died` ends the
process, so that the orchestrator starts a new one.

A GPU computes a step after it was launched. Meanwhile the thread lays out and launches the
next one, if it is here, so that the GPU goes from one to the other without a pause:

    thread   launch 1 | launch 2 | collect 1, answer | launch 3 | collect 2, answer | ...
    device            | ------- 1 ------- | ------- 2 ------- | ------- 3 ------- | ...

At most one step is on the device when another one is launched. On a CPU the thread itself
computes, a step is done once it is launched, and is answered at once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from typing import Any, Protocol

from executor_svc.errors import DeviceLost, StaleEpoch, StartupError
from executor_svc.ownership import Fence
from executor_svc.plan import Description, Outcome, Plan, RowDigest

_MAX_JOBS = 64
_BEAT_SECONDS = 5.0
"""How often an engine that has nothing to do is asked to show that it is alive."""
_POLL_SECONDS = 1e-4
"""How often to ask a GPU whether it is done, while no job comes."""


class Engine(Protocol):
    """What the thread drives: an `executor.Executor`, the `tensor_parallel.leader.Leader` of
    several, or a stand-in of tests.
    """

    description: Description

    def start(self, on_lost: Callable[[BaseException], None]) -> None:
        """Called first. `on_lost` may be called, from any thread, when no step can succeed."""

    def beat(self) -> None:
        """Called every few seconds while there is nothing to do."""

    def close(self) -> None:
        """Called last of all, unless something raised an exception before."""

    @property
    def num_rows(self) -> int:
        """How many rows exist."""

    def reset(self) -> None:
        """Forget every row and any failure."""

    def launch(self, plan: Plan) -> Any:
        """Give the device one step."""

    def is_done(self, launched: Any) -> bool:
        """Whether the device is through with it."""

    def collect(self, launched: Any) -> Outcome:
        """Wait for the device, and answer."""

    def audit(self) -> list[RowDigest]:
        """Digest of every row."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The rows between two steps."""

    epoch: int
    step_id: int
    rows: list[RowDigest]


@dataclass(frozen=True, slots=True)
class _Claim:
    epoch: int
    answer: Future[None]


@dataclass(frozen=True, slots=True)
class _Step:
    plan: Plan
    submitted_ns: int
    answer: Future[Outcome]


@dataclass(frozen=True, slots=True)
class _AuditJob:
    answer: Future[Audit]


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A step that was launched and is not answered yet."""

    job: _Step
    launched: Any
    begin_ns: int
    queue_ns: int
    idle_ns: int


_Job = _Claim | _Step | _AuditJob


class DeviceThread:
    """Runs one engine; every method may be called from any thread.

    Invariant: a plan runs only under the epoch that was claimed last.
    """

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load = load
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_MAX_JOBS)
        self._fence = Fence()
        self._last_step_id = 0
        self._last_done_ns = 0
        self._on_device: _OnDevice | None = None
        self._busy_since_ns: int | None = None
        self.num_rows = 0
        self.ready: Future[Description] = Future()
        self.died: Future[BaseException] = Future()
        # A daemon: a hung device must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, name="octavo-device", daemon=True)

    def start(self) -> None:
        """Begin loading the model."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end after the jobs that it has."""
        with contextlib.suppress(queue.Full):  # it is hung, and it is a daemon
            self._jobs.put_nowait(None)

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread; False if it is stuck in a call that does not come back."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def claim(self, epoch: int) -> Future[None]:
        """Forget all rows, and from now on refuse plans of other epochs."""
        self._fence.raise_to(epoch)
        job = _Claim(epoch, Future())
        self._put(job)
        return job.answer

    def submit(self, plan: Plan) -> Future[Outcome]:
        """Run a plan after the ones before it."""
        job = _Step(plan, time.perf_counter_ns(), Future())
        self._put(job)
        return job.answer

    def audit(self) -> Future[Audit]:
        """Take a digest of the rows between two steps."""
        job = _AuditJob(Future())
        self._put(job)
        return job.answer

    def busy_seconds(self) -> float:
        """For how long the job in progress has been running; 0 if there is none."""
        since = self._busy_since_ns
        return 0.0 if since is None else (time.perf_counter_ns() - since) / 1e9

    def _put(self, job: _Job) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            job.answer.set_exception(DeviceLost("the device does not take work any more"))
        if self.died.done():
            self._refuse_jobs(self.died.result())

    def _main(self) -> None:
        try:
            engine = self._load()
            engine.start(self._lose)
            self.ready.set_result(engine.description)
        except BaseException as error:  # the waiter on `ready` ends the process
            self.ready.set_exception(_as_startup_error(error))
            return
        try:
            while (job := self._next_job(engine)) is not None:
                if job.answer.set_running_or_notify_cancel():
                    self._run(engine, job)
            self._collect(engine)
            engine.close()
        except BaseException as error:  # the waiter on `died` ends the process
            if self._on_device is not None and not self._on_device.job.answer.done():
                self._on_device.job.answer.set_exception(_as_lost(error))
            self._lose(error)

    def _lose(self, error: BaseException) -> None:
        """The device is gone; the thread may still wait for it."""
        with contextlib.suppress(InvalidStateError):  # it was lost before
            self.died.set_result(error)
        self._refuse_jobs(error)

    def _next_job(self, engine: Engine) -> _Job | None:
        """Wait for a job; what the device finishes meanwhile is answered at once."""
        while self._on_device is not None:
            if engine.is_done(self._on_device.launched):
                self._collect(engine)
                break
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=_POLL_SECONDS)
        while True:
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=_BEAT_SECONDS)
            engine.beat()

    def _run(self, engine: Engine, job: _Job) -> None:
        """Do one job; an exception of the engine answers the job and ends the thread."""
        begin = time.perf_counter_ns()
        self._busy_since_ns = begin
        try:
            if isinstance(job, _Step):
                self._step(engine, job, begin)
                return
            self._collect(engine)
            if isinstance(job, _Claim):
                engine.reset()
                self._last_step_id = 0
                self._last_done_ns = time.perf_counter_ns()
                job.answer.set_result(None)
            else:
                job.answer.set_result(Audit(self._fence.epoch, self._last_step_id, engine.audit()))
        except BaseException as error:
            if not job.answer.done():
                job.answer.set_exception(_as_lost(error))
            raise
        finally:
            self.num_rows = engine.num_rows
            if self._on_device is None:
                self._busy_since_ns = None

    def _step(self, engine: Engine, job: _Step, begin: int) -> None:
        try:
            self._fence.check(job.plan.epoch)
        except StaleEpoch as error:
            job.answer.set_exception(error)
            return
        # Either the plan waited for the device or the device for the plan.
        is_free, free_since_ns = self._on_device is None, self._last_done_ns
        waited = not is_free or job.submitted_ns < free_since_ns
        step = _OnDevice(
            job,
            engine.launch(job.plan),
            begin_ns=begin,
            queue_ns=begin - job.submitted_ns if waited else 0,
            idle_ns=begin - free_since_ns if is_free else 0,
        )
        self._collect(engine)
        self._on_device, self._busy_since_ns = step, begin
        if engine.is_done(step.launched):
            self._collect(engine)

    def _collect(self, engine: Engine) -> None:
        """Answer the step that is on the device, if there is one."""
        step = self._on_device
        if step is None:
            return
        outcome = engine.collect(step.launched)
        self._on_device = self._busy_since_ns = None
        # To hand the result over wakes another thread: that is time the device idles.
        self._last_done_ns = time.perf_counter_ns()
        self._last_step_id = step.job.plan.step_id
        timings = replace(
            outcome.timings,
            begin_ns=step.begin_ns,
            queue_ns=step.queue_ns,
            idle_ns=step.idle_ns,
        )
        step.job.answer.set_result(replace(outcome, timings=timings))

    def _refuse_jobs(self, error: BaseException) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None and job.answer.set_running_or_notify_cancel():
                job.answer.set_exception(_as_lost(error))


def _as_lost(error: BaseException) -> DeviceLost:
    return DeviceLost(f"{type(error).__name__}: {error}")


def _as_startup_error(error: BaseException) -> StartupError:
    if isinstance(error, StartupError):
        return error
    wrapped = StartupError(f"cannot load the model: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
