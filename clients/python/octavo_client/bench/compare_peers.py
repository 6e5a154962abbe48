"""The three kinds of peers: a running server, a server by recipe, a script by recipe."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from octavo_client._socket import settle_address
from octavo_client.bench.compare import Load, Peer, Turn
from octavo_client.bench.compare_process import PeerError, PeerProcess
from octavo_client.bench.compare_recipe import Recipe
from octavo_client.bench.measure import Record, summarize
from octavo_client.bench.report import failure_lines
from octavo_client.bench.targets import Sampling, open_target
from octavo_client.bench.workload import Request
from octavo_client.errors import OctavoError

_PROBE_SECONDS = 2.0


async def _measure(url: str, model: str | None, load: Load) -> Turn:
    """Warm a server up, then send it the load."""
    sampling = Sampling(timeout_seconds=load.timeout_seconds)
    async with open_target(url, sampling, model=model) as target:
        server = await target.describe()
        load.check(load.requests, server)
        if load.warm_up:
            warm = await load.send(target, load.warm_up)
            for error in filter(None, (record.error for record in warm.records)):
                raise PeerError(f"the warm-up failed: {error}")
        run = await load.send(target, load.requests)
    return Turn(
        summary=summarize(run.records, load.slo, max_send_lag=run.max_send_lag),
        failures=tuple(failure_lines(run.records)),
        server=server,
    )


@dataclass(frozen=True, slots=True)
class RunningPeer:
    """A server that runs already. Its caches live on from round to round."""

    name: str
    url: str

    async def take_turn(
        self,
        load: Load,
        say: Callable[[str], None],  # noqa: ARG002  # nothing is waited for
    ) -> Turn:
        """Run the load."""
        return await _measure(self.url, None, load)


@dataclass(frozen=True, slots=True)
class ServerPeer:
    """A server that lives for its turn only."""

    name: str
    recipe: Recipe
    log: Path

    async def take_turn(self, load: Load, say: Callable[[str], None]) -> Turn:
        """Start it, wait until it is ready, run the load, stop it."""
        recipe = self.recipe
        names = _built_in(recipe)
        url = recipe.fill(recipe.url, names)
        process = PeerProcess(self.name, self.log)
        begin = time.monotonic()
        try:
            say("starting")
            await process.start(_command(recipe, names), env=_env(recipe, names))
            await process.until_ready(_probe(url, recipe.ready), recipe.ready_seconds)
            ready_seconds = time.monotonic() - begin
            say(f"ready after {ready_seconds:.1f} s")
            turn = await _measure(url, recipe.model, load)
            process.check_alive()
            turn = replace(
                turn, ready_seconds=ready_seconds, peak_rss_bytes=process.peak_rss_bytes()
            )
            say("stopping")
        finally:
            await process.stop()
        return turn


@dataclass(frozen=True, slots=True)
class ScriptPeer:
    """A script that loads a model, runs the workload in its own process, and says how it went."""

    name: str
    recipe: Recipe
    log: Path

    async def take_turn(self, load: Load, say: Callable[[str], None]) -> Turn:
        """Run it to its end, and read what it printed."""
        recipe = self.recipe
        process = PeerProcess(self.name, self.log)
        with tempfile.TemporaryDirectory(prefix="octavo-compare-") as folder:
            workload = _write_workload(Path(folder), load.requests)
            output = Path(folder, "output.json")
            names = {**_built_in(recipe), "requests": str(workload)}
            try:
                say("running")
                await process.start(_command(recipe, names), env=_env(recipe, names), output=output)
                await process.until_ended(recipe.run_seconds)
            finally:
                await process.stop()
            return _read_turn(output, load)


def recipe_peer(name: str, recipe: Recipe, log_dir: Path) -> Peer:
    """Choose by the recipe's kind; the log is log_dir/NAME.log."""
    log = log_dir / f"{name.replace('/', '_')}.log"
    kind = ServerPeer if recipe.kind == "server" else ScriptPeer
    return kind(name, recipe, log)


def _built_in(recipe: Recipe) -> dict[str, str]:
    port = settle_address("127.0.0.1:0", str(recipe.path)).rpartition(":")[2]
    return {"port": port, "python": sys.executable, "here": str(recipe.path.resolve().parent)}


def _command(recipe: Recipe, names: dict[str, str]) -> list[str]:
    return [recipe.fill(word, names) for word in recipe.command]


def _env(recipe: Recipe, names: dict[str, str]) -> dict[str, str]:
    return {name: recipe.fill(value, names) for name, value in recipe.env.items()}


def _probe(url: str, path: str) -> Callable[[], Any]:
    """Whether a server is ready: gRPC's health service, or a GET that answers 200."""

    async def by_grpc() -> bool:
        from octavo_client import NO_RETRIES, AsyncClient, Health

        with contextlib.suppress(OctavoError):
            async with AsyncClient(url, retry=NO_RETRIES) as client:
                return await client.health(timeout=_PROBE_SECONDS) is Health.SERVING
        return False

    async def by_http() -> bool:
        import httpx

        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=_PROBE_SECONDS, trust_env=False) as client:
                response = await client.get(httpx.URL(url).copy_with(path=path))
                return response.status_code == httpx.codes.OK
        return False

    return by_grpc if url.startswith("grpc") else by_http


def _write_workload(folder: Path, requests: Sequence[Request]) -> Path:
    """Write the form that `--requests` reads."""
    path = folder / "requests.json"
    entries = [
        {
            "id": request.id,
            "prompt": request.prompt,
            "out": request.num_output_tokens,
            "arrival": request.arrival_seconds,
        }
        for request in requests
    ]
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def _read_turn(output: Path, load: Load) -> Turn:
    """Do the same arithmetic over a script's requests as over a server's.

    Raises:
        PeerError: naming the request and the field that is missing or wrong.
    """
    text = output.read_text(encoding="utf-8", errors="replace")
    try:
        report = json.loads(text)
        entries = report["requests"]
    except (ValueError, KeyError, TypeError):
        raise PeerError(f"printed no JSON with 'requests': {text[:100]!r}") from None
    if not isinstance(entries, list) or len(entries) != len(load.requests):
        raise PeerError(f"'requests' must be a list of {len(load.requests)}")
    records = [
        _record(request, entry) for request, entry in zip(load.requests, entries, strict=True)
    ]
    process = report.get("process") or {}
    return Turn(
        summary=summarize(records, load.slo),
        failures=tuple(failure_lines(records)),
        server=dict(report.get("server") or {}),
        ready_seconds=process.get("ready_seconds"),
        peak_rss_bytes=process.get("peak_rss_bytes"),
    )


def _record(request: Request, entry: dict[str, Any]) -> Record:
    """Rebuild what came when from TTFT and gaps."""

    def seconds(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise PeerError(
                f"request {request.id}: field {name!r} must be seconds from 0, got {value!r}"
            )
        return float(value)

    record = Record(request, sent_at=seconds("sent_at", entry.get("sent_at")))
    record.ended_at = record.sent_at + seconds("e2e", entry.get("e2e"))
    record.error = entry.get("error")
    record.num_output_tokens = int(entry.get("num_output_tokens") or 0)
    if record.error is None and record.num_output_tokens:
        first = record.sent_at + seconds("ttft", entry.get("ttft"))
        gaps = [seconds("gaps", gap) for gap in entry.get("gaps") or ()]
        record.arrivals[0] = [(now, 1) for now in accumulate(gaps, initial=first)]
    return record
