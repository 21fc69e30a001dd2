"""Files that are whole or not there, also when the machine stops."""

import os
import zlib
from pathlib import Path


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
