"""Drawing tokens, against a plain float64 version of each rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from executor_svc import sampler
from executor_svc.batch import build_batch
from executor_svc.draws import uniforms
from executor_svc.plan import Plan, RowStart, Sampling
from executor_svc.rows import Limits, RowTable
from executor_svc.sampler import draw

VOCAB = 3000


def plain_draw(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """One draw in float64, a rule a line; of equal tokens lower ids come first."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    if top_k:
        order = order[:top_k]
    mass = np.cumsum(weights[order]) / weights[order].sum()
    if top_p < 1:
        order = order[: int(np.searchsorted(mass, top_p)) + 1]
    kept = sorted(token for token in order if weights[token] >= min_p)
    cumulative = np.cumsum(weights[kept])
    return kept[int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))]


def cases(seed: int, count: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "temperature": random.choice([0.2, 0.7, 1.0, 1.7, 30.0], count),
        "top_k": random.choice([0, 1, 5, 50, 2000, VOCAB + 5], count),
        "top_p": random.choice([0.05, 0.5, 0.9, 0.999, 1.0], count),
        "min_p": random.choice([0.0, 0.01, 0.3], count),
        "uniform": random.random(count),
    }


def arguments(values: dict[str, np.ndarray], places: list[int] | slice = slice(None)) -> dict:
    return {name: array[places] for name, array in values.items()}


def test_draw_equals_the_plain_rules() -> None:
    """Temperature, top-k, top-p and min-p in any mixture give float64's token."""
    values = cases(1, 200)
    logits = np.random.default_rng(2).normal(0, 3, (200, VOCAB)).astype(np.float32)
    drawn = draw(torch.from_numpy(logits), **arguments(values)).tolist()
    expected = [plain_draw(logits[i], *(array[i] for array in values.values())) for i in range(200)]
    # float32 weights may put a draw on the other side of a border a few 1e-7 wide.
    assert sum(a != b for a, b in zip(drawn, expected, strict=True)) <= 1


def test_draw_equals_the_plain_rules_on_equal_logits() -> None:
    """Coarse logits, as bfloat16 gives them, keep exactly the tokens with lower ids."""
    values = cases(3, 100)
    logits = np.random.default_rng(4).integers(-3, 4, (100, VOCAB)).astype(np.float32)
    drawn = draw(torch.from_numpy(logits), **arguments(values)).tolist()
    expected = [plain_draw(logits[i], *(array[i] for array in values.values())) for i in range(100)]
    assert sum(a != b for a, b in zip(drawn, expected, strict=True)) <= 1


def test_draw_does_not_depend_on_its_neighbours() -> None:
    """A line draws the same token alone, in a batch, and in another order."""
    values = cases(5, 24)
    logits = torch.randn(24, VOCAB, generator=torch.Generator().manual_seed(6))
    together = draw(logits, **arguments(values))
    order = np.random.default_rng(7).permutation(24)
    shuffled = draw(logits[torch.from_numpy(order)], **arguments(values, order))
    alone = [draw(logits[i : i + 1], **arguments(values, slice(i, i + 1)))[0] for i in range(24)]
    assert together.tolist() == alone
    assert together[order].tolist() == shuffled.tolist()


def test_top_k_of_one_is_the_lowest_of_the_likeliest() -> None:
    """With k = 1 equal logits leave no choice, whatever the draw."""
    logits = torch.zeros(3, 50)
    logits[:, [7, 20]] = 4.0
    drawn = draw(
        logits,
        temperature=np.ones(3),
        top_k=np.ones(3, np.int64),
        top_p=np.ones(3),
        min_p=np.zeros(3),
        uniform=np.array([0.0, 0.5, 1 - 2**-53]),
    )
    assert drawn.tolist() == [7, 7, 7]


def test_excluded_tokens_are_never_drawn() -> None:
    """At either end of the distribution the draw stays among tokens that may be drawn."""
    logits = torch.full((2, 50), -torch.inf)
    logits[:, 10:20] = torch.linspace(0, 1, 10)
    drawn = draw(
        logits,
        temperature=np.full(2, 1e-3),
        top_k=np.zeros(2, np.int64),
        top_p=np.ones(2),
        min_p=np.zeros(2),
        uniform=np.array([0.0, 1 - 2**-53]),
    )
    assert 10 <= drawn[0] < 20
    assert drawn[1] == 19


@pytest.mark.parametrize("head", [1, 7, 64])
def test_nucleus_is_the_same_from_a_short_head(head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many values are sorted first changes the speed and no token."""
    values = cases(8, 60)
    logits = torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(9))
    monkeypatch.setattr(sampler, "_NUCLEUS_HEAD", VOCAB)
    whole = draw(logits, **arguments(values)).tolist()
    monkeypatch.setattr(sampler, "_NUCLEUS_HEAD", head)
    assert draw(logits, **arguments(values)).tolist() == whole


def test_frequencies_follow_the_probabilities() -> None:
    """Over many draws each token comes as often as its probability says."""
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    count = 20_000
    drawn = draw(
        torch.from_numpy(np.log(probabilities)).float().expand(count, -1),
        temperature=np.ones(count),
        top_k=np.zeros(count, np.int64),
        top_p=np.ones(count),
        min_p=np.zeros(count),
        uniform=np.random.default_rng(10).random(count),
    )
    shares = np.bincount(drawn, minlength=4) / count
    deviation = np.sqrt(probabilities * (1 - probabilities) / count)
    assert (abs(shares - probabilities) < 5 * deviation).all()


def test_rows_draw_by_seed_sample_index_and_position(limits: Limits) -> None:
    """Each row's own seed, index and place in its sequence key its draw; greedy rows none."""
    rows = RowTable(limits)
    drawn = Sampling(temperature=0.8, top_k=60, seed=2**64 - 5)
    plan = Plan(
        starts=[
            RowStart(1, [4, 5, 6], 2, [0], sampling=drawn, sample_index=3),
            RowStart(2, [4, 5], 2, [1]),
            RowStart(6, [4], 1, [2], sampling=replace(drawn, seed=17)),
        ],
        chunk_rows=[6, 1, 2],
        chunk_counts=[1, 3, 2],
    )
    rows.apply(plan)
    batch = build_batch(rows, plan)
    logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(11))
    samples = sampler.sample(logits, batch, rows)
    # Logits come in the order of the chunks: 6, 1, 2.
    keys = uniforms(np.array([2**64 - 5, 17], np.uint64), np.array([3, 0]), np.array([3, 1]))
    of_1 = plain_draw(logits[1].numpy(), 0.8, 60, 1.0, 0.0, keys[0])
    of_6 = plain_draw(logits[0].numpy(), 0.8, 60, 1.0, 0.0, keys[1])
    assert samples.tokens.tolist() == [of_1, int(logits[2].argmax()), of_6]
