"""Where chunks lie in a packed batch: from offsets on the host, copied to the device at once."""

from typing import NamedTuple

import torch
from torch import Tensor

from fuxi_torchrec.ops.placement import placed

WIDE, NARROW = 32, 16  # events a chunk: of constant decays, of the temporal channel


class Chunks(NamedTuple):
    """Chunks of one size, user after user, int32.

    Attributes:
        places_2N: the first packed row of each, and how many of its slots are filled.
        bounds_B: B + 1 bounds of the users' chunks.
    """

    places_2N: Tensor
    bounds_B: Tensor


class Layout(NamedTuple):
    """The chunks of a batch in both sizes."""

    wide: Chunks
    narrow: Chunks


def layout(offsets: list[int], device: torch.device) -> Layout:
    """Of B users with B + 1 ``offsets``, in one copy.

    Example:
        >>> layout([0, 3, 3, 21], torch.device("cpu")).narrow
        Chunks(places_2N=tensor([[ 0,  3, 19],
                [ 3, 16,  2]], dtype=torch.int32), bounds_B=tensor([0, 1, 1, 3], dtype=torch.int32))
    """
    bounds = torch.tensor(offsets, dtype=torch.int64)
    host = [part for size in (WIDE, NARROW) for part in _cut(bounds, size)]
    packed = torch.cat([part.flatten() for part in host]).to(torch.int32)
    pieces = placed(packed, device).split([part.numel() for part in host])
    wide, wide_bounds, narrow, narrow_bounds = (
        piece.view(part.shape) for piece, part in zip(pieces, host, strict=True)
    )
    return Layout(Chunks(wide, wide_bounds), Chunks(narrow, narrow_bounds))


def _cut(bounds: Tensor, size: int) -> tuple[Tensor, Tensor]:
    lengths = bounds.diff()
    counts = (lengths + size - 1) // size
    at = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    user_N = torch.repeat_interleave(torch.arange(len(counts)), counts)
    begin_N = (torch.arange(int(at[-1])) - at[user_N]) * size
    return torch.stack((bounds[user_N] + begin_N, (lengths[user_N] - begin_N).clamp(max=size))), at
