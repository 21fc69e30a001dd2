"""What is kept of users between calls.

A constant state has everything committed, and the last event, which still waits for its successor: an event's output
depends on the time of the one after it, and so does what deeper blocks keep of it. The last event is therefore kept as
it came and committed only when its successor arrives. A growing state has the events themselves.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fuxi_torchrec.ops.placement import placed

VERSION = 1
_HEADER = 4  # of a byte record, int64 each: version, fingerprint, count, pending time


class States(Protocol):
    """States of B users, whatever the encoder keeps of them; never changed in place.

    Attributes:
        fingerprint: of the configuration they belong to.
        count: (B,) int64, events seen.
        last_time: (B,) int64, of the last event; 0 without events.
        sample: any tensor of the encoder's precision.
    """

    @property
    def fingerprint(self) -> int: ...
    @property
    def count(self) -> Tensor: ...
    @property
    def last_time(self) -> Tensor: ...
    @property
    def sample(self) -> Tensor: ...
    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...

    def select(self, users: Tensor | Sequence[int]) -> "States":
        """The states of some users: indices in the order wanted, or a mask."""

    def to(self, device: torch.device | str) -> "States": ...

    @staticmethod
    def concatenate(states: Sequence[Any]) -> "States":
        """Several as one, users in the given order."""


def user_index(users: Tensor | Sequence[int], count: int, device: torch.device) -> Tensor:
    """Users given as indices or as a mask, as indices."""
    index = torch.as_tensor(users)  # on the host, if it was given there: looked at without waiting for the device
    if index.dtype == torch.bool and index.shape == (count,):
        return placed(torch.nonzero(index).flatten(), device)
    if index.dim() != 1 or (len(index) and (index.dtype == torch.bool or index.is_floating_point())):
        raise ValueError(f"users must be indices or a mask of {count} users, not {index.dtype} of {tuple(index.shape)}")
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < count:
        raise ValueError(f"users must be 0 to {count - 1}, not {int(index.min())} to {int(index.max())}")
    return placed(index.long(), device)


def _on_host(users: Tensor | Sequence[int]) -> list[int] | None:
    """The indices, if the host has them."""
    index = torch.as_tensor(users)
    if index.device.type != "cpu":
        return None
    return torch.nonzero(index).flatten().tolist() if index.dtype == torch.bool else index.tolist()


@dataclass(frozen=True, eq=False)
class EncoderState:
    """A state of constant size, of B users. Made by an encoder's ``init_state`` and ``append``.

    Attributes:
        fingerprint: of the configuration it belongs to.
        count: (B,) int64, events seen, the pending one included.
        pending_time: (B,) int64, time of the last event.
        pending: (B, D), the last event's row as it enters the first block; zero without events.
        memory: of each block, by channel, (B, ...): what it keeps of the committed events, decayed to the pending
            one's time; float64 where a channel needs it.
        known: the counts again, on the host, where it has them; a state on another device is then appended to
            without asking it.

    Example:
        >>> from fuxi_torchrec import EncoderState, FuXiLinearConfig, FuXiLinearEncoder
        >>> encoder = FuXiLinearEncoder(FuXiLinearConfig(dim=16, num_layers=1, num_heads=1))
        >>> records = encoder.init_state(3).to_bytes()  # a row of bytes for each user, of one size
        >>> EncoderState.from_bytes(records, like=encoder.init_state(0)).count
        tensor([0, 0, 0])
    """

    fingerprint: int
    count: Tensor
    pending_time: Tensor
    pending: Tensor
    memory: tuple[dict[str, Tensor], ...]
    known: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.count)

    def counts(self) -> Sequence[int]:
        """Events seen, by user; waits for the device unless they are known."""
        return self.count.tolist() if self.known is None else self.known

    @property
    def last_time(self) -> Tensor:
        return self.pending_time

    @property
    def sample(self) -> Tensor:
        return self.pending

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def map(self, change: Callable[[Tensor], Tensor]) -> "EncoderState":
        """Change every tensor; users are the first dimension of all."""
        return replace(
            self,
            known=None,
            count=change(self.count),
            pending_time=change(self.pending_time),
            pending=change(self.pending),
            memory=tuple({name: change(x) for name, x in block.items()} for block in self.memory),
        )

    def select(self, users: Tensor | Sequence[int]) -> "EncoderState":
        index = user_index(users, len(self), self.count.device)
        chosen = self.map(lambda tensor: tensor.index_select(0, index))
        picked = _on_host(users)
        if self.known is None or picked is None:
            return chosen
        return replace(chosen, known=tuple(self.known[user] for user in picked))

    def put(self, users: Tensor | Sequence[int], other: "EncoderState") -> "EncoderState":
        """The same with some users replaced by those of ``other``."""
        check_same([self, other])
        index = user_index(users, len(self), self.count.device)
        if len(index) != len(other):
            raise ValueError(f"users names {len(index)} users, other has {len(other)}")
        new = iter(other._tensors())
        changed = self.map(lambda tensor: tensor.index_copy(0, index, next(new)))
        picked = _on_host(users)
        if self.known is None or other.known is None or picked is None:
            return changed
        known = {**dict(enumerate(self.known)), **dict(zip(picked, other.known, strict=True))}
        return replace(changed, known=tuple(known.values()))

    @staticmethod
    def concatenate(states: Sequence["EncoderState"]) -> "EncoderState":
        check_same(states)
        parts = zip(*(state._tensors() for state in states), strict=True)
        return states[0].map(lambda _: torch.cat(next(parts)))

    def to(self, device: torch.device | str) -> "EncoderState":
        moved = self.map(lambda tensor: tensor.to(device))
        if self.count.device.type != "cpu" or moved.count.device.type == "cpu":
            return replace(moved, known=self.known)
        return replace(moved, known=tuple(self.count.tolist()))

    def _tensors(self) -> list[Tensor]:
        """In the order of :meth:`map`."""
        return [self.count, self.pending_time, self.pending, *(x for block in self.memory for x in block.values())]

    def flat(self) -> tuple[Tensor, ...]:
        """As exported programs take a state: count, pending time, pending row, then each channel of all blocks."""
        channels = (torch.stack([block[name] for block in self.memory], dim=1) for name in self.memory[0])
        return (self.count, self.pending_time, self.pending, *channels)

    def from_flat(self, tensors: Sequence[Tensor]) -> "EncoderState":
        """Back from :meth:`flat`, unchecked; this is any state of the encoder."""
        count, pending_time, pending, *channels = tensors
        memory = tuple(
            {name: channel[:, n] for name, channel in zip(block, channels, strict=True)}
            for n, block in enumerate(self.memory)
        )
        return EncoderState(self.fingerprint, count, pending_time, pending, memory)

    def to_bytes(self) -> Tensor:
        """One record of fixed size per user: (B, record size) uint8, on the host."""
        count, pending_time, *rows = self.to("cpu").flat()
        origin = (torch.full_like(count, number) for number in (VERSION, self.fingerprint))
        columns = [torch.stack((*origin, count, pending_time), dim=1), *(tensor.flatten(1) for tensor in rows)]
        return torch.cat([column.contiguous().view(torch.uint8) for column in columns], dim=1)

    @staticmethod
    def peek(record: Tensor) -> tuple[int, int]:
        """Events and last time of one record of :meth:`to_bytes`."""
        _, _, count, time = record[: 8 * _HEADER].view(torch.int64).tolist()
        return count, time

    @classmethod
    def from_bytes(cls, records: Tensor, like: "EncoderState") -> "EncoderState":
        """Back from :meth:`to_bytes`; ``like`` is any state of the encoder, ``init_state(0)`` for one, on its device.

        That the weights are those of then is not checked: keep a model's version beside the records.
        """
        rows = like.flat()[2:]
        sizes = [tensor.element_size() * math.prod(tensor.shape[1:]) for tensor in rows]
        wanted = 8 * _HEADER + sum(sizes)
        if records.dtype != torch.uint8 or records.dim() != 2 or records.shape[1] != wanted:
            raise ValueError(
                f"records must be uint8 of shape (users, {wanted}) for this encoder, "
                f"not {records.dtype} of {tuple(records.shape)}"
            )
        pieces = records.cpu().split([8 * _HEADER, *sizes], dim=1)
        header, *parts = (piece.clone(memory_format=torch.contiguous_format) for piece in pieces)
        fields = header.view(torch.int64)
        for version, fingerprint in torch.unique(fields[:, :2], dim=0).tolist():
            if version != VERSION:
                raise ValueError(
                    f"state of version {version}, this software reads version {VERSION}: encode the history again"
                )
            if fingerprint != like.fingerprint:
                raise ValueError(
                    f"state of another configuration: fingerprint {fingerprint}, the encoder has {like.fingerprint}: "
                    "encode the history again"
                )
        flat = [part.view(x.dtype).reshape(len(part), *x.shape[1:]) for part, x in zip(parts, rows, strict=True)]
        state = like.from_flat((fields[:, 2], fields[:, 3], *flat))
        return state.map(lambda tensor: tensor.contiguous()).to(like.count.device)


@dataclass(frozen=True, eq=False)
class GrowingState:
    """The events of B users, for encoders that answer from them.

    Attributes:
        fingerprint: of the configuration it belongs to.
        rows: (T, D) of all users' events, one user after another.
        times: (T,) int64.
        bounds: (B + 1,) int64 of the users' events.
    """

    fingerprint: int
    rows: Tensor
    times: Tensor
    bounds: Tensor

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def count(self) -> Tensor:
        return self.bounds.diff()

    @property
    def last_time(self) -> Tensor:
        padded = torch.cat((self.times.new_zeros(1), self.times))
        return torch.where(self.count > 0, padded[self.bounds[1:]], 0)

    @property
    def sample(self) -> Tensor:
        return self.rows

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.times.nbytes + self.bounds.nbytes

    def select(self, users: Tensor | Sequence[int]) -> "GrowingState":
        index = user_index(users, len(self), self.bounds.device)
        length_B = self.count[index]
        bounds = torch.cat((length_B.new_zeros(1), length_B.cumsum(0)))
        shift_T = torch.repeat_interleave(self.bounds[:-1][index] - bounds[:-1], length_B)
        event_T = torch.arange(len(shift_T), device=shift_T.device) + shift_T
        return GrowingState(self.fingerprint, self.rows[event_T], self.times[event_T], bounds)

    def appended(self, rows: Tensor, bounds: Tensor, times: Tensor) -> "GrowingState":
        new = GrowingState(self.fingerprint, rows.to(self.rows.dtype), times, bounds)
        users = torch.arange(len(self), device=bounds.device)
        both = GrowingState.concatenate([self, new]).select(torch.stack((users, users + len(self)), 1).flatten())
        return replace(both, bounds=both.bounds[::2].contiguous())

    def batches(self, events: int) -> Iterator[tuple[int, int]]:
        """Users from and to, of about so many events together."""
        bounds, first = self.bounds.tolist(), 0
        while first < len(self):
            end = first + 1
            while end < len(self) and bounds[end + 1] - bounds[first] <= events:
                end += 1
            yield first, end
            first = end

    @staticmethod
    def concatenate(states: Sequence["GrowingState"]) -> "GrowingState":
        check_same(states)
        count_B = torch.cat([state.count for state in states])
        return GrowingState(
            states[0].fingerprint,
            torch.cat([state.rows for state in states]),
            torch.cat([state.times for state in states]),
            torch.cat((count_B.new_zeros(1), count_B.cumsum(0))),
        )

    def to(self, device: torch.device | str) -> "GrowingState":
        return replace(self, rows=self.rows.to(device), times=self.times.to(device), bounds=self.bounds.to(device))

    def _tensors(self) -> list[Tensor]:
        return [self.rows, self.times, self.bounds]


def check_same(states: Sequence[Any]) -> None:
    """Refuse states of different encoders, dtypes or devices."""
    if not states:
        raise ValueError("states is empty: nothing to concatenate")
    one, *others = states
    for other in others:
        if one.fingerprint != other.fingerprint:
            raise ValueError(
                f"states of different configurations: fingerprints {one.fingerprint} and {other.fingerprint}"
            )
        for a, b in zip(one._tensors(), other._tensors(), strict=True):
            if a.dtype != b.dtype or a.device != b.device:
                raise ValueError(f"states of different kinds: {a.dtype} on {a.device} and {b.dtype} on {b.device}")
