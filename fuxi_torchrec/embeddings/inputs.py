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

from fuxi_torchrec.data.batches import EventBatch, SideFeature
from fuxi_torchrec.embeddings.tables import ITEM_FEATURE

Ints = NDArray[np.int64]

# more ids than this share of the table are deduplicated by marking rows instead of sorting ids
_MARK_SHARE = 1 / 16


@dataclass
class ModelInput(Pipelineable):
    """One micro-batch of a process: T events of B sequences, P of them with a target.

    Every item that occurs (inputs, targets, candidates) is looked up once; ``*_rows`` say where it is in the result.

    Attributes:
        items: the U distinct items, one bag each; then empty bags, up to the largest U of all processes.
        sides: one bag per event and side feature, or None.
        input_rows: (T,) rows of the input events.
        target_positions: (P,) the events with a target.
        target_rows: (P,) rows of the targets.
        target_weights: (P,) float32.
        candidate_rows: (M,) rows of one pool for all positions, or (P, K) of a pool for each.
        candidate_log_weights: (M,) float32, or None.
        target_column: (P,) where the pool holds the position's own target, −1 if it does not; None for pools of (P, K).
        timestamps, request_timestamps, offsets: as in EventBatch; offsets stay on the host.
        loss_scale: multiplies the summed loss, so that gradients averaged over processes are those of the global mean.
    """

    items: KeyedJaggedTensor
    sides: KeyedJaggedTensor | None
    input_rows: Tensor
    target_positions: Tensor
    target_rows: Tensor
    target_weights: Tensor
    candidate_rows: Tensor
    candidate_log_weights: Tensor | None
    target_column: Tensor | None
    timestamps: Tensor
    request_timestamps: Tensor
    offsets: Tensor
    loss_scale: float = 1.0

    def to(self, device: torch.device, non_blocking: bool = False) -> "ModelInput":
        """On another device; the offsets stay where they are: the encoder wants them on the host."""
        if device.type == "cpu" and self.input_rows.device.type == "cpu":
            return self

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, non_blocking=non_blocking)
            return value.to(device, non_blocking=non_blocking) if isinstance(value, KeyedJaggedTensor) else value

        moved = {each.name: move(getattr(self, each.name)) for each in fields(self) if each.name != "offsets"}
        return replace(self, **moved)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the stream is done with it."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "offsets" and isinstance(value, Tensor | KeyedJaggedTensor):
                value.record_stream(stream)


@dataclass(frozen=True)
class Candidates:
    """What targets are compared with.

    Attributes:
        ids: (M,) distinct items for all positions, or (P, K) for each.
        log_weights: (M,) float32 added to the scores, or None.
    """

    ids: Ints
    log_weights: NDArray[np.float32] | None = None


def make_input(
    batch: EventBatch, weights: Tensor, candidates: Candidates, table_rows: int, sides: Sequence[str] = ()
) -> ModelInput:
    """A batch as one process sees it, before the processes have agreed on bag counts.

    Args:
        batch: the events.
        weights: (T,) of each event's target; positions of weight 0 are left out.
        candidates: what targets are compared with; (P, K) pools are in the order of the positions left.
        table_rows: of the item table.
        sides: side features, in the order of the tables.
    """
    positions = torch.nonzero(weights > 0).squeeze(1)
    targets = batch.targets[positions]
    parts = [batch.items.numpy(), targets.numpy(), candidates.ids.reshape(-1)]
    unique, rows = deduplicate(np.concatenate(parts), table_rows)
    input_rows, target_rows, candidate_rows = np.split(rows, np.cumsum([len(part) for part in parts])[:-1])
    column = None
    if candidates.ids.ndim == 1:
        column_of_row = np.full(len(unique), -1, np.int64)
        column_of_row[candidate_rows] = np.arange(len(candidate_rows))
        column = torch.from_numpy(column_of_row[target_rows])
    log_weights = None if candidates.log_weights is None else torch.from_numpy(candidates.log_weights)
    return ModelInput(
        items=bags([ITEM_FEATURE], [SideFeature(torch.from_numpy(unique))]),
        sides=bags(list(sides), [batch.sides[name] for name in sides]) if sides else None,
        input_rows=torch.from_numpy(input_rows),
        target_positions=positions,
        target_rows=torch.from_numpy(target_rows),
        target_weights=weights[positions],
        candidate_rows=torch.from_numpy(candidate_rows.reshape(candidates.ids.shape)),
        candidate_log_weights=log_weights,
        target_column=column,
        timestamps=batch.timestamps,
        request_timestamps=batch.request_timestamps,
        offsets=batch.offsets,
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


def agree(inputs: Sequence[ModelInput], pad: bool) -> list[ModelInput]:
    """The micro-batches of a step, with equal bag counts on all processes and the global loss scale: a collective.

    Args:
        inputs: this process's; every process has as many.
        pad: fill up with empty bags to the largest count of any process.
    """
    size = dist.get_world_size()
    mine = torch.tensor(
        [[len(x.items.lengths()), len(x.input_rows), float(x.target_weights.double().sum())] for x in inputs],
        dtype=torch.float64,
    )
    everyone = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine)
    weight = float(sum(part[:, 2].sum() for part in everyone))
    scale = size / weight if weight else 0.0
    largest = torch.stack(everyone).amax(0)[:, :2].long().tolist()
    return [
        replace(
            each,
            items=padded(each.items, items) if pad else each.items,
            sides=padded(each.sides, events) if pad and each.sides is not None else each.sides,
            loss_scale=scale,
        )
        for each, (items, events) in zip(inputs, largest, strict=True)
    ]


def bags(keys: list[str], features: Sequence[SideFeature]) -> KeyedJaggedTensor:
    """One bag per event and key."""
    lengths = [torch.ones(len(f.values), dtype=torch.int64) if f.lengths is None else f.lengths for f in features]
    return KeyedJaggedTensor(keys, torch.cat([f.values for f in features]), lengths=torch.cat(lengths))


def padded(given: KeyedJaggedTensor, count: int) -> KeyedJaggedTensor:
    """With empty bags at the end of every key, ``count`` in all."""
    keys = given.keys()
    lengths = given.lengths().view(len(keys), -1)
    if lengths.shape[1] == count:
        return given
    filled = lengths.new_zeros(len(keys), count)
    filled[:, : lengths.shape[1]] = lengths
    return KeyedJaggedTensor(keys, given.values(), lengths=filled.view(-1))
