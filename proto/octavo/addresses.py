"""Addresses: how they are written, and which are this machine's alone."""

from __future__ import annotations

import ipaddress


def join_address(host: str, port: int) -> str:
    """Give HOST:PORT; an IPv6 address gets its brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host; an IPv6 address stands without brackets."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
