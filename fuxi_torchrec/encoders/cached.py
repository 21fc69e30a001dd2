"""Encoders that attend to every event, and serve from what :mod:`cache` keeps of users."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fuxi_torchrec.encoders import checks
from fuxi_torchrec.encoders.cache import CachedState, History
from fuxi_torchrec.encoders.explain import Curve
from fuxi_torchrec.encoders.stack import Batch, StackEncoder
from fuxi_torchrec.ops.cached import query_blocks
from fuxi_torchrec.ops.chunks import Chunks

_SHORT, _LONG = 128, 256  # events of a chunk: large tiles for long histories, less padding for short ones
_LONG_FROM = 2048

Kept = tuple[Tensor, ...]  # of each event, by a block: (T, heads, width) each


class Cached(NamedTuple):
    """What a block has of one user's earlier events, and some of the user's new rows.

    Attributes:
        rows: among all new rows.
        queries: among the user's new rows.
        time_E: of the earlier events.
        tensors: the block's, (heads, earlier events, width) each.
    """

    rows: slice
    queries: slice
    time_E: Tensor
    tensors: tuple[Tensor, ...]


class CachedBlock(nn.Module):
    """A block that attends to every event.

    ``forward`` gives the rows, and of each event what later ones need, of the shapes that ``cache_shapes`` tells.
    """

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """Heads and width of what is kept of an event."""
        raise NotImplementedError

    def forward(
        self, x_TD: Tensor, batch: Batch, earlier: "Earlier | None" = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        raise NotImplementedError


class PendingBlock(CachedBlock):
    """A block of a :class:`PendingEncoder`."""

    def kept(self, x_TD: Tensor) -> Kept:
        """What later events need of these, alone: the last block's rows are not needed when events are committed."""
        raise NotImplementedError


class Earlier:
    """The earlier events of a batch's users, as one block has them."""

    def __init__(self, offsets: list[int], histories: tuple[History, ...], first: int, count: int) -> None:
        self._offsets, self._histories, self._own = offsets, histories, slice(first, first + count)

    def blocks(self, heads: int) -> Iterator[Cached]:
        """Users that have both earlier and new events, some new ones at a time."""
        for (a, b), history in zip(itertools.pairwise(self._offsets), self._histories, strict=True):
            if b > a and history.length:
                tensors = history.tensors
                for queries in query_blocks(b - a, heads, history.length):
                    rows = slice(a + queries.start, a + queries.stop)
                    yield Cached(rows, queries, tensors[0].flatten(), tensors[self._own])


def tile_chunks(batch: Batch) -> Chunks:
    """Chunks for :mod:`fuxi_torchrec.ops.tiles`."""
    longest = max((b - a for a, b in itertools.pairwise(batch.offsets)), default=0)
    return batch.chunks(_LONG if longest > _LONG_FROM else _SHORT)


