"""Paths, local and remote: one way to open both."""

from pathlib import Path
from typing import Any

import pyarrow.fs

from fuxi_torchrec.events.errors import DataError


def resolve(path: str | Path) -> tuple[Any, str]:
    """A file system and the path inside it; ``s3://``, ``gs://``, ``hdfs://`` and whatever fsspec knows are remote."""
    text = str(path)
    if is_local(path):
        return pyarrow.fs.LocalFileSystem(), str(Path(text).absolute())
    try:
        filesystem, inside = pyarrow.fs.FileSystem.from_uri(text)
        return filesystem, inside
    except (pyarrow.lib.ArrowInvalid, pyarrow.lib.ArrowNotImplementedError) as arrow_error:
        try:
            import fsspec

            filesystem, inside = fsspec.core.url_to_fs(text)
        except (ImportError, ValueError) as error:
            raise DataError(f"{text}: no file system for this path: {arrow_error}; {error}") from None
        return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(filesystem)), inside


def is_local(path: str | Path) -> bool:
    """Whether the path is on this machine's own file system."""
    return "://" not in str(path)


def read_bytes(path: str | Path) -> bytes:
    """A whole file; a DataError if it cannot be read."""
    filesystem, inside = resolve(path)
    try:
        with filesystem.open_input_stream(inside) as file:
            content: bytes = file.read()
            return content
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def exists(path: str | Path) -> bool:
    """Whether there is something at the path."""
    filesystem, inside = resolve(path)
    found: bool = filesystem.get_file_info(inside).type != pyarrow.fs.FileType.NotFound
    return found
