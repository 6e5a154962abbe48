"""Octavo's wire: the contract, generated from the protos beside it, and its TLS."""
