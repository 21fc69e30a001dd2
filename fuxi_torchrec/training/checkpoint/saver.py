"""Checkpoints written beside training: a copy is taken, training goes on, a thread writes."""

import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fuxi_torchrec.embeddings.sharding import copied
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.training.checkpoint.info import Info
from fuxi_torchrec.training.checkpoint.store import Checkpoints

logger = get_logger(__name__)


class Saver:
    """Writes checkpoints, one at a time. Making one is a collective.

    With ``async_save`` training goes on while a thread writes; its collectives have a group and timeout of their own.
    """

    def __init__(self, checkpoints: Checkpoints, async_save: bool, timeout_seconds: float) -> None:
        self.checkpoints = checkpoints
        self._group: dist.ProcessGroup | None = None
        if async_save:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: dict[str, Any], info: Info, best: bool) -> float:
        """Begin to write: a collective. The seconds for which training paused.

        Waits for the save before this one, and raises what made it fail.
        """
        began = time.monotonic()
        self.wait()
        if self._group is None:
            self._write(state, info, best, began)
            self.wait()
            return time.monotonic() - began
        snapshot = {name: copied(value) for name, value in state.items()}
        pause = time.monotonic() - began
        given = (snapshot, info, best, began, pause)
        self._thread = threading.Thread(target=self._write, args=given, name="checkpoint", daemon=True)
        self._thread.start()
        return pause

    def _write(self, state: dict[str, Any], info: Info, best: bool, began: float, pause: float | None = None) -> None:
        try:
            path = self.checkpoints.save(state, info, best, self._group)
        except BaseException as error:  # raised where training waits for it
            self._error = error
            return
        seconds = time.monotonic() - began
        paused = seconds if pause is None else pause
        note = ", the best so far" if best else ""
        logger.info("saved %s in %.2f s, training paused for %.3f s%s", path.name, seconds, paused, note)

    @property
    def failed(self) -> bool:
        """Whether the save in the background has failed; the next call raises why."""
        return self._error is not None

    def wait(self) -> None:
        """Until nothing is being written; raises what made it fail."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
