"""Two ranks with a share of a model each draw what one rank with all of it does.

Real processes over gloo; every model of the list in one pair of them. Fused layers and
transformers' own, biases, tied weights, norms of heads, soft-caps, windows.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing
from transformers import (
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from executor_svc.config import ExecutorConfig
from executor_svc.executor import Executor
from executor_svc.fused_layers import FusedStack
from executor_svc.plan import Plan, RowStart
from executor_svc.tensor_parallel.ranks import Ranks
from tests.support.rank_pair import join_pair

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS = {
    "llama, biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama, tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "mistral, window": MistralConfig(**SHAPE, sliding_window=9),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3, norms of heads": Qwen3Config(**SHAPE),
    "gemma2, soft-caps": Gemma2Config(
        **SHAPE, query_pre_attn_scalar=64, sliding_window=9, tie_word_embeddings=False
    ),
}
FUSED = ("llama", "mistral", "qwen2")
NUM_STEPS = 12
SECONDS = 60.0
PROMPTS = [[5, 9, 2, 7, 1], [int(n) for n in "8364728364728362"], [33] * 21]


def is_known(folder: Path) -> bool:
    """Whether the layers of this model can be fused."""
    model_type: str = json.loads((folder / "config.json").read_text())["model_type"]
    return model_type in FUSED


def tokens_of(folder: Path, fused: bool, ranks: Ranks | None) -> list[list[int]]:
    """What an executor draws for all prompts at once, step by step."""
    config = ExecutorConfig(
        model="tiny",
        device="cpu",
        dtype="float32",
        num_blocks=32,
        num_host_blocks=4,
        num_threads=1,
        max_num_rows=4,
        max_num_batched_tokens=64,
        fuse_layers=fused,
        kv_check=True,
    )
    executor = Executor.load(config, folder, ranks)
    layer = executor._runner._loaded.model.model.layers[0]
    assert isinstance(layer, FusedStack) == (fused and is_known(folder)), folder
    rows = range(len(PROMPTS))
    starts = [
        RowStart(row, prompt, len(prompt), blocks=[4 * row + block for block in range(4)])
        for row, prompt in enumerate(PROMPTS)
    ]
    counts = [len(prompt) for prompt in PROMPTS]
    steps = [Plan(starts=starts, chunk_rows=list(rows), chunk_counts=counts)]
    steps += [Plan(decode_enter_rows=list(rows))] + [Plan()] * (NUM_STEPS - 2)
    drawn = []
    for plan in steps:
        outcome = executor.run(plan)
        assert outcome.error is None, outcome.error
        drawn.append(list(outcome.tokens))
    return drawn


def run_rank(rank: int, rendezvous: str, folders: list[Path], results: Path) -> None:
    try:
        ranks = join_pair(rank, rendezvous, SECONDS)
        drawn = [[tokens_of(folder, fused, ranks) for fused in (False, True)] for folder in folders]
        (results / f"{rank}.json").write_text(json.dumps(drawn))
    except BaseException:
        traceback.print_exc()
        raise


def test_shares_draw_what_the_whole_does(
    make_model: Callable[[PreTrainedConfig], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy, three rows; also the ranks that do not draw know all tokens."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3])  # they import this module
    folders = [make_model(config) for config in MODELS.values()]
    arguments = (str(tmp_path / "meet"), folders, tmp_path)
    multiprocessing.spawn(run_rank, arguments, nprocs=2)
    torch.set_num_threads(1)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for index, (name, folder) in enumerate(zip(MODELS, folders, strict=True)):
        for fused in (False, True):
            whole = tokens_of(folder, fused, None)
            for rank in range(2):
                assert found[rank][index][fused] == whole, (name, fused, rank)
            assert len({tuple(line) for line in whole}) > NUM_STEPS // 2, name
