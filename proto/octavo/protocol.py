"""The version of the plan protocol, which a scheduler and its executors must have in common."""

from __future__ import annotations

PLAN_PROTOCOL = 1
"""Raised by a change that an older side would understand wrongly; additions that it may
ignore leave it as it is."""
