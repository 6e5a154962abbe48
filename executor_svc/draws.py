"""Random numbers that belong to a place, not to a generator.

A draw depends on (seed, sample index, position) and on nothing else, so a sequence
draws the same numbers whatever runs beside it, after preemption, and on another
executor. There is no state to restore and none to share.

Source: the finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom
Number Generators, OOPSLA 2014), chained over the three keys.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(
    seeds: npt.NDArray[np.uint64],
    sample_indices: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """One uniform number in [0, 1) for each (seed, sample index, position).

    Args:
        seeds: [n] uint64.
        sample_indices: [n] which sample of the request.
        positions: [n] where in the sequence the token will stand, from 0.
    Returns: [n] float64, multiples of 2^-53.
    """
    state = _mix(seeds + _GOLDEN)
    state = _mix(state ^ (sample_indices.astype(np.uint64) * _GOLDEN))
    state = _mix(state ^ (positions.astype(np.uint64) * _GOLDEN))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's next(): advance by the golden ratio, then scramble every bit."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
