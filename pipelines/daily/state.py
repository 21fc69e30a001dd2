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
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fuxi_torchrec.artifacts import lock, sync, write_atomically

VERSION = 1
STATE, LOCK, POINTER_LOCK, PUBLISHED, RELEASE = "state.json", ".lock", ".pointer.lock", "published", "release.json"
ROLLED_BACK = "rolled_back"  # beside release.json: when the pointer left the day for another

DayStatus = Literal["waiting", "running", "failed", "rejected", "published", "skipped"]
StageStatus = Literal["waiting", "running", "failed", "finished"]


class DailyError(RuntimeError):
    """The pipeline cannot do what it was asked to; the message says what to do."""


class StageError(DailyError):
    """A stage that did not give what it should."""


def now() -> str:
    """The time as it is written down."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def locked(path: Path, what: str, wait_seconds: float = 0.5) -> Iterator[None]:
    """Hold a lock; the system lets go when the process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if not lock(file, wait_seconds):
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise DailyError(f"{path.parent}: {what} is locked by {holder}: wait for it, or stop it")
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield


# --- where things are ------------------------------------------------------------------------------------------------


def place_of(parent: Path, day: str) -> Path:
    """Where something of a day is; a name that would lead elsewhere is refused."""
    if day in ("", ".", "..") or "/" in day:
        raise DailyError(f"{day!r} cannot be a day's name")
    return parent / day


@dataclass(frozen=True)
class Layout:
    """The directories below ROOT."""

    root: Path

    def inputs(self, day: str) -> Path:
        """Links to logs."""
        return place_of(self.root / "inputs", day)

    def data(self, day: str) -> Path:
        """The dataset."""
        return place_of(self.root / "data", day)

    def run(self, day: str) -> Path:
        """The training run."""
        return place_of(self.root / "runs", day)

    def export(self, day: str) -> Path:
        """The export."""
        return place_of(self.root / "exports", day)

    @property
    def jobs(self) -> Path:
        """Logs of local jobs."""
        return self.root / "jobs"

    @property
    def lock(self) -> Path:
        """Held by the pipeline that runs."""
        return self.root / LOCK

    def set_aside(self, day: str) -> None:
        """Take what a day has made from its place; the last stage's first, so that what stays belongs together."""
        for path, gone in self._made(day):
            if path.exists():
                shutil.rmtree(gone, ignore_errors=True)
                os.rename(path, gone)  # never half a dataset under its own name

    def remove_aside(self, day: str) -> None:
        """Remove what was set aside."""
        for _, gone in self._made(day):
            if gone.exists():
                shutil.rmtree(gone)

    def _made(self, day: str) -> list[tuple[Path, Path]]:
        """What a day has made, and where it is set aside."""
        made = (self.export(day), self.run(day), self.data(day), self.inputs(day))
        return [(path, path.with_name(f".{path.name}.removed")) for path in made]


# --- what has been done ----------------------------------------------------------------------------------------------


@dataclass
class Stage:
    """One stage of a day."""

    status: StageStatus = "waiting"
    attempts: int = 0
    started: str | None = None
    finished: str | None = None
    seconds: float | None = None
    job: str | None = None  # TorchX's handle
    logs: str | None = None
    message: str | None = None


@dataclass
class Day:
    """One day: where it began, what was done, how it ended.

    Attributes:
        kind: a new model, or the published one with new events.
        base: the day that was published when this one began.
        metrics: of its model.
        reason: why it failed, was rejected or was published.
        before_skip: status and reason of a day that is skipped now.
    """

    status: DayStatus = "waiting"
    kind: Literal["train", "refresh"] = "train"
    base: str | None = None
    stages: dict[str, Stage] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None
    reason: str | None = None
    before_skip: tuple[DayStatus, str | None] | None = None

    def stage(self, name: str) -> Stage:
        """Made if it is not there."""
        return self.stages.setdefault(name, Stage())


class State:
    """Every day's stages, in a file that is whole at any moment.

    Args:
        root: of the pipeline.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / STATE
        self.days: dict[str, Day] = {}
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        try:
            plain = json.loads(self.path.read_text())
            if plain["version"] != VERSION:
                raise DailyError(f"{self.path}: version {plain['version']}, this software reads {VERSION}")
            for name, day in plain["days"].items():
                stages = {each: Stage(**stage) for each, stage in day.pop("stages").items()}
                self.days[name] = Day(**day, stages=stages)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise DailyError(
                f"{self.path}: not a readable state file: {error!r}. Move it away: published days are known without "
                "it, a day on its way must be done again with --redo"
            ) from None

    def save(self) -> None:
        """Write it down."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        plain = {"version": VERSION, "days": {name: dataclasses.asdict(day) for name, day in self.days.items()}}
        write_atomically(self.path, json.dumps(plain, indent=1) + "\n")

    def day(self, name: str) -> Day:
        """Made if it is not there."""
        return self.days.setdefault(name, Day())

    def start(self, day: str, stage: str) -> Stage:
        """A stage begins, or begins again."""
        found = self.day(day).stage(stage)
        found.status, found.started, found.finished, found.seconds = "running", now(), None, None
        found.job = found.logs = found.message = None
        found.attempts += 1
        self.save()
        return found

    def end(self, day: str, stage: str, status: StageStatus, message: str | None = None) -> None:
        """A stage is done with."""
        found = self.day(day).stage(stage)
        found.status, found.finished, found.message = status, now(), message
        if found.started is not None:
            began, ended = datetime.fromisoformat(found.started), datetime.fromisoformat(found.finished)
            found.seconds = (ended - began).total_seconds()
        self.save()


