"""Where executors are: a list of addresses, and names whose addresses come and go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import structlog
from octavo.addresses import join_address
from octavo.settings import parse_address

_log = structlog.get_logger()

DNS_PREFIX = "dns:///"
_RESOLVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """One executor's address.

    Attributes:
        address: HOST:PORT.
        server_name: that its certificate carries; "": the address's host.
    """

    address: str
    server_name: str = ""


class Discovery:
    """Knows the places of executors; a name is asked again whenever `find` is called.

    A headless service of Kubernetes is such a name: it has the addresses of all ready pods.
    """

    def __init__(self, executors: Iterable[str], server_name: str) -> None:
        """Sort what was given.

        Args:
            executors: HOST:PORT, or dns:///NAME:PORT for all addresses of a name.
            server_name: that all certificates carry; "": each its own host or name.
        """
        given = list(executors)
        self.fixed = [Place(each, server_name) for each in given if not is_name(each)]
        self._names = [each.removeprefix(DNS_PREFIX) for each in given if is_name(each)]
        self._server_name = server_name
        self._found: dict[str, list[Place]] = {}

    @property
    def has_names(self) -> bool:
        """Whether places may come and go."""
        return bool(self._names)

    async def find(self) -> list[Place]:
        """Give all places; a name that cannot be resolved now has those it had."""
        for name in self._names:
            try:
                async with asyncio.timeout(_RESOLVE_SECONDS):
                    self._found[name] = await self._resolve(name)
            except (OSError, TimeoutError, UnicodeError) as error:
                _log.warning("name_not_resolved", name=name, reason=str(error) or "no answer")
        found = [place for name in self._names for place in self._found.get(name, ())]
        return list(dict.fromkeys([*self.fixed, *found]))

    async def _resolve(self, name: str) -> list[Place]:
        host, port = parse_address(name)
        loop = asyncio.get_running_loop()
        answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        hosts = sorted({str(address[0]) for *_, address in answers})
        return [Place(join_address(each, port), self._server_name or host) for each in hosts]


def is_name(executor: str) -> bool:
    """Whether a setting is a name to resolve, rather than one address."""
    return executor.startswith(DNS_PREFIX)
