"""Names for the content of full blocks: chained hashes.

    hash(block i) = SHA-256(hash(block i-1) | token ids of block i)
    hash(block -1) = SHA-256 of the request's tagged extra keys

Two blocks have the same name only if all tokens up to their end are the same and the
requests share all extra keys. Each key is written with its kind and its length, so
that tenant "a" with salt "bc" is another prefix than tenant "ab" with salt "c".
"""

from __future__ import annotations

from array import array
from hashlib import sha256

from scheduler_svc.core.request import Request
from scheduler_svc.core.sequence import Sequence


def root_hash(request: Request) -> bytes:
    """Hash of everything besides tokens that must agree for K/V to be shared."""
    digest = sha256(b"octavo-prefix-1")
    for kind, value in (("tenant", request.tenant), ("salt", request.cache_salt)):
        data = value.encode()
        digest.update(f"{kind}:{len(data)}:".encode())
        digest.update(data)
    return digest.digest()


def prompt_hashes(request: Request, block_size: int) -> list[bytes]:
    """Hash the blocks of a prompt that a cache may hold: the last token is computed anyway."""
    tokens = request.prompt_tokens
    parent, hashes = root_hash(request), []
    for first in range(0, (len(tokens) - 1) // block_size * block_size, block_size):
        parent = _next_hash(parent, tokens[first : first + block_size])
        hashes.append(parent)
    return hashes


def extend_hashes(seq: Sequence, num_blocks: int, block_size: int) -> list[bytes]:
    """Hash the sequence's first `num_blocks` blocks, keeping those already hashed.

    Returns: the sequence's own list, with at least that many entries.
    """
    hashes = seq.block_hashes
    for first in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        parent = hashes[-1] if hashes else root_hash(seq.group.request)
        hashes.append(_next_hash(parent, seq.tokens[first : first + block_size]))
    return hashes


def _next_hash(parent: bytes, tokens: list[int]) -> bytes:
    return sha256(parent + array("I", tokens).tobytes()).digest()


def lineage(request: Request) -> int:
    """64 bits that requests share exactly if they may share blocks."""
    return int.from_bytes(root_hash(request)[:8], "little")
