"""The one thread that owns the device.

Work goes in by a bounded queue and comes back as futures. The thread loads the model,
then runs jobs in order until it is told to stop, or dies; who waits on `died` ends the
process, so that the orchestrator starts a new one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from executor_svc.errors import DeviceLost, StaleEpoch, StartupError
from executor_svc.plan import Description, Outcome, Plan, RowDigest

_MAX_JOBS = 64


class Engine(Protocol):
    """What the thread drives: `executor.Executor`, or a stand-in of tests."""

    description: Description

    @property
    def num_rows(self) -> int:
        """How many rows exist."""

    def reset(self) -> None:
        """Forget every row and any failure."""

    def run(self, plan: Plan) -> Outcome:
        """Carry out one step."""

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


_Job = _Claim | _Step | _AuditJob


class DeviceThread:
    """Runs one engine; every method may be called from any thread.

    Invariant: a plan runs only under the epoch that was claimed last.
    """

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load = load
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_MAX_JOBS)
        self._epoch = 0
        self._last_step_id = 0
        self._last_done_ns = 0
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
        self._epoch = epoch
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
            self.ready.set_result(engine.description)
        except BaseException as error:  # the waiter on `ready` ends the process
            self.ready.set_exception(_as_startup_error(error))
            return
        try:
            while (job := self._jobs.get()) is not None:
                if job.answer.set_running_or_notify_cancel():
                    self._run(engine, job)
        except BaseException as error:  # the waiter on `died` ends the process
            self.died.set_result(error)
            self._refuse_jobs(error)

    def _run(self, engine: Engine, job: _Job) -> None:
        """Do one job; an exception of the engine answers the job and ends the thread."""
        begin = time.perf_counter_ns()
        self._busy_since_ns = begin
        try:
            if isinstance(job, _Step):
                self._step(engine, job, begin)
            elif isinstance(job, _Claim):
                engine.reset()
                self._last_step_id = 0
                self._last_done_ns = time.perf_counter_ns()
                job.answer.set_result(None)
            else:
                job.answer.set_result(Audit(self._epoch, self._last_step_id, engine.audit()))
        except BaseException as error:
            job.answer.set_exception(DeviceLost(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self.num_rows = engine.num_rows
            self._busy_since_ns = None

    def _step(self, engine: Engine, job: _Step, begin: int) -> None:
        if job.plan.epoch != self._epoch:
            job.answer.set_exception(StaleEpoch(f"epoch {self._epoch} was claimed meanwhile"))
            return
        outcome = engine.run(job.plan)
        # To hand the result over wakes another thread: that is time the device idles.
        idle_since_ns, self._last_done_ns = self._last_done_ns, time.perf_counter_ns()
        self._last_step_id = job.plan.step_id
        # Either the plan waited for the device or the device for the plan.
        waited = job.submitted_ns < idle_since_ns
        timings = replace(
            outcome.timings,
            queue_ns=begin - job.submitted_ns if waited else 0,
            idle_ns=begin - idle_since_ns,
        )
        job.answer.set_result(replace(outcome, timings=timings))

    def _refuse_jobs(self, error: BaseException) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None and job.answer.set_running_or_notify_cancel():
                job.answer.set_exception(DeviceLost(f"{type(error).__name__}: {error}"))


def _as_startup_error(error: BaseException) -> StartupError:
    if isinstance(error, StartupError):
        return error
    wrapped = StartupError(f"cannot load the model: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
