"""Sequences and sequence groups: the state of one request inside the core.

Token counts of a sequence, always `num_scheduled <= known tokens + samples in flight`:

    tokens         prompt and output that are known
    num_scheduled  tokens whose K/V some planned step computes, or has computed
    num_computed   the same, but the step's result is in; while a sequence decodes this
                   is brought up to date at every block's end only

While a sample is in flight the next token is not known yet: a decode may be planned
for it all the same ("the token you sampled last"), which is why num_scheduled can
be ahead of len(tokens).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from scheduler_svc.core.block_pool import BlockId
from scheduler_svc.core.request import FinishReason, Request

if TYPE_CHECKING:
    from scheduler_svc.core.beam import BeamSearch
    from scheduler_svc.core.events import Blocked


class GroupStatus(enum.Enum):
    """Where a group is in its life."""

    WAITING = "waiting"  # in the queue, never ran
    RUNNING = "running"  # holds blocks, or will get them in this very plan
    PREEMPTED = "preempted"  # gave its blocks back, runs its tokens again later
    SWAPPED = "swapped"  # its blocks are in host memory
    FINISHED = "finished"


class DecodeClock:
    """Counts the steps of a decode set, whose members all move on by a token in each."""

    __slots__ = ("num_steps",)

    def __init__(self) -> None:
        """Start at 0."""
        self.num_steps = 0


class Sequence:
    """One stream of tokens.

    Invariant: `block_table` covers at least `num_scheduled` tokens while the group
    runs, and is empty while it waits, is preempted or swapped (then `host_table`
    holds the blocks).
    """

    __slots__ = (
        "_decode_clock",
        "_num_scheduled",
        "accepts",
        "block_hashes",
        "block_table",
        "cumulative_logprob",
        "finish_reason",
        "group",
        "horizon",
        "host_table",
        "is_prefilled",
        "limit",
        "max_len",
        "num_computed",
        "num_prompt_tokens",
        "num_registered",
        "row",
        "sample_index",
        "share_from",
        "stops",
        "tokens",
        "told_at",
    )

    def __init__(self, group: SequenceGroup, sample_index: int, tokens: list[int]) -> None:
        """Start with known tokens and nothing computed."""
        request = group.request
        self.group = group
        self.sample_index = sample_index
        self.tokens = tokens
        self.num_prompt_tokens = len(request.prompt_tokens)
        self.max_len = self.num_prompt_tokens + request.max_tokens
        # The last token to be sampled never needs its own K/V.
        self.limit = self.max_len - 1
        # While it decodes, this is what it was, or would have been, at the clock's zero.
        self._num_scheduled = 0
        self._decode_clock: DecodeClock | None = None
        self.num_computed = 0
        # The next num_scheduled at which a decode needs more than a plain step: a
        # new block, a copy, or to leave because its length is reached.
        self.horizon = 0
        self.row: int | None = None
        # All tokens that were known at the (re)start are scheduled: it decodes now.
        self.is_prefilled = False
        # The token that a step draws becomes the next token as it is: the sequence has
        # a row, is not finished, and no beam search has the choice.
        self.accepts = False
        self.stops = request.stop_token_ids
        self.block_table: list[BlockId] = []
        self.host_table: list[BlockId] = []
        self.block_hashes: list[bytes] = []
        self.num_registered = 0
        self.share_from: Sequence | None = None
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        # When its last token was handed on, by the clock of whoever did; 0.0 is never.
        self.told_at = 0.0

    @property
    def num_scheduled(self) -> int:
        """Tokens whose K/V some planned step computes, or has computed."""
        clock = self._decode_clock
        return self._num_scheduled if clock is None else self._num_scheduled + clock.num_steps

    @num_scheduled.setter
    def num_scheduled(self, count: int) -> None:
        clock = self._decode_clock
        self._num_scheduled = count if clock is None else count - clock.num_steps

    @property
    def in_decode_set(self) -> bool:
        """It computes a token in every step, without being touched."""
        return self._decode_clock is not None

    def start_decoding(self, clock: DecodeClock) -> None:
        """Join a decode set: from now on the clock's steps count as its own."""
        self._num_scheduled -= clock.num_steps
        self._decode_clock = clock

    def stop_decoding(self) -> None:
        """Leave the decode set."""
        self._num_scheduled = self.num_scheduled
        self._decode_clock = None

    @property
    def is_finished(self) -> bool:
        """No more tokens are wanted."""
        return self.finish_reason is not None

    @property
    def num_pending(self) -> int:
        """Samples in flight."""
        return max(0, self.num_scheduled + 1 - len(self.tokens))

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and known."""
        return len(self.tokens) - self.num_prompt_tokens

    def restart(self) -> None:
        """Forget what was computed: the row is gone and the blocks are given back."""
        self._decode_clock = None
        self.num_scheduled = 0
        self.num_computed = 0
        self.horizon = 0
        self.row = None
        self.is_prefilled = False
        self.accepts = False
        self.num_registered = 0
        self.share_from = None

    def leave_executor(self) -> None:
        """Forget the blocks as well: whoever computes it next starts from the tokens."""
        self.restart()
        self.block_table, self.host_table = [], []

    def __repr__(self) -> str:
        return (
            f"Sequence({self.group.request.request_id}/{self.sample_index} row={self.row} "
            f"tokens={len(self.tokens)} scheduled={self.num_scheduled})"
        )


class SequenceGroup:
    """All sequences of one request; scheduled and preempted as one.

    `key`, set by the policy, orders groups: the smaller runs first and is preempted
    last. `unforked`
    counts the samples that will fork from the first sequence when its prompt is done.
    """

    __slots__ = (
        "admitted_at",
        "beam",
        "blocked",
        "cached_prompt_tokens",
        "is_suspect",
        "key",
        "lineage",
        "num_deaths",
        "num_failures",
        "num_preemptions",
        "num_prompt_logprobs_told",
        "num_uncached_tokens",
        "request",
        "resume_after",
        "rows_promised",
        "sequences",
        "serial",
        "status",
        "tokens_at_death",
        "unforked",
        "uses_cache",
    )

    def __init__(self, request: Request) -> None:
        """Make the first sequences of a validated request."""
        self.request = request
        # Counts the groups of a core up; breaks ties between equal arrivals.
        self.serial = 0
        self.key: tuple[float, float, int] = (0, request.arrival, 0)
        self.status = GroupStatus.WAITING
        # Reads and writes the prefix cache.
        self.uses_cache = False
        # Groups that share it may share blocks.
        self.lineage = 0
        # Steps it was in that failed; and executors that died silently under it alone.
        self.num_failures = 0
        self.num_deaths = 0
        self.tokens_at_death = 0
        # While it moves from one core to another.
        self.is_suspect = False
        self.num_preemptions = 0
        # Positions of the prompt whose log-probabilities are out. A position may be
        # computed again, after a preemption or by another sample, and is told once.
        self.num_prompt_logprobs_told = 0
        # Newest step in flight when its rows were given up: samples of those steps
        # still come in, so it cannot start again before.
        self.resume_after = 0
        self.cached_prompt_tokens = 0
        self.admitted_at: float | None = None
        # Why it was not admitted when it was last looked at; None: it was not next, or entered.
        self.blocked: Blocked | None = None
        self.rows_promised = 0
        self.beam: BeamSearch | None = None
        if request.resumed:
            self.sequences = [
                Sequence(self, i, [*request.prompt_tokens, *request.resumed.get(i, ())])
                for i in range(request.best_of)
            ]
            self.unforked = 0
        else:
            self.sequences = [Sequence(self, 0, list(request.prompt_tokens))]
            self.unforked = 0 if request.beam else request.best_of - 1
        # To be computed before it draws: what was not cached when it came.
        self.num_uncached_tokens = self.num_known_tokens

    @property
    def num_known_tokens(self) -> int:
        """The prompt's, once, and those drawn so far."""
        drawn = sum(seq.num_output_tokens for seq in self.live)
        return len(self.request.prompt_tokens) + drawn

    @property
    def num_output_tokens_at_most(self) -> int:
        """Tokens that it may draw, of all samples or beams."""
        request = self.request
        num_sequences = request.beam.width if request.beam is not None else request.best_of
        return num_sequences * request.max_tokens

    @property
    def live(self) -> list[Sequence]:
        """Sequences that want more tokens."""
        return [s for s in self.sequences if s.finish_reason is None]

    def leave_executor(self) -> None:
        """Give up rows, blocks and samples in flight; tokens, ends and search stay."""
        for seq in self.live:
            seq.leave_executor()
        self.rows_promised = 0
        self.resume_after = 0
        if self.beam is not None:
            self.beam.candidates.clear()

    @property
    def max_rows(self) -> int:
        """Rows that the group needs at once."""
        if self.request.beam is not None:
            return self.request.beam.width
        return self.unforked + sum(s.finish_reason is None for s in self.sequences)

    @property
    def has_pending(self) -> bool:
        """A sample of one of its sequences is in flight."""
        return any(s.num_pending for s in self.sequences if s.finish_reason is None)
