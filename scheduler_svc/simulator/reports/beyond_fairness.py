"""Fairness between clients: the fair policy against first come, first served."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from scheduler_svc.core.waiting import OUTPUT_TOKEN_WEIGHT
from scheduler_svc.simulator import (
    PAPER_SETUPS,
    RequestTable,
    SimRequest,
    SimulationConfig,
    simulate,
    traces,
    workload,
)
from scheduler_svc.simulator.reports.beyond import PAGE, percent, quantile, seconds
from scheduler_svc.simulator.reports.findings import Bars, Claim, Findings, Panel, Table
from scheduler_svc.simulator.reports.study import Context, Study

_SETUP = "llama-13b"
_FILE = "arena_vtc.csv.gz"
_FASTER = 2.0
_BACKLOGGED = 0.95
_POLICIES = ("fcfs", "fair")
_HEAVY, _LIGHT = 3, 12
_HEAVY_RATE, _LIGHT_RATE = 1.6, 0.06
_SHOWN = 16


@dataclass(frozen=True, slots=True)
class _Job:
    """One policy; the trace, or drawn clients where there is none."""

    policy: str
    trace: Path | None
    num_seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class _Client:
    """What one client asked for and got.

    Attributes:
        demand: of all its requests, in tokens as the policy weighs them.
        served: of those that ended before the last request of anybody came.
        backlog: share of the second half of that time in which it had a request waiting.
        served_late: in that half; a request's tokens are spread over the time that it ran.
        ttft: of all its requests, seconds.
    """

    name: str
    demand: float
    served: float
    backlog: float
    served_late: float
    ttft: list[float]


def _drawn(job: _Job) -> list[SimRequest]:
    """A few clients that ask for more than there is, and many that ask for little."""
    clients = [(f"heavy {i}", _HEAVY_RATE / (1 + i)) for i in range(_HEAVY)]
    clients += [(f"light {i}", _LIGHT_RATE) for i in range(_LIGHT)]
    found: list[SimRequest] = []
    for number, (name, rate) in enumerate(clients):
        draw = random.Random(job.seed * 1_000 + number)
        drawn = workload.sharegpt(
            max(1, round(rate * job.num_seconds)), rate=rate, seed=draw.randrange(1 << 30)
        )
        found += [replace(r, tenant=name) for r in drawn if r.arrival <= job.num_seconds]
    return sorted(found, key=lambda each: each.arrival)


def _recorded(job: _Job) -> list[SimRequest]:
    assert job.trace is not None
    rows = workload.scale_rate(traces.read(job.trace), _FASTER)
    return [r for r in rows if r.arrival <= job.num_seconds]


def _run(job: _Job) -> list[_Client]:
    requests = _drawn(job) if job.trace is None else _recorded(job)
    config = SimulationConfig.of_setup(PAPER_SETUPS[_SETUP], policy=job.policy)
    return _clients(simulate(config, requests).requests)


def _clients(table: RequestTable) -> list[_Client]:
    last = max(table.arrival)
    by_client: dict[str, list[int]] = defaultdict(list)
    for index, number in enumerate(table.tenant):
        by_client[table.tenants[number]].append(index)
    found = [_client(name, rows, table, last) for name, rows in by_client.items()]
    return sorted(found, key=lambda each: (-each.demand, each.name))


def _client(name: str, rows: list[int], table: RequestTable, last: float) -> _Client:
    """Sum up one client's requests.

    Args:
        rows: of its requests, by arrival.
        last: when the last request of anybody came.
    """
    demand = served = late = waited = 0.0
    middle = waited_until = last / 2
    for row in rows:
        tokens = table.num_prompt[row] + OUTPUT_TOKEN_WEIGHT * table.num_output[row]
        demand += tokens
        begin, end = table.admitted[row], table.end[row]
        served += tokens if end <= last else 0.0
        late += tokens * max(0.0, min(end, last) - max(begin, middle)) / max(end - begin, 1e-9)
        waited += max(0.0, min(begin, last) - max(table.arrival[row], waited_until))
        waited_until = max(waited_until, min(begin, last))
    ttft = [table.first_token[row] - table.arrival[row] for row in rows]
    return _Client(name, demand, served, waited / max(last - middle, 1e-9), late, ttft)


def _fair_level(clients: list[_Client]) -> float:
    """What each may have at most if all that was served is shared out by need (max-min)."""
    left, demands = sum(c.served for c in clients), sorted(c.demand for c in clients)
    for number, demand in enumerate(demands):
        equal = left / (len(demands) - number)
        if demand >= equal:
            return equal
        left -= demand
    return demands[-1]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One policy, summed up over clients.

    Attributes:
        light: clients that ask for less than their fair share.
        heavy: those that always have a request waiting under the fair policy.
    """

    light: list[_Client]
    heavy: list[_Client]

    @property
    def light_ttft(self) -> list[float]:
        """Of all requests of light clients."""
        return [each for client in self.light for each in client.ttft]

    @property
    def worst_light(self) -> float:
        """Mean TTFT of the light client that waits longest."""
        return max((sum(c.ttft) / len(c.ttft) for c in self.light), default=0.0)

    @property
    def spread(self) -> float:
        """Most ÷ least that a heavy client was served while all of them had requests waiting."""
        served = [c.served_late for c in self.heavy]
        return max(served) / max(1.0, min(served)) if served else 1.0

    @property
    def light_served(self) -> float:
        """Share of what light clients asked for that was served in time."""
        return sum(c.served for c in self.light) / max(1.0, sum(c.demand for c in self.light))


