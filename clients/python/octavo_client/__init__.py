"""Octavo's Python client and command."""
