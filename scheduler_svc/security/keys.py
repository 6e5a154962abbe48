"""API keys as they are kept: a TOML text of hashes and limits, read into a `KeyRing`.

    [[keys]]
    name = "nightly-tests"
    tenant = "team-a"
    hash = "sha256:..."             # 64 hexadecimal digits
    admin = false

    [tenants.team-a]
    max_concurrent_requests = 16
    max_requests_per_minute = 600
    max_tokens_per_minute = 100000

    [tenants.default]               # for every tenant without a table of its own

A key is 256 random bits. Nobody can try them all, so one plain SHA-256 protects it as well
as the slow, salted hashes that passwords need, and costs a call a microsecond. Looking a
hash up tells, by its timing, at most something about the hash of a guess; that leads to no
key.
"""

from __future__ import annotations

import hashlib
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

KEY_PREFIX = "octavo-"  # so that scanners for leaked secrets, and people, know one
HASH_PREFIX = "sha256:"
DEFAULT_TENANT = "default"
MAX_TEXT_BYTES = 16 * 1024 * 1024
_KEY_BYTES = 32
_MAX_PER_MINUTE = 10**12

# What a field may be, where pydantic's own words would show a pattern, or what was written:
# somebody may have written a key where its hash belongs.
_BOUNDS = {
    "keys": "tables [[keys]]",
    "tenants": "tables [tenants.NAME]",
    "name": "1 to 64 characters of A-Z a-z 0-9 . _ -",
    "tenant": "1 to 128 characters",
    "hash": f"{HASH_PREFIX} and 64 hexadecimal digits in lower case, as octavo keys writes it",
    "admin": "true or false",
    "max_concurrent_requests": f"a whole number, 1 to {_MAX_PER_MINUTE}",
    "max_requests_per_minute": f"a whole number, 1 to {_MAX_PER_MINUTE}",
    "max_tokens_per_minute": f"a whole number, 1 to {_MAX_PER_MINUTE}",
}

_Limit = Annotated[int, Field(ge=1, le=_MAX_PER_MINUTE)] | None


class KeysError(ValueError):
    """The text is not what it must be; the message is one line and shows no key."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ApiKey(_Entry):
    """What a key stands for: a tenant, and whether the AdminService is open to it."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    tenant: Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f-\x9f]{1,128}$")]
    hash: Annotated[str, StringConstraints(pattern=f"^{HASH_PREFIX}[0-9a-f]{{64}}$")]
    admin: bool = False


class TenantLimits(_Entry):
    """What all of a tenant's keys together may use; None: no limit."""

    max_concurrent_requests: _Limit = None
    max_requests_per_minute: _Limit = None
    max_tokens_per_minute: _Limit = None


class _Text(_Entry):
    keys: tuple[ApiKey, ...] = ()
    tenants: dict[str, TenantLimits] = Field(default_factory=dict)


@dataclass(frozen=True)
class KeyRing:
    """Keys by hash, and limits by tenant."""

    keys: Mapping[str, ApiKey]
    tenants: Mapping[str, TenantLimits]

    def find(self, key: str) -> ApiKey | None:
        """Give what a key stands for; None if it is not known."""
        return self.keys.get(hash_of(key))

    def limits_of(self, tenant: str) -> TenantLimits:
        """Give a tenant's own limits, or else those of every tenant without its own."""
        for name in (tenant, DEFAULT_TENANT):
            if name in self.tenants:
                return self.tenants[name]
        return TenantLimits()


def new_key() -> str:
    """Draw a key."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_of(key: str) -> str:
    """Give the form in which a key is kept."""
    return HASH_PREFIX + hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def parse_keys(text: str) -> KeyRing:
    """Read a text of keys.

    Raises:  KeysError: naming the entry, its field and the bound.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise KeysError(f"must be at most {MAX_TEXT_BYTES} bytes")
    try:
        parsed = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers and nesting without end
        raise KeysError(f"is no TOML: {str(error).splitlines()[0]}") from None
    try:
        # Pydantic's strict mode takes no list for a tuple.
        read = _Text.model_validate({**parsed, **_as_tuple(parsed)})
    except ValidationError as error:
        raise KeysError(_explain(error)) from None
    by_hash: dict[str, ApiKey] = {}
    names: set[str] = set()
    for key in read.keys:
        if key.name in names:
            raise KeysError(f"keys: two have the name {key.name!r}")
        if key.hash in by_hash:
            raise KeysError(f"keys: {by_hash[key.hash].name!r} and {key.name!r} are the same key")
        names.add(key.name)
        by_hash[key.hash] = key
    return KeyRing(by_hash, read.tenants)


def _as_tuple(parsed: Mapping[str, object]) -> dict[str, object]:
    keys = parsed.get("keys")
    return {"keys": tuple(keys)} if isinstance(keys, list) else {}


def _explain(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
    ).lstrip(".")
    if first["type"] == "extra_forbidden":
        return f"{path}: there is no such field"
    if first["type"] == "missing":
        return f"{path}: is missing"
    bound = _BOUNDS.get(str(first["loc"][-1]))
    return f"{path}: must be {bound}" if bound else f"{path}: {first['msg']}"
