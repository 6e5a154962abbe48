"""The executor's settings: flags, then environment, then defaults.

This is the only reader of the environment in the executor. Every field is a flag of
`octavo executor` in kebab-case and a variable with the prefix OCTAVO_EXECUTOR_.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from octavo.addresses import is_loopback
from octavo.pem import PemFiles, server_files
from octavo.settings import Flags, parse_address, settings_config
from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings

from executor_svc.errors import StartupError

ENV_PREFIX = "OCTAVO_EXECUTOR_"
_PROG = "octavo executor"
_MODEL_STORE = "~/.cache/octavo/models"
# What --help calls the value of a flag that is neither a switch nor a choice.
_METAVARS = {
    "model": "NAME",
    "model_store": "FOLDER",
    "listen": "HOST:PORT",
    "tls_cert": "FILE",
    "tls_key": "FILE",
    "tls_client_ca": "FILE",
    "metrics_listen": "HOST:PORT",
    "device": "NAME",
    "tensor_parallel_size": "RANKS",
    "block_size": "TOKENS",
    "num_blocks": "BLOCKS",
    "memory_utilization": "FRACTION",
    "kv_cache_gib": "GIB",
    "num_host_blocks": "BLOCKS",
    "host_cache_gib": "GIB",
    "max_num_batched_tokens": "TOKENS",
    "max_num_rows": "N",
    "max_model_len": "TOKENS",
    "num_threads": "N",
    "step_deadline_seconds": "SECONDS",
    "grace_seconds": "SECONDS",
}
_DEFAULTS_IN_WORDS = {
    "model_store": f"OCTAVO_MODEL_STORE if set, else {_MODEL_STORE}",
    "tls_cert": "no TLS",
    "tls_key": "no TLS",
    "tls_client_ca": "any client may connect",
    "metrics_listen": "metrics are not served",
    "num_blocks": "0, as many as memory allows",
    "num_host_blocks": "as many as fit --host-cache-gib",
    "max_num_batched_tokens": "0, 2048 on a GPU, 256 on a CPU or 384 in bf16 if it multiplies that",
    "max_model_len": "0, the model's own",
    "num_threads": "0, one per CPU of this process",
}


def _default_model_store() -> Path:
    return Path(os.environ.get("OCTAVO_MODEL_STORE") or _MODEL_STORE)


class ExecutorConfig(BaseSettings):
    """Run one model over the paged KV cache that this process owns, for a scheduler."""

    model_config = settings_config(ENV_PREFIX)

    model: str = Field(
        "smollm2-135m-instruct",
        min_length=1,
        description="Name in the model store, a folder, a .gguf file or a hub id.",
    )
    model_store: Path = Field(
        default_factory=_default_model_store,
        description="Folder with one folder per model.",
    )
    listen: str = Field(
        "127.0.0.1:50061", description="HOST:PORT to listen on; port 0 takes a free one."
    )
    insecure_bind: bool = Field(
        False,
        description="Listen without TLS on an address other than loopback, such as a pod's.",
    )
    tls_cert: Path | None = Field(
        None,
        description="PEM file of this service's certificate and its chain: the port speaks TLS. "
        "Like the next two it is read again when it changes.",
    )
    tls_key: Path | None = Field(
        None, description="PEM file of the certificate's private key, without a passphrase."
    )
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file of CAs: only schedulers whose certificate one of them signed may "
        "connect (mutual TLS).",
    )
    metrics_listen: str = Field(
        "",
        description="HOST:PORT of metrics for Prometheus, at /metrics, without TLS; port 0 takes a "
        "free one.",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    tensor_parallel_size: Annotated[int, Field(ge=1, le=128)] = Field(
        1,
        description="Ranks that share weights and KV pool, each a process: on GPUs rank i takes "
        "cuda:i. Under torchrun its number of ranks.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="Of weights and KV. auto: bfloat16 where the hardware multiplies it, "
        "else float32.",
    )
    attention: Literal["auto", "compiled", "triton", "reference"] = Field(
        "auto",
        description="Attention implementation. auto: triton on a GPU, compiled on a CPU, "
        "reference where that one cannot serve.",
    )
    fuse_layers: bool = Field(
        True,
        description="On a CPU, run the layers of known models as fewer, larger products.",
    )
    cuda_graphs: bool = Field(
        True,
        description="On a GPU, replay steps of decodes alone from CUDA graphs, recorded at start.",
    )
    block_size: Annotated[int, Field(ge=8, le=128)] = Field(
        16, description="Tokens of a KV block, 8 to 128."
    )
    num_blocks: Annotated[int, Field(ge=0)] = Field(0, description="Blocks of the KV pool.")
    memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9,
        description="Share, above 0 to 1, of the memory left after a worst-case step that "
        "the KV pool takes.",
    )
    kv_cache_gib: Annotated[float, Field(gt=0)] = Field(
        1.0, description="On a CPU, GiB that the KV pool takes at most."
    )
    num_host_blocks: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Blocks of host memory that back swapping; 0 is off.",
    )
    host_cache_gib: Annotated[float, Field(ge=0)] = Field(
        0.25, description="GiB of host memory that back swapping."
    )
    max_num_batched_tokens: Annotated[int, Field(ge=0)] = Field(
        0, description="Tokens that one step may compute."
    )
    max_num_rows: Annotated[int, Field(ge=1, le=65536)] = Field(
        256, description="Sequences that may exist at once."
    )
    max_model_len: Annotated[int, Field(ge=0)] = Field(
        0, description="Longest context in tokens, prompt and output."
    )
    kv_check: bool = Field(
        False,
        description="Sanitizer: tag every KV slot with what stands in it, check every read, "
        "and fail a step that would read another sequence's, naming both.",
    )
    num_threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="CPU threads of a step."
    )
    step_deadline_seconds: Annotated[float, Field(gt=0, le=86_400)] = Field(
        60.0, description="Seconds after which a step counts as hung and health says so."
    )
    grace_seconds: Annotated[float, Field(ge=0)] = Field(
        30.0, description="Seconds that SIGTERM leaves to the stream in progress."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severity logged."
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="Of the log on stderr. auto: console on a terminal, else json."
    )

    @field_validator("listen")
    @classmethod
    def _listen_has_a_port(cls, listen: str) -> str:
        parse_address(listen)
        return listen

    @field_validator("metrics_listen")
    @classmethod
    def _metrics_listen_has_a_port(cls, listen: str) -> str:
        if listen:
            parse_address(listen)
        return listen

    @field_validator("tls_cert", "tls_key", "tls_client_ca", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: object) -> object:
        return value or None

    @field_validator("model_store", "tls_cert", "tls_key", "tls_client_ca")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser()

    @model_validator(mode="after")
    def _loopback_unless_told(self) -> ExecutorConfig:
        if not (self.tls_files or self.is_loopback or self.insecure_bind):
            raise ValueError(
                f"--listen {self.listen} has no TLS and is not loopback; give --tls-cert, or "
                "--insecure-bind if the network is yours"
            )
        return self

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of metrics; None if they are not served."""
        return parse_address(self.metrics_listen) if self.metrics_listen else None

    @property
    def tls_files(self) -> PemFiles | None:
        """The files of the port's TLS; None without TLS."""
        return server_files(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the port."""
        return is_loopback(parse_address(self.listen)[0])


def read_config(argv: list[str]) -> ExecutorConfig:
    """Read flags and environment.

    Raises:
        StartupError: if one is unknown or out of bounds; the message is one line.
        SystemExit: after --help.
    """
    return Flags(
        _PROG,
        ExecutorConfig,
        _METAVARS,
        _DEFAULTS_IN_WORDS,
        example="block_size",
        error=StartupError,
    ).read(argv)
