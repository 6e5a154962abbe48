"""What the servicer asks of whoever guards the API: whose call this is, and its limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar

from scheduler_svc.errors import ApiKeyUnknown, TenantMismatch
from scheduler_svc.security.keys import ApiKey
from scheduler_svc.security.limits import TenantLimiter, Ticket
from scheduler_svc.security.store import KeyStore

_caller: ContextVar[ApiKey | None] = ContextVar("caller", default=None)


def set_caller(key: ApiKey) -> None:
    """Say who makes the call that runs in this context."""
    _caller.set(key)


def caller_ids() -> dict[str, str]:
    """Give the names of the call's key and tenant, for the log; the key itself is not known."""
    key = _caller.get()
    return {} if key is None else {"api_key_name": key.name, "tenant": key.tenant}


class Gate:
    """Lets calls in as their tenants; without keys everyone is whom they say they are."""

    def __init__(
        self, store: KeyStore | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Guard by these keys; None: let all in, without limits."""
        self._store = store
        self._limiter = TenantLimiter(clock)

    def check_caller(self) -> None:
        """Look again whether the key of this call is still good, for calls without an end.

        Raises:  ApiKeyUnknown: if it was revoked, or changed.
        """
        key = _caller.get()
        if self._store is None or key is None:
            return
        if self._store.current().keys.get(key.hash) != key:
            raise ApiKeyUnknown(f"the API key {key.name!r} was revoked")

    def enter(self, tenant: str) -> Ticket:
        """Let the call of this context in.

        Args:
            tenant: that the request names; "" for the key's own.

        Raises:
            TenantMismatch: if the request names another tenant than its key's.
            TenantLimit: if the tenant has reached one of its limits.
        """
        if self._store is None:
            return Ticket(tenant)
        key = _caller.get()
        if key is None:
            raise RuntimeError("a call came past the check of its key")
        if tenant not in ("", key.tenant):
            raise TenantMismatch(key.tenant)
        return self._limiter.enter(key.tenant, self._store.current().limits_of(key.tenant))
