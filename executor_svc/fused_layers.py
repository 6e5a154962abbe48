"""Decoder layers for a CPU: fewer and larger matrix products, compiled work between them.

A layer of the Llama family is, as transformers writes it, seven matrix products and some
fifty small operators, each of which starts the threads and passes over memory. `fuse` puts
in its place a module that does the same in four products and four compiled passes:

    qkv   = norm(x) @ [q | k | v]        one product
            rotate q and k in place
    x    += attention(q, k, v) @ o       added on the way through the next norm
    x    += (silu(gate) * up) @ down     where [gate | up] = norm(x) @ one weight

Over the compiled attention all layers of a step are one call (`octavo_kernels.cpu.decoder`).
They are called one by one where ranks add their shares up between two products, where the
attention is another, and where another's product is faster; results are the same to the bit.

Only classes whose arithmetic is known here are replaced; every other model keeps
transformers' own code. The replaced weights are given back to the system layer by layer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from octavo_kernels.cpu.build import KernelsUnavailable
from octavo_kernels.cpu.decoder import Decoder, Layer
from octavo_kernels.cpu.layers import (
    WIDTH_MULTIPLE,
    NormPlan,
    RotatePlan,
    SiluMulPlan,
    rms_norm,
)
from octavo_kernels.cpu.library import library
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from executor_svc.attention import AttentionCall, AttentionStep
from executor_svc.compiled_attention import CompiledStep
from executor_svc.huge_pages import Slabs
from executor_svc.linear import Head, Linear, is_cut, local
from executor_svc.model_loader import BATCH_DEPENDENT_ROPE
from executor_svc.pool import KvPool

# Their layers differ in biases and in whether a window slides, which the modules tell.
_KNOWN_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}
_KNOWN_MODELS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"}
_DTYPES = {torch.float32, torch.bfloat16}
_LEAST_POSITIONS = 2048


def fuse(model: PreTrainedModel) -> bool:
    """Replace the layers of a model that this module knows.

    Args:
        model: on a CPU, for inference only; changed in place.
    Returns: whether the model was changed.
    """
    body: Any = getattr(model, "model", None)  # a module's attributes have no types
    layers = getattr(body, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not all(map(_is_known, layers)):
        return False
    rotated = 2 * body.rotary_emb.inv_freq.numel()
    if any(_head_dim(layer) != rotated for layer in layers):
        return False  # only a part of each head is rotated
    try:
        library()
    except KernelsUnavailable:
        return False
    shared, fused = _Shared(), []
    for index, layer in enumerate(layers):
        fused.append(FusedLayer(layer, shared))
        layers[index] = nn.Identity()
    body.layers = nn.ModuleList([FusedStack(fused)])
    body.norm = _Norm(body.norm)
    body.rotary_emb = _RotaryTable(body.rotary_emb)
    is_tied = body.embed_tokens.weight is model.lm_head.weight
    model.lm_head = head = Head(model.lm_head, shared.slabs)
    if is_tied and (embedding := head.embedding()) is not None:
        body.embed_tokens = embedding  # the weight is not there twice
    if type(model).__name__ in _KNOWN_MODELS:
        model.forward = functools.partial(_forward, model)
    return True


def _forward(
    model: Any,
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    logits_to_keep: Tensor,
    octavo_step: AttentionStep,
    **_: Any,
) -> CausalLMOutputWithPast:
    """What transformers' forward comes to here: its masks, caches and checks take 2% of a step.

    Args:
        model: a fused one.
        input_ids: [1, num_tokens].
        position_ids: [1, num_tokens].
        logits_to_keep: [num_kept] places.
        octavo_step: the step's attention.
    Returns: with logits [1, num_kept, vocab_size].
    """
    body = model.model
    x = body.embed_tokens(input_ids)
    table = body.rotary_emb(x, position_ids)
    x = body.layers[0](x, position_embeddings=table, octavo_step=octavo_step)
    return CausalLMOutputWithPast(logits=model.lm_head(body.norm(x[:, logits_to_keep])))


def _is_known(layer: Any) -> bool:
    if type(layer).__name__ not in _KNOWN_LAYERS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    widths = (attention.head_dim // 2, *local(mlp.gate_proj.weight).shape)
    return bool(
        mlp.gate_proj.weight.dtype in _DTYPES
        and mlp.gate_proj.weight.device.type == "cpu"
        and layer.self_attn.config.hidden_act == "silu"
        and all(width % WIDTH_MULTIPLE == 0 for width in widths)
    )


def _head_dim(layer: Any) -> int:
    return int(layer.self_attn.head_dim)


class FusedStack(nn.Module):
    """All layers of a model, which to transformers are one."""

    def __init__(self, layers: list[FusedLayer]) -> None:
        """Take the layers, in their order."""
        super().__init__()
        self.layers = layers
        self._decoder: Decoder | None = None
        self._pool: KvPool | None = None

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: Tensor,
        octavo_step: AttentionStep,
        **_: Any,
    ) -> Tensor:
        """Transformers' calling convention: hidden_states is [1, num_tokens, width]."""
        if isinstance(octavo_step, CompiledStep):
            decoder = self._decoder_over(octavo_step.pool)
            if decoder is not None:
                plans = functools.partial(octavo_step.plans, self.layers[0].num_heads)
                slots, kept = octavo_step.slots, octavo_step.kept
                decoder.run(hidden_states[0], position_embeddings, slots, kept, plans)
                return hidden_states
        for layer in self.layers:
            layer.run(hidden_states, position_embeddings, octavo_step)
        return hidden_states

    def _decoder_over(self, pool: KvPool) -> Decoder | None:
        if self._pool is not pool:
            self._pool, self._decoder = pool, None
            parts = [part for layer in self.layers if (part := layer.compiled()) is not None]
            if len(parts) == len(self.layers):
                num_heads = self.layers[0].num_heads
                self._decoder = Decoder(parts, pool.keys, pool.values, num_heads=num_heads)
        return self._decoder


