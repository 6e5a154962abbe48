"""Tiny random models, made once, and a driver that writes plans by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from executor_svc.config import ExecutorConfig
from executor_svc.executor import Executor
from executor_svc.plan import Outcome, Plan
from executor_svc.rows import Limits

VOCAB_SIZE = 97


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[PreTrainedConfig], Path]:
    """Saves a random model of a configuration, with logits that differ clearly."""

    def make(config: PreTrainedConfig) -> Path:
        folder = tmp_path_factory.mktemp(config.model_type)
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_llama(make_model: Callable[[PreTrainedConfig], Path]) -> Path:
    return make_model(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            eos_token_id=None,
            bos_token_id=None,
        )
    )


@pytest.fixture(scope="session")
def load() -> Callable[..., Executor]:
    """Loads an executor over a folder; keywords are fields of its configuration."""

    def load_executor(folder: Path, **fields: Any) -> Executor:
        settings = {
            "num_blocks": 64,
            "num_host_blocks": 16,
            "num_threads": 1,
            "dtype": "float32",
            "max_num_batched_tokens": 128,
            "max_num_rows": 16,
            **fields,
        }
        return Executor.load(ExecutorConfig(model="tiny", **settings), folder)

    return load_executor


@pytest.fixture(scope="session")
def generate() -> Callable[[Path, Sequence[int], int], list[int]]:
    """Greedy tokens of plain transformers: what every way of serving must give."""
    models: dict[Path, Any] = {}

    def run(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
        if folder not in models:
            # Eager, because transformers' SDPA leaves soft-caps out.
            models[folder] = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
        tokens = torch.tensor([list(prompt)])
        out = models[folder].generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    return run


@pytest.fixture
def limits() -> Limits:
    return Limits(
        max_num_rows=8,
        max_model_len=64,
        block_size=8,
        num_device_blocks=32,
        num_host_blocks=4,
        vocab_size=VOCAB_SIZE,
        max_num_batched_tokens=64,
    )


class Steps:
    """Runs plans one after the other and insists that each succeeds."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        executor.reset()

    def __call__(self, **fields: Any) -> Outcome:
        outcome = self.executor.run(Plan(**fields))
        assert outcome.error is None, outcome.error
        return outcome


@pytest.fixture(scope="session")
def steps() -> type[Steps]:
    return Steps
