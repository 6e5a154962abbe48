"""The tokens that a step drew: on the device at once, on the host when they have arrived.

While a GPU works on step k, the host lays out step k+1. Positions, slots and tables do not
depend on what k draws; only the token ids do, and the device has them already:

    step k     ... -> logits -> tokens ──┬─> fetched, settled in the row table, answered
    step k+1   token_ids (host) <────────┘   `feed`: put in their places on the device

A row counts its new token when the step is launched, and the row table's copy of it is
filled in by `settle`. At most one step is unsettled when the next one is launched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from executor_svc.batch import StepBatch
from executor_svc.rows import RowTable
from executor_svc.sampler import Samples
from executor_svc.transfer import Fetch, Mark, send

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens of a flat batch that only the device knows.

    `places` are theirs in the batch, `sources` where they stand among `tokens`; both None
    if the first tokens of the batch are all of `tokens`, in order.
    """

    tokens: Tensor
    places: Tensor | None
    sources: Tensor | None

    def put_into(self, token_ids: Tensor) -> None:
        """Fill them in.

        Args:
            token_ids: [num_tokens or more] int64, on the device.
        """
        if self.places is None or self.sources is None:
            token_ids[: len(self.tokens)].copy_(self.tokens)
        else:
            token_ids.index_copy_(0, self.places, self.tokens.index_select(0, self.sources))


class DrawnTokens:
    """One step's tokens.

    Invariant: a token is written to the row table only if its row is still the one that
    drew it, not another that got its number.

    Attributes:
        sample_rows: [S] rows that sampled.
    """

    def __init__(self, samples: Samples, batch: StepBatch, rows: RowTable) -> None:
        """Count the tokens in their rows, and begin to fetch them.

        A beam row reports candidates; which of them go on is the scheduler's choice.
        """
        appends = rows.state["num_beam_candidates"][batch.sample_rows] == 0
        self._places = np.flatnonzero(appends)
        self.sample_rows = batch.sample_rows
        self._rows: Ints = batch.sample_rows[appends]
        self._positions = rows.count_tokens(self._rows)
        self._births = rows.births[self._rows]
        self._tokens = samples.tokens
        self._fetch = Fetch([samples.tokens, samples.best])

    @property
    def end(self) -> Mark:
        """Passed once the tokens are on the host."""
        return self._fetch.end

    def wait(self) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Tokens, and each line's largest logit, of all rows that sampled."""
        tokens, best = self._fetch.wait()
        return tokens, best  # type: ignore[return-value]  # their dtypes are the tensors'

    def settle(self, rows: RowTable) -> None:
        """Write the tokens into the row table, once they are there."""
        tokens, _ = self.wait()
        same = rows.births[self._rows] == self._births
        rows.tokens[self._rows[same], self._positions[same]] = tokens[self._places[same]]

    def needs_settling(self, rows: RowTable) -> bool:
        """Whether to draw the next tokens of these rows takes more than their logits."""
        return bool(rows.state["has_penalties"][self._rows].any())

    def feed(self, batch: StepBatch, rows: RowTable) -> Feed | None:
        """Which tokens of the next step's batch are these; None if none is."""
        lookup = np.full(rows.limits.max_num_rows, -1)
        same = np.flatnonzero(rows.births[self._rows] == self._births)
        lookup[self._rows[same]] = same
        found = lookup[batch.token_rows]
        places = np.flatnonzero(found >= 0)
        places = places[batch.positions[places] == self._positions[found[places]]]
        if not places.size:
            return None
        sources = self._places[found[places]]
        everyone = np.arange(len(self._tokens))
        if np.array_equal(places, everyone) and np.array_equal(sources, everyone):
            return Feed(self._tokens, None, None)
        sent = send([places, sources], self._tokens.device)
        return Feed(self._tokens, *sent)
