"""Files of a refresh that are the same as before."""

import os
import shutil
from pathlib import Path

from fuxi_torchrec.artifacts import sync


def link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where links cannot be made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        sync(target)
