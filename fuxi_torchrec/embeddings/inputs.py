"""Batches of events to what the tables take: jagged ids, deduplicated, with equal bag counts where they must be."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from fuxi_torchrec.data.batches import EventBatch
from fuxi_torchrec.embeddings.bags import bags, padded
from fuxi_torchrec.embeddings.owned import FeatureLookup
from fuxi_torchrec.embeddings.tables import ITEM_FEATURE, Tables
from fuxi_torchrec.events.feature_table import projection_inputs
from fuxi_torchrec.tasks.base import Targets

Ints = NDArray[np.int64]
SIZES = 4  # of a micro-batch, which the ranks exchange

# more ids than this share of the table are deduplicated by marking rows instead of sorting ids
_MARK_SHARE = 1 / 16


@dataclass
class ModelInput(Pipelineable):
    """One micro-batch of a rank: T events of B sequences.

    Every item that occurs (inputs and what the task asks for) is looked up once; its row is its place in the result.
    """

    items: KeyedJaggedTensor  # the U distinct items, one bag each; then empty bags, up to the largest U of all ranks
    features: KeyedJaggedTensor | None  # one bag per event and feature, or None
    input_rows: Tensor  # (T,) rows of the input events
    targets: Targets  # what the task compares, its items by their rows
    timestamps: Tensor  # (T,)
    request_timestamps: Tensor  # (B,)
    offsets: Tensor  # (B + 1,) stays on the host
    event_numbers: Tensor | None = None  # (T, inputs) of the events' projection
    # features of the U items, a bag each, and inputs of their projection; of the B users likewise
    item_features: KeyedJaggedTensor | None = None
    item_numbers: Tensor | None = None
    user_features: KeyedJaggedTensor | None = None
    user_numbers: Tensor | None = None
    # multiplies the summed loss, so that gradients averaged over ranks are those of the global mean
    loss_scale: float = 1.0

    def to(self, device: torch.device, non_blocking: bool = False) -> "ModelInput":
        """On another device; the offsets stay where they are: the encoder wants them on the host."""
        if device.type == "cpu" and self.input_rows.device.type == "cpu":
            return self

        def move(value: Any) -> Any:
            return value.to(device, non_blocking=non_blocking) if isinstance(value, _MOVED) else value

        moved = {each.name: move(getattr(self, each.name)) for each in fields(self) if each.name != "offsets"}
        return replace(self, **moved)

    def record_stream(self, stream: torch.Stream) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "offsets" and isinstance(value, _MOVED):
                value.record_stream(stream)


_MOVED = (Tensor, KeyedJaggedTensor, Targets)


@dataclass(frozen=True, eq=False)
class Lookups:
    """Features of the run's items and users; None where the model reads none."""

    items: FeatureLookup | None = None
    users: FeatureLookup | None = None


NO_LOOKUPS = Lookups()


def make_input(
    batch: EventBatch,
    targets: Targets,
    tables: Tables,
    lookups: Lookups = NO_LOOKUPS,
    step: tuple[int, int] | None = None,
) -> ModelInput:
    """A batch as one rank sees it, before the ranks have exchanged their sizes; the targets have items by their ids.

    Args:
        step: epoch and step in training, which decide what is left out at random.
    """
    parts = [batch.items, *targets.items.values()]
    unique, rows = deduplicate(np.concatenate([part.numpy().reshape(-1) for part in parts]), tables.items.rows)
    found = torch.from_numpy(rows).split([part.numel() for part in parts])
    names = tables.feature_names
    looked_up = {name: r.view(ids.shape) for (name, ids), r in zip(targets.items.items(), found[1:], strict=True)}
    items, item_numbers, users, user_numbers = None, None, None, None
    own = unique
    if lookups.items is not None:
        own = lookups.items.rows_of(unique, step)
        items, item_numbers = lookups.items.inputs(unique)
    if lookups.users is not None:
        users, user_numbers = lookups.users.inputs(batch.users.numpy() + 1)
    return ModelInput(
        items=bags([ITEM_FEATURE], [own]),
        features=bags(names, [batch.features[name] for name in names]) if names else None,
        input_rows=found[0],
        targets=replace(targets, items=looked_up),
        timestamps=batch.timestamps,
        request_timestamps=batch.request_timestamps,
        offsets=batch.offsets,
        event_numbers=torch.from_numpy(projection_inputs(tables.numbers, batch.features)) if tables.numbers else None,
        item_features=items,
        item_numbers=item_numbers,
        user_features=users,
        user_numbers=user_numbers,
    )


def deduplicate(ids: Ints, table_rows: int) -> tuple[Ints, Ints]:
    """The distinct ids in order, and where each id is among them.

    Example:
        >>> deduplicate(np.array([7, 2, 7, 9]), table_rows=10)
        (array([2, 7, 9]), array([1, 0, 1, 2]))
    """
    if len(ids) < table_rows * _MARK_SHARE:
        unique, rows = np.unique(ids, return_inverse=True)
        return unique, rows.astype(np.int64, copy=False)
    present = np.zeros(table_rows, dtype=bool)
    present[ids] = True
    return np.flatnonzero(present), (np.cumsum(present) - 1)[ids]


def sizes_of(inputs: Sequence[ModelInput]) -> Tensor:
    """(micro-batches, 4) float64: items looked up, events, the weight of the targets, and users."""
    sizes = [
        [len(x.items.lengths()), len(x.input_rows), float(x.targets.weights.double().sum()), len(x.offsets) - 1]
        for x in inputs
    ]
    return torch.tensor(sizes, dtype=torch.float64).view(-1, SIZES)


def fitted(inputs: Sequence[ModelInput], everyone: Tensor, pad: bool) -> list[ModelInput]:
    """The micro-batches of a step, with equal bag counts on all ranks and the global loss scale.

    Args:
        everyone: (ranks, micro-batches, 4) the sizes of all.
        pad: fill up with empty bags to the largest count of any rank.
    """
    weight = float(sum(part[:, 2].sum() for part in everyone))
    scale = len(everyone) / weight if weight else 0.0
    largest = everyone.amax(0)[:, [0, 1, 3]].long().tolist()
    ready = [replace(each, loss_scale=scale) for each in inputs]
    if not pad:
        return ready
    return [
        replace(
            each,
            items=padded(each.items, items),
            features=None if each.features is None else padded(each.features, events),
            item_features=None if each.item_features is None else padded(each.item_features, items),
            user_features=None if each.user_features is None else padded(each.user_features, users),
        )
        for each, (items, events, users) in zip(ready, largest, strict=True)
    ]


def agree(inputs: Sequence[ModelInput], pad: bool) -> list[ModelInput]:
    """Exchange sizes and fit the inputs to them, see :func:`fitted`: a collective."""
    return fitted(inputs, gathered(sizes_of(inputs)), pad)


def gathered(mine: Tensor) -> Tensor:
    """(ranks, ...) every rank's tensor, all of one shape: a collective."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone)
