"""Checkpoints: complete or absent, loadable on any number of ranks and under any sharding.

A checkpoint is a directory ``step-000001000`` of torch.distributed.checkpoint files and ``checkpoint.json``. It is
written under another name and renamed when everything is there; then ``latest`` moves.
"""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fuxi_torchrec.artifacts import crc32_of
from fuxi_torchrec.distributed import World, raise_on_all_ranks
from fuxi_torchrec.embeddings.pipeline import ShardedModel
from fuxi_torchrec.embeddings.sharding import clipped
from fuxi_torchrec.embeddings.tables import table_of
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.training.checkpoint.info import (
    BEST,
    LATEST,
    CheckpointError,
    Info,
    check_file,
    complete,
    named,
    point,
    read_info,
    step_name,
)
from fuxi_torchrec.training.checkpoint.reader import CheckpointReader
from fuxi_torchrec.training.optimizers import StepOptimizer

logger = get_logger(__name__)

_PARTIAL = ".partial-"


class Checkpoints:
    """The checkpoints of a run directory; ``keep_last`` of them stay beside the best one."""

    def __init__(self, directory: Path, keep_last: int, world: World) -> None:
        self.directory, self.keep_last, self.world = directory, keep_last, world

    # --- writing -----------------------------------------------------------------------------------------------------

    def save(self, state: dict[str, Any], info: Info, best: bool, group: dist.ProcessGroup | None = None) -> Path:
        """Write a checkpoint: a collective. If it fails, it fails on every rank and the previous one stands."""
        name = step_name(info.progress.step)
        final, partial = self.directory / name, self.directory / (_PARTIAL + name)
        try:
            with raise_on_all_ranks("making a checkpoint directory", group):
                if self.world.rank == 0:
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir(parents=True)
            dcp_save(state, storage_writer=FileSystemWriter(partial), process_group=group)
            info = dataclasses.replace(info, files=self._checksums(partial, group))
            with raise_on_all_ranks("writing a checkpoint", group):
                if self.world.rank == 0:
                    info.write(partial)
                    if final.exists():
                        shutil.rmtree(final)
                    os.replace(partial, final)
                    point(self.directory, LATEST, final)
                    if best:
                        self.point_to_best(final)
                    self._prune()
        except (CheckpointException, OSError, RuntimeError) as error:
            if self.world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            last = named(self.directory, LATEST)
            stands = f"the last complete one, {last.name}, stands" if last else "there is no earlier one"
            raise CheckpointError(f"{final}: the checkpoint could not be written: {_cause(error)}; {stands}") from error
        return final

    def amend(self, info: Info, best: bool) -> None:
        """Change what a complete checkpoint of this step says of itself; call it on one rank."""
        path = self.directory / step_name(info.progress.step)
        old = read_info(path)
        dataclasses.replace(info, world_size=old.world_size, files=old.files).write(path)
        if best:
            self.point_to_best(path)

    def point_to_best(self, checkpoint: Path) -> None:
        """Note which one is the best; call it on one rank."""
        if named(self.directory, BEST) != checkpoint:
            point(self.directory, BEST, checkpoint)

    def _checksums(self, partial: Path, group: dist.ProcessGroup | None) -> dict[str, tuple[int, int]]:
        """Sizes and checksums of all files, each rank reading its own."""
        own = {}
        with raise_on_all_ranks("reading a checkpoint back", group):
            for path in sorted(partial.iterdir()):
                if path.name.startswith(f"__{self.world.rank}_") or (self.world.rank == 0 and path.name == ".metadata"):
                    own[path.name] = (path.stat().st_size, crc32_of(path))
        everyone: list[dict[str, tuple[int, int]]] = [{} for _ in range(self.world.size)]
        dist.all_gather_object(everyone, own, group)
        return {name: value for part in everyone for name, value in part.items()}

    def _prune(self) -> None:
        there = complete(self.directory)
        keep = {*there[-self.keep_last :], named(self.directory, LATEST), named(self.directory, BEST)}
        for path in there:
            if path not in keep:  # out of the way first: a half removed one must not pass for a checkpoint
                os.replace(path, path.with_name(_PARTIAL + path.name))
        for path in self.directory.glob(f"{_PARTIAL}*"):  # also what killed processes left
            shutil.rmtree(path, ignore_errors=True)

    # --- reading -----------------------------------------------------------------------------------------------------

    def read_info(self, path: Path) -> Info:
        """What a checkpoint says about itself, its files checked: a collective, each rank checks some."""
        with raise_on_all_ranks(f"checking {path}"):
            info = read_info(path)
            for name in sorted(info.files)[self.world.rank :: self.world.size]:
                check_file(path, name, *info.files[name])
        return info

    def load(self, path: Path, model: ShardedModel, optimizer: StepOptimizer | None, grown: bool = False) -> None:
        """Read weights, and moments if an optimizer is given, into a model: a collective.

        With ``grown`` its tables may have more rows than the checkpoint's: those stay as they are.
        """
        state = state_of(model, optimizer)
        try:
            with raise_on_all_ranks("reading what the checkpoint has"):
                reader, rows = CheckpointReader(path), table_rows(path) if grown else {}
            state = {name: clipped(value, rows[name]) if name in rows else value for name, value in state.items()}
            dcp_load(state, storage_reader=reader)
        except (CheckpointException, OSError, RuntimeError, ValueError) as error:
            other = self._other(path) if optimizer is not None else ""
            raise CheckpointError(f"{path}: the checkpoint cannot be loaded: {_cause(error)}{other}") from error

    def _other(self, path: Path) -> str:
        others = [each.name for each in complete(self.directory) if each != path]
        return f"; remove the directory to continue from {others[-1]}" if others else ""


def table_rows(path: Path) -> dict[str, int]:
    """Rows of every table in a checkpoint, by the name of its weight."""
    found = CheckpointReader(path).tensors().items()
    return {name: about.size[0] for name, about in found if name.startswith("model.") and table_of(name) is not None}


def state_of(model: ShardedModel, optimizer: StepOptimizer | None) -> dict[str, Any]:
    """All tensors of a checkpoint by name; they alias the live ones."""
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    if optimizer is not None:
        state |= {f"optimizer.{name}": value for name, value in optimizer.moments().items()}
    return state


def _cause(error: BaseException) -> str:
    """The first line that says something; DCP's errors hold one per rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {inner}"
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
