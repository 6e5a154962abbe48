"""Random numbers that belong to a token at a place, not to a generator.

A draw depends on (seed, sample index, position) and on nothing else, so a sequence
draws the same numbers whatever runs beside it, after preemption, and on another
executor. There is no state to restore and none to share.

A token is drawn by an exponential race: token i arrives after E_i / p_i, with E_i
exponential, and the first one wins, which happens with probability p_i. Every token
has a number of its own, so logits that differ by rounding, as those of another batch
shape do, change a draw only if the first two arrive within that rounding. Inverting
the cumulative distribution has no such calm: a change anywhere moves every border
behind it, and hands draws to the neighbouring token ids.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.mixing import GOLDEN, mix


def _signed(value: int) -> int:
    """32 bits as the int32 that has them."""
    return value - (1 << 32) if value >> 31 else value


_SPREAD = _signed(0x9E3779B1)  # 2^32 over the golden ratio, odd
_FIRST, _SECOND = _signed(0x85EBCA6B), _signed(0xC2B2AE35)
_LARGEST = 1 - 2.0**-24  # the float32 before 1, where the logarithm is still finite


def keys(
    seeds: npt.NDArray[np.uint64],
    sample_indices: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> npt.NDArray[np.int32]:
    """Two 32-bit keys for each (seed, sample index, position): splitmix64, chained.

    Args:
        seeds: [n] uint64.
        sample_indices: [n] which sample of the request.
        positions: [n] where in the sequence the token will stand, from 0.
    Returns: [n, 2] int32: the upper and the lower half of the hash.
    """
    state = mix(seeds + GOLDEN)
    state = mix(state ^ (sample_indices.astype(np.uint64) * GOLDEN))
    state = mix(state ^ (positions.astype(np.uint64) * GOLDEN))
    halves = np.stack([state >> np.uint64(32), state & np.uint64(0xFFFFFFFF)], axis=-1)
    return halves.astype(np.uint32).view(np.int32)


def exponentials(token_ids: Tensor, row_keys: Tensor) -> Tensor:
    """One exponential number for each token id with its keys.

        x = fmix32(id * 0x9E3779B1 + key_0), with key_1 xored in after its first product
        v = ((x mod 2^31) + 1/2) / 2^31
        E = -log1p(-v)

    The token drawn from logits l at temperature T is argmax(l / T - log(E)), which is
    argmin(E / exp(l / T)). E keeps its precision as v goes to 0, so that an unlikely
    token wins as often as it should, down to probabilities of about 2^-31.

    Args:
        token_ids: [...] int32.
        row_keys: [..., 2] int32, of `keys`, on the same device. Keys of shape [n, 1, 2]
            give every one of [m] ids a number in each of n rows.
    Returns: [...], broadcast, float32, above 0 and finite; each depends on its id and
        keys only.
    Source: exponential races, the Gumbel-max trick (Maddison, Tarlow, Minka: A*
        Sampling, NeurIPS 2014, section 2); fmix32 is MurmurHash3's finaliser (Appleby).
    """
    x = token_ids * _SPREAD + row_keys[..., 0]
    shifted = torch.empty_like(x)
    _mix_in(x, 16, shifted)
    x.mul_(_FIRST).bitwise_xor_(row_keys[..., 1])
    _mix_in(x, 13, shifted)
    x.mul_(_SECOND)
    _mix_in(x, 16, shifted)
    minus_v = x.bitwise_and_(0x7FFFFFFF).float()
    minus_v.add_(0.5).mul_(-(2.0**-31)).clamp_(min=-_LARGEST)
    return minus_v.log1p_().neg_()


def _mix_in(x: Tensor, shift: int, shifted: Tensor) -> None:
    """Apply x ^= x >> shift to 32 bits; torch shifts in the sign, so it is masked away."""
    torch.bitwise_right_shift(x, shift, out=shifted)
    x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1))
