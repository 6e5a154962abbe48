"""Static batching: one padded batch after the other; baselines.py says what it is."""

from __future__ import annotations

from itertools import chain

from scheduler_svc.simulator.baseline import Baseline, Job
from scheduler_svc.simulator.work import StepWork


class StaticBatching(Baseline):
    """One padded batch after the other."""

    name = "static"

    @property
    def _num_allocated(self) -> int:
        return self._num_running * self._config.max_len

    def _can_ever_hold(self, job: Job) -> bool:
        return job.num_sequences <= self._max_sequences

    @property
    def _max_sequences(self) -> int:
        fits = self._config.num_slots // self._config.max_len
        return fits if self._config.max_batch is None else min(fits, self._config.max_batch)

    def _serve(self) -> None:
        batch: list[Job] = []
        num_sequences = 0
        while self._waiting:
            if num_sequences + self._waiting[0].num_sequences > self._max_sequences:
                break
            job = self._waiting.popleft()
            num_sequences += job.num_sequences
            self._meter.requests.admitted[job.index] = self._now
            batch.append(job)
        self._num_running = len(batch)
        longest_prompt = max(job.request.num_prompt for job in batch)
        longest_output = max(job.request.num_output for job in batch)
        outputs = [[job.request.num_output] * job.num_sequences for job in batch]
        alive_until = sorted(chain.from_iterable(outputs))
        prefills = [(0, longest_prompt)] * len(batch)
        num_done = 0
        for position in range(longest_output):
            if position == 0:
                work = StepWork(0, 0, prefills, num_sequences)
            else:
                context = num_sequences * (longest_prompt + position)
                work = StepWork(num_sequences, context, None, num_sequences)
            seconds = self._step(work, len(batch), num_sequences)
            while num_done < num_sequences and alive_until[num_done] <= position:
                num_done += 1
            num_alive = num_sequences - num_done
            if position == 0:
                for job in batch:
                    self._meter.requests.first_token[job.index] = self._now
            else:
                self._meter.itl.add(seconds, num_alive)
            self._num_tokens += num_alive
            self._note_kv(batch, position, seconds)
            self._take_arrivals()
        for job in batch:
            self._note_end(job)
        self._num_running = 0

    def _note_kv(self, batch: list[Job], position: int, seconds: float) -> None:
        """Count the batch's slots: only tokens that somebody asked for are of use."""
        stored = final = 0
        num_sequences = 0
        for job in batch:
            request = job.request
            num_sequences += job.num_sequences
            stored += job.num_sequences * (request.num_prompt + min(position, request.num_output))
            final += job.num_sequences * job.length
        self._meter.note_kv(
            seconds,
            self._config.num_slots,
            token_states=stored,
            reserved=final - stored,
            internal=num_sequences * self._config.max_len - final,
            is_waiting=bool(self._waiting),
        )