# --- what is published -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """What publishing a day meant; never changed afterwards.

    Attributes:
        day: its name; the export is of this day.
        trained: the day of the model; an earlier one if the export was only refreshed.
        metrics: of the model.
        previous: what was published before.
        at: when it was made.
    """

    day: str
    trained: str
    metrics: dict[str, Any]
    previous: str | None = None
    at: str = field(default_factory=now)


class Releases:
    """Days that were published, and which of them is now.

    Args:
        layout: of the pipeline.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.directory, self.pointer = layout.root / "releases", layout.root / PUBLISHED

    def ever(self) -> set[str]:
        """Days that the pointer is known to have been at; a release written just before a stop may be at none."""
        left = self.directory.glob(f"*/{ROLLED_BACK}") if self.directory.exists() else ()
        return {*self.line(), *(path.parent.name for path in left)}

    def read(self, day: str) -> Release:
        """The release of a day."""
        path = place_of(self.directory, day) / RELEASE
        try:
            return Release(**json.loads(path.read_text()))
        except FileNotFoundError:
            there = ", ".join(sorted(p.parent.name for p in self.directory.glob(f"*/{RELEASE}"))) or "none"
            raise DailyError(f"day {day} was never published; published were: {there}") from None
        except (json.JSONDecodeError, TypeError) as error:
            raise DailyError(f"{path}: not a readable release: {error!r}") from None

    def current(self) -> Release | None:
        """What is published now."""
        try:
            target = os.readlink(self.pointer)
        except FileNotFoundError:
            return None
        return self.read(Path(target).name)

    def line(self) -> list[str]:
        """What is published now, what was before it, and so on: what was rolled back is not among them."""
        found: list[str] = []
        at = self.current()
        while at is not None:
            found.append(at.day)
            before = at.previous
            at = self.read(before) if before is not None and (self.directory / before / RELEASE).exists() else None
        return found

    def publish(self, release: Release) -> None:
        """Write a release and move the pointer to it; one begun from what is not published any more is refused."""
        with self._moving():
            current = self.current()
            if current is not None and current.day == release.day:
                return  # stopped just after the pointer moved
            if (current.day if current else None) != release.previous:
                raise DailyError(
                    f"day {release.day} was begun from {release.previous or 'nothing'}, now "
                    f"{current.day if current else 'nothing'} is published: --redo {release.day} begins it anew"
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
            if not (self.layout.export(wanted) / "manifest.json").exists():
                raise DailyError(f"{self.layout.export(wanted)}: the export of day {wanted} is gone")
            if wanted != current.day:
                write_atomically(self.directory / current.day / ROLLED_BACK, now() + "\n")
                self._point_to(wanted)
                (self.directory / wanted / ROLLED_BACK).unlink(missing_ok=True)
            return current.day, wanted

    def forget(self, day: str) -> None:
        """Set aside what a day has made, unless it is published, and remove the release of one that was rolled back."""
        with self._moving():
            if day in self.line():
                raise DailyError(f"day {day} is published, or was before what is: roll back to an earlier day first")
            self.layout.set_aside(day)
            shutil.rmtree(place_of(self.directory, day), ignore_errors=True)

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        with locked(self.layout.root / POINTER_LOCK, "the pointer", wait_seconds=30.0):
            yield

    def _write(self, release: Release) -> None:
        place, aside = self.directory / release.day, self.directory / f".{release.day}.new"
        if (place / RELEASE).exists():
            shutil.rmtree(place)  # written before a stop, never pointed to: a day is published once
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        (aside / "export").symlink_to(f"../../exports/{release.day}")
        (aside / "run").symlink_to(f"../../runs/{release.trained}")
        (aside / "data").symlink_to(f"../../data/{release.trained}")
        write_atomically(aside / RELEASE, json.dumps(dataclasses.asdict(release), indent=1) + "\n")
        os.rename(aside, place)
        sync(self.directory)

    def _point_to(self, day: str) -> None:
        aside = self.pointer.with_name(f".{PUBLISHED}.new")
        aside.unlink(missing_ok=True)
        aside.symlink_to(f"releases/{day}")
        os.replace(aside, self.pointer)
        sync(self.layout.root)
