"""Files that are whole or not there, also when the machine stops, and that one process writes at a time."""

import fcntl
import os
import zlib
from pathlib import Path
from typing import IO


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
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = self.path.exists() and os.fstat(file.fileno()).st_ino == self.path.stat().st_ino
        except OSError:
            mine = False
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
