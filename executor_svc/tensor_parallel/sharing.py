"""How a model is cut over ranks: by the plan that transformers has for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.distributed.configuration_utils import DistributedConfig

from executor_svc.errors import StartupError, UnsupportedModel
from executor_svc.tensor_parallel.ranks import Place, choose_device_type, one_line

_CUT_HEADS = "layers.*.self_attn.k_proj"


def sharing_arguments(size: int) -> dict[str, Any]:
    """What `from_pretrained` needs to be told to load one of `size` shares."""
    return {"distributed_config": DistributedConfig(tp_size=size)}


def check_shareable(folder: Path, place: Place, device: str) -> None:
    """Refuse what no group of ranks can serve, before one waits for the others.

    Args:
        folder: a Hugging Face model folder.
        place: of this rank.
        device: --device.

    Raises:
        StartupError: if the devices or the model cannot be shared so.
    """
    _check_devices(place, device)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(f"cannot read the model in {folder}: {one_line(error)}") from error
    check_heads(config, place.size)


def check_heads(config: Any, size: int) -> None:
    """Refuse a number of ranks that does not fit the model.

    Args:
        config: the model's.
        size: how many ranks.

    Raises:
        StartupError: if they cannot have as many heads each.
        UnsupportedModel: if transformers has no plan for it.
    """
    text = config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise UnsupportedModel(
            f"transformers has no tensor parallel plan for {config.model_type}; "
            "--tensor-parallel-size must be 1"
        )
    if plan.get(_CUT_HEADS) != "colwise":
        return
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    for number, name in ((num_kv_heads, "KV heads"), (num_heads, "attention heads")):
        if number % size:
            fitting = [n for n in range(1, num_kv_heads + 1) if not num_kv_heads % n]
            raise StartupError(
                f"--tensor-parallel-size {size} does not divide the model's {number} {name}; "
                f"it may be {', '.join(map(str, fitting))}"
            )


def _check_devices(place: Place, wanted: str) -> None:
    if wanted.startswith("cuda:"):
        raise StartupError(
            f"--device {wanted} names one GPU, and each rank needs its own; give cuda"
        )
    kind = choose_device_type(wanted)
    if kind not in ("cpu", "cuda"):
        raise StartupError(f"--device {wanted} cannot be shared by ranks; give cpu or cuda")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and num_gpus < place.local_size:
        raise StartupError(
            f"{place.local_size} ranks on this machine need a GPU each, and torch sees {num_gpus}"
        )
    if kind == "cpu" and torch.accelerator.is_available():
        # transformers takes the accelerator that it finds.
        raise StartupError(
            "--device cpu with several ranks needs that torch sees no GPU; set "
            "CUDA_VISIBLE_DEVICES to nothing"
        )
