"""Checkpoints: complete or absent, loadable on any number of processes and under any sharding.

A checkpoint is a directory ``step-000001000`` of torch.distributed.checkpoint files and ``checkpoint.json``. It is
written under another name and renamed when everything is there; then ``latest`` moves.
"""

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fuxi_torchrec import __version__
from fuxi_torchrec.data.schedule import Position
from fuxi_torchrec.distributed import World, failing_together
from fuxi_torchrec.durable import crc32_of, write_atomically
from fuxi_torchrec.embeddings.pipeline import ShardedModel
from fuxi_torchrec.embeddings.sharding import clipped
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.training.optimizers import StepOptimizer

logger = get_logger(__name__)

FORMAT = 1
INFO = "checkpoint.json"
LATEST, BEST = "latest", "best"
_PARTIAL = ".partial-"
_DAMAGED = "the checkpoint is damaged: remove its directory to continue from an earlier one"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands, beside its tensors.

    Attributes:
        step: steps trained.
        position: of the next step in the data.
        total_steps: as planned at the run's first start; schedules run towards it.
        best_metric, best_step: of the validations so far.
        validations_since_best: for early stopping.
    """

    step: int = 0
    position: Position = field(default_factory=Position)
    total_steps: int = 0
    best_metric: float | None = None
    best_step: int | None = None
    validations_since_best: int = 0


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to."""

    dataset: str  # fingerprint
    vocabulary: str  # fingerprint of the known items
    time_unit: str
    items: int
    encoder: str  # fingerprint

    def check(self, found: "Identity", where: Path) -> None:
        """Refuse a checkpoint of something else."""
        names = {
            "time_unit": "the time unit",
            "dataset": "the dataset's fingerprint",
            "vocabulary": "the known items",
            "items": "the number of items",
            "encoder": "the encoder's configuration",
        }
        for name, what in names.items():
            ours, theirs = getattr(self, name), getattr(found, name)
            if ours != theirs:
                raise CheckpointError(
                    f"{where}: {what} is {theirs!r} in the checkpoint and {ours!r} here: this is another run. Take "
                    "another --run-dir, and --init-from this one to start from its weights"
                )


@dataclass(frozen=True)
class Info:
    """What ``checkpoint.json`` says."""

    progress: Progress
    identity: Identity
    metrics: dict[str, float]
    config: dict[str, Any]
    world_size: int
    files: dict[str, tuple[int, int]]  # name -> size, crc32
    software: str = __version__
    format: int = FORMAT


@dataclass(frozen=True)
class About:
    """What a checkpoint holds beside tensors."""

    progress: Progress
    identity: Identity
    config: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)
    best: bool = False

    def info(self, world_size: int, files: dict[str, tuple[int, int]]) -> Info:
        """With what is known when the files are written."""
        return Info(self.progress, self.identity, self.metrics, self.config, world_size, files)