class CachedEncoder(StackEncoder):
    """An encoder of cached blocks that ignores time: an event is committed at once, a query reads the last output."""

    @property
    def layers(self) -> list[CachedBlock]:
        return [cast(CachedBlock, block) for block in self.blocks]

    def init_state(self, batch_size: int) -> CachedState:
        if batch_size < 0:
            raise ValueError(f"batch_size must not be negative, but is {batch_size}")
        like = self.positions.detach()
        count, time = (like.new_zeros(batch_size, dtype=torch.int64) for _ in range(2))
        times = like.new_zeros(1, 0, 1, dtype=torch.int64)
        shapes = [shape for block in self.layers for shape in block.cache_shapes()]
        empty = [times, *(like.new_zeros(heads, 0, width) for heads, width in shapes)]
        histories = tuple(History.empty(empty) for _ in range(batch_size))
        return CachedState(self.fingerprint, count, time, like.new_zeros(batch_size, self.config.dim), histories)

    @torch.no_grad()
    def append(
        self, state: CachedState, x: Tensor, offsets: Tensor, timestamps: Tensor, *, validate: bool | None = None
    ) -> CachedState:
        checks.state(self, state, self.positions)
        bounds = checks.batch(self.config, self.positions, x, offsets, timestamps, validate, state=state)
        if not len(x):
            return state
        batch = Batch(bounds, timestamps, timestamps[:0], state.count)
        rows, touched = self._embed(x, batch.position_T), batch.bounds.diff() > 0
        last_B = (batch.bounds[1:] - 1).clamp(min=0)
        pending, histories = self._commit(state, rows, batch, last_B)
        return replace(
            state,
            count=state.count + batch.bounds.diff(),
            last_time=torch.where(touched, timestamps[last_B], state.last_time),
            pending=torch.where(touched.unsqueeze(1), pending, state.pending),
            histories=histories,
        )

    @torch.no_grad()
    def query(self, state: CachedState, request_timestamps: Tensor, *, validate: bool | None = None) -> Tensor:
        checks.state(self, state, self.positions)
        checks.requests(request_timestamps, len(state), self.positions.device, validate)
        return self._answer(state, request_timestamps)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _commit(
        self, state: CachedState, rows: Tensor, batch: Batch, last_B: Tensor
    ) -> tuple[Tensor, tuple[History, ...]]:
        """What is pending, for users with new rows, and all histories."""
        rows, new = self._through(rows, batch, state.histories)
        return self.finish(rows)[last_B], _extended(state.histories, batch, new)

    def _answer(self, state: CachedState, request_B: Tensor) -> Tensor:
        return state.pending.clone()

    def _through(
        self, rows: Tensor, batch: Batch, histories: tuple[History, ...], blocks: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """All blocks, or the first few: the rows, and what is to be kept of them."""
        new: list[Tensor] = []
        for block in self.layers[:blocks]:
            earlier = Earlier(batch.offsets, histories, 1 + len(new), len(block.cache_shapes()))
            rows, kept = block(rows, batch, earlier)
            new += kept
        return rows, new


class PendingEncoder(CachedEncoder):
    """An encoder of cached blocks whose outputs depend on the time of the next event.

    So does what deeper blocks keep: the last event waits as it came, is run through all blocks at every query, and
    committed when its successor arrives. Its blocks have weights of the distance and of the time between events.
    """

    def reset_positions(self) -> None:
        nn.init.xavier_normal_(self.positions)

    def curves(self, block: Any, per_second: int) -> list[Curve]:
        return list(block.relative.curves(per_second))

    def _commit(
        self, state: CachedState, rows: Tensor, batch: Batch, last_B: Tensor
    ) -> tuple[Tensor, tuple[History, ...]]:
        # of users with new events: the pending one and the new ones but the last
        waiting = (state.count > 0).tolist()
        places, offsets = [last_B[:0]], [0]
        for user, (a, b) in enumerate(itertools.pairwise(batch.offsets)):
            if b > a:
                if waiting[user]:
                    places.append(torch.tensor([user], device=rows.device))
                places.append(torch.arange(len(state) + a, len(state) + b - 1, device=rows.device))
            offsets.append(offsets[-1] + (b - a - (not waiting[user]) if b > a else 0))
        place_T = torch.cat(places)
        both, times = torch.cat((state.pending, rows)), torch.cat((state.last_time, batch.time_T))
        committed = Batch(offsets, times[place_T], batch.time_T[last_B])
        histories = state.histories
        if len(place_T):
            *_, last = self.layers
            rows_in, new = self._through(both[place_T], committed, histories, len(self.layers) - 1)
            histories = _extended(histories, committed, [*new, *cast(PendingBlock, last).kept(rows_in)])
        return rows[last_B], histories

    def _answer(self, state: CachedState, request_B: Tensor) -> Tensor:
        some = state.count > 0
        offsets = [0, *some.long().cumsum(0).tolist()]
        outputs = torch.zeros_like(state.pending)
        if offsets[-1]:
            batch = Batch(offsets, state.last_time[some], request_B)
            rows, _ = self._through(state.pending[some], batch, state.histories)
            outputs[some] = self.finish(rows).to(outputs.dtype)
        return outputs


def _extended(histories: tuple[History, ...], batch: Batch, new: list[Tensor]) -> tuple[History, ...]:
    """With each user's new events behind."""
    rows = [batch.time_T.view(1, -1, 1), *(tensor.transpose(0, 1) for tensor in new)]
    return tuple(
        history.appended([tensor[:, a:b] for tensor in rows]) if b > a else history
        for (a, b), history in zip(itertools.pairwise(batch.offsets), histories, strict=True)
    )
