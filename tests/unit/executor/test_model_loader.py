"""Loading: what cannot be served is refused in one line, before it can go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, LlamaConfig, MambaConfig, PreTrainedConfig

from executor_svc.errors import StartupError, UnsupportedModel
from executor_svc.executor import Executor
from executor_svc.model_loader import choose_dtype, load_model, tokens_of_a_step

SMALL = {
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def load(folder: Path, max_model_len: int = 0) -> Any:
    return load_model(folder, device="cpu", dtype="float32", max_model_len=max_model_len)


def write_config(folder: Path, **changes: Any) -> Path:
    config = LlamaConfig(**SMALL).to_dict() | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=97, hidden_size=16, n_layer=1, n_head=2),
        MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4),
    ],
    ids=["ALiBi", "state space"],
)
def test_models_without_attention_backends_are_refused(
    tmp_path: Path, config: PreTrainedConfig
) -> None:
    """The refusal comes from the configuration alone; no weight is read."""
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="does not support attention backends"):
        load(tmp_path)


def test_chunked_attention_is_refused(tmp_path: Path) -> None:
    """A model that hides tokens by a mask of its own would be served wrongly."""
    with pytest.raises(UnsupportedModel, match="attends in chunks"):
        load(write_config(tmp_path, attention_chunk_size=64))


def test_encoders_are_refused(tmp_path: Path) -> None:
    """Only decoder-only language models have a token to give."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(UnsupportedModel, match="t5 is not a decoder-only"):
        load(tmp_path)


def test_unreadable_folders_are_one_line(tmp_path: Path) -> None:
    """A folder without a configuration, or without weights, says so in one line."""
    for prepare in (lambda: tmp_path, lambda: write_config(tmp_path)):
        with pytest.raises(StartupError) as caught:
            load(prepare())
        assert str(tmp_path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_context_is_bounded_by_the_model(
    make_model: Callable[[PreTrainedConfig], Path],
) -> None:
    """Longer than the model's own is refused; shorter is taken; 0 is the model's."""
    folder = make_model(LlamaConfig(**SMALL))
    assert load(folder).max_model_len == 512
    assert load(folder, 100).max_model_len == 100
    with pytest.raises(StartupError, match="--max-model-len 513 is above the model's 512"):
        load(folder, 513)


def test_rotary_scaling_that_looks_at_the_batch_is_not_reached(
    make_model: Callable[[PreTrainedConfig], Path],
) -> None:
    """Where positions beyond a length would change other rows, that length is the limit."""
    config = LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 256,
        },
    )
    assert load(make_model(config)).max_model_len == 256


def test_an_unusable_device_is_one_line(tiny_llama: Path) -> None:
    """A device that is not there is named."""
    with pytest.raises(StartupError, match="device 'cuda:77' is not usable"):
        load_model(tiny_llama, device="cuda:77", dtype="auto", max_model_len=0)


def test_auto_dtype_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 only where it is multiplied by hardware; a named dtype always."""
    cpu = torch.device("cpu")
    for feature, expected in [
        ("avx512_bf16", torch.bfloat16),
        ("amx_bf16", torch.bfloat16),
        ("avx2", torch.float32),
    ]:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda feature=feature: {feature: True})
        assert choose_dtype("auto", cpu) is expected
        tokens = 384 if expected is torch.bfloat16 else 256
        assert tokens_of_a_step(cpu, torch.bfloat16) == tokens
        assert tokens_of_a_step(cpu, torch.float32) == 256
    assert choose_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert choose_dtype("float16", cpu) is torch.float16


def test_vocabulary_is_that_of_the_embeddings(
    tiny_llama: Path, load: Callable[..., Executor]
) -> None:
    """What the executor describes comes from the model that it loaded."""
    description = load(tiny_llama).description
    assert description.vocab_size == 97
    assert description.max_model_len == 256
    assert (description.dtype, description.device) == ("float32", "cpu")
