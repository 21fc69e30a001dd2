"""Consecutive batches of bounded size."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def batch_ends(sizes: Ints, limit: int, most: int | None = None) -> list[int]:
    """Where consecutive batches end, each as long as it may be: of sizes that sum to ``limit``, or of one larger size.

    A batch has no more than ``most`` sizes, if that is given.

    Example:
        >>> batch_ends(np.array([3, 1, 2, 9, 1]), limit=4)
        [2, 3, 4, 5]
        >>> batch_ends(np.array([1, 1, 1]), limit=4, most=2)
        [2, 3]
    """
    total = np.concatenate([[0], np.cumsum(sizes)])
    ends, first = [], 0
    while first < len(sizes):
        end = int(np.searchsorted(total, total[first] + limit, side="right")) - 1
        first = min(max(first + 1, end), len(sizes), first + (most or len(sizes)))
        ends.append(first)
    return ends
