"""The scheduler's settings: one frozen object, the only reader of the environment.

A flag wins over its environment variable, which wins over the default. The variable of
--max-queue is OCTAVO_SCHEDULER_MAX_QUEUE, and so on.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from octavo.addresses import is_loopback
from octavo.pem import PemFiles, TlsError, server_files
from octavo.settings import Flags, bad, parse_address, settings_config, split_list
from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode

from scheduler_svc.discovery import DNS_PREFIX
from scheduler_svc.errors import StartupError

ENV_PREFIX = "OCTAVO_SCHEDULER_"
DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_MODEL_STORE = "~/.cache/octavo/models"
_PROG = "octavo scheduler"
# What --help calls the value of a flag that is neither a switch nor a choice.
_METAVARS = {
    "model": "NAME",
    "model_store": "FOLDER",
    "listen": "HOST:PORT",
    "tls_cert": "FILE",
    "tls_key": "FILE",
    "tls_client_ca": "FILE",
    "api_keys": "FILE.toml",
    "api_keys_inline": "TOML",
    "executors": "HOST:PORT,...",
    "executor_ca": "FILE",
    "executor_cert": "FILE",
    "executor_key": "FILE",
    "executor_server_name": "NAME",
    "metrics_listen": "HOST:PORT",
    "scheduler_id": "NAME",
    "max_num_batched_tokens": "TOKENS",
    "max_num_seqs": "N",
    "max_queue": "N",
    "max_queue_seconds": "SECONDS",
    "max_model_len": "TOKENS",
    "watermark": "FRACTION",
    "max_steps_in_flight": "N",
    "step_timeout_seconds": "SECONDS",
    "min_step_timeout_seconds": "SECONDS",
    "orphan_timeout_seconds": "SECONDS",
    "handover_seconds": "SECONDS",
    "claim_timeout_seconds": "SECONDS",
    "grace_seconds": "SECONDS",
    "reader_timeout_seconds": "SECONDS",
    "tokenizer_threads": "N",
    "max_request_bytes": "BYTES",
    "max_connection_calls": "N",
}
_DEFAULTS_IN_WORDS = {
    "model_store": f"OCTAVO_MODEL_STORE if set, else {DEFAULT_MODEL_STORE}",
    "scheduler_id": "made of host, process and a random part",
    "max_model_len": "0, the model's own",
    "max_queue_seconds": "0, any",
    "max_request_bytes": "4194304, 4 MiB",
    "tls_cert": "no TLS",
    "tls_key": "no TLS",
    "tls_client_ca": "clients need no certificate",
    "api_keys": "clients need no key",
    "api_keys_inline": "clients need no key",
    "executor_ca": "no TLS",
    "executor_cert": "none is shown",
    "executor_key": "none is shown",
    "executor_server_name": "the host that --executors names",
    "metrics_listen": "metrics are not served",
}
_FILES = ("tls_cert", "tls_key", "tls_client_ca", "api_keys")
_EXECUTOR_FILES = ("executor_cert", "executor_key", "executor_ca")


def _default_model_store() -> Path:
    return Path(os.environ.get("OCTAVO_MODEL_STORE") or DEFAULT_MODEL_STORE)


def _default_scheduler_id() -> str:
    """Host and process, and a part that a restarted container does not repeat."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


