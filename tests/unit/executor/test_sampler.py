"""Drawing tokens, against a plain float64 version of each rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from executor_svc import sampler
from executor_svc.batch import build_batch
from executor_svc.draws import exponentials, keys
from executor_svc.plan import Plan, RowStart, Sampling
from executor_svc.rows import Limits, RowTable
from executor_svc.sampler import draw

VOCAB = 3000


def plain_draw(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, keys: np.ndarray
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
    kept = np.array(sorted(token for token in order if weights[token] >= min_p))
    ids = torch.from_numpy(kept.astype(np.int32))
    arrivals = exponentials(ids, torch.from_numpy(keys)).double().numpy()
    return int(kept[np.argmax(scaled[kept] - np.log(arrivals))])


def keys_at(count: int, seed: int = 0) -> np.ndarray:
    """Keys of the first positions of one sequence."""
    return keys(np.full(count, seed, np.uint64), np.zeros(count, np.int64), np.arange(count))


def freely(count: int, **changed: object) -> dict:
    """Arguments of `count` draws at temperature 1 that leave nothing out."""
    return {
        "temperature": np.ones(count),
        "top_k": np.zeros(count, np.int64),
        "top_p": np.ones(count),
        "min_p": np.zeros(count),
        "row_keys": keys_at(count),
        **changed,
    }


def cases(seed: int, count: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "temperature": random.choice([0.2, 0.7, 1.0, 1.7, 30.0], count),
        "top_k": random.choice([0, 1, 5, 50, 2000, VOCAB + 5], count),
        "top_p": random.choice([0.05, 0.5, 0.9, 0.999, 1.0], count),
        "min_p": random.choice([0.0, 0.01, 0.3], count),
        "row_keys": keys_at(count, seed),
    }


def arguments(values: dict[str, np.ndarray], places: list[int] | slice = slice(None)) -> dict:
    return {name: array[places] for name, array in values.items()}


def test_draw_equals_the_plain_rules() -> None:
    """Temperature, top-k, top-p and min-p in any mixture give float64's token."""
    values = cases(1, 200)
    logits = np.random.default_rng(2).normal(0, 3, (200, VOCAB)).astype(np.float32)
    drawn = draw(torch.from_numpy(logits), **arguments(values)).tolist()
    expected = [plain_draw(logits[i], *(array[i] for array in values.values())) for i in range(200)]
    # In float32 the first two may arrive within a few 1e-7.
    assert sum(a != b for a, b in zip(drawn, expected, strict=True)) <= 1


def test_draw_equals_the_plain_rules_on_equal_logits() -> None:
    """Coarse logits, as bfloat16 gives them, keep exactly the tokens with lower ids."""
    values = cases(3, 100)
    logits = np.random.default_rng(4).integers(-3, 4, (100, VOCAB)).astype(np.float32)
    drawn = draw(torch.from_numpy(logits), **arguments(values)).tolist()
    expected = [plain_draw(logits[i], *(array[i] for array in values.values())) for i in range(100)]
    assert sum(a != b for a, b in zip(drawn, expected, strict=True)) <= 1


