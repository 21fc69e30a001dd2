"""Checkpoints written beside training: a copy is taken, training goes on, a thread writes."""

import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fuxi_torchrec.embeddings.sharding import copied
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.training.checkpoint.store import About, Checkpoints

logger = get_logger(__name__)


class Saver:
    """Writes checkpoints, one at a time, in the background or not. Making one is a collective.

    Args:
        checkpoints: where to.
        async_save: go on while a thread writes; its collectives have a group of their own.
        timeout_seconds: of these collectives.
    """

    def __init__(self, checkpoints: Checkpoints, async_save: bool, timeout_seconds: float) -> None:
        self.checkpoints = checkpoints
        self._group: dist.ProcessGroup | None = None
        if async_save:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: dict[str, Any], about: About) -> float:
        """Begin to write: a collective. The seconds for which training paused.

        Waits for the save before this one, and raises what made it fail.
        """
        began = time.monotonic()
        self.wait()
        if self._group is None:
            self._write(state, about, began)
            self._raise()
            return time.monotonic() - began
        snapshot = {name: copied(value) for name, value in state.items()}
        pause = time.monotonic() - began
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, about, began, pause), name="checkpoint", daemon=True
        )
        self._thread.start()
        return pause

    def _write(self, state: dict[str, Any], about: About, began: float, pause: float | None = None) -> None:
        try:
            path = self.checkpoints.save(state, about, self._group)
        except BaseException as error:  # raised where training waits for it
            self._error = error
            return
        seconds = time.monotonic() - began
        paused = seconds if pause is None else pause
        best = ", the best so far" if about.best else ""
        logger.info("saved %s in %.2f s, training paused for %.3f s%s", path.name, seconds, paused, best)

    @property
    def failed(self) -> bool:
        """Whether the save in the background has failed; the next call raises why."""
        return self._error is not None

    def wait(self) -> None:
        """Until nothing is being written; raises what made it fail."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
