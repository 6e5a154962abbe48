"""All decoder layers of a step in one call: no Python between two kernels.

What the layers of Llama's family do is written in csrc/decoder.c, out of the kernels that
`linear`, `layers` and `plans` call one by one, in the same order: results are the same to
the bit. A step's attention is laid out before, once for each sliding window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels.checks import check_contiguous, check_dtype, check_shape
from octavo_kernels.cpu.layers import WIDTH_MULTIPLE
from octavo_kernels.cpu.library import library
from octavo_kernels.cpu.linear import LinearArguments, PackedLinear
from octavo_kernels.cpu.plans import Plans


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: its weights, in one dtype."""

    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    attention_norm: Tensor
    """[width]"""
    mlp_norm: Tensor
    """[width]"""
    attention_epsilon: float
    mlp_epsilon: float
    scale: float
    sliding_window: int | None


class _Layer(Structure):
    """`octavo_layer` of csrc/decoder.c."""

    _fields_ = (
        *[(name, LinearArguments) for name in ("qkv", "output", "gate_up", "down")],
        *[(name, c_void_p) for name in ("attention_norm", "mlp_norm", "keys", "values")],
        *[(name, c_float) for name in ("attention_epsilon", "mlp_epsilon", "scale")],
        ("window", c_int32),
    )


class _Window(Structure):
    """`octavo_window` of csrc/decoder.c."""

    _fields_ = tuple((name, c_void_p) for name in ("decode", "prefill"))


class _Layers(Structure):
    """`octavo_layers` of csrc/decoder.c."""

    _fields_ = (
        *[(name, c_void_p) for name in ("layers", "windows", "slots", "kept")],
        *[(name, c_void_p) for name in ("x", "table", "scratch")],
        *[(name, c_int64) for name in ("num_layers", "num_tokens")],
        *[(name, c_int64) for name in ("num_decodes", "num_kept")],
        *[(name, c_int64) for name in ("width", "num_heads", "num_kv_heads", "head_dim")],
        *[(name, c_int64) for name in ("mlp_width", "block_size")],
        *[(name, c_int64) for name in ("key_block_stride", "value_block_stride")],
        *[(name, c_int32) for name in ("is_bf16", "num_threads")],
    )


