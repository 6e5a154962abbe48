"""How a model is cut over ranks: by the plan that transformers has for it."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.distributed import DistributedConfig

from executor_svc.errors import StartupError, UnsupportedModel
from executor_svc.tensor_parallel.ranks import Ranks

_CUT_HEADS = "layers.*.self_attn.k_proj"


def sharing_arguments(
    config: transformers.PreTrainedConfig, ranks: Ranks, device: torch.device
) -> dict[str, Any]:
    """What `from_pretrained` needs to be told to load this rank's share.

    Args:
        config: the model's.
        ranks: the group.
        device: of this rank.

    Raises:
        StartupError: if the model cannot be cut so.
    """
    size, text = ranks.place.size, config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise UnsupportedModel(
            f"transformers has no tensor parallel plan for {config.model_type}; "
            "--tensor-parallel-size must be 1"
        )
    if plan.get(_CUT_HEADS) == "colwise":
        num_heads = text.num_attention_heads
        num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
        for number, name in ((num_kv_heads, "KV heads"), (num_heads, "attention heads")):
            if number % size:
                fitting = [n for n in range(1, num_kv_heads + 1) if not num_kv_heads % n]
                raise StartupError(
                    f"--tensor-parallel-size {size} does not divide the model's {number} {name}; "
                    f"it may be {', '.join(map(str, fitting))}"
                )
    # transformers takes the accelerator that it finds.
    found = torch.accelerator.current_accelerator()
    if (found is None or found.type == "mps") != (device.type == "cpu"):
        raise StartupError(
            f"--device {device.type} with several ranks needs that torch sees no other one; set "
            "CUDA_VISIBLE_DEVICES to nothing"
        )
    return {"distributed_config": DistributedConfig(tp_size=size)}