def _sum_up(clients: list[_Client], level: float, heavy: set[str]) -> _Outcome:
    light = [c for c in clients if c.demand <= level]
    return _Outcome(light, [c for c in clients if c.name in heavy])


def _study(context: Context, trace: Path | None) -> Findings:
    num_seconds = context.pick(300.0, 20.0)
    jobs = [_Job(policy, trace, num_seconds, context.seed) for policy in _POLICIES]
    both = context.map(_run, jobs)
    # One level for both, so that the same clients are light.
    level = min(_fair_level(clients) for clients in both)
    heavy = {c.name for c in both[1] if c.backlog >= _BACKLOGGED}
    fcfs, fair = (_sum_up(clients, level, heavy) for clients in both)
    source = _DRAWN_SOURCE if trace is None else _recorded_source(len(both[0]))
    return Findings(
        setup=f"{_SETUP} on the paper's A100-40GB; {source}, {num_seconds:g} s of it, which is "
        "more than can be served. Service counts a token of output as two, as the policy does. A "
        "light client asks for less than its fair share of what was served (max-min). A heavy one "
        "has, under the fair policy, a request waiting throughout the second half; what these were "
        "served then is compared.",
        claims=_claims(fcfs, fair),
        tables=[_table(fcfs, fair)],
        panels=_panels(both[0], both[1], level),
        notes=[
            "The policy orders those that wait; it takes nothing from those that run. So a client "
            "that comes back waits until one sequence ends, not for the whole queue.",
        ],
    )


_DRAWN_SOURCE = (
    f"{_HEAVY} clients that send {_HEAVY_RATE:g} requests/s, a half and a third of that, "
    f"and {_LIGHT} that send {_LIGHT_RATE:g} each, all with ShareGPT's lengths"
)


def _recorded_source(num_clients: int) -> str:
    return f"the slice of Chatbot Arena with {num_clients} clients, {_FASTER:g} times as fast"


def _claims(fcfs: _Outcome, fair: _Outcome) -> list[Claim]:
    fcfs_p99, fair_p99 = (quantile(each.light_ttft, 0.99) for each in (fcfs, fair))
    return [
        Claim(
            "Light clients do not wait behind heavy ones: their TTFT p99 is at most half of "
            "that of first come, first served",
            fair_p99 <= fcfs_p99 / 2,
            f"{seconds(fair_p99)} s against {seconds(fcfs_p99)} s, of {len(fcfs.light)} clients",
        ),
        Claim(
            "Heavy clients are served alike: the most served got at most 1.5 times what the "
            "least served got",
            fair.spread <= 1.5,
            f"{fair.spread:.2f} times, and {fcfs.spread:.2f} times first come, first served; "
            f"{len(fair.heavy)} clients",
        ),
    ]


def _table(fcfs: _Outcome, fair: _Outcome) -> Table:
    return Table(
        "Light and heavy clients",
        (
            "policy",
            "light: TTFT p50, s",
            "light: TTFT p99, s",
            "light: worst client's mean, s",
            "light: served in time",
            "heavy: most ÷ least served",
        ),
        [
            (
                policy,
                seconds(quantile(each.light_ttft, 0.5)),
                seconds(quantile(each.light_ttft, 0.99)),
                seconds(each.worst_light),
                percent(each.light_served),
                f"{each.spread:.2f}",
            )
            for policy, each in zip(_POLICIES, (fcfs, fair), strict=True)
        ],
    )


def _panels(fcfs: list[_Client], fair: list[_Client], level: float) -> list[Panel]:
    """Draw the clients that ask for most.

    Args:
        fcfs, fair: all clients under each policy.
        level: a fair share, in tokens as the policy weighs them.
    """
    shown = fair[:_SHOWN]
    by_name = {c.name: c for c in fcfs}
    x_names = [str(i + 1) for i in range(len(shown))]
    return [
        Panel(
            "Served, by client",
            "clients, the one that asks for most first",
            "served ÷ fair share",
            bars=[
                Bars("fcfs", [by_name[c.name].served / level for c in shown]),
                Bars("fair", [c.served / level for c in shown]),
                Bars("asked for (up to 3)", [min(3.0, c.demand / level) for c in shown]),
            ],
            x_names=x_names,
            bound=1.0,
        ),
        Panel(
            "Mean TTFT, by client",
            "clients, the one that asks for most first",
            "seconds",
            bars=[
                Bars("fcfs", [_mean(by_name[c.name].ttft) for c in shown]),
                Bars("fair", [_mean(c.ttft) for c in shown]),
            ],
            x_names=x_names,
        ),
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def run_drawn(context: Context) -> Findings:
    """Drawn clients."""
    return _study(context, None)


def run_recorded(context: Context) -> Findings:
    """Clients of the arena."""
    assert context.traces is not None
    return _study(context, context.traces / _FILE)


_QUESTION = (
    "A few clients send more than there is room for. Do those that send little have to wait behind "
    "them, and do those that send much get the same?"
)

STUDIES = (
    Study(
        name="beyond_fairness",
        title="Fairness between clients",
        question=_QUESTION,
        run=run_drawn,
        page=PAGE,
    ),
    Study(
        name="beyond_fairness_arena",
        title="Fairness between the clients of Chatbot Arena",
        question=_QUESTION,
        run=run_recorded,
        page=PAGE,
        needs_traces=True,
    ),
)
