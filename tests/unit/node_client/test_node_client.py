"""The Node client without services: its own tests, its types, its package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import node


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    """What the client needs is installed."""
    node.set_up()


async def test_its_own_tests_pass() -> None:
    """Resuming, retrying, cancelling, errors and input, against a fake scheduler in Node."""
    suites = sorted(str(path.relative_to(node.CLIENT)) for path in _tests())
    assert suites
    output = await node.run("node", "--test", "--test-reporter=tap", *suites)
    assert "# fail 0" in output


def _tests() -> list[Path]:
    return list(node.CLIENT.glob("test/unit/*.test.js"))


async def test_its_types_allow_and_refuse_what_they_should() -> None:
    """The TypeScript compiler accepts a program of every kind, and refuses the wrong calls."""
    await node.run("node", "node_modules/typescript/bin/tsc", "-p", "test/types")


async def test_the_package_has_what_it_needs_and_nothing_else() -> None:
    """Code, types, protos, a README; no tests, no examples."""
    output = await node.run("node", node.NPM, "pack", "--dry-run", "--json", "--loglevel=error")
    names = {file["path"] for file in json.loads(output)[0]["files"]}
    on_disk = {
        str(path.relative_to(node.CLIENT))
        for folder in ("src", "proto")
        for path in (node.CLIENT / folder).rglob("*")
        if path.is_file()
    }
    assert names == on_disk | {"README.md", "index.d.ts", "package.json"}


def test_its_protos_are_copies() -> None:
    """After a change of the protos: `make proto`."""
    copies = set((node.CLIENT / "proto").rglob("*.proto"))
    sources = {
        node.ROOT / "proto" / "octavo" / "v1" / "inference.proto",
        node.ROOT / "proto" / "octavo" / "v1" / "types.proto",
        node.ROOT / "clients" / "proto" / "octavo" / "client" / "details.proto",
    }
    assert {copy.name: copy.read_bytes() for copy in copies} == {
        source.name: source.read_bytes() for source in sources
    }


def test_its_lock_names_public_addresses_only() -> None:
    """Every package is pinned to npm's public registry, by address and digest."""
    lock = json.loads((node.CLIENT / "package-lock.json").read_text(encoding="utf-8"))
    packages = {name: entry for name, entry in lock["packages"].items() if name}
    assert packages
    odd = [
        name
        for name, entry in packages.items()
        if not entry.get("resolved", "").startswith("https://registry.npmjs.org/")
        or not entry.get("integrity", "").startswith("sha512-")
    ]
    assert odd == []
