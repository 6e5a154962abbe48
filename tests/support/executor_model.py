"""An executor without a model: it keeps what every slot holds and checks every read.

The K/V of a token depend on all tokens up to it, so a slot's content is modelled as the
chained hash of those tokens. Computing a token writes its hash to its slot and then
reads the slots of all positions up to it: a block shared, freed, copied or swapped
wrongly shows as a slot with another hash.

The next token is a pure function of the tokens so far and the sample index. So the
right output of a request is known without any scheduler: `expected_output`, and
`expected_hypotheses` for beam search.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import lru_cache

from scheduler_svc.core.request import FinishReason, PositionLogprobs, Request, TokenLogprob
from scheduler_svc.core.step import RowLogprobs, StepPlan, StepResult, StepTimings

VOCAB = 50
_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """Hash integers to 32 bits."""
    return zlib.crc32(b",".join(b"%d" % v for v in values))


def link(last: int, token: int) -> int:
    """Hash of a prefix and the token after it, to 64 bits."""
    return (last * 0x9E3779B97F4A7C15 + (token + 1) * 0xD1B54A32D192ED03) & _MASK


def chain(tokens: list[int]) -> list[int]:
    """Hash of every prefix."""
    hashes, last = [], 1
    for token in tokens:
        last = link(last, token)
        hashes.append(last)
    return hashes


def draw(last: int, sample_index: int) -> int:
    """Return the token that the modelled model draws after the prefix with this hash."""
    return mix(last, sample_index, 7) % VOCAB


@lru_cache(maxsize=4096)
def ranked(last: int) -> tuple[TokenLogprob, ...]:
    """Every token with a made-up log-probability, the likeliest first."""
    entries = [TokenLogprob(t, -0.01 - 4.0 * mix(last, t) / 2**32) for t in range(VOCAB)]
    return tuple(sorted(entries, key=lambda e: -e.logprob))


def expected_output(request: Request, sample_index: int) -> list[int]:
    """Return the output tokens of one choice, computed without scheduling."""
    output = list(request.resumed.get(sample_index, ()))
    last = chain([*request.prompt_tokens, *output])[-1]
    while len(output) < request.max_tokens and not (
        output and output[-1] in request.stop_token_ids
    ):
        output.append(draw(last, sample_index))
        last = link(last, output[-1])
    return output


@dataclass(frozen=True)
class ExpectedHypothesis:
    """A finished beam of the oracle."""

    tokens: list[int]
    score: float
    reason: FinishReason


def expected_hypotheses(request: Request) -> list[ExpectedHypothesis]:
    """Beam search as Hugging Face does it, over the whole vocabulary and without sharing.

    The best max(2, 1 + number of stop tokens) * width continuations of all beams are
    looked at. One that ends is kept if it ranks among the first `width`; the best
    `width` that do not end go on. It is over when nothing can go on, or when `width`
    have ended and either early stopping is on or the best beam's score, penalized at
    its present length, does not beat the worst of them.
    """
    params = request.beam
    assert params is not None
    pool_size = max(2, 1 + len(request.stop_token_ids)) * params.width
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[ExpectedHypothesis] = []
    for length in range(1, request.max_tokens + 1):
        pool = [
            (total + entry.logprob, [*output, entry.token_id])
            for total, output in beams
            for entry in ranked(chain([*request.prompt_tokens, *output])[-1])
        ]
        pool.sort(key=lambda c: -c[0])
        beams = []
        for rank, (total, output) in enumerate(pool[:pool_size]):
            is_stop = output[-1] in request.stop_token_ids
            if not is_stop and length < request.max_tokens:
                beams.append((total, output))
            elif rank < params.width:
                reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
                score = total / length**params.length_penalty
                ended.append(ExpectedHypothesis(output, score, reason))
        ended = sorted(ended, key=lambda h: -h.score)[: params.width]
        beams = beams[: params.width]
        if not beams:
            break
        if len(ended) == params.width:
            best = beams[0][0] / length**params.length_penalty
            if params.early_stopping or best <= ended[-1].score:
                break
    return ended[: request.n]


@dataclass
class ModelRow:
    """A row of the modelled executor; `hashes` are those of its tokens' prefixes."""

    tokens: list[int]
    hashes: list[int]
    table: list[int]
    sample_index: int
    num_computed: int
    num_beam_candidates: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    num_prompt_tokens: int = 0

    def append(self, token: int) -> None:
        """Add a known token."""
        self.tokens.append(token)
        self.hashes.append(link(self.hashes[-1], token))


