"""What a sampler is: what a step's targets are compared with, drawn in the loader, the same on any number of ranks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fuxi_torchrec.events.hashing import Bits
from fuxi_torchrec.tasks.base import Events, Ints, ItemSet

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Candidates:
    """What targets are compared with."""

    ids: Ints  # (M,) distinct items in order, for all positions; or (P, K) items of each position
    log_weights: Floats | None = None  # (M,) float32 added to the scores, or None


@dataclass(frozen=True)
class Draw:
    """What candidates are drawn for: the P positions of a rank's micro-batch that have a target."""

    seed: int  # everything random follows from them, and from the position where each has its own draws
    epoch: int
    step: int
    events: Events  # the micro-batch
    positions: torch.Tensor  # (P,) its events with a target

    @property
    def targets_P(self) -> Ints:
        return self.events.targets[self.positions].numpy()

    def places(self) -> tuple[Ints, Ints, Ints]:
        """Of each position: the row of its user, the time at which its sequence starts, its place in the sequence."""
        lengths = self.events.offsets.diff()
        first = torch.repeat_interleave(self.events.offsets[:-1], lengths)[self.positions]
        users = torch.repeat_interleave(self.events.users, lengths)[self.positions]
        return users.numpy(), self.events.timestamps[first].numpy(), (self.positions - first).numpy()


@dataclass(frozen=True)
class Sampler(ABC):
    """A way to choose candidates. A new one is a file here and a line in the registry."""

    count: int  # ``loss.num_negatives``, for samplers that draw a number of items

    needs_target_counts: ClassVar[bool] = False  # how often each item is a training target
    per_position: ClassVar[bool] = False  # candidates of its own for each position, (P, K); else one pool for all, (M,)
    grows: ClassVar[bool] = False  # looks up more with more positions, or a larger catalogue

    @abstractmethod
    def draw(self, items: ItemSet, at: Draw) -> Candidates:
        """The candidates of a micro-batch."""

    def stands_for(self, items: ItemSet) -> float:
        """How many known items each draw stands for where draws are compared with what is not drawn; 1 by default."""
        return 1.0

    @abstractmethod
    def lookups(self, events: int, items: int) -> int:
        """Items that it looks up beside inputs and targets, at most, for so many events of a catalogue."""


def below(limit: int, bits: Bits) -> Bits:
    """Bits to integers in 0 .. limit − 1, in place: ⌊limit · bits / 2^64⌋, but for the bits that would overflow."""
    width = limit.bit_length()
    bits >>= np.uint64(width)
    bits *= np.uint64(limit)
    bits >>= np.uint64(64 - width)
    return bits
