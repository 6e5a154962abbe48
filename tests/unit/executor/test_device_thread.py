"""The device thread: order, fencing, timings and what happens when it dies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from executor_svc import device_thread
from executor_svc.device_thread import DeviceThread
from executor_svc.errors import DeviceLost, StaleEpoch, StartupError
from executor_svc.plan import Description, Outcome, Plan, RowDigest
from tests.support.in_turn import InTurn
from tests.unit.executor.test_ownership import DESCRIPTION

WAIT = 20
MOST_STEPS = 4


class Engine(InTurn):
    """Stands in for the model: counts, waits at a gate, dies on request."""

    description: Description = DESCRIPTION

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: BaseException | None = None

    @property
    def num_rows(self) -> int:
        return len(self.seen)

    def reset(self) -> None:
        self.seen.append("reset")

    def run(self, plan: Plan) -> Outcome:
        self.entered.set()
        assert self.gate.wait(WAIT)
        if self.error is not None:
            raise self.error
        self.seen.append(plan.step_id)
        return Outcome(epoch=plan.epoch, step_id=plan.step_id)

    def audit(self) -> list[RowDigest]:
        return [RowDigest(0, len(self.seen), 0, 0)]


class Device(Engine):
    """An engine whose steps are computed behind its back, until `finish` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.finished = [threading.Event() for _ in range(MOST_STEPS)]
        self.launched = [threading.Event() for _ in range(MOST_STEPS)]
        self.collect_error: BaseException | None = None

    def launch(self, plan: Plan) -> Outcome:
        outcome = super().launch(plan)
        self.launched[plan.step_id].set()
        return outcome

    def is_done(self, launched: Outcome) -> bool:
        return self.finished[launched.step_id].is_set()

    def collect(self, launched: Outcome) -> Outcome:
        assert self.finished[launched.step_id].wait(WAIT)
        if self.collect_error is not None:
            raise self.collect_error
        self.seen.append(f"answer {launched.step_id}")
        return launched


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def thread(engine: Engine) -> Iterator[DeviceThread]:
    device = DeviceThread(lambda: engine)
    device.start()
    yield device
    engine.gate.set()
    device.stop()
    assert device.join(WAIT)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def ahead(device: Device) -> Iterator[DeviceThread]:
    thread = DeviceThread(lambda: device)
    thread.start()
    thread.claim(1).result(WAIT)
    yield thread
    for finished in device.finished:
        finished.set()
    thread.stop()
    assert thread.join(WAIT)


def test_jobs_run_in_order(engine: Engine, thread: DeviceThread) -> None:
    """Claim, steps and audit happen in the order in which they were handed in."""
    thread.claim(3)
    steps = [thread.submit(Plan(epoch=3, step_id=step)) for step in (1, 2)]
    audit = thread.audit().result(WAIT)
    assert engine.seen == ["reset", 1, 2]
    assert [step.result(0).step_id for step in steps] == [1, 2]
    assert (audit.epoch, audit.step_id, audit.rows[0].num_tokens) == (3, 2, 3)


def test_waiting_plans_of_an_older_epoch_do_not_run(engine: Engine, thread: DeviceThread) -> None:
    """A claim fences plans that were queued before it and have not begun."""
    thread.claim(1).result(WAIT)
    engine.gate.clear()
    running = thread.submit(Plan(epoch=1, step_id=1))
    assert engine.entered.wait(WAIT)
    waiting = thread.submit(Plan(epoch=1, step_id=2))
    claimed = thread.claim(2)
    engine.gate.set()
    assert running.result(WAIT).step_id == 1
    with pytest.raises(StaleEpoch):
        waiting.result(WAIT)
    claimed.result(WAIT)
    assert engine.seen == ["reset", 1, "reset"]


def test_time_is_either_waiting_or_idle(engine: Engine, thread: DeviceThread) -> None:
    """A plan behind another one has waited; one that found the device free has not."""
    thread.claim(1).result(WAIT)
    engine.gate.clear()
    first = thread.submit(Plan(epoch=1, step_id=1))
    assert engine.entered.wait(WAIT)
    second = thread.submit(Plan(epoch=1, step_id=2))
    engine.gate.set()
    assert first.result(WAIT).timings.queue_ns == 0
    assert first.result(WAIT).timings.idle_ns > 0
    assert second.result(WAIT).timings.queue_ns > 0


def test_busy_only_while_a_job_runs(engine: Engine, thread: DeviceThread) -> None:
    """Health may ask how long the present step has been running."""
    thread.claim(1).result(WAIT)
    thread.audit().result(WAIT)
    engine.gate.clear()
    step = thread.submit(Plan(epoch=1, step_id=1))
    assert engine.entered.wait(WAIT)
    assert thread.busy_seconds() > 0
    engine.gate.set()
    step.result(WAIT)
    thread.stop()
    assert thread.join(WAIT)
    assert thread.busy_seconds() == 0


def test_a_cancelled_plan_does_not_run(engine: Engine, thread: DeviceThread) -> None:
    """A plan whose stream has gone before its turn costs nothing."""
    thread.claim(1).result(WAIT)
    engine.gate.clear()
    thread.submit(Plan(epoch=1, step_id=1))
    assert engine.entered.wait(WAIT)
    waiting = thread.submit(Plan(epoch=1, step_id=2))
    assert waiting.cancel()
    engine.gate.set()
    thread.audit().result(WAIT)
    assert engine.seen == ["reset", 1]


