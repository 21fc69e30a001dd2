"""Tasks by the name that ``task.kind`` gives them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fuxi_torchrec.encoders.base import setting
from fuxi_torchrec.tasks.base import Task
from fuxi_torchrec.tasks.next_item import LossConfig, NextItem
from fuxi_torchrec.tasks.repeats import RepeatsConfig

TASKS: dict[str, Callable[[LossConfig, RepeatsConfig, int], Task]] = {"next_item": NextItem}

if TYPE_CHECKING:
    TaskKind = str
else:
    TaskKind = Literal[tuple(TASKS)]


@dataclass(frozen=True)
class TaskConfig:
    """What is learned."""

    kind: TaskKind = setting("next_item", "what is predicted of a history")
    repeats: RepeatsConfig = field(default_factory=RepeatsConfig)


def make_task(config: TaskConfig, loss: LossConfig, dim: int) -> Task:
    """The task that a configuration asks for, of an encoder's outputs of width ``dim``."""
    return TASKS[config.kind](loss, config.repeats, dim)
