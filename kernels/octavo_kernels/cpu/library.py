"""Loads the compiled kernels; the C structs as ctypes see them."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path

import torch  # noqa: F401  its OpenMP runtime must be there before the kernels are

from octavo_kernels.cpu.build import (
    KernelsUnavailable,
    cached_library,
    is_intact,
    sources_digest,
)

_OPENMP = re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*$")


class AttentionArguments(Structure):
    """`octavo_attention` of csrc/octavo.h."""

    _fields_ = (
        *[(name, c_void_p) for name in ("query", "keys", "values", "out")],
        ("query_token_stride", c_int64),
        ("query_head_stride", c_int64),
        ("out_token_stride", c_int64),
        ("out_head_stride", c_int64),
        ("key_block_stride", c_int64),
        ("value_block_stride", c_int64),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        *[(name, c_void_p) for name in ("context_lens", "query_starts", "items")],
        *[(name, c_void_p) for name in ("first_partial", "pending", "partials")],
        *[(name, c_int32) for name in ("num_items", "num_parts")],
        *[(name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size")],
        *[(name, c_int32) for name in ("is_bf16", "num_threads", "tile_queries")],
        ("sliding_window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    )


class WriteArguments(Structure):
    """`octavo_write` of csrc/octavo.h."""

    _fields_ = (
        ("source", c_void_p),
        ("cache", c_void_p),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("block_stride", c_int64),
    )


class WritesArguments(Structure):
    """`octavo_writes` of csrc/octavo.h."""

    _fields_ = (
        *[(name, WriteArguments) for name in ("keys", "values")],
        ("slots", c_void_p),
        *[(name, c_int64) for name in ("num_tokens", "block_size", "num_kv_heads", "head_dim")],
        *[(name, c_int64) for name in ("element_bytes", "num_threads")],
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels: those that `OCTAVO_CPU_KERNELS` names, or this machine's.

    Raises:
        KernelsUnavailable: if they cannot be compiled, or not be used here.
    """
    given = os.environ.get("OCTAVO_CPU_KERNELS")
    path = Path(given).expanduser().absolute() if given else cached_library()
    # The loader would map what is missing of a file, and the process would die of it.
    if given and not is_intact(path):
        raise KernelsUnavailable(f"{path} is not a whole library that build.py has made")
    try:
        _share_openmp()
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"cannot load the compiled kernels: {error}") from error
    _declare(loaded)
    built_from = loaded.octavo_sources().decode()
    if built_from != sources_digest():
        raise KernelsUnavailable(f"{path} was built from other sources than these")
    if not loaded.octavo_supported():
        raise KernelsUnavailable(f"{path} was built for another CPU than this")
    return loaded


def _declare(loaded: ctypes.CDLL) -> None:
    try:
        loaded.octavo_sources.restype = ctypes.c_char_p
        loaded.octavo_sources.argtypes = ()
        loaded.octavo_supported.argtypes = ()
        for name in ("octavo_decode", "octavo_prefill"):
            getattr(loaded, name).argtypes = (POINTER(AttentionArguments),)
        loaded.octavo_reshape_and_cache.argtypes = (POINTER(WritesArguments),)
        loaded.octavo_reshape_and_cache.restype = None
        loaded.octavo_read.argtypes = (c_void_p, c_int64, c_int)
        loaded.octavo_read.restype = c_uint32
    except AttributeError as error:
        raise KernelsUnavailable(f"{loaded._name} is not a library of kernels: {error}") from error


def _share_openmp() -> None:
    """Let the kernels find the symbols of the OpenMP runtime that torch has loaded."""
    # A torch wheel brings its own, and means that one.
    found = sorted(openmp_runtimes(), key=lambda path: "torch" not in path)
    ctypes.CDLL(found[0] if found else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


def openmp_runtimes() -> set[str]:
    """The OpenMP runtimes mapped into this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split(maxsplit=5)[-1] for line in maps if _OPENMP.search(line)}
