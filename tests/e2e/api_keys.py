"""A file of API keys for tests, and the keys themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.security.key_file import add_key

_LIMITS = """
[tenants.guests]
max_requests_per_minute = 1

[tenants.singles]
max_concurrent_requests = 1
"""


@dataclass(frozen=True)
class Keys:
    """API keys, and the file of their hashes.

    Attributes:
        operator: an administrator's.
        user: of a tenant without limits.
        guest: of a tenant that may ask once a minute.
        single: of a tenant with room for one request at a time.
    """

    file: Path
    operator: str
    user: str
    guest: str
    single: str


def make_keys(file: Path) -> Keys:
    """Write a new file of keys."""
    keys = Keys(
        file,
        operator=add_key(file, name="operator", tenant="ops", admin=True),
        user=add_key(file, name="user", tenant="users", admin=False),
        guest=add_key(file, name="guest", tenant="guests", admin=False),
        single=add_key(file, name="single", tenant="singles", admin=False),
    )
    with file.open("a") as text:
        text.write(_LIMITS)
    return keys
