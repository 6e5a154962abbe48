"""Paged attention for transformers' models, through its `AttentionInterface`.

A model calls the registered function once per layer. What the function needs to know
of the step travels with the call, as a model argument that transformers hands through
to its attention; there is no global. A `ProbeStep` learns what the model's K/V look like;
the others read and write the pool: `ReferenceStep` here, and those of the fast kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from octavo_kernels.reference import (
    ChunkContext,
    ContextBucket,
    attend_buckets,
    attend_chunk,
    bucket_contexts,
    chunk_context,
    reshape_and_cache,
)
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from executor_svc.batch import StepBatch
from executor_svc.errors import UnsupportedModel
from executor_svc.pool import KvPool, KvShape
from executor_svc.transfer import to_device

ATTENTION_NAME = "octavo_paged"
STEP_ARGUMENT = "octavo_step"

# Arguments that models hand to attention and that say nothing about its result.
_HARMLESS = {"position_ids", "cache_position", "position_embeddings", "token_type_ids"}


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer says of its attention beside query, key and value."""

    layer: int
    module_name: str
    scale: float
    sliding_window: int | None
    softcap: float | None
    extras: dict[str, Any]
    """The model's other arguments, to be refused if they mean anything."""


class AttentionStep(Protocol):
    """One step's attention, called once per layer."""

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend [num_tokens, num_heads, head_dim] to the keys and values."""


def register() -> None:
    """Make `ATTENTION_NAME` an attention implementation of transformers."""
    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    octavo_step: AttentionStep | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Transformers' calling convention: [1, num_heads, num_tokens, head_dim]."""
    if octavo_step is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not hand the model's arguments on to its attention"
        )
    if attention_mask is not None:
        extras["attention_mask"] = attention_mask
    call = AttentionCall(
        layer=getattr(module, "layer_idx", -1),
        module_name=type(module).__name__,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        extras=extras,
    )
    attended = octavo_step.attend(
        call, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    )
    return attended[None], None


class ProbeStep:
    """Runs a model without a pool, to learn the shape of its K/V.

    Refuses what the paged attention would get wrong without noticing.
    """

    def __init__(self, layer_types: list[str] | None) -> None:
        self._layer_types = layer_types
        self._shapes: dict[int, tuple[int, int, torch.dtype]] = {}

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally within the batch, as one sequence."""
        layer, name = call.layer, call.module_name
        if layer < 0 or layer in self._shapes:
            raise UnsupportedModel(f"{name} does not call attention once per numbered layer")
        if key.shape != value.shape or key.shape[0] != query.shape[0]:
            raise UnsupportedModel(
                f"{name} has keys {tuple(key.shape)} unlike its values {tuple(value.shape)}"
            )
        self._check_extras(name, call.extras)
        if self._layer_types is not None:
            self._check_layer_type(name, self._layer_types[layer], call.sliding_window)
        self._shapes[layer] = (key.shape[1], key.shape[2], key.dtype)
        return scaled_dot_product_attention(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            is_causal=True,
            scale=call.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(0, 1)

    def kv_shape(self, num_layers: int) -> KvShape:
        """Shape of the K/V that the model asked to attend to.

        Raises:
            UnsupportedModel: if layers differ, or some keep their state elsewhere.
        """
        if sorted(self._shapes) != list(range(num_layers)):
            raise UnsupportedModel(
                f"{len(self._shapes)} of {num_layers} layers keep their state in attention's K/V"
            )
        if len(set(self._shapes.values())) != 1:
            raise UnsupportedModel("the layers' K/V differ in shape")
        num_kv_heads, head_dim, dtype = self._shapes[0]
        return KvShape(num_layers, num_kv_heads, head_dim, dtype)

    def _check_extras(self, name: str, extras: dict[str, Any]) -> None:
        for key, value in extras.items():
            if isinstance(value, Tensor) and key not in _HARMLESS:
                raise UnsupportedModel(f"{name} needs the attention argument {key}")
        if extras.get("is_causal") is False:
            raise UnsupportedModel(f"{name} is not causal")

    def _check_layer_type(self, name: str, kind: str, sliding_window: int | None) -> None:
        if kind not in {"full_attention", "sliding_attention"}:
            raise UnsupportedModel(f"{name} is of kind {kind}")
        if kind == "sliding_attention" and sliding_window is None:
            raise UnsupportedModel(f"{name} does not name its sliding window")


class ReferenceStep:
    """A step over the pool with the reference kernels.

    What depends on the step and not on the layer is laid out once, at the first layer
    that asks, and for each sliding window apart.
    """

    name = "reference"

    def __init__(self, pool: KvPool, batch: StepBatch, device: torch.device) -> None:
        self._pool = pool
        self._batch = batch
        self._slots = to_device(batch.slots, device)
        self._tables = to_device(batch.block_tables, device)
        self._chunk_starts: list[int] = batch.chunk_starts.tolist()
        self._layouts: dict[int | None, tuple[list[ContextBucket], list[ChunkContext]]] = {}

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the step's K/V of this layer, then attend every token to its context."""
        keys, values = self._pool.keys[call.layer], self._pool.values[call.layer]
        reshape_and_cache(key, value, keys, values, self._slots)
        buckets, chunks = self._layout(call.sliding_window, query.dtype)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if buckets:
            decodes = self._batch.num_decodes
            attend_buckets(
                query[:decodes],
                keys,
                values,
                buckets,
                scale=call.scale,
                softcap=call.softcap,
                out=out[:decodes],
            )
        for index, context in enumerate(chunks):
            chunk = slice(self._chunk_starts[index], self._chunk_starts[index + 1])
            attend_chunk(
                query[chunk],
                keys,
                values,
                context,
                scale=call.scale,
                softcap=call.softcap,
                out=out[chunk],
            )
        return out

    def _layout(
        self, sliding_window: int | None, dtype: torch.dtype
    ) -> tuple[list[ContextBucket], list[ChunkContext]]:
        layout = self._layouts.get(sliding_window)
        if layout is not None:
            return layout
        decodes = self._batch.num_decodes
        lengths: list[int] = self._batch.context_lens.tolist()
        buckets = bucket_contexts(
            self._tables[:decodes],
            lengths[:decodes],
            block_size=self._pool.block_size,
            dtype=dtype,
            sliding_window=sliding_window,
        )
        chunks = [
            chunk_context(
                self._tables[decodes + index],
                self._chunk_starts[index + 1] - self._chunk_starts[index],
                context_len,
                block_size=self._pool.block_size,
                dtype=dtype,
                sliding_window=sliding_window,
            )
            for index, context_len in enumerate(lengths[decodes:])
        ]
        self._layouts[sliding_window] = (buckets, chunks)
        return buckets, chunks
