"""Check rules, dashboard and metrics with Prometheus itself, over a running stack.

Usage: python -P scripts/observability_check.py [--rules-only]

Needs promtool and, without --rules-only, prometheus on the PATH; Debian's package
"prometheus" has both. Starts both services and the gateway with the default model, sends a
few requests, and lets a real Prometheus scrape them.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from octavo.metrics import Kind, Metric
from octavo_client import AsyncClient
from octavo_client._local import LocalOptions, LocalStack
from octavo_client._socket import settle_address
from octavo_gateway import metrics as gateway

from executor_svc import metrics as executor
from scheduler_svc.observation import definitions as scheduler

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
RULES_TEST = ROOT / "deploy" / "prometheus" / "rules_test.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "octavo.json"
METRICS: dict[str, tuple[Metric, ...]] = {
    "octavo-scheduler": scheduler.METRICS,
    "octavo-executor": executor.METRICS,
    "octavo-gateway": gateway.METRICS,
}
_START_SECONDS = 60.0
_LOAD_SECONDS = 15.0


def main(arguments: list[str]) -> int:
    """Run every check; gives the exit status, after one line per check."""
    rules_only = arguments == ["--rules-only"]
    if arguments and not rules_only:
        return say("usage: observability_check.py [--rules-only]", 2)
    needed = ["promtool"] if rules_only else ["promtool", "prometheus"]
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        return say(
            f"{' and '.join(missing)} not found: on Debian and Ubuntu, apt install prometheus; "
            "elsewhere, https://prometheus.io/download",
            1,
        )
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(RULES_TEST))
    if not rules_only:
        asyncio.run(scrape())
    return say("all is well", 0)


def say(text: str, status: int) -> int:
    """Print a line, to stderr if something is wrong."""
    (sys.stderr if status else sys.stdout).write(f"observability-check: {text}\n")
    return status


def promtool(*arguments: str, text: str | None = None) -> None:
    """Run promtool.

    Raises:  SystemExit: if it finds something.
    """
    done = subprocess.run(
        ["promtool", *arguments], input=text, capture_output=True, text=True, check=False
    )
    said = (done.stdout + done.stderr).strip()
    if done.returncode:
        raise SystemExit(f"promtool {' '.join(arguments)} failed:\n{said}")
    say(f"promtool {' '.join(arguments[:2])}: {said.splitlines()[-1].strip() if said else 'ok'}", 0)


async def scrape() -> None:
    """Run a stack under load and look at it through Prometheus.

    Raises:  SystemExit: if something is missing there.
    """
    ports = {
        job: settle_address("127.0.0.1:0", "--metrics-listen")
        for job in ("octavo-scheduler", "octavo-executor")
    }
    options = LocalOptions(
        listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
        # Small, so that there are preemptions and evictions to be seen.
        num_blocks=64,
        num_host_blocks=32,
        scheduler_args=("--metrics-listen", ports["octavo-scheduler"]),
        executor_args=("--metrics-listen", ports["octavo-executor"]),
    )
    async with LocalStack(options) as stack:
        targets = {**ports, "octavo-gateway": stack.http_url.removeprefix("http://")}
        async with prometheus(targets) as ask:
            await load(stack)
            await until_scraped(ask, targets)
            await check_names(ask)
            await check_rules(ask)
            await check_dashboard(ask)
        await check_formats(targets)


@asynccontextmanager
async def prometheus(targets: dict[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    """Run Prometheus over these targets; gives a client of its API."""
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [target]}]}
        for job, target in targets.items()
    ]
    listen = settle_address("127.0.0.1:0", "--web.listen-address")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        # JSON is YAML.
        config.write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(RULES)],
                    "scrape_configs": jobs,
                }
            )
        )
        promtool("check", "config", str(config))
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={listen}",
            "--log.level=warn",
        )
        try:
            url = f"http://{listen}/api/v1/"
            async with httpx.AsyncClient(base_url=url, timeout=10.0, trust_env=False) as ask:
                yield ask
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), 15.0)


async def load(stack: LocalStack) -> None:
    """Keep the stack busy for a while, through the gateway and past it."""
    until = time.monotonic() + _LOAD_SECONDS
    async with (
        AsyncClient(stack.target) as client,
        httpx.AsyncClient(base_url=stack.http_url, timeout=60.0, trust_env=False) as http,
    ):

        async def generate(number: int) -> None:
            while time.monotonic() < until:
                prompt = f"{'The rules of the game are as follows. ' * 4} Player {number}:"
                await client.generate(prompt, max_tokens=32, n=1 + number % 2, ignore_eos=True)

        async def complete() -> None:
            while time.monotonic() < until:
                body = {"prompt": "Once upon a time", "max_tokens": 8, "stream": True}
                (await http.post("/v1/completions", json=body)).raise_for_status()

        await asyncio.gather(*(generate(number) for number in range(8)), complete())
    say(f"sent requests for {_LOAD_SECONDS:g} s", 0)


async def get(ask: httpx.AsyncClient, path: str, **params: Any) -> Any:
    """Ask Prometheus.

    Raises:  SystemExit: with what it says, if it refuses.
    """
    answer = (await ask.get(path, params=params)).json()
    if answer["status"] != "success":
        raise SystemExit(f"Prometheus refuses {path} {params}: {answer.get('error')}")
    return answer["data"]


async def until_scraped(ask: httpx.AsyncClient, targets: dict[str, str]) -> None:
    """Wait until every target was scraped well.

    Raises:  SystemExit: if one is not.
    """
    give_up = time.monotonic() + _START_SECONDS
    while True:
        try:
            found = (await get(ask, "targets", state="active"))["activeTargets"]
        except httpx.TransportError:
            found = []  # it still starts
        healthy = [target for target in found if target["health"] == "up"]
        if len(healthy) == len(targets):
            say(f"Prometheus scrapes {', '.join(targets)}", 0)
            return
        if time.monotonic() > give_up:
            why = {target["scrapeUrl"]: target["lastError"] for target in found}
            raise SystemExit(f"not every target is up: {why}")
        await asyncio.sleep(0.5)


async def check_names(ask: httpx.AsyncClient) -> None:
    """Every documented metric has a series, and no other of ours has.

    Raises:  SystemExit: if they differ.
    """
    for job, metrics in METRICS.items():
        expected = {name for metric in metrics for name in series_names(metric)}
        data = await get(ask, "label/__name__/values", **{"match[]": f'{{job="{job}"}}'})
        # The gateway's library also tells when a series began.
        ours = (name for name in data if name.startswith("octavo_"))
        found = {name for name in ours if not name.endswith("_created")}
        if expected != found:
            raise SystemExit(
                f"{job}: missing {sorted(expected - found)}, unknown {sorted(found - expected)}"
            )
        say(f"{job}: all {len(metrics)} metrics are there", 0)


def series_names(metric: Metric) -> Iterator[str]:
    """Yield the names of a metric's series."""
    if metric.kind is Kind.HISTOGRAM:
        yield from (f"{metric.name}_{suffix}" for suffix in ("bucket", "count", "sum"))
    else:
        yield metric.name


