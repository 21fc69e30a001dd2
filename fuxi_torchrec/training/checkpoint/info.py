"""Which checkpoints a run has, and what one says of itself: ``checkpoint.json``, and the checksums of its files."""

import json
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fuxi_torchrec import __version__
from fuxi_torchrec.artifacts import crc32_of, write_atomically
from fuxi_torchrec.data.schedule import Position
from fuxi_torchrec.schema import Record, read_json

FORMAT = 2
INFO = "checkpoint.json"
LATEST, BEST = "latest", "best"  # files with the name of a checkpoint, and its checksum
_DAMAGED = "the checkpoint is damaged: remove its directory to continue from an earlier one"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read."""


@dataclass(frozen=True)
class Progress(Record):
    """Where a run stands, beside its tensors."""

    step: int = 0  # steps trained
    position: Position = field(default_factory=Position)  # of the next step in the data
    total_steps: int = 0  # as planned at the run's first start; schedules run towards it
    best_metric: float | None = None  # of the validations so far
    best_step: int | None = None
    best_of: str | None = None  # what the best metric is, and of which users
    validations_since_best: int = 0  # for early stopping
    validated_step: int | None = None  # of the last validation
    seconds: float = 0.0  # trained so far, over all starts of the run
    events: int = 0  # likewise

    def validated(self, value: float, of: str) -> "Progress":
        """After a validation of this step; it is the best so far if ``best_step`` is now this step."""
        if self.best_metric is None or value > self.best_metric:
            best = replace(self, best_metric=value, best_step=self.step, best_of=of)
            return replace(best, validated_step=self.step, validations_since_best=0)
        return replace(self, validated_step=self.step, validations_since_best=self.validations_since_best + 1)

    def without_best(self) -> "Progress":
        """For a run that is validated otherwise from now on."""
        return replace(self, best_metric=None, best_step=None, best_of=None, validations_since_best=0)


@dataclass(frozen=True)
class Identity(Record):
    """What a checkpoint belongs to."""

    dataset: str  # fingerprint
    vocabulary: str  # fingerprint of the known items
    time_unit: str
    items: int
    encoder: str  # kind and fingerprint

    def check(self, found: "Identity", where: Path) -> None:
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
class Info(Record):
    """What ``checkpoint.json`` says."""

    progress: Progress
    identity: Identity
    metrics: dict[str, float]
    config: dict[str, Any]
    world_size: int
    files: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> size, crc32
    software: str = __version__
    format: int = FORMAT

    def write(self, checkpoint: Path) -> None:
        write_atomically(checkpoint / INFO, json.dumps(asdict(self), indent=1) + "\n")


def step_name(step: int) -> str:
    """The directory of a step's checkpoint.

    Example:
        >>> step_name(1200)
        'step-000001200'
    """
    return f"step-{step:09d}"


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints in a directory, oldest first."""
    return sorted(path.parent for path in directory.glob(f"step-*/{INFO}"))


def named(directory: Path, which: str) -> Path | None:
    """``latest``, ``best`` or a step's number; None if there is no such checkpoint."""
    if which not in (LATEST, BEST):
        path = directory / (step_name(int(which)) if which.isdigit() else which)
        return path if (path / INFO).exists() else None
    pointer = directory / which
    if pointer.exists():
        name = pointer.read_bytes().split(b" ")[0].decode(errors="replace")
        if pointer.read_bytes() != _pointer(name).encode():
            raise CheckpointError(f"{pointer}: damaged: remove it, or give the number of a step")
        path = directory / name
        if path.is_dir():  # complete when it was named: if it no longer is, it is damaged
            return path
    there = complete(directory)
    return there[-1] if which == LATEST and there else None


def point(directory: Path, which: str, checkpoint: Path) -> None:
    """Name a checkpoint ``latest`` or ``best``."""
    write_atomically(directory / which, _pointer(checkpoint.name))


def _pointer(name: str) -> str:
    return f"{name} {zlib.crc32(name.encode()):08x}\n"


def find_checkpoint(directory: Path, which: str | None = None) -> Path:
    """``best``, ``latest`` or a step's number; by default the best one if there is one, else the latest."""
    found = named(directory, which) if which else named(directory, BEST) or named(directory, LATEST)
    if found is None:
        there = ", ".join(path.name for path in complete(directory)) or "none"
        wanted = f"checkpoint {which!r}" if which else "checkpoint"
        raise CheckpointError(
            f"{directory}: no complete {wanted}; there are {there}. Give best, latest or a step's number"
        )
    return found


def read_info(path: Path) -> Info:
    """What a checkpoint says of itself; its files are not looked at."""
    where = path / INFO
    if not where.exists():
        raise CheckpointError(f"{where} is missing: {_reason(path)}")
    try:
        text = where.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{where}: {error.strerror}; {_DAMAGED}") from None
    return read_json(Info, text, where, CheckpointError, _DAMAGED, version=("format", FORMAT))


def _reason(path: Path) -> str:
    if path.exists():
        return _DAMAGED
    return "a running job has removed the checkpoint meanwhile: start again, or raise its checkpoint.keep_last"


def check_file(path: Path, name: str, size: int, crc: int) -> None:
    """Refuse a file that is not as it was written."""
    file = path / name
    if not file.exists():
        raise CheckpointError(f"{file} is missing: {_reason(path)}")
    if file.stat().st_size != size:
        raise CheckpointError(f"{file} has {file.stat().st_size} bytes where {size} were written: {_DAMAGED}")
    if crc32_of(file) != crc:
        raise CheckpointError(f"{file} has another checksum than when it was written: {_DAMAGED}")
