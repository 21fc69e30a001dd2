"""Packed rows cut into tiles, so that long batches pass through all blocks in small buffers."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fuxi_torchrec.encoders.fuxi_linear.sequences import Sequences

_FULL = 0.75  # of a tile: full enough to end with a user


class Tile(NamedTuple):
    """Rows first_row .. end_row − 1, of users first_user .. end_user − 1."""

    first_row: int
    end_row: int
    first_user: int
    end_user: int
    offsets: list[int]
    goes_on: bool  # the first user began in an earlier tile
    cut: bool  # the last user goes on in the next tile


def tiles(offsets: list[int], size: int) -> Iterator[Tile]:
    """Cut packed rows into tiles of at most ``size``; users without rows at the edges belong to no tile.

    A user is cut only if its tile were far from full without: after a cut every user of the next tile has a state to
    start from, which the backward pass keeps.

    Example:
        >>> [(tile.offsets, tile.goes_on, tile.cut) for tile in tiles([0, 3, 3, 8], 5)]
        [([0, 3, 3, 5], False, True), ([0, 3], True, False)]
        >>> [(tile.offsets, tile.goes_on, tile.cut) for tile in tiles([0, 4, 8], 5)]
        [([0, 4], False, False), ([0, 4], False, False)]
    """
    a = b = 0
    while b < offsets[-1]:
        a, b = b, min(b + size, offsets[-1])
        edge = offsets[bisect_right(offsets, b) - 1]  # where the user at b begins
        if edge - a >= _FULL * size:
            b = edge
        first_user = bisect_right(offsets, a) - 1
        end_user = bisect_left(offsets, b)
        local = [min(max(bound, a), b) - a for bound in offsets[first_user : end_user + 1]]
        yield Tile(a, b, first_user, end_user, local, offsets[first_user] < a, offsets[end_user] > b)


def part(sequences: Sequences, tile: Tile) -> Sequences:
    """What a tile covers of a batch."""
    users = slice(tile.first_user, tile.end_user)
    request_B = sequences.request_B[users]
    if tile.cut:  # the successor of the tile's last event is the next tile's first
        request_B = torch.cat((request_B[:-1], sequences.time_T[tile.end_row : tile.end_row + 1]))
    start_B = None if sequences.start_B is None else sequences.start_B[users]
    if tile.goes_on:
        start_B = request_B.new_zeros(len(request_B)) if start_B is None else start_B.clone()
        start_B[0] += tile.first_row - sequences.offsets[tile.first_user]
    time_T = sequences.time_T[tile.first_row : tile.end_row]
    return Sequences(sequences.config, tile.offsets, time_T, request_B, sequences.dtype, start_B)
