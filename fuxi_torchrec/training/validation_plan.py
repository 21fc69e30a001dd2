"""When a run is validated, on whom, and when it has seen enough."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fuxi_torchrec.config import Config
from fuxi_torchrec.data.schedule import Position
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.training.checkpoint.info import Progress

Ints = NDArray[np.int64]


def sample_users(users: Ints, wanted: int | None, seed: int) -> Ints:
    """A fixed sample of rows, in order."""
    if wanted is None or wanted >= len(users):
        return users
    return users[np.sort(np.random.default_rng([seed, 0x5A17]).choice(len(users), wanted, replace=False))]


@dataclass(frozen=True)
class ValidationPlan:
    """The validations of a run."""

    users: Ints  # rows of those who are ranked, a fixed sample; nobody if the run is not validated
    every_epochs: float
    steps: Callable[[int], int]  # of an epoch: they are not all of one length
    patience: int | None  # validations without a better one, after which training stops; None for never
    measure: str  # what is measured, of whom: values of another are not compared with it

    @staticmethod
    def of(config: Config, users: Ints, steps: Callable[[int], int]) -> "ValidationPlan":
        """As a configuration asks for; refused if there are no ``users`` that have an event to validate on."""
        data, wanted = config.data, config.validation
        nothing_held_out = data.fit_on_valid if data.split == "leave_one_out" else data.valid_from is None
        if wanted.every_epochs is None or nothing_held_out:
            return ValidationPlan(np.zeros(0, np.int64), 1.0, steps, wanted.patience, "nothing")
        users = sample_users(users, wanted.users, config.seed)
        if not len(users):
            raise DataError(
                f"{data.path}: no user has an event to validate on: histories are too short, or "
                f"data.valid_from = {data.valid_from} is after them. Set validation.every_epochs=null to train without "
                "validation"
            )
        measure = f"{wanted.metric} of {len(users)} users{', without seen items' * wanted.filter_seen}"
        return ValidationPlan(users, wanted.every_epochs, steps, wanted.patience, measure)

    @property
    def active(self) -> bool:
        return len(self.users) > 0

    def due(self, position: Position) -> bool:
        """Whether the step that ends at a position completes another ``every_epochs``."""
        if not self.active or position == Position():
            return False
        epoch = position.epoch if position.step else position.epoch - 1
        steps = self.steps(epoch)
        done = position.step or steps
        before, after = (math.floor((epoch + n / steps) / self.every_epochs + 1e-9) for n in (done - 1, done))
        return after > before

    def enough(self, progress: Progress) -> bool:
        return self.active and self.patience is not None and progress.validations_since_best >= self.patience
