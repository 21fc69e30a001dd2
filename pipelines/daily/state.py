"""What the daily pipeline leaves on disk: directories of each day, what has been done, and what is published.

ROOT/inputs/DAY      links to the logs that the day's dataset or refresh reads
ROOT/data/DAY        its dataset
ROOT/runs/DAY        its training run, with the evaluation
ROOT/exports/DAY     its export
ROOT/jobs            logs of the jobs
ROOT/state.json      every day's stages
ROOT/releases/DAY    what publishing the day meant: release.json, and links to export, run and data
ROOT/published       link to a release; moved in one step
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fuxi_torchrec.artifacts import lock, sync, write_atomically
from fuxi_torchrec.schema import CHECKSUM, Record, read_json, sealed

VERSION = 2
STATE, LOCK, JOB_LOCK, RELEASE = "state.json", ".lock", ".job.lock", "release.json"
LEFT = "left"  # beside release.json: when the pointer left the day for another

DayStatus = Literal["waiting", "running", "failed", "rejected", "published"]
StageStatus = Literal["running", "failed", "finished"]


class DailyError(RuntimeError):
    """The pipeline cannot do what it was asked to; the message says what to do."""


class StageError(DailyError):
    """A stage that has failed; after another error its job may still run."""


def now() -> str:
    """The time as it is written down."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def locked(path: Path, what: str, wait_seconds: float = 0.5) -> Iterator[None]:
    """Hold a lock; the system lets go when the process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        file.seek(0)
        if not lock(file, wait_seconds):
            holder = file.read().strip() or "another process"
            raise DailyError(f"{path.parent}: {what} is locked by {holder}: wait for it, or stop it")
        file.truncate()
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield


@dataclass(frozen=True)
class Layout:
    """The directories below ROOT."""

    root: Path

    def of(self, kind: Literal["inputs", "data", "runs", "exports", "releases"], day: str) -> Path:
        if day in ("", ".", "..") or "/" in day:
            raise DailyError(f"{day!r} cannot be a day's name")  # it would lead elsewhere
        return self.root / kind / day


@dataclass(frozen=True)
class Evaluation:
    """What the pipeline reads and keeps of an evaluation: metrics by request time, and what they are of."""

    split: str
    filter_seen: bool
    checkpoint: str
    step: int
    dataset: str
    users: int
    last: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> "Evaluation":
        return read_json(Evaluation, path.read_bytes(), path, StageError, "remove it, and run again: it is made anew")


@dataclass
class Stage(Record):
    """One stage of a day."""

    status: StageStatus = "running"
    attempts: int = 0
    started: str | None = None
    finished: str | None = None
    job: str | None = None  # TorchX's handle
    logs: str | None = None
    message: str | None = None

    def took(self) -> str:
        if self.started is None or self.finished is None:
            return "done"
        return f"{(datetime.fromisoformat(self.finished) - datetime.fromisoformat(self.started)).total_seconds():.0f} s"


@dataclass
class Day(Record):
    """One day: what it began from, what was done, how it ended."""

    status: DayStatus = "waiting"  # whether it is published now is for the releases to say
    kind: Literal["train", "refresh"] = "train"  # a new model, or the published one with new events
    base: str | None = None  # the day that was published when this one began
    stages: dict[str, Stage] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    reason: str | None = None  # why it failed, was rejected or was published
    skipped: bool = False  # its log is left out


@dataclass
class _StateFile(Record):
    version: int
    days: dict[str, Day]


class State:
    """Every day's stages, in a file that is whole at any moment."""

    def __init__(self, root: Path) -> None:
        self.path, self.days = root / STATE, dict[str, Day]()
        if self.path.exists():
            advice = "move it away: published days are known without it, one on its way is done again with --redo"
            version = ("version", VERSION)
            text = self.path.read_bytes()
            seal = CHECKSUM.encode() in text  # who changes it by hand leaves that out
            self.days = read_json(_StateFile, text, self.path, DailyError, advice, version=version, seal=seal).days

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, sealed(asdict(_StateFile(VERSION, self.days))))

    def look(self, day: str) -> Day:
        """A day's record; a new one is not kept."""
        return self.days.get(day, Day())

    def start(self, day: str, stage: str) -> Stage:
        """A stage begins, or begins again."""
        stages = self.days[day].stages
        stages[stage] = Stage("running", stages.get(stage, Stage()).attempts + 1, now())
        self.save()
        return stages[stage]

    def end(self, day: str, stage: str, status: StageStatus, message: str | None = None) -> None:
        found = self.days[day].stages.setdefault(stage, Stage())
        found.status, found.finished, found.message = status, now(), message
        self.save()

    def close(self, day: str, status: DayStatus, reason: str | None) -> None:
        self.days[day].status, self.days[day].reason = status, reason
        self.save()


