"""A fused model computes what transformers' own code computes."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from octavo_kernels.cpu.decoder import Decoder
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from executor_svc import attention, linear
from executor_svc.attention_choice import choose_attention
from executor_svc.batch import build_batch
from executor_svc.fused_layers import FusedStack, fuse
from executor_svc.huge_pages import Slabs
from executor_svc.model_loader import LoadedModel, forward
from executor_svc.plan import Plan, RowStart
from executor_svc.pool import KvPool, KvShape
from executor_svc.rows import Limits, RowTable

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 192,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOWS = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}
MODELS = {
    "llama": LlamaConfig(**SHAPE),
    "llama with biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama with tied weights": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "mistral with a window": MistralConfig(**SHAPE, sliding_window=5),
    "qwen2 with windows in some layers": Qwen2Config(**SHAPE, **WINDOWS),
}
UNKNOWN = {
    "another class": Gemma2Config(**SHAPE),
    "another activation": LlamaConfig(**SHAPE, hidden_act="gelu"),
    "an odd width": LlamaConfig(**(SHAPE | {"intermediate_size": 200})),
    "heads rotated in part": LlamaConfig(
        **(SHAPE | {"head_dim": 128}),
        rope_parameters={
            "rope_type": "linear",
            "rope_theta": 1e4,
            "factor": 2.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "narrow heads": LlamaConfig(**(SHAPE | {"head_dim": 32})),
}
LIMITS = Limits(
    max_num_rows=4,
    max_model_len=64,
    block_size=8,
    num_device_blocks=12,
    num_host_blocks=0,
    vocab_size=97,
    max_num_batched_tokens=64,
)
PROMPTS = [[5, 17, 3, 80, 41], list(range(20, 57))]
PLANS = [
    Plan(
        starts=[
            RowStart(0, PROMPTS[0], len(PROMPTS[0]), [3]),
            RowStart(1, PROMPTS[1], len(PROMPTS[1]), [9, 0, 4, 11, 5]),
        ],
        chunk_rows=[1],
        chunk_counts=[3],  # a step of which no logits are wanted
    ),
    Plan(chunk_rows=[0, 1], chunk_counts=[5, 17]),
    Plan(decode_enter_rows=[0], chunk_rows=[1], chunk_counts=[17]),
    Plan(decode_enter_rows=[1]),
]


def make_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model whose norms and biases do something, too."""
    attention.register()
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=attention.ATTENTION_NAME, dtype=dtype
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.5)
    return model.eval().requires_grad_(False)


def run(model: PreTrainedModel, attend: str = "reference") -> list[torch.Tensor]:
    """Logits of a few steps: chunks, decodes, and both together."""
    config = model.config
    shape = KvShape(config.num_hidden_layers, config.num_key_value_heads, 64, model.dtype)
    pool = KvPool(
        shape, block_size=8, num_device_blocks=12, num_host_blocks=0, device=torch.device("cpu")
    )
    loaded = LoadedModel(
        model=model,
        device=torch.device("cpu"),
        dtype=model.dtype,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        max_model_len=64,
        layer_types=None,
        keeps_logits=True,
    )
    rows = RowTable(LIMITS)
    logits = []
    for plan in PLANS:
        rows.apply(plan)
        batch = build_batch(rows, plan)
        places = (batch.token_ids, batch.positions, batch.kept_tokens)
        tokens, positions, kept = map(torch.from_numpy, places)
        step = choose_attention(attend, pool).make_step(batch)
        logits.append(forward(loaded, tokens, positions, step, kept))
        rows.append_tokens(batch.sample_rows, np.full(len(batch.sample_rows), 11))
    return logits


@pytest.mark.parametrize("attend", ["reference", "compiled"])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_transformers(config: PreTrainedConfig, attend: str) -> None:
    """In fp32 to rounding, through chunks and decodes, layer by layer and in one call."""
    expected = run(make_model(config))
    fused = make_model(config)
    assert fuse(fused)
    for got, wanted in zip(run(fused, attend), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_layers_in_one_call_are_the_same_to_the_bit(
    config: PreTrainedConfig, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As layer by layer over the same attention."""
    fused = make_model(config, dtype)
    assert fuse(fused)
    calls = []
    at_once = Decoder.run
    monkeypatch.setattr(Decoder, "run", lambda *args: calls.append(1) or at_once(*args))
    together = run(fused, "compiled")
    if linear.is_worthwhile(torch.zeros(2, 2, dtype=dtype)):
        assert len(calls) == len(PLANS)
    monkeypatch.setattr(FusedStack, "_decoder_over", lambda *_: None)
    for got, wanted in zip(together, run(fused, "compiled"), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_bfloat16_is_as_near_to_float32_as_transformers(config: PreTrainedConfig) -> None:
    """Rounding less often than transformers, it may differ from it, but not be worse."""
    exact = run(make_model(config))
    plain = run(make_model(config, torch.bfloat16))
    fused = make_model(config, torch.bfloat16)
    assert fuse(fused)
    for got, other, wanted in zip(run(fused), plain, exact, strict=True):
        error, accepted = ((each.float() - wanted).abs().sum() for each in (got, other))
        assert error <= 1.5 * accepted


@pytest.mark.parametrize("config", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_stays_as_it_is(config: PreTrainedConfig) -> None:
    """Nothing is replaced, not even in part."""
    model = make_model(config)
    before = [type(module) for module in model.modules()]
    assert not fuse(model)
    assert [type(module) for module in model.modules()] == before


def test_replaced_weights_are_given_back() -> None:
    """Nothing of a fused model refers to them any more."""
    model = make_model(LlamaConfig(**SHAPE))
    weights = [weakref.ref(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert fuse(model)
    gc.collect()
    assert all(weight() is None for weight in weights)


@pytest.mark.parametrize("product", ["octavo", "onednn", "torch"])
@pytest.mark.parametrize("num_rows", [1, 5, 200])
def test_products_of_several_weights_in_one(
    num_rows: int, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a bias, with weights in either order or as they are."""
    monkeypatch.setattr(linear, "is_worthwhile", lambda _: product == "octavo")
    if product == "torch":
        monkeypatch.setattr(linear, "_can_pack", lambda _: False)
    torch.manual_seed(3)
    parts = [torch.nn.Linear(64, 32), torch.nn.Linear(64, 96, bias=False)]
    x = torch.randn(num_rows, 64)
    expected = torch.cat([part(x) for part in parts], dim=1).detach()
    torch.testing.assert_close(linear.Linear(parts, Slabs())(x).detach(), expected)


@pytest.mark.parametrize("num_kept", [0, 1, 3])
def test_logits_of_the_places_that_are_kept(num_kept: int) -> None:
    """None too: a step that only computes a part of a prompt wants none."""
    torch.manual_seed(3)
    part = torch.nn.Linear(64, 40, bias=False)
    x = torch.randn(1, num_kept, 64)
    torch.testing.assert_close(linear.Head(part, Slabs())(x), part(x).detach())


@pytest.mark.parametrize("width", [32, 49])
def test_a_tied_embedding_reads_the_packed_weight(width: int) -> None:
    """Every row, of ids in any shape."""
    torch.manual_seed(3)
    part = torch.nn.Linear(64, width, bias=False)
    embedding = linear.Head(part, Slabs()).embedding()
    assert embedding is not None
    token_ids = torch.randint(width, (3, 7))
    assert torch.equal(embedding(token_ids), part.weight.detach()[token_ids])
    assert torch.equal(embedding(torch.arange(width)), part.weight.detach())
