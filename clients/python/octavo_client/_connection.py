"""How a client reaches its target: TLS, the server's name, the API key. Both clients share it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from octavo.pem import PemFiles, TlsError
from octavo.tls import ClientTls

from octavo_client._channel import Address, parse_target
from octavo_client.errors import InvalidArgument

_MAX_KEY_CHARACTERS = 4096
_Channel = TypeVar("_Channel")
_Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """What a caller gave, as `AsyncClient` describes it; None leaves it to the environment.

    An empty string means: none, whatever the environment says.
    """

    target: str
    credentials: grpc.ChannelCredentials | None = None
    api_key: str | None = None
    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str | None = None
    allow_insecure_key: bool = False


class Connection:
    """A target, and what every call to it needs.

    Invariant: a key leaves this machine only encrypted, unless the caller allowed it.

    Attributes:
        target: in gRPC's own form.
        has_replicas: whether a second call may reach another process than the first.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        """Read the files; nothing is connected to yet.

        Raises:  InvalidArgument: naming the parameter, or the variable, that is wrong.
        """
        address = parse_target(settings.target)
        self.target = address.target
        self.has_replicas = address.may_have_replicas
        self._credentials = settings.credentials
        self._options: tuple[tuple[str, Any], ...] = address.options
        if settings.credentials is None:
            tls = _read_tls(settings, address)
            if tls is not None:
                self._credentials = tls.credentials()
                self._options += tls.options
        else:
            _refuse_files(settings, "give credentials or files, not both")
        allows = settings.allow_insecure_key or os.environ.get("OCTAVO_ALLOW_INSECURE_KEY") == "1"
        self._is_private = self._credentials is not None or address.is_loopback or allows
        name, key = "api_key", settings.api_key
        if key is None:
            name, key = "OCTAVO_API_KEY", os.environ.get("OCTAVO_API_KEY", "").strip()
        self._metadata = self._with_key(name, key)

    def open(
        self, insecure_channel: Callable[..., _Channel], secure_channel: Callable[..., _Channel]
    ) -> _Channel:
        """Open a channel by grpc's, or grpc.aio's, two functions for it."""
        if self._credentials is None:
            return insecure_channel(self.target, options=self._options)
        return secure_channel(self.target, self._credentials, options=self._options)

    def metadata(self, api_key: str | None) -> _Metadata:
        """Give what a call sends along.

        Args:
            api_key: of this call alone; None: the client's own; "": none.
        Raises:  InvalidArgument: if the key is no key, or would travel unencrypted.
        """
        return self._metadata if api_key is None else self._with_key("api_key", api_key)

    def _with_key(self, name: str, key: str) -> _Metadata:
        if not key:
            return ()
        # Never shown: it would end up in a log.
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise _invalid(name, "printable ASCII characters without spaces")
        if len(key) > _MAX_KEY_CHARACTERS:
            raise _invalid(name, f"at most {_MAX_KEY_CHARACTERS} characters")
        if not self._is_private:
            raise _invalid(
                name,
                f"sent over TLS, and {self.target} is reached without: use grpcs:// or ca_file; "
                "or allow_insecure_key (OCTAVO_ALLOW_INSECURE_KEY=1) if the network is yours",
            )
        return (("authorization", f"Bearer {key}"),)


def _read_tls(settings: ConnectionSettings, address: Address) -> ClientTls | None:
    """Give the TLS that settings, environment and target call for; None: none of them does."""
    if address.tls is False:
        _refuse_files(settings, "needs TLS, and grpc:// says that there is none: use grpcs://")
        return None
    ca_name, ca = _file("ca_file", settings.ca_file)
    if not address.tls and ca is None:
        _refuse_files(settings, "needs TLS: use grpcs:// or ca_file")
        return None
    if address.is_list and not settings.server_name:
        problem = "needed for a list of replicas with TLS: their certificates have one name"
        raise InvalidArgument(f"server_name: {problem}", field="server_name", bound=problem)
    cert_name, cert = _file("cert_file", settings.cert_file)
    key_name, key = _file("key_file", settings.key_file)
    try:
        files = PemFiles(cert, key, ca, (cert_name, key_name, ca_name))
        return ClientTls(files, settings.server_name or "")
    except TlsError as error:
        raise InvalidArgument(str(error), field=error.setting, bound=str(error)) from None


def _file(name: str, given: str | Path | None) -> tuple[str, Path | None]:
    """Give a file, and what names it: the parameter, or else the variable OCTAVO_NAME."""
    if given is None:
        variable = f"OCTAVO_{name.upper()}"
        given = os.environ.get(variable, "")
        name = variable if given else name
    return name, Path(given).expanduser() if str(given) else None


def _refuse_files(settings: ConnectionSettings, problem: str) -> None:
    for name in ("ca_file", "cert_file", "key_file", "server_name"):
        if getattr(settings, name):
            raise InvalidArgument(f"{name}: {problem}", field=name, bound=problem)


def _invalid(name: str, bound: str) -> InvalidArgument:
    return InvalidArgument(f"{name} must be {bound}", field=name, bound=bound)