@pytest.mark.parametrize("error", [DeviceLost("gone"), SystemExit(3)])
def test_death_answers_everybody(
    error: BaseException, engine: Engine, thread: DeviceThread
) -> None:
    """When the thread dies the running, the waiting and later jobs all fail, and it is told."""
    thread.claim(1).result(WAIT)
    engine.gate.clear()
    engine.error = error
    running = thread.submit(Plan(epoch=1, step_id=1))
    assert engine.entered.wait(WAIT)
    waiting = thread.submit(Plan(epoch=1, step_id=2))
    engine.gate.set()
    assert thread.died.result(WAIT) is error
    for job in (running, waiting, thread.submit(Plan(epoch=1, step_id=3)), thread.audit()):
        with pytest.raises(DeviceLost):
            job.result(WAIT)


def test_a_failed_load_is_told_once() -> None:
    """The reason why a model cannot be loaded reaches who waits for it."""

    def load() -> Engine:
        raise StartupError("no such model")

    device = DeviceThread(load)
    device.start()
    with pytest.raises(StartupError, match="no such model"):
        device.ready.result(WAIT)
    assert device.join(WAIT)


def test_the_next_step_is_launched_before_this_one_is_done(
    device: Device, ahead: DeviceThread
) -> None:
    """One step ahead of the device, and no further; answers keep their order."""
    steps = [ahead.submit(Plan(epoch=1, step_id=step)) for step in (1, 2, 3)]
    assert device.launched[2].wait(WAIT)
    assert not steps[0].done()
    assert not device.launched[3].wait(0.05)
    device.finished[1].set()
    assert steps[0].result(WAIT).step_id == 1
    assert device.launched[3].wait(WAIT)
    assert not steps[1].done()
    for step in (2, 3):
        device.finished[step].set()
    assert [step.result(WAIT).step_id for step in steps] == [1, 2, 3]
    assert device.seen == ["reset", 1, 2, "answer 1", 3, "answer 2", "answer 3"]


def test_a_step_is_answered_when_it_is_done(device: Device, ahead: DeviceThread) -> None:
    """Without a next plan the answer does not wait for one."""
    step = ahead.submit(Plan(epoch=1, step_id=1))
    assert device.launched[1].wait(WAIT)
    assert ahead.busy_seconds() > 0
    device.finished[1].set()
    assert step.result(WAIT).timings.idle_ns > 0
    ahead.audit().result(WAIT)
    assert ahead.busy_seconds() == 0


def test_a_step_behind_another_finds_no_idle_device(device: Device, ahead: DeviceThread) -> None:
    """It waited for the device, and the device not for it."""
    steps = [ahead.submit(Plan(epoch=1, step_id=step)) for step in (1, 2)]
    assert device.launched[2].wait(WAIT)
    for step in (1, 2):
        device.finished[step].set()
    timings = steps[1].result(WAIT).timings
    assert timings.idle_ns == 0
    assert timings.queue_ns > 0


def test_a_claim_waits_for_the_device(device: Device, ahead: DeviceThread) -> None:
    """Rows are forgotten between two steps, not under one."""
    step = ahead.submit(Plan(epoch=1, step_id=1))
    assert device.launched[1].wait(WAIT)
    claim = ahead.claim(2)
    assert not claim.done()
    device.finished[1].set()
    claim.result(WAIT)
    assert step.result(WAIT).step_id == 1
    assert device.seen == ["reset", 1, "answer 1", "reset"]


def test_a_device_lost_behind_the_host_answers_everybody(
    device: Device, ahead: DeviceThread
) -> None:
    """The step that was on it, the one behind that, and those that wait."""
    device.collect_error = DeviceLost("gone")
    steps = [ahead.submit(Plan(epoch=1, step_id=step)) for step in (1, 2, 3)]
    assert device.launched[2].wait(WAIT)
    device.finished[1].set()
    assert ahead.died.result(WAIT) is device.collect_error
    for step in steps:
        with pytest.raises(DeviceLost):
            step.result(WAIT)


def test_an_idle_engine_shows_that_it_is_alive(
    engine: Engine, thread: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again, and not in the middle of a step."""
    beats = threading.Semaphore(0)
    monkeypatch.setattr(engine, "beat", beats.release)
    monkeypatch.setattr(device_thread, "_BEAT_SECONDS", 0.01)
    thread.claim(1).result(WAIT)
    for _ in range(3):
        assert beats.acquire(timeout=WAIT)


def test_an_engine_is_closed_after_its_last_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and only if it did not die."""
    closed: list[bool] = []
    for error in (None, RuntimeError("the device is gone")):
        engine = Engine()
        engine.error = error
        engine.gate.set()
        monkeypatch.setattr(engine, "close", lambda: closed.append(True))
        thread = DeviceThread(lambda engine=engine: engine)  # type: ignore[misc]
        thread.start()
        thread.claim(1).result(WAIT)
        step = thread.submit(Plan(epoch=1, step_id=1))
        assert (step.exception(WAIT) is None) == (error is None)
        thread.stop()
        assert thread.join(WAIT)
    assert closed == [True]


def test_an_engine_may_say_that_it_is_lost(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another thread, while a step waits for the device; whoever waits is told."""
    told: list[Callable[[BaseException], None]] = []
    monkeypatch.setattr(engine, "start", told.append)
    thread = DeviceThread(lambda: engine)
    thread.start()
    thread.claim(1).result(WAIT)
    engine.gate.clear()
    thread.submit(Plan(epoch=1, step_id=1))
    assert engine.entered.wait(WAIT)
    waiting = thread.submit(Plan(epoch=1, step_id=2))
    told[0](DeviceLost("another rank is gone"))
    told[0](DeviceLost("and said so twice"))
    assert str(thread.died.result(WAIT)) == "another rank is gone"
    with pytest.raises(DeviceLost, match="another rank is gone"):
        waiting.result(WAIT)
    with pytest.raises(DeviceLost):
        thread.submit(Plan(epoch=1, step_id=3)).result(WAIT)
    engine.gate.set()
    thread.stop()
    assert thread.join(WAIT)
