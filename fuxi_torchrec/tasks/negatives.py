"""Candidates of the sampled softmax: drawn in the loader, the same for any number of processes."""

import numpy as np
from numpy.typing import NDArray

from fuxi_torchrec.events.hashing import GOLDEN, Bits, mix, scramble

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

# so that the draws have nothing in common with each other, nor with any other use of the same seed
_SHARED = 0x5348_4152_4544
_UNIFORM = 0x554E_4946_4F52_4D

_BLOCK = 2**15  # draws at a time, few enough to stay in the cache


def shared_pool(known_N: Ints, count: int, seed: int, epoch: int, step: int) -> tuple[Ints, Floats]:
    """``count`` draws, with replacement, from the known items: the distinct ones, and the log of how often each came.

    One pool for all micro-batches of all processes in a step.
    """
    bits = mix(_SHARED, seed, epoch, step, np.arange(count, dtype=np.uint64))
    ids_M, times_M = np.unique(known_N[_below(len(known_N), bits)], return_counts=True)
    return ids_M, np.log(times_M).astype(np.float32)


def uniform_per_position(
    known_N: Ints, count: int, seed: int, epoch: int, step: int, users_P: Ints, starts_P: Ints, positions_P: Ints
) -> Ints:
    """``count`` draws, with replacement, from the known items for each position: (P, count).

    Args:
        known_N: ids of the known items.
        count: how many.
        seed: of the run.
        epoch: of the batch.
        step: of the batch.
        users_P: row of the position's user.
        starts_P: timestamp at which the position's sequence starts.
        positions_P: the position's place in its sequence.
    """
    position = (x.astype(np.uint64) for x in (users_P, starts_P, positions_P))
    state_P1 = mix(_UNIFORM, seed, epoch, step, *position)[:, None]
    stride_K = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN
    drawn_PK = np.empty((len(users_P), count), np.int64)
    size = max(_BLOCK // max(count, 1), 1)
    for begin in range(0, len(drawn_PK), size):
        part = slice(begin, begin + size)
        drawn_PK[part] = known_N[_below(len(known_N), scramble(state_P1[part] + stride_K))]
    return drawn_PK


def in_batch_pool(targets_P: Ints, counts: Ints, total: int) -> tuple[Ints, Floats]:
    """The batch's distinct targets, and for each ``log(times it came / times expected)``.

    Weighted so, a sum over the pool estimates the sum over all items. Targets of 0 are none and left out.

    Args:
        targets_P: ids of this process's targets.
        counts: training targets of each item id.
        total: training targets of all items.
    """
    targets_P = targets_P[targets_P > 0]
    ids_M, times_M = np.unique(targets_P, return_counts=True)
    expected_M = counts[ids_M] * (len(targets_P) / total)
    return ids_M, np.log(times_M / expected_M).astype(np.float32)


def _below(limit: int, bits: Bits) -> Bits:
    """Bits to numbers in 0 .. limit − 1, in place: ⌊limit · bits / 2^64⌋, but for the bits that would overflow."""
    width = limit.bit_length()
    bits >>= np.uint64(width)
    bits *= np.uint64(limit)
    bits >>= np.uint64(64 - width)
    return bits
