"""Which checkpoints a run has, and what one says of itself: ``checkpoint.json``, and the checksums of its files."""

import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from fuxi_torchrec import __version__
from fuxi_torchrec.artifacts import crc32_of, inside, write_atomically
from fuxi_torchrec.data.schedule import Position
from fuxi_torchrec.errors import FuxiError
from fuxi_torchrec.schema import Record, read_json, sealed

FORMAT = 3
INFO, METADATA = "checkpoint.json", ".metadata"
LATEST, BEST = "latest", "best"  # files with the name of a checkpoint
_FILES = re.compile(r"\.metadata|__\d+_\d+\.distcp")
_STEP = re.compile(r"step-\d{9,}")
_DAMAGED = "the checkpoint is damaged: remove its directory to continue from an earlier one"


_Schema = TypeVar("_Schema")


class CheckpointError(FuxiError, RuntimeError):
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

    def __post_init__(self) -> None:
        for name in self.files:
            if not _FILES.fullmatch(name):
                raise ValueError(f"files: {name!r} is no file of a checkpoint")
        if self.world_size < 1 or self.progress.step < 0 or self.identity.items < 0:
            raise ValueError("world_size must be positive, progress.step and identity.items not negative")

    def write(self, checkpoint: Path) -> None:
        write_atomically(checkpoint / INFO, sealed(asdict(self)))


@dataclass(frozen=True)
class _Pointer(Record):
    """What ``latest`` and ``best`` say."""

    checkpoint: str

    def __post_init__(self) -> None:
        if not _STEP.fullmatch(self.checkpoint):
            raise ValueError(f"{self.checkpoint!r} is no checkpoint's name")


def point(directory: Path, which: str, checkpoint: Path) -> None:
    """Let ``latest`` or ``best`` name a checkpoint."""
    write_atomically(directory / which, sealed(asdict(_Pointer(checkpoint.name))))


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
        path = directory / (step_name(int(which)) if which.isdecimal() else which)
        return path if _STEP.fullmatch(path.name) and (path / INFO).exists() else None
    pointer = directory / which
    if pointer.exists():
        advice = f"remove it, and name the checkpoint by its step in place of {which}"
        path = inside(directory, _read(_Pointer, pointer, advice).checkpoint, CheckpointError)
        if path.is_dir():  # complete when it was named: if it no longer is, it is damaged
            return path
    there = complete(directory)
    return there[-1] if which == LATEST and there else None


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
    info = _read(Info, where, _DAMAGED, version=("format", FORMAT))
    if METADATA not in info.files:
        raise CheckpointError(f"{where}: files: {METADATA} is missing; {_DAMAGED}")
    return info


def _read(schema: type[_Schema], where: Path, advice: str, version: tuple[str, int] | None = None) -> _Schema:
    try:
        text = where.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{where}: {error.strerror}; {advice}") from None
    return read_json(schema, text, where, CheckpointError, advice, version=version, seal=True)


def _reason(path: Path) -> str:
    if path.exists():
        return _DAMAGED
    return "a running job has removed the checkpoint meanwhile: start again, or raise its checkpoint.keep_last"


def check_file(path: Path, name: str, size: int, crc: int) -> None:
    """Refuse a file that is not as it was written."""
    file = inside(path, name, CheckpointError)
    if not file.exists():
        raise CheckpointError(f"{file} is missing: {_reason(path)}")
    if file.stat().st_size != size:
        raise CheckpointError(f"{file} has {file.stat().st_size} bytes where {size} were written: {_DAMAGED}")
    if crc32_of(file) != crc:
        raise CheckpointError(f"{file} has another checksum than when it was written: {_DAMAGED}")
