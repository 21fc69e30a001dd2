"""What a training run says and writes while it runs: the progress line, metrics.jsonl, TensorBoard."""

import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuxi_torchrec.config import Config
from fuxi_torchrec.distributed import World, raise_on_all_ranks
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.training.checkpoint.info import Progress
from fuxi_torchrec.training.progress import ProgressLine
from fuxi_torchrec.training.run_directory import RunDirectory

logger = get_logger(__name__)

Report = Callable[[], dict[str, float]]


class MetricsLogger:
    """What is said and written while training runs, on rank 0.

    Args:
        config: how often to speak, and where to.
        directory: where metrics go.
        world: this rank among its peers.
        progress: where training begins.
        planned: steps of the whole run.
    """

    def __init__(self, config: Config, directory: RunDirectory, world: World, progress: Progress, planned: int) -> None:
        self.config, self.directory, self.world = config, directory, world
        self.active = world.rank == 0
        self._line = ProgressLine(planned) if self.active else None
        self._board: Any = None
        with raise_on_all_ranks("opening TensorBoard's files"):
            if self.active and config.logging.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(directory.tensorboard), purge_step=progress.step + 1)
        self._events, self._since = 0, time.monotonic()
        self._unsaid: tuple[Progress, Report, float, Tensor | None, float] | None = None  # about the last step

    def step(self, progress: Progress, report: Report, events: int, share: float, norm: Tensor | None) -> None:
        """A step was trained: read back only if it is shown, which is a collective.

        Args:
            progress: after it.
            report: reads what the task says of it, over all ranks.
            events: of all ranks.
            share: of the learning rate.
            norm: of the gradients.
        """
        self._events += events
        now = time.monotonic()
        about = (progress, report, share, norm, self._events / max(1e-9, now - self._since))
        if progress.step % self.config.logging.every_steps and progress.step > 1:
            self._unsaid = about
            return
        self._unsaid = None
        self._events, self._since = 0, now
        self._log_step(*about)

    def _log_step(self, progress: Progress, report: Report, share: float, norm: Tensor | None, speed: float) -> None:
        values = report()
        with raise_on_all_ranks("writing metrics"):
            if self.active:
                self._write_step(progress, values, share, None if norm is None else float(norm), speed)

    def _write_step(
        self, progress: Progress, values: dict[str, float], share: float, norm: float | None, speed: float
    ) -> None:
        epoch, memory = progress.position.epoch, peak_memory_mb(self.world.device)
        entry: dict[str, Any] = {
            "step": progress.step,
            **values,
            "epoch": epoch,
            "lr": self.config.optimizer.lr * share,
            "events_per_second": round(speed),
            "memory_mb": memory,
        }
        if norm is not None:
            entry["gradient_norm"] = norm
        self.directory.log(entry)
        self._draw("train", entry, progress.step)
        assert self._line is not None
        self._line.show(progress.step, values["loss"], speed, memory, epoch)

    def validated(self, step: int, metrics: dict[str, float], shown: Sequence[str]) -> None:
        """The run was validated; ``shown`` of the metrics are logged."""
        self._since = time.monotonic()  # not training time
        self._events = 0
        with raise_on_all_ranks("writing metrics"):
            if self.active:
                self.directory.log({"step": step, "validation": metrics})
                self._draw("validation", metrics, step)
        logger.info(
            "step %d: validation %s, %d users",
            step,
            ", ".join(f"{name} {metrics[name]:.4f}" for name in shown),
            metrics["users"],
        )

    def finish(self) -> None:
        """At the end of training: the last step is always said. A collective."""
        if self._unsaid is not None:
            self._log_step(*self._unsaid)

    def close(self) -> None:
        """Leave the terminal and the files as they should be, however training ended."""
        if self._line is not None:
            self._line.close()
        if self._board is not None:
            self._board.close()

    def _draw(self, group: str, values: dict[str, Any], step: int) -> None:
        if self._board is not None:
            for name, value in values.items():
                if name not in ("step", "epoch"):
                    self._board.add_scalar(f"{group}/{name.replace('@', '_at_')}", value, step)


def peak_memory_mb(device: torch.device) -> int:
    """Most memory this process has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) // 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10
