"""What a batch of histories decides before any weight is used: positions, times, chunk layouts.

Made once per forward pass and shared by all blocks.
"""

import itertools
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from fuxi_torchrec.encoders.fuxi_linear.config import FuXiLinearConfig
from fuxi_torchrec.ops.chunks import Chunks
from fuxi_torchrec.ops.placement import placed
from fuxi_torchrec.ops.positional import ChunkPositions
from fuxi_torchrec.ops.temporal import ChunkTimes, phase_vectors, query_vectors
from fuxi_torchrec.ops.triton import block as triton
from fuxi_torchrec.ops.triton.layout import layout


def temporal_vectors(
    config: FuXiLinearConfig, time: Tensor, next_time: Tensor, dtype: torch.dtype, periods: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keys (X, H, 2) at some times and queries (X, 2H, 2) at those that follow; empty if the channel is off.

    ``periods`` are the configuration's, where they are on the device already.
    """
    if not config.use_temporal:
        nothing = torch.empty(*time.shape, 0, 2, dtype=dtype, device=time.device)
        return nothing, nothing
    if not config.uses_phases:
        key = torch.full((*time.shape, config.num_scales, 2), 0.5**0.5, dtype=dtype, device=time.device)
        return key, key.repeat(1, 2, 1)
    if periods is None:
        periods = placed(torch.tensor(config.temporal_periods, dtype=torch.int64, device="cpu"), time.device)
    return phase_vectors(time, periods, dtype), query_vectors(phase_vectors(next_time, periods, dtype))


TICKS_OF_LOG = 1024  # of the logarithm of 1 + gap, where gaps scale steps


def ticks(config: FuXiLinearConfig, time: Tensor, next_time: Tensor) -> Tensor:
    """What the temporal channel's clock passes between times, int64; 0 for a step back."""
    gap = (next_time - time).clamp(min=0)
    if config.temporal != "scaled":
        return gap
    return (gap.double().log1p() * TICKS_OF_LOG).round().long()


_LEAST = 4  # events of a chunk that are worth one, however short histories are


class Sequences:
    """The histories of B users, T events in all.

    Args:
        config: the encoder's.
        offsets: B + 1 bounds of the users' rows, on the host.
        time_T: int64 time of each event.
        request_B: int64 time that follows each user's last event: its successor's, or the request's.
        dtype: of phases and decays.
        start_B: position of each user's first row; 0 if None.
    """

    def __init__(
        self,
        config: FuXiLinearConfig,
        offsets: list[int],
        time_T: Tensor,
        request_B: Tensor,
        dtype: torch.dtype,
        start_B: Tensor | None = None,
    ) -> None:
        self.config = config
        self.offsets = offsets
        self.time_T = time_T
        self.request_B = request_B
        self.dtype = dtype
        self.start_B = start_B
        self.device = time_T.device
        self._layouts: dict[int, Chunks] = {}

    @cached_property
    def bounds(self) -> Tensor:
        """The offsets on the device."""
        return self._placed(self.offsets)

    def _placed(self, integers: Sequence[int]) -> Tensor:
        return placed(torch.tensor(integers, dtype=torch.int64, device="cpu"), self.device)

    @cached_property
    def last(self) -> tuple[Tensor, Tensor]:
        """Users with rows, and the last row of each; from the host's offsets: nothing is read back from the device."""
        users = [user for user, (a, b) in enumerate(itertools.pairwise(self.offsets)) if b > a]
        rows = [self.offsets[user + 1] - 1 for user in users]
        return self._placed(users), self._placed(rows)

    @cached_property
    def position_T(self) -> Tensor:
        """Each event's row in the position tables."""
        begin_B = self.bounds[:-1] if self.start_B is None else self.bounds[:-1] - self.start_B
        begin_T = torch.repeat_interleave(begin_B, self.bounds.diff(), output_size=self.offsets[-1])
        events = torch.arange(self.offsets[-1], device=self.device)
        return (events - begin_T).clamp(max=self.config.max_positions - 1)

    def _follow(self, own_TX: Tensor, last_BX: Tensor) -> Tensor:
        """Each event's successor: the next row, or the user's own entry after the last."""
        users, rows = self.last
        return own_TX.roll(-1, 0).index_copy_(0, rows, last_BX[users])

    @cached_property
    def next_time_T(self) -> Tensor:
        """t_{i+1}."""
        return self._follow(self.time_T, self.request_B)

    @cached_property
    def ticks_T(self) -> Tensor:
        """From each event to its successor; 0 for a step back."""
        return ticks(self.config, self.time_T, self.next_time_T)

    @cached_property
    def clocks(self) -> tuple[Tensor, Tensor]:
        """The clock that ignores steps back, at each event and at its successor, int64; only differences count."""
        next_T = self.ticks_T.cumsum(0)
        return next_T - self.ticks_T, next_T

    @cached_property
    def phases(self) -> tuple[Tensor, Tensor]:
        """Temporal keys (T, H, 2) at each event's time and queries (T, 2H, 2) at its successor's."""
        if not self.config.uses_phases:
            return temporal_vectors(self.config, self.time_T, self.next_time_T, self.dtype)
        # an event's successor is the next row: one set of phases serves both
        periods = self._placed(self.config.temporal_periods)
        key_THK = phase_vectors(self.time_T, periods, self.dtype)
        return key_THK, query_vectors(self._follow(key_THK, phase_vectors(self.request_B, periods, self.dtype)))

    def chunks(self, size: int) -> Chunks:
        """The layout for a chunk size, or less: what the longest history needs, and the short ones do not fill."""
        lengths = [b - a for a, b in itertools.pairwise(self.offsets)]
        longest = max([1, *lengths])
        while size // 2 >= longest:
            size //= 2
        while size > _LEAST and sum(-(-n // size) for n in lengths) * size > 2 * self.offsets[-1]:
            size //= 2
        if size not in self._layouts:
            self._layouts[size] = Chunks(self.offsets, size, self.device)
        return self._layouts[size]

    @cached_property
    def retention_chunks(self) -> Chunks:
        return self.chunks(self.config.retention_chunk)

    @cached_property
    def positional_chunks(self) -> tuple[Chunks, ChunkPositions]:
        """Chunks of the positional channel and the table rows they use."""
        chunks = self.chunks(self.config.positional_chunk)
        return chunks, ChunkPositions(chunks, self.config.max_positions, self.start_B)

    @cached_property
    def temporal_chunks(self) -> ChunkTimes:
        """Chunks of the temporal channel with their phases and clocks."""
        return ChunkTimes(self.chunks(self.config.temporal_chunk), *self.phases, *self.clocks)

    @cached_property
    def triton_events(self) -> triton.Events:
        """As the Triton kernels take them."""
        return triton.Events(layout(self.offsets, self.device), *self.clocks, *self.phases, self.position_T)
