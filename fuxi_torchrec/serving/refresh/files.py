"""Files of a refresh: where they are written, and those that are the same as before."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fuxi_torchrec.artifacts import OutputLock, sync
from fuxi_torchrec.export.bundle import ExportError


@contextmanager
def place_for(output: Path) -> Iterator[Path]:
    """A directory beside the output that only this process writes; it goes away unless it was renamed."""
    lock, place = OutputLock(output), output.absolute().with_name(f".{output.name}.refreshing")
    if not lock.take():
        raise ExportError(f"{output}: another refresh is writing it: wait for it, or choose another output")
    try:
        shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
        place.mkdir()
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        lock.release()


def link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where links cannot be made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        sync(target)
