"""Octavo's wire contract: generated from the protos beside it."""
