"""Paged attention kernels: the specification in torch, and the fast ones."""
