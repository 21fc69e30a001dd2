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
    """Says and writes how training goes, on rank 0, from ``progress`` on; ``planned`` tells how many steps it has."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        world: World,
        progress: Progress,
        planned: Callable[[Progress], int],
    ) -> None:
        self.config, self.directory, self.world = config, directory, world
        self._line, self._planned = ProgressLine() if world.rank == 0 else None, planned
        self._board: Any = None
        with raise_on_all_ranks("opening TensorBoard's files"):
            if self._line is not None and config.logging.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(directory.path / "tensorboard"), purge_step=progress.step + 1)
        self._events, self._since = 0, time.monotonic()
        self._unsaid: tuple[Progress, Report, float, Tensor | None, float] | None = None  # about the last step

    def step(self, progress: Progress, report: Report, events: int, share: float, norm: Tensor | None) -> None:
        """A step of so many events was trained: ``report`` is read back only if it is shown, which is a collective."""
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
        epoch, memory = progress.position.epoch, peak_memory_mb(self.world.device)
        entry = {
            "step": progress.step,
            **report(),
            "epoch": epoch,
            "lr": self.config.optimizer.lr * share,
            "events_per_second": round(speed),
            "memory_mb": memory,
        }
        if norm is not None:
            entry["gradient_norm"] = float(norm)
        with raise_on_all_ranks("writing metrics"):
            if self._line is not None:
                self.directory.log(entry)
                self._draw("train", entry, progress.step)
                self._line.show(progress.step, self._planned(progress), entry["loss"], speed, memory, epoch)

    def validated(self, step: int, metrics: dict[str, float], shown: Sequence[str]) -> None:
        """The run was validated; ``shown`` of the metrics are logged."""
        self._since = time.monotonic()  # not training time
        self._events = 0
        with raise_on_all_ranks("writing metrics"):
            if self._line is not None:
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
    """Most memory this process has held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) // 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10