class Decoder:
    """The layers of one model over one pool. For one thread at a time.

    Invariant: what the arguments point to lives as long as this object, or is given anew
    with every step.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        *,
        num_heads: int,
    ) -> None:
        """Take the layers and the pool.

        Args:
            layers: of one shape and dtype.
            key_caches: of each layer [num_blocks, block_size, num_kv_heads, head_dim] in
                that dtype, each block contiguous; all of the same strides.
            value_caches: as `key_caches`.
            num_heads: of the query.

        Raises:
            ValueError: if shapes or dtypes disagree.
            KernelsUnavailable: if the compiled kernels cannot be had here.
        """
        self._function, self._scratch_size = _functions()
        first, cache = layers[0], key_caches[0]
        self._dtype = dtype = first.qkv.dtype
        self._kept = (list(layers), list(key_caches), list(value_caches))
        _, block_size, self._num_kv_heads, self._head_dim = cache.shape
        self._num_heads = num_heads
        self.width, mlp_width = first.qkv.num_in, first.down.num_in
        for name, size, multiple in (
            ("width", self.width, WIDTH_MULTIPLE),
            ("mlp width", mlp_width, WIDTH_MULTIPLE),
            ("head_dim", self._head_dim, 2 * WIDTH_MULTIPLE),
        ):
            if size % multiple:
                raise ValueError(f"{name} {size} is no multiple of {multiple}")
        heads = num_heads * self._head_dim
        qkv = heads + 2 * self._num_kv_heads * self._head_dim
        shapes = {
            "qkv": (qkv, self.width),
            "output": (self.width, heads),
            "gate_up": (2 * mlp_width, self.width),
            "down": (self.width, mlp_width),
        }
        for layer in layers:
            _check_layer(layer, shapes, dtype)
        for name, caches in (("key_caches", key_caches), ("value_caches", value_caches)):
            _check_caches(name, caches, cache.shape, dtype, len(layers))
        self.windows = list(dict.fromkeys(layer.sliding_window for layer in layers))
        self._layers = (_Layer * len(layers))(*map(self._arguments, *self._kept))
        self._call = _Layers(
            layers=addressof(self._layers),
            num_layers=len(layers),
            width=self.width,
            num_heads=num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim,
            mlp_width=mlp_width,
            block_size=block_size,
            key_block_stride=cache.stride(0),
            value_block_stride=value_caches[0].stride(0),
            is_bf16=dtype is torch.bfloat16,
        )
        self._scratch = torch.empty(0, dtype=dtype)

    def run(
        self,
        x: Tensor,
        table: Tensor,
        slots: Tensor,
        kept: Tensor,
        plans: Callable[[int | None], Plans],
    ) -> None:
        """Put a step's tokens through all layers.

        Args:
            x: [num_tokens, width], contiguous; changed in place. Decodes come first.
            table: [num_tokens, head_dim] cosines and sines, contiguous.
            slots: [num_tokens] int64, where their keys and values go.
            kept: [num_kept] int64, places of the tokens whose x is wanted; the others' is
                of no use afterwards.
            plans: the attention laid out for a sliding window, over this pool.

        Raises:
            ValueError: if a shape or dtype does not fit.
            MemoryError: if there is none for the threads' scratch.
        """
        num_tokens = len(x)
        laid_out = [plans(window) for window in self.windows]
        num_decodes = laid_out[0][0].query_shape[0]
        self._check_step(x, table, slots, kept, laid_out)
        call = self._call
        needed = num_tokens * int(self._scratch_size(byref(call)))
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed, dtype=self._dtype)
        windows = (_Window * len(laid_out))(
            *[
                _Window(addressof(decode.arguments), addressof(prefill.arguments))
                for decode, prefill in laid_out
            ]
        )
        call.windows, call.slots = addressof(windows), slots.data_ptr()
        call.x, call.table = x.data_ptr(), table.data_ptr()
        call.scratch = self._scratch.data_ptr()
        call.num_tokens, call.num_decodes = num_tokens, num_decodes
        call.kept, call.num_kept = kept.data_ptr(), len(kept)
        call.num_threads = torch.get_num_threads()
        if num_tokens and self._function(byref(call)):
            raise MemoryError("no memory for the scratch of attention")

    def _arguments(self, layer: Layer, keys: Tensor, values: Tensor) -> _Layer:
        return _Layer(
            qkv=layer.qkv.arguments,
            output=layer.output.arguments,
            gate_up=layer.gate_up.arguments,
            down=layer.down.arguments,
            attention_norm=layer.attention_norm.data_ptr(),
            mlp_norm=layer.mlp_norm.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            attention_epsilon=layer.attention_epsilon,
            mlp_epsilon=layer.mlp_epsilon,
            scale=layer.scale,
            window=self.windows.index(layer.sliding_window),
        )

    def _check_step(
        self, x: Tensor, table: Tensor, slots: Tensor, kept: Tensor, laid_out: Sequence[Plans]
    ) -> None:
        num_tokens = len(x)
        for name, tensor, shape, dtype in (
            ("x", x, (num_tokens, self.width), self._dtype),
            ("table", table, (num_tokens, self._head_dim), self._dtype),
            ("slots", slots, (num_tokens,), torch.int64),
            ("kept", kept, (None,), torch.int64),
        ):
            check_shape(name, tensor, shape)
            check_dtype(name, tensor, dtype)
            check_contiguous(name, tensor)
        if len(kept) > num_tokens or (
            len(kept) and not 0 <= int(kept.min()) <= int(kept.max()) < num_tokens
        ):
            raise ValueError(f"kept are not at most {num_tokens} places in [0, {num_tokens - 1}]")
        cache = self._kept[1][0]
        num_decodes = laid_out[0][0].query_shape[0]
        heads = (self._num_heads, self._head_dim)
        wanted = ((num_decodes, *heads), (num_tokens - num_decodes, *heads))
        for plans in laid_out:
            shapes = tuple(plan.query_shape for plan in plans)
            if shapes != wanted or any(plan.cache_shape != cache.shape for plan in plans):
                raise ValueError(f"plans of {shapes} do not fit {num_tokens} tokens of this pool")


def _check_layer(layer: Layer, shapes: dict[str, tuple[int, int]], dtype: torch.dtype) -> None:
    for name, (num_out, num_in) in shapes.items():
        product: PackedLinear = getattr(layer, name)
        shape = (product.num_out, product.num_in)
        if shape != (num_out, num_in) or product.dtype != dtype:
            raise ValueError(f"{name} {shape} {product.dtype} is not ({num_out}, {num_in}) {dtype}")
    for name in ("attention_norm", "mlp_norm"):
        weight: Tensor = getattr(layer, name)
        check_shape(name, weight, (shapes["qkv"][1],))
        check_dtype(name, weight, dtype)
        check_contiguous(name, weight)


def _check_caches(
    name: str, caches: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype, num_layers: int
) -> None:
    if len(caches) != num_layers:
        raise ValueError(f"{name} are of {len(caches)} layers, not {num_layers}")
    for cache in caches:
        check_shape(name, cache, tuple(shape))
        check_dtype(name, cache, dtype)
        check_contiguous(name, cache, from_dim=1)
        if cache.stride(0) != caches[0].stride(0):
            raise ValueError(f"{name} have blocks of several strides")


@functools.cache
def _functions() -> tuple[Callable[..., int], Callable[..., int]]:
    loaded = library()
    run, scratch = loaded.octavo_run_layers, loaded.octavo_layer_scratch
    run.argtypes = scratch.argtypes = (POINTER(_Layers),)
    run.restype, scratch.restype = c_int, c_int64
    return run, scratch
