"""Files that are whole or not there, also when the machine stops, and that one process writes at a time."""

import fcntl
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fuxi_torchrec.errors import FuxiError


class OutputError(FuxiError, ValueError):
    """An output that cannot be written as asked."""


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """A path to write at; the file then takes the place of another, whole or not at all, and is on disk."""
    aside = path.with_name(f".{path.name}.new")
    try:
        yield aside
        sync(aside)
        os.replace(aside, path)
        sync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def check_file(flag: str, path: Path) -> None:
    """An error that names the flag if no file can be put there: said before the work."""
    if not path.absolute().parent.is_dir():
        raise OutputError(f"{flag} {path}: there is no directory {path.parent}, make it first")
    if path.is_dir():
        raise OutputError(f"{flag} {path} is a directory: name a file")


def write_atomically(path: Path, text: str) -> None:
    """Put a text in a file's place: all of it or nothing, and on disk when this returns."""
    with replace_file(path) as aside:
        aside.write_text(text)


def inside(directory: Path, name: str, error: type[Exception] = OutputError) -> Path:
    """The path of a file that another file names; an error if it is not in the directory, links followed.

    Example:
        >>> inside(Path("/exports/a"), "users/part-00000.parquet").name
        'part-00000.parquet'
        >>> inside(Path("/exports/a"), "../b/manifest.json")
        Traceback (most recent call last):
        ...
        fuxi_torchrec.artifacts.OutputError: /exports/a: '../b/manifest.json' is outside of the directory
    """
    path = directory / name
    if "\0" in name or not path.resolve().is_relative_to(directory.resolve()):
        raise error(f"{directory}: {name!r} is outside of the directory")
    return path


def sync(path: Path) -> None:
    """Wait until a file, or a directory's list of files, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def follow_umask(path: Path) -> None:
    """Give a file that a library wrote for its owner alone the mode that any new file has."""
    probe = path.with_name(f".{path.name}.mode")
    probe.touch()
    path.chmod(probe.stat().st_mode)
    probe.unlink()


def crc32_of(path: Path) -> int:
    """Of a file's contents."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            value = zlib.crc32(block, value)
    return value


def lock(file: IO[Any], wait_seconds: float = 0.5, shared: bool = False) -> bool:
    """Take a file's lock until it is closed; False if another process keeps it.

    Args:
        file: open for writing; for a shared lock for reading.
        wait_seconds: somebody who only looks (:func:`is_locked`) has it for a moment.
        shared: others may share it.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        except OSError as error:
            what = f"{error.strerror}: this file system does not lock files, take another place"
            raise OSError(error.errno, what, file.name) from None
        else:
            return True


def is_locked(path: Path) -> bool:
    """Whether a process holds a file's lock now."""
    if not path.exists():
        return False
    with path.open() as file:  # NFS gives who only reads a shared lock, and no other
        return not lock(file, 0.0, shared=True)


class NewDirectory:
    """A directory that appears whole, or not at all; one process at a time makes it.

    As a context manager it gives the place to write in, and commits unless there is an error. Where several ranks write
    into the place, one of them calls the methods.

    Args:
        output: must not exist.

    Attributes:
        scratch: a directory beside the output for whatever is needed on the way; it goes away, at the latest with the
            next attempt.
        place: the directory in it that becomes the output.
        lock_path: a file that is locked while the output is being made.
    """

    def __init__(self, output: str | Path) -> None:
        self.output = Path(output).absolute()
        self.scratch = self.output.with_name(f".{self.output.name}.partial")
        self.place = self.scratch / self.output.name
        self.lock_path = self.output.with_name(f".{self.output.name}.lock")
        self._lock: IO[str] | None = None

    def begin(self) -> Path:
        """Make the place, which only this process does; an OutputError if there is an output, or another writer."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        file = self.lock_path.open("a")
        try:
            if not lock(file, 0.0) or os.fstat(file.fileno()).st_ino != self.lock_path.stat().st_ino:
                raise FileNotFoundError
        except FileNotFoundError:  # also if its holder has just removed it
            file.close()
            raise OutputError(
                f"{self.output}: another job is writing it: wait for it, or choose another output"
            ) from None
        except OSError:
            file.close()
            raise
        self._lock = file
        try:
            self.check()
            shutil.rmtree(self.scratch, ignore_errors=True)  # of a process that was killed
            self.place.mkdir(parents=True)
        except BaseException:
            self.end()
            raise
        return self.place

    def check(self) -> None:
        if self.output.exists():
            raise OutputError(f"{self.output} exists: nothing is written over it, choose another output")

    def commit(self) -> None:
        """Give the place its name, everything in it on disk."""
        self.check()
        for path in (*self.place.rglob("*"), self.place):
            sync(path)
        os.rename(self.place, self.output)
        sync(self.output.parent)

    def end(self) -> None:
        """Leave nothing behind but the output, and let others in; nothing happens if it was not begun."""
        if self._lock is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.lock_path.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Path:
        return self.begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.end()
