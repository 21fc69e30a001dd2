"""From positions in the data to the inputs of a pipeline, and what is known about each of them."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuxi_torchrec.config import LossConfig
from fuxi_torchrec.data.batches import EventBatch
from fuxi_torchrec.data.schedule import Position
from fuxi_torchrec.embeddings.inputs import Candidates, ModelInput, agree, make_input
from fuxi_torchrec.embeddings.tables import Tables
from fuxi_torchrec.tasks.negatives import in_batch_pool, shared_pool, uniform_per_position

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """One step's share of a process, before the processes have agreed.

    Attributes:
        inputs: of the micro-batches.
        users: rows of the users in each, for reports.
        end: where training stands after it.
    """

    inputs: list[ModelInput]
    users: list[Tensor]
    end: Position


@dataclass(frozen=True)
class StepMaker:
    """Events to inputs, with negatives; runs where the data is read.

    Args:
        loss: what is compared with what.
        counts: (items + 1,) how often each item is a target; used by ``in_batch`` alone.
        known: ids of the known items, in order.
        tables: what is looked up.
        seed: of the draws.
    """

    loss: LossConfig
    counts: Ints
    known: Ints
    tables: Tables
    seed: int

    def __call__(self, position: Position, batches: list[EventBatch]) -> Step:
        """A step's micro-batches."""
        end = batches[-1].end
        assert end is not None
        return Step([self._input(position, batch) for batch in batches], [batch.users for batch in batches], end)

    def _input(self, position: Position, batch: EventBatch) -> ModelInput:
        weights = sequence_weights(batch, self.loss.weighting)
        sides = [table.feature for table in self.tables.sides]
        return make_input(batch, weights, self._candidates(position, batch, weights), self.tables.items.rows, sides)

    def _candidates(self, position: Position, batch: EventBatch, weights: Tensor) -> Candidates:
        loss, key = self.loss, (self.seed, position.epoch, position.step)
        if loss.negatives == "full":
            return Candidates(self.known)
        if loss.negatives == "shared":
            return Candidates(*shared_pool(self.known, loss.num_negatives, *key))
        kept = torch.nonzero(weights > 0).squeeze(1)
        if loss.negatives == "in_batch":
            return Candidates(*in_batch_pool(batch.targets[kept].numpy(), self.counts, int(self.counts.sum())))
        lengths = batch.offsets.diff()
        first = torch.repeat_interleave(batch.offsets[:-1], lengths)[kept]
        users = torch.repeat_interleave(batch.users, lengths)[kept]
        drawn = uniform_per_position(
            self.known,
            loss.num_negatives,
            *key,
            users.numpy(),
            batch.timestamps[first].numpy(),
            (kept - first).numpy(),
        )
        return Candidates(drawn)


def sequence_weights(batch: EventBatch, weighting: str) -> Tensor:
    """(T,) weights of the targets: a sequence of n targets weighs n (position), 1 (user) or the root of n (sqrt)."""
    if weighting == "position":
        return batch.target_weights
    sequence = torch.repeat_interleave(torch.arange(len(batch)), batch.offsets.diff())
    total = torch.zeros(len(batch)).index_add_(0, sequence, batch.target_weights).clamp(min=1e-12)
    return batch.target_weights / (total if weighting == "user" else total.sqrt())[sequence]


@dataclass(frozen=True)
class MicroBatch:
    """What is known of an input on its way through a pipeline.

    Attributes:
        first, last: of its step.
        events: of this process.
        users: rows of this process's users.
        scale: of the summed loss, for gradients.
        end: where training stands after the step.
    """

    first: bool
    last: bool
    events: int
    users: Tensor
    scale: float
    end: Position


class Feed(Iterator[ModelInput]):
    """What a pipeline reads; ``waiting`` describes what it has read and not yet trained, oldest first."""

    def __init__(self, steps: Iterator[Step], pad: bool) -> None:
        self.waiting: deque[MicroBatch] = deque()
        self._steps, self._pad = steps, pad
        self._ready: deque[tuple[ModelInput, MicroBatch]] = deque()

    def __next__(self) -> ModelInput:
        if not self._ready:
            step = next(self._steps)
            inputs = agree(step.inputs, self._pad)
            last = len(inputs) - 1
            for number, (each, users) in enumerate(zip(inputs, step.users, strict=True)):
                about = MicroBatch(number == 0, number == last, len(each.input_rows), users, each.loss_scale, step.end)
                self._ready.append((each, about))
        each, about = self._ready.popleft()
        self.waiting.append(about)
        return each
