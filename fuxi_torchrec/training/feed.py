"""From positions in the data to the inputs of a pipeline, and what is known about each of them."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fuxi_torchrec.data.batches import EventBatch
from fuxi_torchrec.data.schedule import Position
from fuxi_torchrec.distributed import raise_on_all_ranks
from fuxi_torchrec.embeddings.inputs import (
    NO_LOOKUPS,
    SIZES,
    Lookups,
    ModelInput,
    fitted,
    gathered,
    make_input,
    sizes_of,
)
from fuxi_torchrec.embeddings.tables import Tables
from fuxi_torchrec.tasks.base import TargetMaker


@dataclass(frozen=True)
class StepInputs:
    """One step's share of a rank, before the ranks have exchanged their sizes."""

    inputs: list[ModelInput]  # of the micro-batches
    users: list[Tensor]  # rows of the users in each, for reports
    end: Position  # where training stands after it


@dataclass(frozen=True)
class StepMaker:
    """Events to inputs, with the task's targets; runs where the data is read."""

    targets: TargetMaker
    tables: Tables
    lookups: Lookups = NO_LOOKUPS

    def __call__(self, position: Position, batches: list[EventBatch]) -> StepInputs:
        targets = [self.targets(position.epoch, position.step, batch) for batch in batches]
        inputs = [
            make_input(batch, each, self.tables, self.lookups, (position.epoch, position.step))
            for batch, each in zip(batches, targets, strict=True)
        ]
        end = batches[-1].end
        assert end is not None
        return StepInputs(inputs, [batch.users for batch in batches], end)


@dataclass(frozen=True)
class MicroBatch:
    """What is known of an input on its way through a pipeline."""

    first: bool  # of its step
    last: bool  # of its step
    events: int  # of all ranks
    users: Tensor  # rows of this rank's users
    scale: float  # of the summed loss, for gradients
    end: Position  # where training stands after the step


class Signals(Protocol):
    """What ranks tell each other with every exchange."""

    def say(self) -> list[float]:
        """This rank's; as many values on every rank."""

    def hear(self, everyone: Tensor) -> bool:
        """(ranks, values) what all ranks said, the same on each. Whether training goes on; it may raise."""


class Feed(Iterator[ModelInput]):
    """What a pipeline reads; ``waiting`` describes what it has read and not yet trained, oldest first.

    One exchange a step, when the step's batches have been read, carries everything that ranks must know of each other:
    who could not read, the sizes, and the ``signals``. A pipeline may read a step or two ahead of what it trains. When
    the signals end the feed, what was read before is still trained, equally on all ranks.

    Args:
        pad: see :func:`fitted`.
        start: where the first step is.
        micro_batches: how many the step at a position has: a rank that cannot read it takes part in the exchange too.
    """

    def __init__(
        self,
        steps: Iterator[StepInputs],
        pad: bool,
        signals: Signals | None = None,
        start: Position | None = None,
        micro_batches: Callable[[Position], int] = lambda _: 1,
    ) -> None:
        self.waiting: deque[MicroBatch] = deque()
        self._steps, self._pad, self._signals = steps, pad, signals
        self._position, self._micro_batches = start or Position(), micro_batches
        self._ready: deque[tuple[ModelInput, MicroBatch]] = deque()
        self._ended = False

    def __next__(self) -> ModelInput:
        if not self._ready and not self._ended:
            self._ended = not self._read()
        if not self._ready:
            raise StopIteration
        each, about = self._ready.popleft()
        self.waiting.append(about)
        return each

    def _read(self) -> bool:
        """Read a step and exchange what is to be known of it: a collective. False at the end."""
        step, error = None, None
        try:
            step = next(self._steps)
        except StopIteration:
            return False
        except Exception as caught:
            error = caught
        sizes = torch.zeros(self._micro_batches(self._position), SIZES) if step is None else sizes_of(step.inputs)
        said = [] if self._signals is None else self._signals.say()
        mine = torch.tensor([float(step is None), *said], dtype=torch.float64)
        everyone = gathered(torch.cat([mine, sizes.flatten().double()]))
        if everyone[:, 0].any():
            with raise_on_all_ranks("reading training data"):
                if error is not None:
                    raise error
        assert step is not None
        if self._signals is not None and not self._signals.hear(everyone[:, 1 : len(mine)]):
            return False
        all_sizes = everyone[:, len(mine) :].view(len(everyone), -1, SIZES)
        events = all_sizes[:, :, 1].sum(0).long().tolist()
        inputs, last = fitted(step.inputs, all_sizes, self._pad), len(step.inputs) - 1
        for number, (each, users) in enumerate(zip(inputs, step.users, strict=True)):
            about = MicroBatch(number == 0, number == last, events[number], users, each.loss_scale, step.end)
            self._ready.append((each, about))
        self._position = step.end
        return True