@dataclass(frozen=True)
class Release(Record):
    """What publishing a day meant; never changed afterwards."""

    day: str  # of the export
    trained: str  # the day of the model; an earlier one if the export was only refreshed
    evaluation: Evaluation  # of the model
    previous: str | None = None  # what was published before
    at: str = field(default_factory=now)


class Releases:
    """Days that were published, and which of them is now."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.pointer = layout, layout.root / "published"

    def ever(self) -> set[str]:
        """Days that the pointer is or was at; a release written just before a stop is not among them."""
        return {*self.line()[:1], *(path.parent.name for path in self.layout.root.glob(f"releases/*/{LEFT}"))}

    def read(self, day: str) -> Release:
        path = self.layout.of("releases", day) / RELEASE
        if not path.exists():
            found = sorted(path.parent.name for path in self.layout.root.glob(f"releases/*/{RELEASE}"))
            raise DailyError(f"day {day} was never published; published were: {', '.join(found) or 'none'}")
        text, advice = path.read_bytes(), "restore it, or point published elsewhere"
        return read_json(Release, text, path, DailyError, advice, seal=CHECKSUM.encode() in text)

    def current(self) -> Release | None:
        """What is published now."""
        return self.read(Path(os.readlink(self.pointer)).name) if self.pointer.is_symlink() else None

    def line(self) -> list[str]:
        """What is published now, what was before it, and so on: what was rolled back is not among them."""
        at, found = self.current(), list[str]()
        while at is not None:
            found.append(at.day)
            known = at.previous is not None and self.layout.of("releases", at.previous).exists()
            at = self.read(str(at.previous)) if known else None
        return found

    def publish(self, release: Release) -> None:
        """Write a release and move the pointer to it; one begun from what is not published any more is refused."""
        with self._moving():
            current = self.current()
            published = current.day if current else None
            if published == release.day:
                return  # stopped just after the pointer moved
            if published != release.previous:
                raise StageError(
                    f"day {release.day} was begun from {release.previous or 'nothing'}, now "
                    f"{published or 'nothing'} is published: --redo {release.day} begins it anew"
                )
            self._write(release)
            self._point_to(release.day)

    def roll_back(self, day: str | None) -> tuple[str, str]:
        """Move the pointer to a day's release, by default to what was published before; from where to where."""
        with self._moving():
            current = self.current()
            if current is None:
                raise DailyError(f"{self.layout.root}: nothing is published")
            wanted = day if day is not None else current.previous
            if wanted is None:
                raise DailyError(f"nothing was published before day {current.day}")
            self.read(wanted)
            if not (self.layout.of("exports", wanted) / "manifest.json").exists():
                raise DailyError(f"{self.layout.of('exports', wanted)}: the export of day {wanted} is gone")
            if wanted != current.day:
                self._point_to(wanted)
            return current.day, wanted

    def forget(self, day: str) -> None:
        """Set aside what a day has made, as ``.DAY.removed``, unless it is published; a release of it is removed."""
        with self._moving():
            if day in self.line():
                raise DailyError(f"day {day} is published, or was before what is: roll back to an earlier day first")
            release = self.layout.of("releases", day)
            for kind in ("exports", "runs", "data", "inputs"):  # the last stage's first: what stays belongs together
                path = self.layout.root / kind / day
                aside = path.with_name(f".{day}.removed")
                if path.exists():
                    shutil.rmtree(aside, ignore_errors=True)
                    os.rename(path, aside)  # never half a dataset under its own name
            shutil.rmtree(release, ignore_errors=True)

    def _moving(self) -> contextlib.AbstractContextManager[None]:
        return locked(self.layout.root / ".pointer.lock", "the pointer", wait_seconds=30.0)

    def _write(self, release: Release) -> None:
        place = self.layout.of("releases", release.day)
        aside = place.with_name(f".{release.day}.new")
        for old in (place, aside):  # written before a stop, never pointed to: a day is published once
            shutil.rmtree(old, ignore_errors=True)
        aside.mkdir(parents=True)
        (aside / "export").symlink_to(f"../../exports/{release.day}")
        (aside / "run").symlink_to(f"../../runs/{release.trained}")
        (aside / "data").symlink_to(f"../../data/{release.trained}")
        write_atomically(aside / RELEASE, sealed(asdict(release)))
        os.rename(aside, place)
        sync(place.parent)

    def _point_to(self, day: str) -> None:
        if self.pointer.is_symlink():
            write_atomically(self.pointer / LEFT, now() + "\n")
        aside = self.pointer.with_name(".published.new")
        aside.unlink(missing_ok=True)
        aside.symlink_to(f"releases/{day}")
        os.replace(aside, self.pointer)
        sync(self.layout.root)
