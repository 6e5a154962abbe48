"""The finaliser of splitmix64: 64 bits in, 64 bits out that look like any others.

Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio, odd: multiples of it spread evenly."""


def mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's next(): advance by the golden ratio, then scramble every bit."""
    state = state + GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
