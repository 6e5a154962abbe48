"""The gateway's settings: one frozen object, the only reader of the environment.

A flag wins over its environment variable, which wins over the default. The variable of
--max-concurrent-requests is OCTAVO_GATEWAY_MAX_CONCURRENT_REQUESTS, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from octavo.addresses import is_loopback
from octavo.settings import (
    Flags,
    flag_of,
    parse_address,
    settings_config,
    split_list,
)
from octavo_client import InvalidArgument, parse_target
from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode

from octavo_gateway.errors import StartupError

ENV_PREFIX = "OCTAVO_GATEWAY_"
_PROG = "octavo gateway"
# What --help calls the value of a flag that is neither a switch nor a choice.
_METAVARS = {
    "listen": "HOST:PORT",
    "target": "HOST:PORT,...",
    "tls_cert": "FILE",
    "tls_key": "FILE",
    "ca_file": "FILE",
    "cert_file": "FILE",
    "key_file": "FILE",
    "server_name": "NAME",
    "cors_origins": "ORIGIN,...",
    "timeout": "SECONDS",
    "max_concurrent_requests": "N",
    "max_body_bytes": "BYTES",
    "grace_seconds": "SECONDS",
    "max_console_watchers": "N",
}
_DEFAULTS_IN_WORDS = {
    "tls_cert": "none, plain HTTP",
    "tls_key": "none",
    "ca_file": "none, the system's roots with grpcs://",
    "cert_file": "none",
    "key_file": "none",
    "server_name": "the host of --target",
    "cors_origins": "none",
    "max_body_bytes": "4194304, 4 MiB",
}


class GatewayConfig(BaseSettings):
    """Serve OpenAI's HTTP API in front of a scheduler, as a client of it."""

    model_config = settings_config(ENV_PREFIX)

    listen: str = Field(
        "127.0.0.1:8000", description="HOST:PORT of the HTTP API; port 0 takes a free one."
    )
    insecure_bind: bool = Field(
        False,
        description="Allow --listen on an address that other machines reach without --tls-cert: "
        "texts and keys travel unencrypted.",
    )
    target: str = Field(
        "127.0.0.1:50051",
        min_length=1,
        description="HOST:PORT of the scheduler, grpcs://HOST:PORT for TLS; a name with several "
        "addresses, or a list HOST:PORT,HOST:PORT of IP addresses, is a set of replicas.",
    )
    insecure_target: bool = Field(
        False,
        description="Allow a --target on another machine without TLS: texts and callers' keys "
        "travel unencrypted.",
    )
    ca_file: Path | None = Field(
        None, description="Certificates, in PEM, that --target's must be signed by; turns TLS on."
    )
    cert_file: Path | None = Field(
        None, description="Certificate, in PEM, that is shown to --target."
    )
    key_file: Path | None = Field(None, description="Private key of --cert-file.")
    server_name: str | None = Field(
        None, description="Name that --target's certificate must have instead."
    )
    tls_cert: Path | None = Field(
        None, description="Certificate chain, in PEM, for --listen; turns HTTPS on."
    )
    tls_key: Path | None = Field(None, description="Private key of --tls-cert.")
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Origins whose pages may call from a browser, separated by commas; * is all.",
    )
    timeout: float = Field(
        600.0, gt=0.0, le=86400.0, description="Seconds that one request may take in all."
    )
    max_concurrent_requests: int = Field(
        1024, ge=1, description="Requests in flight; more are refused with 429 and a delay."
    )
    max_body_bytes: int = Field(
        4 * 1024 * 1024,
        ge=1024,
        le=1024 * 1024 * 1024,
        description="Bytes of one request's body; the scheduler has a limit of its own.",
    )
    console: bool = Field(
        True, description="Serve the web console at /console, for whoever reaches --listen."
    )
    max_console_watchers: int = Field(
        8, ge=1, le=256, description="Consoles that may watch at once; more are refused with 503."
    )
    grace_seconds: float = Field(
        30.0,
        ge=0.0,
        le=3600.0,
        description="Seconds that requests in flight get to finish after SIGTERM.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe event that is logged."
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto",
        description="Of the log on stderr: for people, or one JSON object per line. auto: console "
        "on a terminal, else json.",
    )

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split_list(cls, value: object) -> object:
        return split_list(value)

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: str) -> str:
        parse_address(value)
        return value

    @model_validator(mode="after")
    def _check_pairs(self) -> GatewayConfig:
        for cert, key in (("tls_cert", "tls_key"), ("cert_file", "key_file")):
            if (getattr(self, cert) is None) != (getattr(self, key) is None):
                raise StartupError(f"{flag_of(cert)} and {flag_of(key)} go together: give both")
        return self

    @model_validator(mode="after")
    def _ask_for_open_bind(self) -> GatewayConfig:
        host, _ = parse_address(self.listen)
        if not (self.insecure_bind or self.tls_cert or is_loopback(host)):
            raise StartupError(
                f"--listen must be a loopback address, got {self.listen}; give --tls-cert and "
                "--tls-key, or --insecure-bind to let other machines reach an unencrypted port"
            )
        return self

    @model_validator(mode="after")
    def _ask_for_open_target(self) -> GatewayConfig:
        try:
            address = parse_target(self.target)
        except InvalidArgument as error:
            raise StartupError(f"--{error}") from None
        has_tls = address.tls or self.ca_file is not None
        if not (has_tls or self.insecure_target or address.is_loopback):
            raise StartupError(
                f"--target must be reached over TLS or be a loopback address, got {self.target}; "
                "use grpcs:// or --ca-file, or --insecure-target if the network is yours"
            )
        return self

    @classmethod
    def from_args(cls, args: Sequence[str]) -> GatewayConfig:
        """Read flags, then the environment, then defaults.

        Raises:
            StartupError: one line naming the flag and what it may be.
            SystemExit: with code 0, after printing help.
        """
        return Flags(
            _PROG, cls, _METAVARS, _DEFAULTS_IN_WORDS, example="grace_seconds", error=StartupError
        ).read(args)