class FusedLayer:
    """One decoder layer over a flat batch."""

    def __init__(self, layer: Any, shared: _Shared) -> None:
        """Take the weights of a transformers layer, which is of no use afterwards.

        Args:
            layer: of a class that is known.
            shared: the same for all layers of a model.
        """
        self.shared = shared
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim: int = attention.head_dim
        self.num_heads = len(local(attention.q_proj.weight)) // self.head_dim
        self.num_kv_heads = len(local(attention.k_proj.weight)) // self.head_dim
        self.call = AttentionCall(
            layer=attention.layer_idx,
            module_name=type(attention).__name__,
            scale=attention.scaling,
            sliding_window=_sliding_window(attention),
            softcap=None,
            extras={},
        )
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        self.heads = list(heads)
        self.attention_norm = _Scale(layer.input_layernorm)
        self.qkv = Linear([attention.q_proj, attention.k_proj, attention.v_proj], shared.slabs)
        self.output = _last([attention.o_proj], shared.slabs)
        self.mlp_norm = _Scale(layer.post_attention_layernorm)
        self.gate_up = Linear([mlp.gate_proj, mlp.up_proj], shared.slabs)
        self.down = _last([mlp.down_proj], shared.slabs)

    def run(self, hidden_states: Tensor, table: Tensor, attention: AttentionStep) -> None:
        """Put hidden_states [1, num_tokens, width] through this layer, in place."""
        step = self.shared.step_of(hidden_states, table, self)
        x, norm, scale = step.x, step.norm, self.attention_norm
        qkv = self.qkv(norm.run(scale.weight, scale.epsilon))
        step.rotate.run(qkv)
        query, key, value = qkv.view(step.heads_shape).split_with_sizes(self.heads, dim=1)
        attended = attention.attend(self.call, query, key, value)
        delta, scale = self.output(attended.flatten(1)), self.mlp_norm
        gate_up = self.gate_up(norm.run(scale.weight, scale.epsilon, delta))
        x += self.down(step.silu_mul.run(gate_up))

    def compiled(self) -> Layer | None:
        """The layer for `Decoder`; None if that cannot run it."""
        qkv, output = self.qkv.packed(), self.output.packed()
        gate_up, down = self.gate_up.packed(), self.down.packed()
        if qkv is None or output is None or gate_up is None or down is None:
            return None
        return Layer(
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
            attention_norm=self.attention_norm.weight,
            mlp_norm=self.mlp_norm.weight,
            attention_epsilon=self.attention_norm.epsilon,
            mlp_epsilon=self.mlp_norm.epsilon,
            scale=self.call.scale,
            sliding_window=self.call.sliding_window,
        )


