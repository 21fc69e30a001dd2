"""What a task is: which targets a batch has, the loss on looked-up rows, the metrics, what an export must say."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fuxi_torchrec.encoders.base import Explanation

Ints = NDArray[np.int64]
_GATHERED = 2**22  # elements of gathered rows at a time, about


class Events(Protocol):
    """What a task sees of a micro-batch, on the host: T events of B sequences, one after another.

    Attributes:
        items: (T,) of the events, 0 if it is unknown.
        targets: (T,) the item after each event, 0 if it is unknown.
        target_weights: (T,) float32, 0 where nothing is to be predicted.
        timestamps: (T,) int64.
        request_timestamps: (B,) int64, the time of the event after each sequence's last.
        offsets: (B + 1,) int64.
        users: (B,) rows of the users in the dataset.
    """

    @property
    def items(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def target_weights(self) -> Tensor: ...
    @property
    def timestamps(self) -> Tensor: ...
    @property
    def request_timestamps(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor: ...
    @property
    def users(self) -> Tensor: ...


@dataclass(frozen=True)
class ItemSet:
    """The items of a run."""

    ids: Ints  # of the known items, in order
    # (items + 1,) how often each known item is a training target; None unless the task needs it
    target_counts: Ints | None = None


@dataclass(frozen=True)
class Targets:
    """What a task needs of a micro-batch."""

    positions: Tensor  # (P,) the events whose outputs it uses
    weights: Tensor  # (P,) float32; a step's values are divided by their sum over all ranks
    # int64 of any shape, by name: ids to look up; after the lookup, their places in the looked-up rows
    items: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)  # other tensors, by name

    @staticmethod
    def none() -> "Targets":
        """For a batch that is only encoded."""
        return Targets(torch.zeros(0, dtype=torch.int64), torch.zeros(0))

    def to(self, device: torch.device, non_blocking: bool = False) -> "Targets":
        def moved(values: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: value.to(device, non_blocking=non_blocking) for name, value in values.items()}

        own = moved({"positions": self.positions, "weights": self.weights})
        return replace(self, items=moved(self.items), constants=moved(self.constants), **own)

    def record_stream(self, stream: torch.Stream) -> None:
        for value in (self.positions, self.weights, *self.items.values(), *self.constants.values()):
            value.record_stream(stream)


class TargetMaker(Protocol):
    """Makes the targets of a micro-batch where the data is read: picklable, and the same on any number of ranks."""

    def __call__(self, epoch: int, step: int, events: Events) -> Targets:
        """The targets of one micro-batch of a step."""


class Metrics(Protocol):
    """Validation metrics, summed up as predictions come."""

    def add(self, predictions: Tensor, /) -> None:
        """More of them; of a task that ranks, the targets' ranks."""

    def add_peers(self) -> None:
        """Add what the other ranks have: a collective."""

    def result(self) -> dict[str, float]:
        """By name."""


@dataclass(frozen=True)
class Correction:
    """Of the scores of some items of B users: ``<q + shift, e> + bias`` in place of ``<q, e>``.

    Queries and items are as similarities compare them, before anything is divided by the temperature.
    """

    ids: Tensor  # (B, W) distinct items; 0 for empty slots
    bias: Tensor  # (B, W)
    shift: Tensor  # (B, D)

    def scores(self, queries_BD: Tensor, rows_ND: Tensor, places_BW: Tensor) -> Tensor:
        """(B, W) of the items, whose rows are at these places; of empty slots anything."""
        shifted_BD, found = queries_BD + self.shift, [queries_BD.new_zeros(0, places_BW.shape[1])]
        step = max(1, _GATHERED // max(1, rows_ND.shape[1] * places_BW.shape[1]))
        for query_CD, place_CW in zip(shifted_BD.split(step), places_BW.clamp(min=0).split(step), strict=True):
            rows_CWD = rows_ND.index_select(0, place_CW.flatten()).view(*place_CW.shape, -1)
            found.append(torch.bmm(rows_CWD, query_CD[..., None]).squeeze(2))
        return torch.cat(found) + self.bias

    @staticmethod
    def stack(several: "Sequence[Correction | None]") -> "Correction | None":
        """Users of several, one after another; None if any is."""
        there = [each for each in several if each is not None]
        if len(there) < len(several):
            return None
        return Correction(*(torch.cat([getattr(each, name) for each in there]) for name in ("ids", "bias", "shift")))


class Task(nn.Module, ABC):
    """From the encoder's outputs to losses and metrics. A new one is a file here and a line in the registry."""

    needs_target_counts: bool = False  # of the items, for its TargetMaker
    shown_metrics: ClassVar[tuple[str, ...]]  # of a validation, in the log

    @abstractmethod
    def target_maker(self, items: ItemSet, seed: int) -> TargetMaker:
        """What makes its targets."""

    @abstractmethod
    def forward(self, outputs_PD: Tensor, item_rows_UD: Tensor, targets: Targets) -> dict[str, Tensor]:
        """Weighted sums over positions, by name; ``loss`` is what is trained.

        Args:
            outputs_PD: the encoder's, at the targets' positions.
            item_rows_UD: rows of all items of the micro-batch.
            targets: with places in ``item_rows_UD`` in place of ids.
        """

    @abstractmethod
    def metrics(self) -> Metrics:
        """What a validation measures, with nothing added yet."""

    @abstractmethod
    def lookups(self, events: int, items: int) -> int:
        """Items that it looks up beside inputs and the events after them, at most: for planning."""

    @abstractmethod
    def loss_elements(self, lookups: int, events: int, dim: int) -> int:
        """Elements of the loss's buffers, about: for planning."""

    def correction(self, events: Events, outputs_BD: Tensor, request_times: Tensor) -> Correction | None:
        """What a ranking adds to similarities of users after ``events``, queried at these times; None for nothing."""
        return None

    @abstractmethod
    def exported(self) -> dict[str, Any]:
        """What scores are made of, for an export's manifest."""

    def exported_weights(self) -> dict[str, Tensor]:
        """Parameters that scores need beside vectors, by name; none by default."""
        return {}

    def explain(self, per_second: int) -> Explanation | None:
        """What it has learned, None if there is nothing to show; the data's time unit has so many ticks a second."""
        return None
