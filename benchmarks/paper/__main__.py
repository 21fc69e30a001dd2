"""The paper's experiments, each by one command, on sets that can be had.

    python -m benchmarks.paper list [NAME ...]
    python -m benchmarks.paper NAME ... [--budget MINUTES] [--jobs 2]      # a study, a row, or a pattern: 'temporal-*'
    python -m benchmarks.paper report

A row is trained for a stated time of one processor: how many steps that is, a short training tells first, and the plan
is kept. `--budget` gives each row other minutes, on a machine that has more of them. A row that was killed goes on
where it was. Results are lines of docs/results/paper.json, every user's rank included; `report` writes the tables and
figures of docs/paper.md.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase

from benchmarks import experiments
from benchmarks.paper import report
from benchmarks.paper.rows import ROWS, Timed
from benchmarks.paper.run import Place, run_row, state


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, list or report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="list, report, or what to run")
    parser.add_argument("--budget", type=_minutes, metavar="MINUTES", help="of processor time for each row")
    parser.add_argument("--jobs", type=int, default=1, choices=range(1, 65), metavar="N", help="rows at a time")
    options = parser.parse_args(arguments)
    first, *others = options.names
    if first == "report" and not others:
        return report.write()
    names = others if first == "list" else options.names
    for name in names:
        if not any(_named(row, name) for row in ROWS):
            parser.error(f"no study or row {name}: `python -m benchmarks.paper list` shows them")
    wanted = [row for row in ROWS if not names or any(_named(row, name) for name in names)]
    if first == "list":
        return _list(wanted, options.budget)
    try:
        for set in sorted({row.set for row in wanted}):
            experiments.prepare(set)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"paper: {error}", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(options.jobs) as pool:
        return int(not all(pool.map(lambda row: run_row(row, options.budget or row.minutes), wanted)))


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value <= 100_000:
        raise argparse.ArgumentTypeError(f"{text} is no number of minutes above 0")
    return value


def _named(row: Timed, name: str) -> bool:
    """Whether a row is meant: by its own name or its study's, or by a pattern of one; comparison is all of its sets."""
    return any(fnmatchcase(each, name) for each in (row.name, row.study, row.study.partition("-")[0]))


def _list(rows: Sequence[Timed], budget: float | None) -> int:
    place, total = Place(), 0.0
    for row in rows:
        minutes = budget or row.minutes
        total += row.cost(minutes)
        print(f"{row.name:<52} {row.cost(minutes):>6.1f} min  {state(row, minutes, place):<10} {row.what}")
    print(f"{len(rows)} rows, {total / 60:.1f} hours of processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
