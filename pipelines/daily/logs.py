"""The days there are logs of."""

import glob
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fuxi_torchrec.events.sources import LOGS
from pipelines.daily.config import DAY, LogsConfig
from pipelines.daily.state import DailyError


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


def shape(day: str) -> str:
    """A day's name without its numbers; all days have one.

    Example:
        >>> shape("2024-05-9") == shape("2024-05-10"), shape("archive")
        (True, 'archive')
    """
    return re.sub(r"\d+", "0", day)


def check_names(days: Sequence[str]) -> None:
    """Refuse what lies beside the logs and is no day: it would come after all days, and end the loop for good."""
    shapes = Counter(map(shape, days))
    usual = shapes.most_common(1)[0][0] if shapes else ""  # the first in order if there are as many of each
    others = [day for day in days if shape(day) != usual]
    if others:
        example = next(day for day in days if shape(day) == usual)
        raise DailyError(
            f"{', '.join(others[:5])}: not named as day {example} is. What is no day's log: move it elsewhere, put an "
            f"underscore before its name, or --skip {others[0]}; what is one: name it as the others are"
        )


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
            found = list(path.rglob("*"))
        elif path.exists():
            found = [path]
        else:
            found = [Path(each) for each in glob.glob(glob.escape(head + day) + tail, recursive=True)]
        return sorted(each.absolute() for each in found if self._is_log(each))

    def _is_log(self, path: Path) -> bool:
        """Whether a file of a day is one that is read; nothing below the day's own name may be aside."""
        inside = path.relative_to(os.path.dirname(self.config.path.split(DAY)[0]) or ".").parts[1:]
        return path.name.endswith(LOGS) and path.is_file() and not any(map(is_aside, inside))

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
