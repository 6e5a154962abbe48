"""Bias, masks, penalties and log-probabilities, against sums written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.logits import adjust, likeliest, positions
from executor_svc.plan import Plan, RowStart, Sampling
from executor_svc.rows import Limits, RowTable

VOCAB = 97


@pytest.fixture
def rows(limits: Limits) -> RowTable:
    return RowTable(limits)


def adjusted(
    rows: RowTable, start: dict[str, Any], logits: list[float] | None = None
) -> list[float]:
    """Line of row 2, which has the prompt 3 4 4 and the output 5 6 6 6."""
    fields = {"num_prompt_tokens": 3, "blocks": [0], **start}
    rows.apply(Plan(starts=[RowStart(2, [3, 4, 4, 5, 6, 6, 6], **fields)]))
    lines = torch.zeros(1, VOCAB)
    lines[0, : len(logits or [])] = torch.tensor(logits or [])
    adjust(lines, [2], rows)
    return lines[0].tolist()


def test_repetition_penalty_looks_at_prompt_and_output(rows: RowTable) -> None:
    """Positive logits of seen tokens are divided, negative ones multiplied, once."""
    sampling = Sampling(repetition_penalty=2.0)
    line = adjusted(rows, {"sampling": sampling}, [1, 1, 1, 1, -1, 4, -4, 1])
    assert line[:8] == [1, 1, 1, 0.5, -2, 2, -8, 1]


def test_presence_and_frequency_look_at_the_output(rows: RowTable) -> None:
    """Presence counts once, frequency each time, and the prompt not at all."""
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    line = adjusted(rows, {"sampling": sampling})
    assert line[:8] == [0, 0, 0, 0, 0, -0.75, -1.25, 0]


def test_bias_comes_before_penalties(rows: RowTable) -> None:
    """A biased logit is what the repetition penalty divides."""
    sampling = Sampling(logit_bias={4: 3.0, 90: -1.5}, repetition_penalty=2.0)
    line = adjusted(rows, {"sampling": sampling}, [0, 0, 0, 0, 1])
    assert (line[4], line[90]) == (2.0, -1.5)


def test_allowed_tokens_exclude_all_others(rows: RowTable) -> None:
    """What is not allowed is impossible, even where bias favours it."""
    sampling = Sampling(allowed_token_ids=[8, 9], logit_bias={9: 2.0, 10: 100.0})
    line = adjusted(rows, {"sampling": sampling})
    assert [token for token, value in enumerate(line) if value > -np.inf] == [8, 9]
    assert line[9] == 2.0


@pytest.mark.parametrize(("min_tokens", "held_back"), [(4, False), (5, True)])
def test_stop_tokens_wait_for_min_tokens(rows: RowTable, min_tokens: int, held_back: bool) -> None:
    """With four tokens of output a stop token is held back if five are required."""
    start = {"min_tokens": min_tokens, "stop_token_ids": [11, 5000]}
    line = adjusted(rows, start)
    assert (line[11] == -np.inf) is held_back
    assert line[10] == 0


def test_neighbours_do_not_share_penalties(rows: RowTable) -> None:
    """Rows of other lengths and without penalties in one batch change nothing."""
    plain, long = RowStart(0, [6, 6], 1, [1]), RowStart(1, list(range(40)), 1, [1])
    sampling = Sampling(frequency_penalty=1.0)
    short = RowStart(3, [7, 6, 6], 1, [1], sampling=sampling)
    long = RowStart(1, list(range(40)), 1, [1], sampling=sampling)
    rows.apply(Plan(starts=[plain, long, short]))
    lines = torch.zeros(3, VOCAB)
    adjust(lines, [0, 1, 3], rows)
    assert lines[0].abs().sum() == 0
    assert lines[1].tolist() == [0] + [-1] * 39 + [0] * (VOCAB - 40)
    assert {token: value for token, value in enumerate(lines[2].tolist()) if value} == {6: -2}


def test_logprobs_are_of_the_whole_distribution() -> None:
    """Chosen and likeliest come with the log of their softmax, likeliest first."""
    logits = torch.randn(130, VOCAB, generator=torch.Generator().manual_seed(1))
    chosen = torch.arange(130) % VOCAB
    told = positions(logits, chosen, [i % 4 for i in range(130)])
    exact = logits.double().numpy()
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    for place, position in enumerate(told):
        order = np.argsort(-exact[place])[: place % 4].tolist()
        assert position.chosen_token == place % VOCAB
        assert position.chosen_logprob == pytest.approx(exact[place, place % VOCAB], abs=1e-5)
        assert list(position.top_tokens) == order
        assert list(position.top_logprobs) == pytest.approx(exact[place, order], abs=1e-5)


def test_impossible_tokens_are_not_among_the_likeliest() -> None:
    """Two possible tokens give two candidates, however many were asked for."""
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [3, 50]] = 0.0
    (position,) = positions(logits, torch.tensor([3]), [6])
    assert list(position.top_tokens) == [3, 50]


def test_equal_values_are_in_order_of_their_ids() -> None:
    """Ties inside and at the border of the likeliest go to lower ids."""
    values = torch.randint(0, 4, (20, 500), generator=torch.Generator().manual_seed(2)).float()
    top, ids = likeliest(values, 30)
    for line, found, found_ids in zip(values.tolist(), top.tolist(), ids.tolist(), strict=True):
        order = sorted(range(500), key=lambda token: (-line[token], token))[:30]
        assert found_ids == order
        assert found == [line[token] for token in order]
