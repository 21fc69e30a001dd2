"""A group of local gloo ranks that runs one function after another.

Starting a process that imports TorchRec takes seconds, so a group stays up and is given many cases. The tests and
the doctor use it. A case that fails or hangs ends the group, and the next case starts a new one.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

Result = TypeVar("Result")

_GRACE_SECONDS = 2.0  # for the other ranks to report their own errors once one has failed


class WorkerError(RuntimeError):
    """A worker raised, died or did not answer in time; the message holds what each failed rank said."""


class WorkerGroup:
    """``world_size`` ranks in one gloo group, each a process with one thread.

    Args:
        world_size: number of ranks.
        timeout_seconds: how long one call of :meth:`run` may take; also the timeout of every collective.

    Example:
        >>> import torch.distributed
        >>> with WorkerGroup(world_size=2, timeout_seconds=60) as group:
        ...     group.run(torch.distributed.get_rank)
        [0, 1]
    """

    def __init__(self, world_size: int, timeout_seconds: float = 60.0) -> None:
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> list[Result]:
        """Call ``function(*args, **kwargs)`` on every rank and return the results in rank order.

        The function must be importable (defined at the top of a module), its arguments and result picklable.
        """
        if not self._processes:
            self._start()
        request = pickle.dumps((function, args, kwargs))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a worker that died while idle is reported below
                pipe.send_bytes(request)
        results, errors = self._collect()
        if errors:
            self.close()
            raise WorkerError("\n".join(f"rank {r} of {self.world_size}: {errors[r]}" for r in errors))
        return [results[rank] for rank in range(self.world_size)]

    def _collect(self) -> tuple[dict[int, Any], dict[int, str]]:
        """What each rank returned, and what each failed rank said, the first to fail first."""
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + self.timeout_seconds
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failed = "still running when another rank failed"
                late = failed if errors else f"no answer in {self.timeout_seconds:g} s"
                errors.update(dict.fromkeys(waiting.values(), late))
                break
            for pipe in self._pipes:
                if pipe in ready:
                    rank = waiting.pop(pipe)
                    succeeded, value = self._receive(rank)
                    (results if succeeded else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return results, errors

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_GRACE_SECONDS)
            return False, f"died with exit code {self._processes[rank].exitcode}"

    def close(self) -> None:
        """End all processes; the group starts anew with the next :meth:`run`."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._directory is not None:
            self._directory.cleanup()
        self._processes, self._pipes, self._directory = [], [], None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._directory = tempfile.TemporaryDirectory(prefix="worker-group-")
        store = os.path.join(self._directory.name, "store")  # a file: no port that another job could hold
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world_size, store, self.timeout_seconds), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection, rank: int, world_size: int, store: str, timeout_seconds: float) -> None:
    """A worker: join the group, then run what arrives until the pipe closes."""
    joined = False
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        try:
            if not joined:
                _join(rank, world_size, store, timeout_seconds)
                joined = True
            function, args, kwargs = pickle.loads(request)
            answer = pickle.dumps((True, function(*args, **kwargs)))
        except Exception:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _join(rank: int, world_size: int, store: str, timeout_seconds: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group("gloo", f"file://{store}", timeout, world_size=world_size, rank=rank)
