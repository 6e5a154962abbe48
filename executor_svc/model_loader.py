"""Loads a model's own definition from a Hugging Face folder, or says why not.

Everything that would make the paged attention wrong without an error is refused
here, in one line, before the weights are read where possible.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from executor_svc import attention
from executor_svc.errors import StartupError, UnsupportedModel
from executor_svc.pool import KvShape
from executor_svc.tensor_parallel.ranks import Ranks, one_line
from executor_svc.tensor_parallel.sharing import sharing_arguments

# Rotary embeddings of these kinds look at the longest position of the whole batch.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, with what the executor must know of it."""

    model: PreTrainedModel
    device: torch.device
    dtype: torch.dtype
    num_layers: int
    vocab_size: int
    max_model_len: int
    layer_types: list[str] | None
    keeps_logits: bool
    """The model computes logits only for the places it is told to keep."""


def load_model(
    folder: Path, *, device: str, dtype: str, max_model_len: int, ranks: Ranks | None = None
) -> LoadedModel:
    """Load weights and check that this executor can serve them.

    Args:
        folder: a Hugging Face model folder.
        device: "auto" or a torch device.
        dtype: "auto" or the name of a torch dtype.
        max_model_len: in tokens; 0 takes the model's own.
        ranks: those that share the model, of which this one loads its share.

    Raises:
        StartupError: if the folder cannot be read or the model cannot be served.
    """
    # Untyped in transformers; its progress bars would break the log into pieces.
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped there
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there
    attention.register()
    where = choose_device(device if ranks is None else ranks.device(device))
    kind = choose_dtype(dtype, where)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(f"cannot read the model in {folder}: {one_line(error)}") from error
    model_class = _model_class(config)
    length = _max_model_len(config, max_model_len)
    sharing = {} if ranks is None else sharing_arguments(ranks.place.size)
    try:
        model = model_class.from_pretrained(
            folder, dtype=kind, attn_implementation=attention.ATTENTION_NAME, **sharing
        )
        model = model.eval().requires_grad_(False)
        if ranks is None:
            model = model.to(where)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise StartupError(f"cannot load the model in {folder}: {one_line(error)}") from error
    text = config.get_text_config()
    return LoadedModel(
        model=model,
        device=where,
        dtype=kind,
        num_layers=int(text.num_hidden_layers),
        vocab_size=int(model.get_input_embeddings().weight.shape[0]),
        max_model_len=length,
        layer_types=getattr(text, "layer_types", None),
        keeps_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
    )


def probe(loaded: LoadedModel, num_tokens: int) -> KvShape:
    """Run one step of `num_tokens` without a pool: its peak memory is a step's own.

    Raises:
        UnsupportedModel: if the model's K/V do not fit a paged pool.
    """
    step = attention.ProbeStep(loaded.layer_types)
    places = torch.arange(num_tokens, device=loaded.device)
    try:
        forward(loaded, torch.zeros_like(places), places % loaded.max_model_len, step, places)
    except (TypeError, AttributeError) as error:
        name = type(loaded.model).__name__
        raise UnsupportedModel(f"{name} cannot run a flat batch: {one_line(error)}") from error
    return step.kv_shape(loaded.num_layers)


@torch.inference_mode()
def forward(
    loaded: LoadedModel,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    step: attention.AttentionStep,
    kept: torch.Tensor,
) -> torch.Tensor:
    """Run the model over a flat batch.

    Args:
        loaded: the model.
        token_ids: [num_tokens] int64.
        positions: [num_tokens] int64, of each token in its sequence.
        step: this step's attention.
        kept: [num_kept] int64, places whose logits are wanted.
    Returns: [num_kept, vocab_size] logits in the model's dtype.
    """
    arguments: dict[str, Any] = {attention.STEP_ARGUMENT: step}
    if loaded.keeps_logits:
        arguments["logits_to_keep"] = kept
    output = loaded.model(
        input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **arguments
    )
    logits: torch.Tensor = output.logits[0]
    return logits if loaded.keeps_logits else logits.index_select(0, kept)


def choose_device(name: str) -> torch.device:
    """The device to run on; "auto" takes a GPU if there is one.

    Raises:
        StartupError: if there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise StartupError(f"device {name!r} is not usable: {one_line(error)}") from error
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of weights and pool.

    "auto" takes bfloat16 where the hardware multiplies it: GPUs, and CPUs with
    AVX512-BF16 or AMX. Elsewhere a CPU emulates it, slower than float32.
    """
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return torch.bfloat16 if _multiplies_bfloat16(device) else torch.float32


def tokens_of_a_step(device: torch.device, dtype: torch.dtype) -> int:
    """The most tokens of one step, if nobody says another number.

    Prompt tokens of a step hold up the streams beside them, and larger steps compute no
    faster: some hundred tokens keep a CPU's products busy, some thousand a GPU's. A step of
    the default model then takes a quarter to half a second on two cores.
    """
    if device.type != "cpu":
        return 2048
    return 384 if dtype == torch.bfloat16 and _multiplies_bfloat16(device) else 256


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type != "cpu":
        return True
    features = torch.cpu.get_capabilities()
    return any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _model_class(config: transformers.PreTrainedConfig) -> Any:
    """The class that will be loaded, checked before its weights are read."""
    name = config.model_type
    try:
        model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise UnsupportedModel(f"{name} is not a decoder-only language model") from None
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if not model_class.is_backend_compatible():
        raise UnsupportedModel(
            f"transformers' {model_class.__name__} does not support attention backends"
        )
    text = config.get_text_config()
    if getattr(text, "attention_chunk_size", None):
        raise UnsupportedModel(f"{name} attends in chunks, which is not supported")
    if not getattr(text, "is_causal", True) or getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is not a decoder-only language model")
    return model_class


def _max_model_len(config: transformers.PreTrainedConfig, wanted: int) -> int:
    text = config.get_text_config()
    bound = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in BATCH_DEPENDENT_ROPE:
        bound = (
            rope.get("original_max_position_embeddings")
            or getattr(text, "original_max_position_embeddings", None)
            or bound
        )
    if bound is None and not wanted:
        raise StartupError("the model names no longest context; give --max-model-len")
    if bound is not None and wanted > bound:
        raise StartupError(f"--max-model-len {wanted} is above the model's {bound}")
    return int(wanted or bound or 0)
