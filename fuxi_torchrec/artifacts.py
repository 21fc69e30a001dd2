"""Files that are whole or not there, also when the machine stops, and that one process writes at a time."""

import fcntl
import os
import time
import zlib
from pathlib import Path
from typing import IO, Any


def write_atomically(path: Path, text: str) -> None:
    """Put a text in a file's place: all of it or nothing, and on disk when this returns."""
    aside = path.with_name(f".{path.name}.new")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or a directory's list of files, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def crc32_of(path: Path) -> int:
    """Of a file's contents."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            value = zlib.crc32(block, value)
    return value


def sync_all(directory: Path) -> None:
    """Wait until a directory with everything below it is on disk."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


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


class OutputLock:
    """The right to write an output: a file beside it that one process holds, and that is gone afterwards.

    Args:
        output: what is to be written; its directory is made if need be.
    """

    def __init__(self, output: Path) -> None:
        parent = output.absolute().parent
        self.path = parent / f".{output.name}.lock"
        self._file: IO[str] | None = None

    def take(self) -> bool:
        """Whether it is this process's now; False if another one has it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a")
        try:
            mine = lock(file, 0.0) and os.fstat(file.fileno()).st_ino == self.path.stat().st_ino
        except FileNotFoundError:  # its holder has just removed it
            mine = False
        except OSError:
            file.close()
            raise
        if not mine:
            file.close()
            return False
        self._file = file
        return True

    def release(self) -> None:
        """Let others have it; nothing happens if it was not taken."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            self._file.close()
            self._file = None
