import numpy as np
import pytest

from fuxi_torchrec.data.schedule import Position
from fuxi_torchrec.training.validation_plan import ValidationPlan

LENGTHS = (11, 12, 10)  # steps of the epochs


def validated_steps(every_epochs):
    plan = ValidationPlan(np.arange(3), every_epochs, LENGTHS.__getitem__, None, "x")
    found, step = [], 0
    assert not plan.due(Position())
    for epoch, steps in enumerate(LENGTHS):
        for number in range(1, steps + 1):
            step += 1
            if plan.due(Position(epoch, number) if number < steps else Position(epoch + 1, 0)):
                found.append(step)
    return found


@pytest.mark.parametrize(
    ("every_epochs", "steps"),
    [
        (1.0, [11, 23, 33]),  # the ends of epochs, whatever their lengths
        (0.5, [6, 11, 17, 23, 28, 33]),
        (1.5, [17, 33]),
        (3.0, [33]),
        (0.001, list(range(1, 34))),
    ],
)
def test_validations_follow_epochs_and_not_steps(every_epochs, steps):
    assert validated_steps(every_epochs) == steps


def test_tenths_of_an_epoch_are_ten_an_epoch():
    assert len(validated_steps(0.1)) == 30


def test_nobody_is_never_due():
    plan = ValidationPlan(np.zeros(0, np.int64), 1.0, LENGTHS.__getitem__, None, "nothing")
    assert not plan.due(Position(1, 0))
