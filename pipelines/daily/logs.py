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


def is_aside(name: str) -> bool:
    """Whether a name is that of a log that is being written.

    Example:
        >>> is_aside("2024-05-02.tmp"), is_aside("_temporary"), is_aside("2024-05-02")
        (True, True, False)
    """
    return name.startswith((".", "_")) or name.endswith((".tmp", ".temp", ".partial", ".new"))


def check_names(days: Sequence[str]) -> None:
    """Refuse what lies beside the logs and is no day: it would come after all days, and end the loop for good.

    The names of all days differ in their numbers only.
    """
    shapes = {day: re.sub(r"\d+", "0", day) for day in days}
    usual = Counter(shapes.values()).most_common(1)  # the first in order if there are as many of each
    others = [day for day in days if shapes[day] != usual[0][0]]
    if others:
        example = next(day for day in days if day not in others)
        raise DailyError(
            f"{', '.join(others[:5])}: not named as day {example} is. What is no day's log: move it elsewhere, put an "
            f"underscore before its name, or --skip {others[0]}; what is one: name it as the others are"
        )


class Logs:
    """The days there are logs of, in order, and the files of each."""

    def __init__(self, config: LogsConfig) -> None:
        self.head, self.tail = config.path.split(DAY)

    def days(self) -> list[str]:
        last = self.tail.partition("/")[0]
        pattern = re.compile(re.escape(os.path.basename(self.head)) + "(.+)" + re.escape(last))
        paths = glob.glob(f"{glob.escape(self.head)}*{glob.escape(last)}")
        names = {match[1] for path in paths if (match := pattern.fullmatch(os.path.basename(path)))}
        return sorted((name for name in names if not is_aside(name) and self.files(name)), key=order)

    def files(self, day: str) -> list[Path]:
        path = Path(self.head + day + self.tail)
        if path.is_dir():
            found = list(path.rglob("*"))
        elif path.exists():
            found = [path]
        else:
            found = [Path(each) for each in glob.glob(glob.escape(self.head + day) + self.tail, recursive=True)]
        return sorted(each.absolute() for each in found if self._is_log(each))

    def _is_log(self, path: Path) -> bool:
        """Whether a file of a day is one that is read; nothing below the day's own name may be aside."""
        inside = path.relative_to(os.path.dirname(self.head) or ".").parts[1:]
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
