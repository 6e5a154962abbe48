"""How to reach a target: address forms and channel options, shared by both clients."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from octavo.addresses import is_loopback

from octavo_client.errors import InvalidArgument

DEFAULT_TARGET = "127.0.0.1:50051"

_BASE_OPTIONS: tuple[tuple[str, str | int], ...] = (
    # A reconnect should wait for our own back-off only, not for gRPC's second one.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # How long one attempt to connect may take: a handshake over a far line takes its time,
    # and a process that is stopped accepts and says nothing. (One that is refused is over
    # at once.)
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # A peer that vanished without a word (a cut network, a stopped process) is missed after
    # 15 s, however long the stream has been silent: no data need go between two pings.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # In gRPC 1.85 it is this one that counts.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Snapshots with every block, and prompts of any length, fit.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A client's connections are its own: one made while another waits to reconnect to the same
    # address would otherwise share that wait, and fail at once where a server has come back.
    ("grpc.use_local_subchannel_pool", 1),
    # Replicas share the load, and a dead one is left out.
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
        # dns:///NAME:1 has a host of its own kind.
        return all(_is_loopback(each.rpartition("/")[2]) for each in self._listed)

    @property
    def is_list(self) -> bool:
        """Whether it names several addresses."""
        return self.target.startswith(("ipv4:", "ipv6:")) and "," in self.target

    @property
    def may_have_replicas(self) -> bool:
        """Whether a second call may reach another process: a list, or a name, which may be one."""
        if self.is_list:
            return True
        return not self.target.startswith("unix") and not _is_ip(_host(self._listed[0]))

    @property
    def options(self) -> tuple[tuple[str, str | int], ...]:
        """Channel options for this address."""
        if self.is_loopback:
            # An http_proxy in the environment cannot reach this machine's loopback.
            return (*_BASE_OPTIONS, ("grpc.enable_http_proxy", 0))
        return _BASE_OPTIONS

    @property
    def _listed(self) -> list[str]:
        return self.target.removeprefix("ipv4:").removeprefix("ipv6:").split(",")


def parse_target(target: str) -> Address:
    """Read HOST:PORT, grpc://HOST:PORT, grpcs://HOST:PORT or a target of gRPC's own.

    In the place of HOST:PORT there may be several, with commas between them: replicas, by IP
    addresses of one family. gRPC resolves one name only; of a name that has several addresses
    each is a replica.

    Raises:
        InvalidArgument: if there is no port, or it is no number, or a list is none of ours.
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
    listed = [_parse_one(each.strip(), target) for each in rest.split(",")]
    return Address(listed[0] if len(listed) == 1 else _join(listed, target), tls)


def _parse_one(address: str, target: str) -> str:
    try:
        parts = urlsplit(f"//{address}")
        usable = bool(parts.hostname and parts.port) and not (parts.query or parts.fragment)
    except ValueError:
        usable = False
    if not usable or parts.path.strip("/"):
        raise _bad_target(target)
    return parts.netloc


def _join(listed: list[str], target: str) -> str:
    """Write a list as gRPC has it.

    Raises:
        InvalidArgument: if it holds names, or addresses of both families.
    """
    families = set()
    for each in listed:
        host = _host(each)
        if not _is_ip(host):
            bound = "a list of IP addresses, or one name that has several"
            raise InvalidArgument(
                f"target must be {bound}: gRPC cannot look up {host!r} in a list, got {target!r}",
                field="target",
                bound=bound,
            )
        families.add(ipaddress.ip_address(host).version)
    if len(families) > 1:
        bound = "a list of IPv4 or of IPv6 addresses, not of both"
        raise InvalidArgument(
            f"target must be {bound}, got {target!r}", field="target", bound=bound
        )
    return f"ipv{families.pop()}:{','.join(listed)}"


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return is_loopback(_host(address).removeprefix("dns:").strip("[]"))


def _bad_target(target: str) -> InvalidArgument:
    bound = "HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT"
    return InvalidArgument(f"target must be {bound}, got {target!r}", field="target", bound=bound)
