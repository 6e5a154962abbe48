"""Executors by list and by name."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.discovery import Discovery, Place
from scheduler_svc.errors import StartupError


class Names:
    """Stands for a resolver whose answers change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, list[str]] = {}
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._look_up, raising=False)

    async def _look_up(self, host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        if host not in self.answers:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, None, "", (address, port)) for address in self.answers[host]]


async def test_a_list_is_as_it_is() -> None:
    """And is never looked up."""
    discovery = Discovery(["a:1", "[::1]:2"], "")
    assert discovery.fixed == [Place("a:1"), Place("[::1]:2")]
    assert not discovery.has_names
    assert await discovery.find() == discovery.fixed


async def test_a_name_has_many_addresses_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the name that its certificate carries; a failed look-up changes nothing."""
    names = Names(monkeypatch)
    names.answers["pods"] = ["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.1"]
    discovery = Discovery(["dns:///pods:50061"], "")
    assert discovery.has_names and not discovery.fixed
    found = await discovery.find()
    assert [place.address for place in found] == [
        "10.0.0.1:50061",
        "10.0.0.2:50061",
        "[fd00::1]:50061",
    ]
    assert {place.server_name for place in found} == {"pods"}
    names.answers["pods"] = ["10.0.0.3"]
    assert [place.address for place in await discovery.find()] == ["10.0.0.3:50061"]
    del names.answers["pods"]
    assert [place.address for place in await discovery.find()] == ["10.0.0.3:50061"]


async def test_the_setting_wins_over_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all certificates carry one name."""
    Names(monkeypatch).answers["pods"] = ["10.0.0.1"]
    (place,) = await Discovery(["dns:///pods:1"], "executors.local").find()
    assert place.server_name == "executors.local"


@pytest.mark.parametrize("value", ["dns:///pods", "dns:///:1", "dns:///pods:0", "dns://pods:1"])
def test_a_bad_name_is_refused(value: str) -> None:
    """By the flag's name."""
    with pytest.raises(StartupError, match="--executors"):
        SchedulerConfig.from_args([f"--executors={value}"])


def test_names_and_addresses_together() -> None:
    """In one list."""
    config = SchedulerConfig.from_args(["--executors=a:1,dns:///pods:2"])
    assert config.executors == ("a:1", "dns:///pods:2")
