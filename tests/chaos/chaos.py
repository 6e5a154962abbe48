"""One run: serve, record, break, compare, look at what is left."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from octavo_client import AsyncClient

from tests.chaos.catalogue import make_entries, make_http_entries, record, record_http
from tests.chaos.clients import PATIENT, Crowd, use_http, use_sdk
from tests.chaos.faults import Breaker, Pace, draw_plan
from tests.chaos.ledger import Ledger
from tests.chaos.model import write_model
from tests.chaos.rest import (
    Footprint,
    footprints,
    growth_problems,
    read_events,
    until_at_rest,
)
from tests.chaos.stack import Layout, Stack

_HARMLESS_HTTP = {"whole", "broken off", *(f"refused {code}" for code in (429, 502, 503, 504))}


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        seed: of faults and clients.
        pace: of the faults.
        num_clients, num_http_clients: that ask all the time.
        model: folder; None writes a small one of random weights.
        logs: folder; None makes one that stays if anything is off.
        finish_seconds: that all streams may take to end once nothing is broken any more.
        layout: further fields of `Layout`.
    """

    seed: int
    pace: Pace
    num_clients: int = 32
    num_http_clients: int = 3
    model: Path | None = None
    logs: Path | None = None
    finish_seconds: float = 120.0
    layout: dict[str, object] = field(default_factory=dict)


@dataclass
class Report:
    """What came out.

    Attributes:
        settings: of the run.
        ledger: streams, tokens, faults, problems.
        seconds: of the phases, by name.
        events: of the services' logs, counted.
        before, after: processes at rest, between which none was killed.
        logs: folder of the logs.
    """

    settings: Settings
    ledger: Ledger
    logs: Path
    seconds: dict[str, float] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    before: dict[str, Footprint] = field(default_factory=dict)
    after: dict[str, Footprint] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """Everything that is off; none in a good run."""
        return self.ledger.problems


class Chaos:
    """Carries a run out; what it sees while it runs is in `report`."""

    def __init__(self, settings: Settings, on_fault: Callable[[], None] = lambda: None) -> None:
        """Prepare.

        Args:
            settings: what to run.
            on_fault: called after each fault.
        """
        logs = settings.logs or Path(tempfile.mkdtemp(prefix="octavo-chaos-"))
        logs.mkdir(parents=True, exist_ok=True)
        self.report = Report(settings, Ledger(), logs)
        self._settings = settings
        self._on_fault = on_fault
        self._mark = time.monotonic()

    async def run(self) -> Report:
        """Run it all; problems are in the report."""
        settings, report = self._settings, self.report
        model = settings.model or write_model(report.logs / "model")
        fields = settings.layout
        layout = Layout(model=model, folder=report.logs, **fields)  # type: ignore[arg-type]  # mixed
        stack = Stack(layout)
        try:
            async with stack:
                self._end_phase("start")
                await self._run_on(stack)
        except (TimeoutError, ExceptionGroup) as error:
            reasons = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
            for reason in reasons:
                report.ledger.note_problem(f"{type(reason).__name__}: {reason}")
        logs = [log for service in stack.services for log in service.logs]
        report.events, bad_lines = read_events(logs)
        report.problems.extend(stack.unasked_ends + bad_lines)
        self._end_phase("end")
        return report

    async def _run_on(self, stack: Stack) -> None:
        settings, ledger = self._settings, self.report.ledger
        async with AsyncClient(stack.target, retry=PATIENT) as client:
            entries = await record(client, make_entries())
        http_entries = make_http_entries()
        if settings.num_http_clients:
            http_entries = await record_http(stack.http_url, http_entries)
        self._end_phase("undisturbed answers")
        ledger.begin = time.monotonic()
        crowd = Crowd(ledger, settings.seed)
        clients = [
            asyncio.create_task(use_sdk(crowd, f"c{number}", stack.target, entries))
            for number in range(settings.num_clients)
        ] + [
            asyncio.create_task(use_http(crowd, f"h{number}", stack.http_url, http_entries))
            for number in range(settings.num_http_clients)
        ]
        try:
            await self._break(stack, crowd)
            crowd.end()
            await asyncio.gather(*clients)
        finally:
            for each in clients:
                each.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        for end, count in ledger.num_http.items():
            if end not in _HARMLESS_HTTP:
                ledger.note_problem(f"{count} HTTP requests were {end}")

    async def _break(self, stack: Stack, crowd: Crowd) -> None:
        settings, report = self._settings, self.report
        breaker = Breaker(stack, report.ledger, self._on_fault)
        pace = settings.pace
        deadly, harmless = draw_plan(settings.seed, pace, stack)
        await breaker.carry_out(deadly, pace.lethal_seconds)
        await self._rest(stack, crowd)
        report.before = footprints(stack)
        self._end_phase("faults, with kills")
        crowd.may_ask.set()
        await breaker.carry_out(harmless, pace.seconds - pace.lethal_seconds)
        await self._rest(stack, crowd)
        report.after = footprints(stack)
        self._end_phase("faults, without kills")
        report.problems.extend(growth_problems(report.before, report.after))

    async def _rest(self, stack: Stack, crowd: Crowd) -> None:
        seconds = self._settings.finish_seconds
        await crowd.rest(seconds)
        if (why := await until_at_rest(stack, seconds)) is not None:
            self.report.ledger.note_problem(why)

    def _end_phase(self, name: str) -> None:
        now = time.monotonic()
        self.report.seconds[name] = round(now - self._mark, 1)
        self._mark = now
