"""Random numbers that depend on what they are for and on nothing else: no generator, no order, any rank."""

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def scramble(bits: Bits) -> Bits:
    """64 well-mixed bits for 64 others, in place: SplitMix64's finaliser."""
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def mix(*parts: int | Bits, state: Bits | None = None) -> Bits:
    """A hash of several numbers, elementwise; ``state`` is that of numbers before them."""
    state = np.full(1, GOLDEN) if state is None else state
    for part in parts:
        state = scramble((state ^ np.asarray(part, dtype=np.uint64)) + GOLDEN)
    return state
