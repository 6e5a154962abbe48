"""Random numbers that belong to a place, not to a generator.

A draw depends on (seed, sample index, position) and on nothing else, so a sequence
draws the same numbers whatever runs beside it, after preemption, and on another
executor. There is no state to restore and none to share.

The numbers are splitmix64's finaliser, chained over the three keys.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from executor_svc.mixing import GOLDEN, mix


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
    state = mix(seeds + GOLDEN)
    state = mix(state ^ (sample_indices.astype(np.uint64) * GOLDEN))
    state = mix(state ^ (positions.astype(np.uint64) * GOLDEN))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
