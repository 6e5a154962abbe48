"""All layers in one call: what is kept, and what does not fit.

That they compute what a model's layers do is shown in tests/unit/executor/test_fused_layers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from octavo_kernels.cpu.decoder import Decoder, Layer
from octavo_kernels.cpu.linear import PackedLinear
from octavo_kernels.cpu.plans import Plans, plan_decode, plan_prefill

WIDTH, MLP, HEADS, KV_HEADS, HEAD_DIM = 128, 96, 2, 1, 64
NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE = 3, 8, 8
# Two decodes at positions 4 and 12, and a chunk of five tokens after three.
TABLES = torch.tensor([[1, 0], [3, 5], [6, 0]], dtype=torch.int32)
LENGTHS = torch.tensor([5, 13, 8])
STARTS = torch.tensor([0, 5])
SLOTS = torch.tensor([12, 44, 51, 52, 53, 54, 55])
NUM_TOKENS, NUM_DECODES = 7, 2
DTYPES = [torch.float32, torch.bfloat16]


def product(num_out: int, num_in: int, dtype: torch.dtype) -> PackedLinear:
    return PackedLinear((torch.randn(num_out, num_in) / num_in**0.5).to(dtype), None)


def layer(dtype: torch.dtype, **changes: Any) -> Layer:
    parts: dict[str, Any] = {
        "qkv": product((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH, dtype),
        "output": product(WIDTH, HEADS * HEAD_DIM, dtype),
        "gate_up": product(2 * MLP, WIDTH, dtype),
        "down": product(WIDTH, MLP, dtype),
        "attention_norm": torch.rand(WIDTH).to(dtype),
        "mlp_norm": torch.rand(WIDTH).to(dtype),
        "attention_epsilon": 1e-5,
        "mlp_epsilon": 1e-6,
        "scale": HEAD_DIM**-0.5,
        "sliding_window": None,
    }
    return Layer(**(parts | changes))


def pool(dtype: torch.dtype) -> list[torch.Tensor]:
    shape = (NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    return list(torch.randn(shape).to(dtype).unbind())


def laid_out(cache: torch.Tensor) -> Callable[[int | None], Plans]:
    def plans(window: int | None) -> Plans:
        options: dict[str, Any] = {
            "key_cache": cache,
            "num_heads": HEADS,
            "sliding_window": window,
        }
        decode = plan_decode(TABLES[:NUM_DECODES], LENGTHS[:NUM_DECODES], **options)
        chunks = plan_prefill(
            TABLES[NUM_DECODES:], LENGTHS[NUM_DECODES:], query_starts=STARTS, **options
        )
        return decode, chunks

    return plans


def step(dtype: torch.dtype, **changes: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(1)
    given = {
        "x": torch.randn(NUM_TOKENS, WIDTH).to(dtype),
        "table": torch.randn(NUM_TOKENS, HEAD_DIM).to(dtype),
        "slots": SLOTS,
        "kept": torch.arange(NUM_TOKENS),
    }
    return given | changes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", [[], [0], [1, 6], [0, 1, 2, 3, 4, 5, 6]], ids=len)
def test_kept_tokens_are_the_same_to_the_bit(kept: list[int], dtype: torch.dtype) -> None:
    """Whichever are kept; the pool is written for all. Windows differ between layers."""
    torch.manual_seed(0)
    layers = [layer(dtype, sliding_window=window) for window in (None, 3, None)]
    seen = []
    for places in (list(range(NUM_TOKENS)), kept):
        torch.manual_seed(2)
        keys, values = pool(dtype), pool(dtype)
        given = step(dtype, kept=torch.tensor(places, dtype=torch.int64))
        decoder = Decoder(layers, keys, values, num_heads=HEADS)
        decoder.run(**given, plans=laid_out(keys[0]))
        assert given["x"].isfinite().all()
        seen.append((given["x"][kept], torch.stack(keys), torch.stack(values)))
    for all_of_them, some in zip(*seen, strict=True):
        assert torch.equal(all_of_them, some)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_of_any_size_follow_one_another(dtype: torch.dtype) -> None:
    """A larger step makes room; a smaller one before it and after it computes the same."""
    torch.manual_seed(0)
    layers = [layer(dtype) for _ in range(NUM_LAYERS)]
    keys, values = pool(dtype), pool(dtype)
    decoder = Decoder(layers, keys, values, num_heads=HEADS)

    def one_token() -> torch.Tensor:
        given = step(dtype, slots=SLOTS[:1], kept=torch.arange(1))
        x, table = given.pop("x")[:1].clone(), given.pop("table")[:1].clone()
        options: dict[str, Any] = {"key_cache": keys[0], "num_heads": HEADS}
        plans = (
            plan_decode(TABLES[:1], LENGTHS[:1], **options),
            plan_prefill(TABLES[:0], LENGTHS[:0], query_starts=torch.tensor([0]), **options),
        )
        decoder.run(x, table, plans=lambda _: plans, **given)
        return x

    first = one_token()
    decoder.run(**step(dtype), plans=laid_out(keys[0]))
    assert torch.equal(one_token(), first)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": torch.zeros(NUM_TOKENS, WIDTH + 1)}, "x"),
        ({"x": torch.zeros(NUM_TOKENS, WIDTH, dtype=torch.bfloat16)}, "x"),
        ({"x": torch.zeros(WIDTH, NUM_TOKENS).T}, "x"),
        ({"table": torch.zeros(NUM_TOKENS - 1, HEAD_DIM)}, "table"),
        ({"slots": SLOTS[1:]}, "slots"),
        ({"slots": SLOTS.int()}, "slots"),
        ({"kept": torch.tensor([NUM_TOKENS])}, "kept"),
        ({"kept": torch.tensor([-1])}, "kept"),
        ({"kept": torch.zeros(NUM_TOKENS + 1, dtype=torch.int64)}, "kept"),
        (
            {
                "x": torch.zeros(6, WIDTH),
                "table": torch.zeros(6, HEAD_DIM),
                "slots": SLOTS[:6],
                "kept": torch.arange(6),
            },
            "plans",
        ),
    ],
)
def test_a_step_that_does_not_fit(changes: dict[str, torch.Tensor], named: str) -> None:
    """Nothing is read past an end; the message names the argument."""
    keys, values = pool(torch.float32), pool(torch.float32)
    layers = [layer(torch.float32) for _ in range(NUM_LAYERS)]
    decoder = Decoder(layers, keys, values, num_heads=HEADS)
    with pytest.raises(ValueError, match=named):
        decoder.run(**step(torch.float32, **changes), plans=laid_out(keys[0]))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qkv": product(HEADS * HEAD_DIM, WIDTH, torch.float32)}, "qkv"),
        ({"down": product(WIDTH, MLP + 32, torch.float32)}, "down"),
        ({"down": product(WIDTH, MLP, torch.bfloat16)}, "down"),
        ({"mlp_norm": torch.zeros(WIDTH - 1)}, "mlp_norm"),
        ({"attention_norm": torch.zeros(WIDTH).double()}, "attention_norm"),
    ],
)
def test_layers_that_do_not_fit(changes: dict[str, Any], named: str) -> None:
    """One among others."""
    keys, values = pool(torch.float32), pool(torch.float32)
    layers = [layer(torch.float32), layer(torch.float32, **changes), layer(torch.float32)]
    with pytest.raises(ValueError, match=named):
        Decoder(layers, keys, values, num_heads=HEADS)


def test_pools_that_do_not_fit() -> None:
    """A layer too few, another shape, another dtype."""
    layers = [layer(torch.float32) for _ in range(NUM_LAYERS)]
    keys, values = pool(torch.float32), pool(torch.float32)
    for wrong in (values[1:], [*values[1:], values[0][1:]], pool(torch.bfloat16)):
        with pytest.raises(ValueError, match="value_caches"):
            Decoder(layers, keys, wrong, num_heads=HEADS)
    with pytest.raises(ValueError, match="qkv"):
        Decoder(layers, keys, values, num_heads=HEADS + 1)
