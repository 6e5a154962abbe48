"""What tests of recorded decode steps share: models, recorders, and kernels that do not run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from executor_svc import attention
from executor_svc.capture_guard import CaptureGuard
from executor_svc.cuda_graphs import CudaRecorder, Recorder, Run
from executor_svc.model_loader import LoadedModel
from executor_svc.pool import KvPool, KvShape
from executor_svc.rows import Limits

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    # Soft-capped scores, and a sliding window in every other layer.
    "gemma2": Gemma2Config(**SHAPE, sliding_window=6, attn_logit_softcapping=20.0),
    "mistral": MistralConfig(**SHAPE, sliding_window=5),
    "qwen2": Qwen2Config(**SHAPE),
}
LIMITS = Limits(
    max_num_rows=5,
    max_model_len=512,
    block_size=8,
    num_device_blocks=40,
    num_host_blocks=0,
    vocab_size=97,
    max_num_batched_tokens=128,
)


class StandIn:
    """Replays by running again what was recorded; recording it runs it under the guard."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free_bytes = 100 << 20

    def rehearse(self, run: Run) -> None:
        run()

    def record(self, run: Run) -> Run:
        with CaptureGuard(self._device):
            run()
        self._free_bytes -= 3 << 20
        return run

    def free_bytes(self) -> int:
        return self._free_bytes

    def release(self) -> None:
        """There is nothing to give back."""


class Counted:
    """A recorder that tells what was asked of it."""

    def __init__(self, inner: Recorder) -> None:
        self._inner = inner
        self.calls: list[str] = []

    def rehearse(self, run: Run) -> None:
        self.calls.append("rehearse")
        self._inner.rehearse(run)

    def record(self, run: Run) -> Run:
        self.calls.append("record")
        replay = self._inner.record(run)

        def counted() -> None:
            self.calls.append("replay")
            replay()

        return counted

    def free_bytes(self) -> int:
        return self._inner.free_bytes()

    def release(self) -> None:
        self.calls.append("release")
        self._inner.release()


def recorder_for(device: str) -> Counted:
    where = torch.device(device)
    return Counted(CudaRecorder(where) if where.type == "cuda" else StandIn(where))


def load(config: PreTrainedConfig, device: str) -> LoadedModel:
    """Make a random model, the same each time, with logits that differ clearly."""
    attention.register()
    torch.manual_seed(7)
    with torch.device("meta" if device == "meta" else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.ATTENTION_NAME
        )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    return LoadedModel(
        model=model.eval().requires_grad_(False).to(device),
        device=torch.device(device),
        dtype=torch.float32,
        num_layers=2,
        vocab_size=97,
        max_model_len=LIMITS.max_model_len,
        layer_types=None,
        keeps_logits=True,
    )


def new_pool(device: torch.device) -> KvPool:
    """Make a pool of NaN."""
    pool = KvPool(
        KvShape(num_layers=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        block_size=LIMITS.block_size,
        num_device_blocks=LIMITS.num_device_blocks,
        num_host_blocks=0,
        device=device,
    )
    pool.device_blocks.fill_(torch.nan)
    return pool


class NoLaunch:
    """A kernel that is asked for and not run."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: object, **options: object) -> None:
        self.count += 1
