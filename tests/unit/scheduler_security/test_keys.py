"""Tests of scheduler_svc.security.keys and .store."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scheduler_svc.security.keys import KeyRing, KeysError, hash_of, new_key, parse_keys
from scheduler_svc.security.store import KeyStore

KEY = "octavo-abc"


def entry(**fields: object) -> str:
    values = {"name": "a", "tenant": "t", "hash": hash_of(KEY), **fields}
    lines = [f"{name} = {value!r}".replace("True", "true") for name, value in values.items()]
    return "\n".join(["[[keys]]", *lines, ""])


def test_a_key_is_found_by_itself_alone() -> None:
    """Name, tenant and kind come back; anything else finds nothing."""
    ring = parse_keys(entry() + entry(name="b", tenant="u", hash=hash_of("x"), admin=True))
    found, admin = ring.find(KEY), ring.find("x")
    assert found is not None and (found.name, found.tenant, found.admin) == ("a", "t", False)
    assert admin is not None and (admin.name, admin.tenant, admin.admin) == ("b", "u", True)
    for other in ("", KEY + " ", KEY.upper(), hash_of(KEY), "ключ", "\udcff"):
        assert ring.find(other) is None


def test_keys_are_long_and_never_the_same() -> None:
    """256 bits in 43 characters, after a prefix by which scanners know them."""
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"octavo-[A-Za-z0-9_-]{43}", key) for key in keys)


def test_the_hash_is_plain_sha256() -> None:
    """So that any tool can make one: printf %s KEY | sha256sum."""
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert hash_of("abc") == f"sha256:{digest}"


def test_limits_are_the_tenants_own_or_the_default() -> None:
    """A table of one's own stands for itself: nothing of the default is mixed in."""
    ring = parse_keys(
        "[tenants.a]\nmax_concurrent_requests = 3\n[tenants.default]\nmax_requests_per_minute = 5\n"
    )
    assert ring.limits_of("a").max_concurrent_requests == 3
    assert ring.limits_of("a").max_requests_per_minute is None
    assert ring.limits_of("b").max_requests_per_minute == 5
    assert parse_keys("").limits_of("b").max_requests_per_minute is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[keys]", "is no TOML"),
        ("keys = 3", "keys: must be tables"),
        ("key = []", "key: there is no such field"),
        ('[[keys]]\nname = "a"', "keys[0].tenant: is missing"),
        (entry(name=""), "keys[0].name: must be 1 to 64 characters"),
        (entry(name="a b"), "keys[0].name: must be"),
        (entry(tenant=""), "keys[0].tenant: must be 1 to 128 characters"),
        (entry(tenant="t" * 129), "keys[0].tenant: must be"),
        (entry(hash=KEY), "keys[0].hash: must be sha256: and 64"),
        (entry(hash=hash_of(KEY).upper()), "keys[0].hash: must be"),
        (entry(admin=1), "keys[0].admin: must be true or false"),
        (entry(role="x"), "keys[0].role: there is no such field"),
        (entry() + entry(hash=hash_of("x")), "two have the name 'a'"),
        (entry() + entry(name="b"), "'a' and 'b' are the same key"),
        ("[tenants.a]\nmax_concurrent_requests = 0", "max_concurrent_requests: must be a whole"),
        ("[tenants.a]\nmax_requests_per_minute = 1.5", "tenants.a.max_requests_per_minute: must"),
        ("[tenants.a]\nmax_tokens_per_minute = true", "tenants.a.max_tokens_per_minute: must"),
        ("[tenants.a]\nmax_pigs = 1", "tenants.a.max_pigs: there is no such field"),
    ],
)
def test_a_broken_text_is_one_line_without_a_key(text: str, said: str) -> None:
    """It names the entry and the bound, and never shows what might be a key."""
    with pytest.raises(KeysError) as caught:
        parse_keys(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_store_follows_its_file(tmp_path: Path) -> None:
    """A key that is gone from the file is gone; a broken file changes nothing."""
    path = tmp_path / "keys.toml"
    path.write_text(entry())
    store = KeyStore(path)
    assert store.current().find(KEY) is not None
    path.write_text("[[keys]")
    assert store.current().find(KEY) is not None
    path.write_text("")
    assert store.current().find(KEY) is None


def test_a_store_without_a_file_has_fixed_keys() -> None:
    """As of an environment variable."""
    assert KeyStore(None, entry()).current().find(KEY) is not None
    with pytest.raises(KeysError):
        KeyStore(None, "[[keys]")


@pytest.mark.parametrize("content", [b"\xff", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    """No UTF-8, or not there at all."""
    path = tmp_path / "keys.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KeysError, match=re.escape(str(path))):
        KeyStore(path)


def test_rings_are_compared_by_what_they_hold() -> None:
    """A file that is written again with the same content is no change."""
    assert parse_keys(entry()) == parse_keys(entry() + "# said again\n")
    assert parse_keys(entry()) != KeyRing({}, {})
