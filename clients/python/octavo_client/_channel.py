"""How to reach a target: address forms and channel options, shared by both clients."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from octavo.addresses import is_loopback

from octavo_client.errors import InvalidArgument

DEFAULT_TARGET = "127.0.0.1:50051"

_BASE_OPTIONS: tuple[tuple[str, str | int], ...] = (
    # A reconnect should wait for our own back-off only, not for gRPC's second one.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A peer that vanished without a word (a cut network) is noticed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Snapshots with every block, and prompts of any length, fit.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Replicas behind one name share the load, and a dead one is left out.
    ("grpc.service_config", '{"loadBalancingConfig":[{"round_robin":{}}]}'),
)


@dataclass(frozen=True, slots=True)
class Address:
    """A target in gRPC's own form.

    Attributes:
        target: what gRPC resolves, such as "127.0.0.1:50051" or "dns:///name:50051".
        tls: whether to encrypt; None: the target does not say.
    """

    target: str
    tls: bool | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether what is sent there stays on this machine."""
        if self.target.startswith("unix"):
            return True
        # ipv4:A:1,B:2 is a list, dns:///NAME:1 has a host of its own kind.
        listed = self.target.removeprefix("ipv4:").removeprefix("ipv6:").split(",")
        return all(_is_loopback(each.rpartition("/")[2]) for each in listed)

    @property
    def options(self) -> tuple[tuple[str, str | int], ...]:
        """Channel options for this address."""
        if self.is_loopback:
            # An http_proxy in the environment cannot reach this machine's loopback.
            return (*_BASE_OPTIONS, ("grpc.enable_http_proxy", 0))
        return _BASE_OPTIONS


def parse_target(target: str) -> Address:
    """Read HOST:PORT, grpc://HOST:PORT, grpcs://HOST:PORT or a target of gRPC's own.

    Raises:
        InvalidArgument: if there is no port, or it is no number.
    """
    scheme, separator, rest = target.partition("://")
    tls = scheme == "grpcs" if separator else None
    if separator and scheme not in ("grpc", "grpcs"):
        if scheme in ("http", "https"):
            raise _bad_target(target)
        return Address(target)  # dns:///…, xds:///…: gRPC knows them
    if not separator:
        if target.startswith(("unix:", "ipv4:", "ipv6:", "dns:")):
            return Address(target)
        rest = target
    try:
        parts = urlsplit(f"//{rest}")
        usable = bool(parts.hostname and parts.port) and not (parts.query or parts.fragment)
    except ValueError:
        usable = False
    if not usable or parts.path.strip("/"):
        raise _bad_target(target)
    return Address(parts.netloc, tls)


def _is_loopback(address: str) -> bool:
    return is_loopback(address.rpartition(":")[0].removeprefix("dns:").strip("[]"))


def _bad_target(target: str) -> InvalidArgument:
    bound = "HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT"
    return InvalidArgument(f"target must be {bound}, got {target!r}", field="target", bound=bound)
