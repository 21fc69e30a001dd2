"""The days there are logs of."""

import glob
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from fuxi_torchrec.data.sources import LOGS
from pipelines.daily.config import DAY, LogsConfig


def order(day: str) -> tuple[tuple[int, int, str], ...]:
    """How days follow each other: numbers inside their names by value.

    Example:
        >>> sorted(["2024-05-10", "2024-05-9", "2024-05-01"], key=order)
        ['2024-05-01', '2024-05-9', '2024-05-10']
    """
    parts = [part for part in re.split(r"(\d+)", day) if part]
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


# Ends of the names of logs that are being written; a dot or an underscore at the beginning says the same.
ASIDE = (".tmp", ".temp", ".partial", ".new")


def is_aside(name: str) -> bool:
    """Whether a name is that of a log on its way.

    Example:
        >>> is_aside("2024-05-02.tmp"), is_aside("_temporary"), is_aside("2024-05-02")
        (True, True, False)
    """
    return name.startswith((".", "_")) or name.endswith(ASIDE)


class Logs:
    """The days there are logs of.

    Args:
        config: where they are.
    """

    def __init__(self, config: LogsConfig) -> None:
        self.config = config

    def days(self) -> list[str]:
        """In order."""
        head, tail = self.config.path.split(DAY)
        last = tail.partition("/")[0]
        pattern = re.compile(re.escape(os.path.basename(head)) + "(.+)" + re.escape(last))
        found = set()
        for path in glob.glob(f"{glob.escape(head)}*{glob.escape(last)}"):
            match = pattern.fullmatch(os.path.basename(path))
            if match is not None and not is_aside(match[1]) and self.files(match[1]):
                found.add(match[1])
        return sorted(found, key=order)

    def files(self, day: str) -> list[Path]:
        """Of one day, in order."""
        head, tail = self.config.path.split(DAY)
        path = Path(head + day + tail)
        if path.is_dir():
            found = [each for each in path.rglob("*") if each.name.endswith(LOGS)]
        elif path.exists():
            found = [path]
        else:
            found = [Path(each) for each in glob.glob(glob.escape(head + day) + tail, recursive=True)]
        return sorted(each.absolute() for each in found if each.is_file())

    def link(self, days: Sequence[str], into: Path) -> dict[str, str]:
        """A directory of links to the logs of some days, in their order; what each link stands for."""
        aside = into.with_name(f".{into.name}.new")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        meaning = {}
        for number, day in enumerate(days):
            for part, file in enumerate(self.files(day)):
                name = f"{number:05d}-{part:05d}-{file.name}"
                (aside / name).symlink_to(file)
                meaning[str(into / name)] = str(file)
        shutil.rmtree(into, ignore_errors=True)
        os.rename(aside, into)
        return meaning