async def check_rules(ask: httpx.AsyncClient) -> None:
    """Every rule can be evaluated, and of a stack that is well no critical alert fires.

    Raises:  SystemExit: if one cannot, or does.
    """
    groups = (await get(ask, "rules"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    bad = {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] == "err"}
    if bad:
        raise SystemExit(f"rules that cannot be evaluated: {bad}")
    alerts = (await get(ask, "alerts"))["alerts"]
    firing = [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"]
    if firing:
        raise SystemExit(f"alerts that fire although all is well: {firing}")
    say(f"{len(rules)} rules are evaluated, no alert fires", 0)


async def check_dashboard(ask: httpx.AsyncClient) -> None:
    """Every query of the dashboard is valid and finds something.

    Raises:  SystemExit: if one does not.
    """
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    # What happens only when something is wrong.
    may_be_empty = {"Refusals", "Claims"}
    empty, count = [], 0
    for panel in panels:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "10s")
            for name in ("job", "executor", "executor_job", "gateway_job"):
                query = query.replace(f'"${name}"', '".+"')
            query = query.replace('"$job|$executor_job|$gateway_job"', '".+"')
            count += 1
            if not (await get(ask, "query", query=query))["result"]:
                empty.append(panel["title"])
    wrong = set(empty) - may_be_empty
    if wrong:
        raise SystemExit(f"panels that stay empty: {sorted(wrong)}")
    say(f"{count} queries of {len(panels)} panels give something", 0)


async def check_formats(targets: dict[str, str]) -> None:
    """Let promtool look at what the targets say.

    Raises:  SystemExit: if it finds something to mend.
    """
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
        for target in targets.values():
            text = (await http.get(f"http://{target}/metrics")).text
            promtool("check", "metrics", text=text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