@pytest.mark.parametrize("kept", [1, 40, VOCAB])
def test_a_draw_of_all_is_that_of_the_few_that_are_left(kept: int) -> None:
    """What a GPU does for filtered rows gives the CPU's tokens."""
    random = np.random.default_rng(kept)
    weights = np.zeros((30, VOCAB), np.float32)
    for line in weights:
        line[random.choice(VOCAB, kept, replace=False)] = random.uniform(1e-6, 1, kept)
    lines, row_keys = torch.from_numpy(weights), keys_at(30, seed=5)
    of_few = sampler._draw_of_few(lines, row_keys).tolist()
    assert sampler._draw_of_all(lines, row_keys).tolist() == of_few
    assert (weights[np.arange(30), of_few] > 0).all()


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


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_rounding_of_the_logits_does_not_change_draws(scale: float) -> None:
    """Of 5,000 draws from 49,152 tokens an error of 1e-6 changes at most two.

    The error has one sign on each half of the vocabulary, so that it adds up along the
    cumulative distribution, as that of one wrong hidden state does. A draw changes only
    where the first two arrive within it, a chance of about 2e-6 each.
    """
    random = torch.Generator().manual_seed(12)
    logits = torch.randn(50, 49_152, generator=random) * scale
    noisy = logits + torch.where(torch.arange(49_152) < 49_152 // 2, 1e-6, -1e-6)
    changed = 0
    for row_keys in np.split(keys_at(5000), 100):
        values = freely(50, row_keys=row_keys)
        changed += int((draw(logits, **values) != draw(noisy, **values)).sum())
    assert changed <= 2


def test_top_k_of_one_is_the_lowest_of_the_likeliest() -> None:
    """With k = 1 equal logits leave no choice, whatever the draw."""
    logits = torch.zeros(30, 50)
    logits[:, [7, 20]] = 4.0
    drawn = draw(logits, **freely(30, top_k=np.ones(30, np.int64)))
    assert drawn.tolist() == [7] * 30


def test_excluded_tokens_are_never_drawn() -> None:
    """A token whose logit is minus infinity loses every race, hot or cold."""
    logits = torch.full((400, 50), -torch.inf)
    logits[:, 10:20] = torch.linspace(0, 1, 10)
    temperature = np.repeat([1e-3, 100.0], 200)
    drawn = draw(logits, **freely(400, temperature=temperature))
    assert (drawn[:200] == 19).all()
    assert set(drawn[200:].tolist()) == set(range(10, 20))


@pytest.mark.parametrize(
    ("limits_of", "kept"),
    [
        ({"top_k": np.full(600, 3)}, {5, 6, 7}),
        ({"top_p": np.full(600, 0.8)}, {6, 7}),
        ({"min_p": np.full(600, 0.1)}, {5, 6, 7}),
        ({"top_k": np.full(600, 3), "min_p": np.full(600, 0.3)}, {6, 7}),
    ],
)
def test_limits_keep_exactly_the_likeliest(limits_of: dict, kept: set[int]) -> None:
    """Tokens a factor e apart: those inside a limit are all drawn, the others never."""
    logits = torch.arange(8.0).expand(600, -1)
    assert set(draw(logits, **freely(600, **limits_of)).tolist()) == kept


def test_a_limit_does_not_change_a_winner_that_it_keeps() -> None:
    """A token's number does not hang on who else is drawn for."""
    logits = torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(13)) * 3
    free = draw(logits, **freely(300))
    limited = draw(logits, **freely(300, top_k=np.full(300, 200)))
    inside = [bool((logits[i] >= logits[i].topk(200).values[-1])[free[i]]) for i in range(300)]
    assert 150 < sum(inside) < 300
    assert (free[inside] == limited[inside]).all()


@pytest.mark.parametrize("head", [1, 7, 64])
def test_nucleus_is_the_same_from_a_short_head(head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many values are sorted first changes the speed and no token."""
    values = cases(8, 60)
    logits = torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(9))
    monkeypatch.setattr(sampler, "_NUCLEUS_HEAD", VOCAB)
    whole = draw(logits, **arguments(values)).tolist()
    monkeypatch.setattr(sampler, "_NUCLEUS_HEAD", head)
    assert draw(logits, **arguments(values)).tolist() == whole


def chi_square(drawn: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * len(drawn)
    counts = np.bincount(drawn, minlength=len(probabilities))
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_frequencies_follow_the_probabilities(temperature: float) -> None:
    """Over positions, and over seeds, each token comes as often as its probability says."""
    count, size = 20_000, 12
    logits = np.linspace(-2, 2, size)
    weights = np.exp(logits / temperature)
    lines = torch.from_numpy(logits).float().expand(count, -1)
    zeros = np.zeros(count, np.int64)
    for row_keys in (
        keys_at(count, 5),
        keys(np.arange(count, dtype=np.uint64), zeros, zeros + 9),
    ):
        values = freely(count, temperature=np.full(count, temperature), row_keys=row_keys)
        # The upper 1e-5 of chi-square with 11 degrees of freedom begins at 42.
        assert chi_square(draw(lines, **values), weights / weights.sum()) < 42


def test_rare_tokens_come_as_often_as_they_should() -> None:
    """A thousand tokens that share a probability of 1e-3 are drawn 40 times in 40,000."""
    count = 40_000
    logits = torch.full((1001,), float(np.log(1e-6)))
    logits[500] = float(np.log(1 - 1e-3))
    drawn = draw(logits.expand(count, -1), **freely(count))
    assert abs(int((drawn != 500).sum()) - 40) < 5 * np.sqrt(40)


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
    row_keys = keys(np.array([2**64 - 5, 17], np.uint64), np.array([3, 0]), np.array([3, 1]))
    of_1 = plain_draw(logits[1].numpy(), 0.8, 60, 1.0, 0.0, row_keys[0])
    of_6 = plain_draw(logits[0].numpy(), 0.8, 60, 1.0, 0.0, row_keys[1])
    assert samples.tokens.tolist() == [of_1, int(logits[2].argmax()), of_6]