@dataclass
class Footprint:
    """The blocks of one step: all that it reads or writes, and those new in a table."""

    touched: set[int] = field(default_factory=set)
    taken: list[int] = field(default_factory=list)
    touched_host: set[int] = field(default_factory=set)
    taken_host: list[int] = field(default_factory=list)


class ExecutorModel:
    """Applies plans in the order that executor.proto fixes.

    Moves of one kind may run in any order on a real device, so a block may be the
    destination of only one of them, and not a source of the same kind as well.
    """

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
        self.footprint = Footprint()
        self.ns_per_token, self.ns_per_block = 1000, 2000

    def run(self, plan: StepPlan) -> StepResult:
        """Execute a step; raises AssertionError at the first wrong read or delta."""
        assert plan.step_id == self.last_step + 1, "steps come in order"
        self.last_step = plan.step_id
        self.footprint = Footprint()
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
            self.rows[start.row] = self._start(start)
        before = {
            parent: (list(row.tokens), list(row.hashes), list(row.table), row)
            for parent in {parent for parent, _, _ in plan.children}
            for row in [self.rows[parent]]
        }
        for parent, child, token in plan.children:
            tokens, hashes, table, source = before[parent]
            assert child == parent or child not in self.rows
            assert source.num_computed == len(tokens), "a beam goes on before it is computed"
            self.rows[child] = ModelRow(
                list(tokens),
                list(hashes),
                list(table),
                0,
                source.num_computed,
                source.num_beam_candidates,
            )
            self.rows[child].append(token)

    def _start(self, start) -> ModelRow:
        seq = start.sequence
        request = seq.group.request
        first_new = -(-start.num_computed_tokens // self.block_size)
        self.footprint.taken += start.blocks[first_new:]
        beam = seq.group.beam
        return ModelRow(
            list(start.tokens),
            chain(start.tokens),
            list(start.blocks),
            seq.sample_index,
            start.num_computed_tokens,
            beam.num_candidates if beam else 0,
            request.num_logprobs,
            request.num_prompt_logprobs,
            len(request.prompt_tokens),
        )

    def _apply_tables(self, plan: StepPlan) -> None:
        for row, logical, block in plan.replacements:
            self.rows[row].table[logical] = block
            self.footprint.taken.append(block)
        for row, table in plan.tables:
            self.rows[row].table = list(table)
        for row, block in zip(plan.append_rows, plan.append_blocks, strict=True):
            self.rows[row].table.append(block)
            self.footprint.taken.append(block)

    def _move(self, plan: StepPlan) -> None:
        size = self.block_size
        footprint = self.footprint

        def move(source: list, sources: list[int], target: list, destinations: list[int]) -> None:
            assert len(set(destinations)) == len(destinations), "two moves to one block"
            assert source is not target or not set(sources) & set(destinations)
            for a, b in zip(sources, destinations, strict=True):
                target[b * size : (b + 1) * size] = source[a * size : (a + 1) * size]

        move(self.slots, plan.swap_out_device_blocks, self.host, plan.swap_out_host_blocks)
        move(self.slots, plan.copy_sources, self.slots, plan.copy_destinations)
        move(self.host, plan.swap_in_host_blocks, self.slots, plan.swap_in_device_blocks)
        footprint.touched.update(
            plan.swap_out_device_blocks,
            plan.copy_sources,
            plan.copy_destinations,
            plan.swap_in_device_blocks,
        )
        footprint.taken += plan.swap_in_device_blocks
        assert not set(plan.swap_out_host_blocks) & set(plan.swap_in_host_blocks)
        footprint.touched_host.update(plan.swap_out_host_blocks, plan.swap_in_host_blocks)
        footprint.taken_host += plan.swap_out_host_blocks

    def _forward(self, plan: StepPlan) -> StepResult:
        counts = dict(zip(plan.chunk_rows, plan.chunk_counts, strict=True))
        assert len(counts) == len(plan.chunk_rows), "a row has two chunks"
        assert not counts.keys() & self.decode_set and plan.num_decodes == len(self.decode_set)
        counts.update(dict.fromkeys(self.decode_set, 1))
        for row, count in counts.items():
            self._write(self.rows[row], count)
        for row in counts:
            self._check_reads(row)
        prompts = {row: self._prompt_logprobs(self.rows[row], n) for row, n in counts.items()}
        for parent, child, sample_index in plan.forks:
            source = self.rows[parent]
            assert child not in self.rows and source.num_computed == len(source.tokens)
            assert parent in counts, "a fork of a row that does not sample"
            self.rows[child] = ModelRow(
                list(source.tokens),
                list(source.hashes),
                list(source.table),
                sample_index,
                source.num_computed,
                num_logprobs=source.num_logprobs,
            )
            counts[child] = 0
        move_ns = self.ns_per_block * len(self.footprint.taken_host + plan.swap_in_host_blocks)
        forward_ns = move_ns + self.ns_per_token * sum(counts.values())
        timings = StepTimings(forward_ns=forward_ns, move_ns=move_ns)
        result = StepResult(plan.step_id, [], timings=timings)
        for row in sorted(counts):
            self._sample(result, row, prompts.get(row, ()))
        return result

    def _sample(self, result: StepResult, number: int, prompt: tuple) -> None:
        row = self.rows[number]
        sampled = None
        if row.num_computed == len(row.tokens):
            token = draw(row.hashes[-1], row.sample_index)
            if row.num_beam_candidates:
                top = ranked(row.hashes[-1])[: row.num_beam_candidates]
                token, sampled = top[0].token_id, PositionLogprobs(top[0], top)
            else:
                row.append(token)
                if row.num_logprobs is not None:
                    sampled = PositionLogprobs(TokenLogprob(token, -0.5))
            result.tokens.append(token)
        if sampled is not None or prompt:
            result.logprobs[number] = RowLogprobs(sampled, prompt)

    def _prompt_logprobs(self, row: ModelRow, count: int) -> tuple[PositionLogprobs, ...]:
        """Tokens of the prompt that the logits of the positions just computed stand before."""
        if row.num_prompt_logprobs is None:
            return ()
        end = min(row.num_computed + 1, row.num_prompt_tokens)
        told = row.tokens[row.num_computed - count + 1 : end]
        return tuple(PositionLogprobs(TokenLogprob(token, -1.0)) for token in told)

    def _write(self, row: ModelRow, count: int) -> None:
        assert count >= 1 and row.num_computed + count <= len(row.tokens)
        size, table, slots = self.block_size, row.table, self.slots
        for position in range(row.num_computed, row.num_computed + count):
            slots[table[position // size] * size + position % size] = row.hashes[position]
        row.num_computed += count

    def _check_reads(self, number: int) -> None:
        row, size = self.rows[number], self.block_size
        self.footprint.touched.update(row.table)
        for logical, block in enumerate(row.table):
            first = logical * size
            expected = row.hashes[first : min(first + size, row.num_computed)]
            found = self.slots[block * size : block * size + len(expected)]
            assert found == expected, (
                f"row {number} reads positions {first}.. in block {block}: not its K/V"
            )
        self.num_checked_reads += row.num_computed
