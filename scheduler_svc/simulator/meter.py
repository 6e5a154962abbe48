"""Gathers the measures while a simulation runs, in memory that only requests make grow."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from scheduler_svc.simulator.report import KvUse, Report, RequestTable, Sample, Sketch


@dataclass(slots=True)
class Meter:
    """Sums over all executors; `report` divides them.

    Attributes:
        requests: a row each.
        itl: gaps between tokens, seconds.
        timeline: samples of all executors.
        started: when the simulation began, by this process's clock.
        kv_sums: slot seconds of token states, internal, reserved, external, free.
        batched_requests, batched_sequences: times the seconds of their steps.
        blocks, saved_blocks: allocated and saved by sharing, times seconds of steps.
        executor_seconds: seconds in which they took requests, all together.
        last_end: of a request, simulated seconds.
    """

    requests: RequestTable = field(default_factory=RequestTable)
    itl: Sketch = field(default_factory=Sketch)
    timeline: list[Sample] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    kv_sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    busy_seconds: float = 0.0
    batched_requests: float = 0.0
    batched_sequences: float = 0.0
    blocks: float = 0.0
    saved_blocks: float = 0.0
    executor_seconds: float = 0.0
    max_executors: int = 1
    last_end: float = 0.0
    num_steps: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_deaths: int = 0
    num_moved: int = 0

    def note_step(self, seconds: float, num_requests: int, num_sequences: int, tokens: int) -> None:
        """Count a step that is over, or will be for certain."""
        self.num_steps += 1
        self.busy_seconds += seconds
        self.batched_requests += seconds * num_requests
        self.batched_sequences += seconds * num_sequences
        self.num_computed_tokens += tokens

    def note_kv(
        self,
        seconds: float,
        num_slots: int,
        *,
        token_states: float,
        internal: float,
        reserved: float,
        is_waiting: bool,
    ) -> None:
        """Count where the slots of one executor were for some time."""
        sums = self.kv_sums
        sums[0] += seconds * token_states
        sums[1] += seconds * internal
        sums[2] += seconds * reserved
        rest = num_slots - token_states - internal - reserved
        sums[3 if is_waiting else 4] += seconds * rest

    def note_end(self, index: int, now: float, num_tokens: int) -> None:
        """Count a request that got all it asked for.

        Args:
            index: of its row.
            now: simulated seconds.
            num_tokens: of all its samples.
        """
        self.requests.end[index] = now
        self.last_end = max(self.last_end, now)
        self.num_finished += 1
        self.num_prompt_tokens += self.requests.num_prompt[index]
        self.num_output_tokens += num_tokens

    def report(self, system: str, *, now: float, **counters: int) -> Report:
        """Sum up.

        Args:
            system: what was simulated.
            now: simulated seconds at the end.
            counters: the core's, of all executors.
        """
        table = self.requests
        normalized, e2e, ttft, wait = table.latencies()
        start = table.arrival[0] if len(table) else 0.0
        num_ended = self.num_finished + self.num_failed + self.num_refused
        num_unfinished = len(table) - num_ended
        seconds = max(0.0, (now if num_unfinished else self.last_end) - start)
        slots = math.fsum(self.kv_sums)
        kv = KvUse(*(each / slots for each in self.kv_sums)) if slots else KvUse()
        busy, unshared = self.busy_seconds or 1.0, self.blocks + self.saved_blocks
        return Report(
            system=system,
            num_requests=len(table),
            num_finished=self.num_finished,
            num_failed=self.num_failed,
            num_refused=self.num_refused,
            num_unfinished=num_unfinished,
            seconds=seconds,
            busy_seconds=self.busy_seconds,
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_computed_tokens=self.num_computed_tokens,
            output_tokens_per_second=self.num_output_tokens / seconds if seconds else 0.0,
            requests_per_second=self.num_finished / seconds if seconds else 0.0,
            normalized_latency=normalized,
            e2e=e2e,
            ttft=ttft,
            itl=self.itl.spread(),
            queue_wait=wait,
            mean_batched_requests=self.batched_requests / busy,
            mean_batched_sequences=self.batched_sequences / busy,
            kv=kv,
            saved_by_sharing=self.saved_blocks / unshared if unshared else 0.0,
            num_recompute_preemptions=counters.get("num_recompute_preemptions", 0),
            num_swap_preemptions=counters.get("num_swap_preemptions", 0),
            num_copied_blocks=counters.get("num_copied_blocks", 0),
            num_prefix_hit_tokens=counters.get("num_prefix_hit_tokens", 0),
            num_prefix_query_tokens=counters.get("num_prefix_query_tokens", 0),
            num_deaths=self.num_deaths,
            num_moved=self.num_moved,
            mean_executors=self.executor_seconds / now if now else float(self.max_executors),
            max_executors=self.max_executors,
            wall_seconds=time.perf_counter() - self.started,
            requests=table,
            timeline=self.timeline,
        )
