"""The process group: joining and leaving it, and errors of one rank raised on all.

Every group made here has a finite timeout: a peer that is gone becomes an error, never a hang.
"""

import atexit
import hashlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fuxi_torchrec.errors import FuxiError

T = TypeVar("T")

DEFAULT_TIMEOUT_SECONDS = 300.0

# torchrun names the first error it sees as the root cause, so those who only heard of it wait a moment.
_PEER_DELAY_SECONDS = 0.5
_HEARTBEAT_SECONDS = 1.0

# What torchrun gives each worker; all or none of them.
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class PeerError(RuntimeError):
    """Another rank failed; the message carries its error."""


class PeerRefusedError(FuxiError, PeerError):
    """Another rank refused to go on, with an error that was raised on purpose."""


@dataclass(frozen=True)
class World:
    """This rank's place among its peers."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    local_size: int = 1


@contextmanager
def process_group(timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, device_type: str | None = None) -> Iterator[World]:
    """Join the group that torchrun describes, or a group of one outside torchrun; leave it at the end.

    Args:
        timeout_seconds: a collective that waits longer for a peer raises.
        device_type: "cpu" (gloo) or "cuda" (nccl, one device per local rank); by default CUDA where there is one.

    Example:
        >>> with process_group(timeout_seconds=10, device_type="cpu") as world:
        ...     (world.rank, world.size)
        (0, 1)
    """
    if timeout_seconds <= 0:
        raise ValueError(f"timeout_seconds must be positive, not {timeout_seconds}")
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    timeout = timedelta(seconds=timeout_seconds)
    rank, size, local_rank = _place()
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    elif device_type == "cpu":
        device, backend = torch.device("cpu"), "gloo"
    else:
        raise ValueError(f"device_type must be 'cpu' or 'cuda', not {device_type!r}")

    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    try:
        yield World(rank, size, local_rank, device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    finally:
        dist.destroy_process_group()


def exit_now(code: int) -> NoReturn:
    """End this process at once, without the destructors of native libraries.

    They take seconds where TorchRec's modules are torn down, and a job that is preempted has ten; and now and then
    one aborts, so that a job whose work is complete counts as failed.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _place() -> tuple[int, int, int]:
    """Rank, world size and local rank as torchrun says; (0, 1, 0) outside it."""
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if not missing:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if "RANK" in os.environ:
        raise RuntimeError(
            f"RANK is set but {', '.join(missing)} is not: start workers with torchx or torchrun, "
            "or unset RANK to run as a single rank"
        )
    return 0, 1, 0


def check_same(what: str, value: str) -> None:
    """Raise on every rank if ranks have different values of ``what``: a collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, hashlib.sha256(value.encode()).hexdigest())
    others = [rank for rank, each in enumerate(everyone) if each != everyone[0]]
    if others:
        raise RuntimeError(
            f"{what} is not the same on all ranks, rank {others[0]} has another than rank 0: they must run the same "
            "software on the same files"
        )


def broadcast_from_rank_0(what: str, find: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank: shared file systems may show others an older state. A collective."""
    found: list[T | None] = [None]
    with raise_on_all_ranks(what):
        if dist.get_rank() == 0:
            found = [find()]
    dist.broadcast_object_list(found, 0)
    return cast(T, found[0])


@contextmanager
def raise_on_all_ranks(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a local step that may fail on one rank only, and raise on every rank if it failed on any.

    The body must not contain a collective. The rank that failed raises its own error; all others raise a
    :class:`PeerError` that names it, instead of waiting for it in the next collective.

    Args:
        what: what the step does, for the message ("reading the config").
        group: of all ranks, if not the default one: a thread beside others needs its own.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        return
    mine = "".join(traceback.format_exception_only(error)).strip() if error is not None else None
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (mine, isinstance(error, FuxiError)), group)
    if error is not None:
        raise error
    failed = {rank: report for rank, (report, _) in enumerate(reports) if report is not None}
    if failed:
        time.sleep(_PEER_DELAY_SECONDS)
        lines = "; ".join(f"rank {rank}: {report}" for rank, report in failed.items())
        kind = PeerRefusedError if all(reports[rank][1] for rank in failed) else PeerError
        raise kind(f"{what} failed on {len(failed)} of {len(reports)} ranks: {lines}")


def run_on_rank_0(world: World, what: str, work: Callable[[], T]) -> T | None:
    """Let rank 0 do something however long it takes: the others wait as long as it lives. None on the others.

    It works in a thread, and says now and then that it still does, so that no collective meets its timeout.
    """
    done: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    if world.rank == 0:
        thread.start()
    working = torch.ones(1)
    while working:
        if world.rank == 0:
            thread.join(_HEARTBEAT_SECONDS)
            working.fill_(float(thread.is_alive()))
        dist.broadcast(working, 0)
    with raise_on_all_ranks(what):
        if failed:
            raise failed[0]
    return done[0] if done else None


def share_from_rank_0(world: World, what: str, work: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors that rank 0 makes, however long it takes, on every rank: a collective."""
    if world.size == 1:
        return work()
    made = run_on_rank_0(world, what, work) or {}
    about: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{n: (t.shape, t.dtype) for n, t in made.items()}]
    dist.broadcast_object_list(about, 0)
    for name, (shape, dtype) in about[0].items():
        made.setdefault(name, torch.empty(shape, dtype=dtype))
        dist.broadcast(made[name], 0)
    return made
