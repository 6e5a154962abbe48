"""Orca: iteration-level scheduling over contiguous reservations; baselines.py says what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler_svc.simulator.baseline import Baseline, BaselineConfig, Job
from scheduler_svc.simulator.buddy import BuddyAllocator
from scheduler_svc.simulator.work import StepWork
from scheduler_svc.simulator.workload import SimRequest


class Orca(Baseline):
    """Iteration-level scheduling over contiguous reservations."""

    def __init__(
        self,
        config: BaselineConfig,
        requests: Iterable[SimRequest],
        progress: Callable[[int], None] | None,
    ) -> None:
        self.name = f"orca-{config.reserve}"
        self._memory = BuddyAllocator(config.num_slots)
        # Sums over the running sequences; jobs by the iteration that is their last.
        self._num_sequences = self._num_beams = 0
        self._stored_by_beams = 0
        self._stored = self._final = self._promised = 0
        self._iteration = 0
        self._last: dict[int, list[Job]] = {}
        super().__init__(config, requests, progress)

    @property
    def _num_allocated(self) -> int:
        return self._memory.num_allocated

    def _can_ever_hold(self, job: Job) -> bool:
        memory = BuddyAllocator(self._config.num_slots)
        fits = all(memory.allocate(job.reserved) is not None for _ in range(job.num_sequences))
        limit = self._config.max_batch
        return fits and (limit is None or job.num_sequences <= limit)

    def _admit(self) -> list[Job]:
        """Let the next in line enter while there is a contiguous place for each sequence."""
        entered: list[Job] = []
        limit = self._config.max_batch
        while self._waiting:
            job = self._waiting[0]
            if limit is not None and self._num_sequences + job.num_sequences > limit:
                break
            for _ in range(job.num_sequences):
                address = self._memory.allocate(job.reserved)
                if address is None:
                    break
                job.addresses.append(address)
            if len(job.addresses) < job.num_sequences:
                self._give_back(job)
                break
            self._waiting.popleft()
            self._enter(job)
            entered.append(job)
        return entered

    def _give_back(self, job: Job) -> None:
        for address in job.addresses:
            self._memory.free(address)
        job.addresses.clear()

    def _enter(self, job: Job) -> None:
        self._num_running += 1
        self._num_sequences += job.num_sequences
        self._stored += job.num_sequences * job.request.num_prompt
        if job.request.beam_width:
            self._num_beams += job.num_sequences
            self._stored_by_beams += job.num_sequences * job.request.num_prompt
        self._final += job.num_sequences * job.length
        self._promised += job.num_sequences * job.reserved
        last = self._iteration + job.request.num_output - 1
        self._last.setdefault(last, []).append(job)
        self._meter.requests.admitted[job.index] = self._now

    def _leave(self, job: Job) -> None:
        self._num_running -= 1
        self._num_sequences -= job.num_sequences
        for total in (self._stored, self._final):
            assert total >= job.num_sequences * job.length
        self._stored -= job.num_sequences * job.length
        if job.request.beam_width:
            self._num_beams -= job.num_sequences
            self._stored_by_beams -= job.num_sequences * job.length
        self._final -= job.num_sequences * job.length
        self._promised -= job.num_sequences * job.reserved
        self._give_back(job)
        self._note_end(job)

    def _serve(self) -> None:
        num_decodes, context = self._num_sequences, self._stored
        copied = self._config.beam_copy_share * self._stored_by_beams
        entered = self._admit()
        prefills = [(0, job.request.num_prompt) for job in entered]
        work = StepWork(
            num_decodes,
            context,
            prefills,
            self._num_sequences,
            num_copied_blocks=round(copied / self._config.copy_block_size),
        )
        is_waiting = bool(self._waiting)
        seconds = self._step(work, self._num_running, self._num_sequences)
        self._meter.note_kv(
            seconds,
            self._config.num_slots,
            token_states=self._stored,
            reserved=self._final - self._stored,
            internal=self._promised - self._final,
            is_waiting=is_waiting,
        )
        if num_decodes:
            self._meter.itl.add(seconds, num_decodes)
        for job in entered:
            self._meter.requests.first_token[job.index] = self._now
        self._stored += self._num_sequences
        self._stored_by_beams += self._num_beams
        self._num_tokens += self._num_sequences
        for job in self._last.pop(self._iteration, ()):
            self._leave(job)
        self._iteration += 1