class SchedulerConfig(BaseSettings):
    """Serve the public API and own the KV blocks of the executors; needs no GPU."""

    model_config = settings_config(ENV_PREFIX)

    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description="Model to serve: a name in the model store, a folder, or a hub id. Only its "
        "configuration and tokenizer are read.",
    )
    model_store: Path = Field(
        default_factory=_default_model_store,
        description="Folder with one folder per model.",
    )
    listen: str = Field(
        "127.0.0.1:50051",
        description="HOST:PORT of the public API; port 0 takes a free one.",
    )
    insecure_bind: bool = Field(
        False,
        description="Allow --listen without TLS on an address that other machines reach: what "
        "is sent there, API keys too, can be read on its way.",
    )
    tls_cert: Path | None = Field(
        None,
        description="PEM file of this service's certificate and its chain: the port speaks TLS. "
        "All files of certificates, keys and CAs are read again when they change.",
    )
    tls_key: Path | None = Field(
        None, description="PEM file of the certificate's private key, without a passphrase."
    )
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file of CAs: only clients whose certificate one of them signed may "
        "connect (mutual TLS).",
    )
    api_keys: Path | None = Field(
        None,
        description="File of hashed API keys and tenants' limits, as octavo keys writes it: "
        "every call needs a key. Read again when it changes.",
    )
    api_keys_inline: str = Field(
        "", description="What such a file would hold, for where there is none."
    )
    executors: Annotated[tuple[str, ...], NoDecode] = Field(
        ("127.0.0.1:50061",),
        description="HOST:PORT of each executor, separated by commas; dns:///NAME:PORT stands "
        "for all addresses of a name, which is resolved again every 5 seconds.",
    )
    executor_ca: Path | None = Field(
        None,
        description="PEM file of CAs that sign the executors' certificates: TLS to the executors.",
    )
    executor_cert: Path | None = Field(
        None, description="PEM file of the certificate that executors are shown (mutual TLS)."
    )
    executor_key: Path | None = Field(
        None, description="PEM file of that certificate's private key, without a passphrase."
    )
    executor_server_name: str = Field(
        "",
        description="Name that the executors' certificates carry, where it is not the host that "
        "is connected to.",
    )
    metrics_listen: str = Field(
        "",
        description="HOST:PORT of metrics for Prometheus, at /metrics, without TLS; port 0 takes a "
        "free one.",
    )
    scheduler_id: str = Field(
        default_factory=_default_scheduler_id,
        min_length=1,
        max_length=128,
        description="Name under which executors know this process, unique among schedulers.",
    )
    max_num_batched_tokens: int = Field(
        8192,
        ge=1,
        description="Tokens that one step may compute; an executor's own limit is lower as a rule.",
    )
    max_num_seqs: int = Field(128, ge=1, description="Sequences that may run in one step.")
    max_queue: int = Field(
        1024, ge=1, description="Requests that may wait; more are refused with a retry delay."
    )
    max_queue_seconds: float = Field(
        0.0,
        ge=0.0,
        le=86400.0,
        description="Seconds that a new request may have to wait, judged by the last ones; above "
        "it is refused at once with a retry delay.",
    )
    max_model_len: int = Field(0, ge=0, description="Longest context in tokens, prompt and output.")
    watermark: float = Field(
        0.01,
        ge=0.0,
        lt=1.0,
        description="Fraction of the KV blocks held back at admission so that running sequences "
        "can grow.",
    )
    max_steps_in_flight: int = Field(
        2, ge=1, le=4, description="Steps planned ahead of their results."
    )
    preemption: Literal["auto", "recompute", "swap"] = Field(
        "auto",
        description="How blocks are taken back: compute again later, move to host memory, or "
        "whichever is cheaper for the victim.",
    )
    policy: Literal["fcfs", "priority", "fair"] = Field(
        "priority",
        description="Order of waiting requests: by arrival, by priority then arrival, or fair "
        "between tenants within a priority.",
    )
    prefix_cache: bool = Field(
        True, description="Keep the K/V of finished prompts and reuse them for equal prefixes."
    )
    step_timeout_seconds: float = Field(
        60.0,
        gt=0.0,
        le=3600.0,
        description="Seconds that a step may take at most before its executor counts as hung. "
        "Once steps are known, 20 times the longest of the last.",
    )
    min_step_timeout_seconds: float = Field(
        5.0,
        gt=0.0,
        le=3600.0,
        description="Seconds that a step may always take, however short the last ones were.",
    )
    orphan_timeout_seconds: float = Field(
        120.0,
        gt=0.0,
        le=86400.0,
        description="Seconds that running requests wait for an executor after theirs was lost "
        "and there is no other. Then they end with UNAVAILABLE, and clients may resume them.",
    )
    handover_seconds: float = Field(
        2.0,
        gt=0.0,
        le=86400.0,
        description="The same while another scheduler has an executor, and clients that resume "
        "find it.",
    )
    claim_timeout_seconds: float = Field(
        10.0,
        gt=0.0,
        le=600.0,
        description="Seconds an executor may take to answer a claim.",
    )
    grace_seconds: float = Field(
        30.0,
        ge=0.0,
        le=3600.0,
        description="Seconds that running requests get to finish after SIGTERM.",
    )
    reader_timeout_seconds: float = Field(
        300.0,
        gt=0.0,
        le=86400.0,
        description="Seconds that a client may take nothing of its stream before it is given up.",
    )
    tokenizer_threads: int = Field(2, ge=1, le=64, description="Threads that tokenize prompts.")
    max_request_bytes: int = Field(
        4 * 1024 * 1024,
        ge=1024,
        le=1024 * 1024 * 1024,
        description="Bytes of one request; a larger one is refused by the transport itself with "
        "RESOURCE_EXHAUSTED.",
    )
    max_connection_calls: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description="Calls that one connection may have open; further ones wait in the client.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe event that is logged."
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto",
        description="Of the log on stderr: for people, or one JSON object per line. auto: console "
        "on a terminal, else json.",
    )

    @field_validator(*_FILES, *_EXECUTOR_FILES, mode="before")
    @classmethod
    def _empty_is_unset(cls, value: object) -> object:
        return value or None

    @field_validator("model_store", *_FILES, *_EXECUTOR_FILES)
    @classmethod
    def _expand_home(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser()

    @field_validator("executors", mode="before")
    @classmethod
    def _split_list(cls, value: object) -> object:
        return split_list(value)

    @field_validator("executors")
    @classmethod
    def _check_executors(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise bad("at least one HOST:PORT")
        for address in value:
            if parse_address(address.removeprefix(DNS_PREFIX))[1] == 0:
                raise bad("a list of HOST:PORT with ports from 1 to 65535")
        if len(set(value)) != len(value):
            raise bad("a list without repetitions")
        return value

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: str) -> str:
        parse_address(value)
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _check_metrics_listen(cls, value: str) -> str:
        if value:
            parse_address(value)
        return value

    @model_validator(mode="after")
    def _check_together(self) -> SchedulerConfig:
        try:
            tls_files = self.tls_files
            self.executor_files  # noqa: B018  # for what it raises
        except TlsError as error:
            raise StartupError(str(error)) from None
        if self.api_keys is not None and self.api_keys_inline:
            raise StartupError("--api-keys and --api-keys-inline: give one of them, not both")
        if not (tls_files or self.is_loopback or self.insecure_bind):
            raise StartupError(
                f"--listen must be a loopback address, got {self.listen}; give --tls-cert, or "
                "--insecure-bind to listen where other machines can reach an unencrypted port"
            )
        return self

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of metrics; None if they are not served."""
        return parse_address(self.metrics_listen) if self.metrics_listen else None

    @property
    def tls_files(self) -> PemFiles | None:
        """The files of the public port's TLS; None without TLS."""
        return server_files(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def executor_files(self) -> PemFiles | None:
        """The files of the TLS to executors; None without TLS."""
        if self.executor_ca is not None:
            names = ("--executor-cert", "--executor-key", "--executor-ca")
            return PemFiles(self.executor_cert, self.executor_key, self.executor_ca, names)
        for name in ("executor_cert", "executor_key", "executor_server_name"):
            if getattr(self, name):
                raise TlsError(f"--{name.replace('_', '-')}", "needs --executor-ca, without TLS")
        return None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the public port."""
        return is_loopback(parse_address(self.listen)[0])

    @classmethod
    def from_args(cls, args: Sequence[str]) -> SchedulerConfig:
        """Read flags, then the environment, then defaults.

        Raises:
            StartupError: one line naming the flag and what it may be.
            SystemExit: with code 0, after printing help.
        """
        return Flags(
            _PROG, cls, _METAVARS, _DEFAULTS_IN_WORDS, example="max_queue", error=StartupError
        ).read(args)
