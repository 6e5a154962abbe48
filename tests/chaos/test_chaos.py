"""The short form of `make chaos`: every kind of fault once to every kind of service."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from rich.console import Console

from tests.chaos.chaos import Chaos, Settings
from tests.chaos.faults import Pace
from tests.chaos.report import print_report

NUM_FAULTS = 24


@pytest.mark.timeout(420)
async def test_no_stream_notices(small_model: Path, tmp_path: Path) -> None:
    """Streams end with the tokens of an undisturbed run, blocks are free, nothing grows."""
    seed = random.SystemRandom().randrange(1 << 31)
    settings = Settings(
        seed=seed,
        pace=Pace(NUM_FAULTS, seconds=45.0, longest_seconds=6.0),
        model=small_model,
        logs=tmp_path,
    )
    report = await Chaos(settings).run()
    shown = io.StringIO()
    print_report(report, Console(file=shown, width=120))
    assert report.problems == [], shown.getvalue()
    assert len(report.ledger.faults) == NUM_FAULTS
    assert report.ledger.num_resumed_streams > 0
    assert report.ledger.num_http["whole"] > 0
