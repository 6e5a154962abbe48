"""Tests of scheduler_svc.security.gate: the key decides, and nothing gets past it."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TypeVar

import pytest

from scheduler_svc.errors import ApiKeyUnknown, TenantLimit, TenantMismatch
from scheduler_svc.security.gate import Gate, caller_ids, set_caller
from scheduler_svc.security.keys import ApiKey, hash_of
from scheduler_svc.security.store import KeyStore

T = TypeVar("T")
KEY = ApiKey(name="k", tenant="acme", hash=hash_of("octavo-x"))
LIMITS = "[tenants.acme]\nmax_concurrent_requests = 1\n"


def as_caller(act: Callable[[], T]) -> T:
    """Act in a context of its own, as the handler of a call with a key."""

    def call() -> T:
        set_caller(KEY)
        return act()

    return contextvars.Context().run(call)


def test_without_keys_everyone_is_whom_they_say_they_are() -> None:
    """As before there were keys: no limits, the tenant as the request names it."""
    gate = Gate()
    assert gate.enter("someone").tenant == "someone"
    assert gate.enter("").tenant == ""
    assert caller_ids() == {}


def test_the_key_decides_the_tenant() -> None:
    """A request may leave it out or repeat it."""
    gate = Gate(KeyStore(None))
    for tenant in ("", "acme"):
        assert as_caller(lambda named=tenant: gate.enter(named).tenant) == "acme"
    with pytest.raises(TenantMismatch, match="'acme'"):
        as_caller(lambda: gate.enter("other"))


def test_limits_are_those_of_the_keys_tenant() -> None:
    """As the store has them at this moment."""
    gate = Gate(KeyStore(None, LIMITS))
    with as_caller(lambda: gate.enter("")), pytest.raises(TenantLimit):
        as_caller(lambda: gate.enter(""))
    as_caller(lambda: gate.enter(""))


def test_a_key_is_looked_at_again_when_a_call_has_no_end() -> None:
    """One that is gone, or has become another, is told from one that is still there."""
    kept = f'[[keys]]\nname = "k"\ntenant = "acme"\nhash = "{KEY.hash}"\n'
    as_caller(Gate(KeyStore(None, kept)).check_caller)
    for changed in ("", kept.replace("acme", "other"), kept + "admin = true\n"):
        with pytest.raises(ApiKeyUnknown, match="'k' was revoked"):
            as_caller(Gate(KeyStore(None, changed)).check_caller)
    Gate().check_caller()


def test_a_call_that_nobody_checked_is_an_error() -> None:
    """If the interceptor were ever left out, nothing would be let in."""
    with pytest.raises(RuntimeError):
        contextvars.Context().run(Gate(KeyStore(None)).enter, "")


def test_the_log_has_names_and_no_key() -> None:
    """Of the key and its tenant."""
    assert as_caller(caller_ids) == {"api_key_name": "k", "tenant": "acme"}
