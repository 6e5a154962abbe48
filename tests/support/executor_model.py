"""An executor without a model: it keeps what every slot holds and checks every read.

The K/V of a token depend on all tokens up to it, so a slot's content is modelled as the
chained hash of those tokens. Computing a token writes its hash to its slot and then
reads the slots of all positions up to it: a block shared, freed, copied or swapped
wrongly shows as a slot with another hash.

The next token is a pure function of the tokens so far and the sample index. So the
right output of a request is known without any scheduler: `expected_output`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.core.request import PositionLogprobs, Request, TokenLogprob
from scheduler_svc.core.step import RowLogprobs, StepPlan, StepResult

VOCAB = 50


def mix(*values: int) -> int:
    """Hash integers to 32 bits."""
    return zlib.crc32(b",".join(b"%d" % v for v in values))


def chain(tokens: list[int]) -> list[int]:
    """Hash of every prefix."""
    hashes, last = [], 1
    for token in tokens:
        last = mix(last, token)
        hashes.append(last)
    return hashes


def next_token(tokens: list[int], sample_index: int) -> int:
    """Return the token that the modelled model draws after these."""
    return mix(chain(tokens)[-1], sample_index, 7) % VOCAB


def candidates(tokens: list[int], count: int) -> tuple[TokenLogprob, ...]:
    """Return the likeliest tokens after these, with made-up log-probabilities."""
    last = chain(tokens)[-1]
    ranked = sorted(range(VOCAB), key=lambda t: mix(last, t))
    return tuple(
        TokenLogprob(t, -0.01 - 0.3 * i - mix(last, t) / 2**34)
        for i, t in enumerate(ranked[:count])
    )


def expected_output(request: Request, sample_index: int) -> list[int]:
    """Return the output tokens of one choice, computed without scheduling."""
    tokens = [*request.prompt_tokens, *request.resumed.get(sample_index, ())]
    output = tokens[len(request.prompt_tokens) :]
    while len(output) < request.max_tokens and not (
        output and output[-1] in request.stop_token_ids
    ):
        token = next_token(tokens, sample_index)
        tokens.append(token)
        output.append(token)
    return output


@dataclass
class ModelRow:
    """A row of the modelled executor."""

    tokens: list[int]
    table: list[int]
    sample_index: int
    num_computed: int
    num_beam_candidates: int = 0
    hashes: list[int] = field(default_factory=list)


class ExecutorModel:
    """Applies plans in the order that executor.proto fixes."""

    def __init__(
        self, num_blocks: int, block_size: int, num_host_blocks: int, max_rows: int
    ) -> None:
        self.block_size = block_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.host: list[int | None] = [None] * (num_host_blocks * block_size)
        self.rows: dict[int, ModelRow] = {}
        self.decode_set: set[int] = set()
        self.max_rows = max_rows
        self.last_step = 0
        self.num_checked_reads = 0
        self.corrupt: Callable[[StepPlan], None] | None = None

    def run(self, plan: StepPlan) -> StepResult:
        """Execute a step; raises AssertionError at the first wrong read or delta."""
        assert plan.step_id == self.last_step + 1, "steps come in order"
        self.last_step = plan.step_id
        self._apply_rows(plan)
        self._apply_tables(plan)
        self._move(plan)
        for row in plan.decode_leave_rows:
            self.decode_set.remove(row)
        for row in plan.decode_enter_rows:
            assert row in self.rows and row not in self.decode_set
            self.decode_set.add(row)
        return self._forward(plan)

    def _apply_rows(self, plan: StepPlan) -> None:
        for row in plan.finish_rows:
            del self.rows[row]
            self.decode_set.discard(row)
        for start in plan.starts:
            assert start.row not in self.rows and start.row < self.max_rows
            seq = start.sequence
            beam = seq.group.beam
            self.rows[start.row] = ModelRow(
                list(start.tokens),
                list(start.blocks),
                seq.sample_index,
                start.num_computed_tokens,
                beam.num_candidates if beam else 0,
            )
        before = {parent: self.rows[parent] for parent, _, _ in plan.children}
        copies = {p: (list(r.tokens), list(r.table)) for p, r in before.items()}
        for parent, child, token in plan.children:
            tokens, table = copies[parent]
            source = before[parent]
            assert child == parent or child not in self.rows
            self.rows[child] = ModelRow(
                [*tokens, token], list(table), 0, source.num_computed, source.num_beam_candidates
            )

    def _apply_tables(self, plan: StepPlan) -> None:
        for row, logical, block in plan.replacements:
            self.rows[row].table[logical] = block
        for row, table in plan.tables:
            self.rows[row].table = list(table)
        for row, block in zip(plan.append_rows, plan.append_blocks, strict=True):
            self.rows[row].table.append(block)

    def _move(self, plan: StepPlan) -> None:
        size = self.block_size

        def copy(source: list[int | None], a: int, target: list[int | None], b: int) -> None:
            target[b * size : (b + 1) * size] = source[a * size : (a + 1) * size]

        for device, host in zip(
            plan.swap_out_device_blocks, plan.swap_out_host_blocks, strict=True
        ):
            copy(self.slots, device, self.host, host)
        assert len(set(plan.copy_destinations)) == len(plan.copy_destinations)
        assert not set(plan.copy_sources) & set(plan.copy_destinations)
        for a, b in zip(plan.copy_sources, plan.copy_destinations, strict=True):
            copy(self.slots, a, self.slots, b)
        for host, device in zip(plan.swap_in_host_blocks, plan.swap_in_device_blocks, strict=True):
            copy(self.host, host, self.slots, device)

    def _forward(self, plan: StepPlan) -> StepResult:
        counts = dict(zip(plan.chunk_rows, plan.chunk_counts, strict=True))
        assert not counts.keys() & self.decode_set and plan.num_decodes == len(self.decode_set)
        counts.update(dict.fromkeys(self.decode_set, 1))
        for row, count in counts.items():
            self._write(self.rows[row], count)
        for row in counts:
            self._check_reads(row)
        for parent, child, sample_index in plan.forks:
            source = self.rows[parent]
            assert child not in self.rows and source.num_computed == len(source.tokens)
            self.rows[child] = ModelRow(
                list(source.tokens), list(source.table), sample_index, source.num_computed
            )
            counts[child] = 0
        tokens, logprobs = [], {}
        for row in sorted(counts):
            state = self.rows[row]
            if state.num_computed < len(state.tokens):
                continue
            token = next_token(state.tokens, state.sample_index)
            if state.num_beam_candidates:
                top = candidates(state.tokens, state.num_beam_candidates)
                token = top[0].token_id
                logprobs[row] = RowLogprobs(PositionLogprobs(top[0], top))
            else:
                state.tokens.append(token)
            tokens.append(token)
        return StepResult(plan.step_id, tokens, logprobs)

    def _write(self, row: ModelRow, count: int) -> None:
        assert count >= 1 and row.num_computed + count <= len(row.tokens)
        hashes = chain(row.tokens)
        for position in range(row.num_computed, row.num_computed + count):
            block = row.table[position // self.block_size]
            self.slots[block * self.block_size + position % self.block_size] = hashes[position]
        row.num_computed += count

    def _check_reads(self, number: int) -> None:
        row = self.rows[number]
        hashes = chain(row.tokens)
        for position in range(row.num_computed):
            block = row.table[position // self.block_size]
            found = self.slots[block * self.block_size + position % self.block_size]
            assert found == hashes[position], (
                f"row {number} reads position {position} in block {block}: not its K/V"
            )
            self.num_checked_reads += 1
