"""What is compiled: the targets, and the attention layers of five real models."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from triton.backends.compiler import GPUTarget

TARGETS = MappingProxyType(
    {
        "sm_80": GPUTarget("cuda", 80, 32),
        "sm_90": GPUTarget("cuda", 90, 32),
        "sm_100": GPUTarget("cuda", 100, 32),
        "gfx942": GPUTarget("hip", "gfx942", 64),
    }
)

BLOCK_SIZES = (16, 64)


@dataclass(frozen=True, slots=True)
class Layer:
    """One model's attention, as its config.json on the hub has it.

    `sliding_window` is in tokens, None if every layer attends to all of them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    sliding_window: int | None = None
    softcap: float | None = None


# Gemma 2 alternates between layers with a window and without; both are compiled.
LAYERS = MappingProxyType(
    {
        "SmolLM2-135M": Layer(9, 3, 64, num_layers=30),
        "Llama-3.1-8B": Layer(32, 8, 128, num_layers=32),
        "Qwen2.5-7B": Layer(28, 4, 128, num_layers=28),
        "Mistral-7B-v0.1": Layer(32, 8, 128, num_layers=32, sliding_window=4096),
        "Gemma-2-9B": Layer(16, 8, 256, num_layers=42, softcap=50.0),
        "Gemma-2-9B, windowed": Layer(16, 8, 256, num_layers=42, softcap=50.0, sliding_window=4096),
    }
)