class Checkpoints:
    """The checkpoints of a run directory.

    Args:
        directory: holds them.
        keep_last: how many stay beside the best one.
    """

    def __init__(self, directory: Path, keep_last: int, world: World) -> None:
        self.directory, self.keep_last, self.world = directory, keep_last, world

    # --- writing -----------------------------------------------------------------------------------------------------

    def save(self, state: dict[str, Any], about: "About", group: dist.ProcessGroup | None = None) -> Path:
        """Write a checkpoint: a collective. If it fails, it fails on every process and the previous one stands.

        Args:
            state: all tensors, see :func:`state_of`.
            about: everything else.
            group: of all processes, if not the default one.
        """
        name = step_name(about.progress.step)
        final, partial = self.directory / name, self.directory / (_PARTIAL + name)
        try:
            with failing_together("making a checkpoint directory", group):
                if self.world.rank == 0:
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir(parents=True)
            dcp_save(state, storage_writer=FileSystemWriter(partial), process_group=group)
            info = about.info(self.world.size, self._checksums(partial, group))
            with failing_together("writing a checkpoint", group):
                if self.world.rank == 0:
                    write_atomically(partial / INFO, json.dumps(dataclasses.asdict(info), indent=1) + "\n")
                    if final.exists():
                        shutil.rmtree(final)
                    os.replace(partial, final)
                    write_atomically(self.directory / LATEST, name + "\n")
                    if about.best:
                        write_atomically(self.directory / BEST, name + "\n")
                    self._prune()
        except (CheckpointException, OSError, RuntimeError) as error:
            if self.world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            last = self.find(LATEST)
            stands = f"the last complete one, {last.name}, stands" if last else "there is no earlier one"
            raise CheckpointError(f"{final}: the checkpoint could not be written: {_cause(error)}; {stands}") from error
        return final

    def has(self, step: int) -> bool:
        """Whether a step's checkpoint is complete."""
        return (self.directory / step_name(step) / INFO).exists()

    def amend(self, about: "About") -> None:
        """Change what a complete checkpoint of this step says of itself; call it on one process."""
        path = self.directory / step_name(about.progress.step)
        old = _read_info(path)
        info = about.info(old.world_size, old.files)
        write_atomically(path / INFO, json.dumps(dataclasses.asdict(info), indent=1) + "\n")
        if about.best:
            write_atomically(self.directory / BEST, path.name + "\n")

    def _checksums(self, partial: Path, group: dist.ProcessGroup | None) -> dict[str, tuple[int, int]]:
        """Sizes and checksums of all files, each process reading its own."""
        own = {}
        with failing_together("reading a checkpoint back", group):
            for path in sorted(partial.iterdir()):
                if path.name.startswith(f"__{self.world.rank}_") or (self.world.rank == 0 and path.name == ".metadata"):
                    own[path.name] = (path.stat().st_size, crc32_of(path))
        everyone: list[dict[str, tuple[int, int]]] = [{} for _ in range(self.world.size)]
        dist.all_gather_object(everyone, own, group)
        return {name: value for part in everyone for name, value in part.items()}

    def _prune(self) -> None:
        complete = self.all()
        keep = set(complete[-self.keep_last :]) | {self.find(LATEST), self.find(BEST)}
        for path in complete:
            if path not in keep:  # out of the way first: a half removed one must not pass for a checkpoint
                os.replace(path, path.with_name(_PARTIAL + path.name))
        for path in self.directory.glob(f"{_PARTIAL}*"):  # also what killed processes left
            shutil.rmtree(path, ignore_errors=True)

    # --- reading -----------------------------------------------------------------------------------------------------

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path.parent for path in self.directory.glob(f"step-*/{INFO}"))

    def find(self, which: str) -> Path | None:
        """``latest``, ``best`` or a step's number; None if there is no such checkpoint."""
        if which not in (LATEST, BEST):
            path = self.directory / (step_name(int(which)) if which.isdigit() else which)
            return path if (path / INFO).exists() else None
        pointer = self.directory / which
        if pointer.exists():
            path = self.directory / (pointer.read_text().strip() or "none")
            if path.is_dir():  # complete when it was named: if it no longer is, it is damaged
                return path
        complete = self.all()
        return complete[-1] if which == LATEST and complete else None

    def read_info(self, path: Path) -> Info:
        """What a checkpoint says about itself, its files checked: a collective, each process checks some."""
        with failing_together(f"checking {path}"):
            info = _read_info(path)
            for name in sorted(info.files)[self.world.rank :: self.world.size]:
                _check_file(path, name, *info.files[name])
        return info

    def load(self, path: Path, model: ShardedModel, optimizer: StepOptimizer | None, rows: int | None = None) -> None:
        """Read weights, and averages if an optimizer is given, into a model: a collective.

        Args:
            rows: of the item table in the checkpoint, where it has fewer than the model's: the others stay as they are.
        """
        state = state_of(model, optimizer)
        if rows is not None:
            state = {name: clipped(value, rows) if "item_table" in name else value for name, value in state.items()}
        try:
            dcp_load(state, storage_reader=FileSystemReader(path))
        except (CheckpointException, OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: the checkpoint cannot be loaded: {_cause(error)}{self._other(path)}"
            ) from error

    def _other(self, path: Path) -> str:
        others = [each.name for each in self.all() if each != path]
        return f"; remove the directory to continue from {others[-1]}" if others else ""


def state_of(model: ShardedModel, optimizer: StepOptimizer | None) -> dict[str, Any]:
    """All tensors of a checkpoint by name; they alias the live ones."""
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    if optimizer is not None:
        state |= {f"optimizer.{name}": value for name, value in optimizer.moments().items()}
    return state


def step_name(step: int) -> str:
    """The directory of a step's checkpoint.

    Example:
        >>> step_name(1200)
        'step-000001200'
    """
    return f"step-{step:09d}"


def _read_info(path: Path) -> Info:
    where = path / INFO
    if not where.exists():
        raise CheckpointError(f"{where} is missing: {_DAMAGED}")
    try:
        plain = json.loads(where.read_text())
        if plain["format"] != FORMAT:
            raise CheckpointError(f"{where}: format {plain['format']}, this software reads {FORMAT}")
        plain["progress"]["position"] = Position(**plain["progress"]["position"])
        plain["progress"], plain["identity"] = Progress(**plain["progress"]), Identity(**plain["identity"])
        plain["files"] = {name: tuple(value) for name, value in plain["files"].items()}
        return Info(**plain)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: not a readable checkpoint description: {error!r}; {_DAMAGED}") from None


def _check_file(path: Path, name: str, size: int, crc: int) -> None:
    file = path / name
    if not file.exists():
        raise CheckpointError(f"{file} is missing: {_DAMAGED}")
    if file.stat().st_size != size:
        raise CheckpointError(f"{file} has {file.stat().st_size} bytes where {size} were written: {_DAMAGED}")
    if crc32_of(file) != crc:
        raise CheckpointError(f"{file} has another checksum than when it was written: {_DAMAGED}")


def _cause(error: BaseException) -> str:
    """The first line that says something; DCP's errors hold one per process."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"process {rank}: {inner}"
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