def _last(parts: list[nn.Linear], slabs: Slabs) -> Linear:
    """The product at the end of attention or MLP: if ranks share it, its inputs are cut."""
    return Linear(parts, slabs, sums=is_cut(parts[0].weight))


class _Shared:
    """What all layers of a step have in common: planned at the first one, used by the rest.

    Invariant: `_step` belongs to the tensors that it holds, and no tensor of another step
    can be one of those while it does.
    """

    def __init__(self) -> None:
        self.slabs = Slabs()
        self._step: _Step | None = None

    def step_of(self, hidden_states: Tensor, table: Tensor, layer: FusedLayer) -> _Step:
        """The step of these tensors."""
        step = self._step
        if step is None or step.hidden_states is not hidden_states or step.table is not table:
            step = self._step = _Step(hidden_states, table, layer)
        return step


class _Step:
    """One step's plans; the layers run them one after the other."""

    def __init__(self, hidden_states: Tensor, table: Tensor, layer: FusedLayer) -> None:
        self.hidden_states, self.table = hidden_states, table
        self.x = x = hidden_states[0]
        self.norm = NormPlan(x)
        self.rotate = RotatePlan(table, layer.num_heads + layer.num_kv_heads)
        self.silu_mul = SiluMulPlan(len(x), layer.gate_up.num_out, x.dtype)
        self.heads_shape = (len(x), sum(layer.heads), layer.head_dim)


class _Scale:
    """The weights of a norm, copied: one view of a model's file would keep all of it mapped."""

    def __init__(self, norm: Any) -> None:
        self.weight: Tensor = norm.weight.detach().clone()
        self.epsilon: float = norm.variance_epsilon


class _Norm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        scale = _Scale(norm)
        self.weight = nn.Parameter(scale.weight, requires_grad=False)  # which tells the dtype
        self.epsilon = scale.epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return: x's norm."""
        return rms_norm(x.flatten(0, -2), self.weight, self.epsilon).view_as(x)


class _RotaryTable(nn.Module):
    """Cosines and sines of each token's position, side by side for `RotatePlan`.

    Those of all positions so far are kept, where they are the same in every batch.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self._is_fixed = getattr(rotary, "rope_type", "dynamic") not in BATCH_DEPENDENT_ROPE
        self._kept = torch.empty(0, 0)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Returns: [num_tokens, head_dim] of position_ids [1, num_tokens], in x's dtype."""
        if not self._is_fixed:
            return self._compute(x, position_ids)
        positions = position_ids[0]
        needed = int(positions.max()) + 1 if len(positions) else 0
        if needed > len(self._kept):
            everything = torch.arange(max(_LEAST_POSITIONS, 2 * needed))
            self._kept = self._compute(x, everything[None])
        return self._kept[positions]

    def _compute(self, x: Tensor, position_ids: Tensor) -> Tensor:
        cosines, sines = self.rotary(x, position_ids=position_ids)
        half = cosines.shape[-1] // 2  # transformers tells each half of a head twice
        return torch.cat((cosines[0, :, :half], sines[0, :, :half]), dim=-1)


def _sliding_window(attention: Any) -> int | None:
    """What transformers' layer would hand to its attention."""
    owner = attention.config if type(attention).__name__ == "MistralAttention" else attention
    window: int | None = getattr(owner, "sliding_window", None)
    return window
