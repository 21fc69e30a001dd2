"""Damage every format and sort what happens.

python -m benchmarks.fuzz [--cases N] [--seed S] [--formats NAME ...] [--jobs J] [--write]
python -m benchmarks.fuzz --fixtures DIR --seed S --format NAME --case I      # one case again
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.fuzz import report
from benchmarks.fuzz.fuzzer import FORMATS, Fuzzer
from benchmarks.fuzz.outcomes import GOOD
from benchmarks.fuzz.pool import Case

SECONDS = 60.0  # of a case
SHOWN = 3  # cases of a format and an outcome that are printed
MEMORY = Path("/dev/shm")  # copies are made in memory where that is possible: everything we write waits for the disk


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=50, help="of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="NAME")
    parser.add_argument("--format", choices=FORMATS, metavar="NAME", help="of the one case")
    parser.add_argument("--case", type=int, metavar="I", help="run this one case")
    parser.add_argument("--fixtures", type=Path, metavar="DIR", help="made there, or found there from an earlier run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a case, until it counts as hung")
    parser.add_argument("--show", type=int, default=SHOWN, help="cases of a format and an outcome that are printed")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="outcomes, a line of JSON each; those that it has are not run again"
    )
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args(arguments)
    if (args.case is None) != (args.format is None):
        parser.error("--format and --case go together")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases; 1 if one was silent, crashed or hung, or too many were unclear."""
    args = parse(arguments)
    names, numbers = args.formats, range(args.cases)
    if args.case is not None:
        names, numbers = [args.format], range(args.case, args.case + 1)
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-", dir=MEMORY if MEMORY.is_dir() else None))
    place = args.fixtures.absolute() if args.fixtures else Path(tempfile.mkdtemp(prefix="fuzz-fixtures-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nothing is left behind
    try:
        fuzzer = Fuzzer(place, scratch, args.jobs, args.seconds)
        fuzzer.prepare(names)
        found = fuzzer.run([Case(name, number, args.seed) for number in numbers for name in names], args.output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    bad = [(case, outcome) for case, outcome in found if outcome.kind not in GOOD]
    report.show(bad, place, args.show)
    if args.case is not None and not bad:
        report.show(found, place, 1)
    print(f"\n{report.table(found)}\n")
    if args.write:
        report.publish(found, args.cases, args.seed)
    if not args.fixtures and not bad:
        shutil.rmtree(place, ignore_errors=True)
    return 0 if report.passed(found) else 1


if __name__ == "__main__":
    sys.exit(main())
