"""Keys and values of users between calls, for encoders that attend to every event.

Each user's rows stand in buffers with room behind them. A state sees the first so many rows of a buffer, which never
change again. Appending writes behind them if nobody has yet, and else begins a buffer of its own: states that share
their past may go on differently, and a new event does not copy the history.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fuxi_torchrec.encoders.state import check_same, user_index

_LEAST_ROOM = 16


class _Buffers:
    """Tensors of one user, (heads, capacity, width) each, filled up to a row."""

    def __init__(self, like: Sequence[Tensor], capacity: int) -> None:
        # whatever mode the caller is in: rows are written later, perhaps in another
        with torch.inference_mode(False):
            self.tensors = tuple(t.new_empty(t.shape[0], capacity, t.shape[2]) for t in like)
        self.capacity, self.filled, self.lock = capacity, 0, threading.Lock()

    def claim(self, begin: int, rows: int) -> bool:
        """Whether so many rows from ``begin`` are free; they are the caller's then."""
        with self.lock:
            if self.filled != begin or begin + rows > self.capacity:
                return False
            self.filled += rows
            return True

    def write(self, begin: int, rows: Sequence[Tensor]) -> None:
        for buffer, new in zip(self.tensors, rows, strict=True):
            buffer[:, begin : begin + new.shape[1]] = new


@dataclass(frozen=True, eq=False)
class History:
    """One user's committed events: the first ``length`` rows of its buffers."""

    buffers: _Buffers
    length: int

    @staticmethod
    def empty(like: Sequence[Tensor]) -> "History":
        """Without events, of the shapes and dtypes of (heads, 0, width) tensors."""
        return History(_Buffers(like, 0), 0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """(heads, length, width) each."""
        return tuple(buffer[:, : self.length] for buffer in self.buffers.tensors)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.tensors)

    def appended(self, rows: Sequence[Tensor]) -> "History":
        """With (heads, new, width) rows behind."""
        new = rows[0].shape[1]
        length, buffers = self.length + new, self.buffers
        if not buffers.claim(self.length, new):
            buffers = _Buffers(buffers.tensors, length + max(_LEAST_ROOM, length // 4))
            buffers.claim(0, length)
            buffers.write(0, self.tensors)
        buffers.write(self.length, rows)
        return History(buffers, length)

    def to(self, device: torch.device | str) -> "History":
        moved = [tensor.to(device) for tensor in self.tensors]
        buffers = _Buffers(moved, self.length)
        buffers.claim(0, self.length)
        buffers.write(0, moved)
        return History(buffers, self.length)


@dataclass(frozen=True, eq=False)
class CachedState:
    """States of B users that grow with their histories.

    Attributes:
        fingerprint: of the configuration it belongs to.
        count: (B,) int64, events seen, the pending one included.
        last_time: (B,) int64, of the last event; 0 without events.
        pending: (B, D), what the encoder keeps of the last event alone; zero without events.
        histories: of each user, times and then every block's tensors.
    """

    fingerprint: int
    count: Tensor
    last_time: Tensor
    pending: Tensor
    histories: tuple[History, ...]

    def __len__(self) -> int:
        return len(self.histories)

    @property
    def sample(self) -> Tensor:
        return self.pending

    @property
    def nbytes(self) -> int:
        """Room to grow included; what users share is counted for each."""
        return sum(t.nbytes for t in self._tensors()) + sum(history.nbytes for history in self.histories)

    def select(self, users: Tensor | Sequence[int]) -> "CachedState":
        index = user_index(users, len(self), self.count.device)
        return replace(
            self,
            count=self.count[index],
            last_time=self.last_time[index],
            pending=self.pending[index],
            histories=tuple(self.histories[user] for user in index.tolist()),
        )

    @staticmethod
    def concatenate(states: Sequence["CachedState"]) -> "CachedState":
        check_same(states)
        return CachedState(
            states[0].fingerprint,
            torch.cat([state.count for state in states]),
            torch.cat([state.last_time for state in states]),
            torch.cat([state.pending for state in states]),
            tuple(history for state in states for history in state.histories),
        )

    def to(self, device: torch.device | str) -> "CachedState":
        count, last_time, pending = (tensor.to(device) for tensor in self._tensors())
        return CachedState(
            self.fingerprint, count, last_time, pending, tuple(history.to(device) for history in self.histories)
        )

    def _tensors(self) -> list[Tensor]:
        return [self.count, self.last_time, self.pending]
