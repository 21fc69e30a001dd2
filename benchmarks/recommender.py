"""A Recommender of this checkout against one of another, in one run: appending, and opening an export.

    git worktree add ../old COMMIT
    python -m benchmarks.recommender ../old [--only append,open]

Exit code 1 if this one is slower than it may be.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import against, harness
from benchmarks.harness import Aim
from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.tests.random_export import DemoExport, write_demo_export

TURNS = 40
LEAST = 0.95  # of the other one's speed
OPENED, OPENINGS, OPEN_AIM = 1_000_000, 3, 1.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both in turn and write the ratios down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recommender", description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?", help="another checkout of this repository")
    parser.add_argument("--only", default="append,open")
    parser.add_argument("--here", nargs=2, metavar=("WHAT", "PLACE"), help=argparse.SUPPRESS)  # in a child
    options = parser.parse_args(arguments)
    if options.here:
        what, place = options.here
        {"append": append_rates, "write": write_large, "open": open_large}[what](Path(place))
        return 0
    if options.other is None or not (options.other / "fuxi_torchrec").is_dir():
        parser.error(f"{options.other}: no checkout of this repository")
    sections: dict[str, harness.Section] = {
        name: partial(section, options.other.resolve()) for name, section in (("append", append), ("open", opening))
    }
    return harness.run_sections("serving", sections, options.only.split(","), "")


def sides(other: Path) -> dict[str, Path]:
    """The other checkout, and this one."""
    return {"other": other, "this": Path(__file__).resolve().parents[1]}


def append(other: Path, scratch: Path) -> tuple[str, list[Aim], Any]:
    """Acknowledged events a second of this checkout and another one, in short turns: the disk may be others' too."""
    best: dict[str, dict[str, float]] = {"other": {}, "this": {}}
    children = {
        side: subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--here", "append", str(scratch / side)],
            env={**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for side, place in sides(other).items()
    }
    for _ in range(TURNS):
        for side, child in children.items():
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write("go\n")
            child.stdin.flush()
            for name, rate in json.loads(child.stdout.readline()).items():
                best[side][name] = max(rate, best[side].get(name, 0.0))
    for child in children.values():
        child.communicate(timeout=60)
        assert not child.returncode, "not every event is there after a restart"
    rows, aims = [], []
    for name, new in best["this"].items():
        old = best["other"][name]
        rows.append([name, f"{old:,.0f}", f"{new:,.0f}", f"{new / old:.2f}"])
        aims.append(Aim(f"{name}: this over the other", new / old, LEAST))
    table = harness.table(["what", "before, events/s", "now, events/s", "now / before"], rows)
    text = (
        f"`Recommender.append`, on disk when it returns; commit {against.commit(other)} (*before*) against this one "
        f"(*now*), the best of {TURNS} short turns each.\n\n{table}"
    )
    return text, aims, best


def append_rates(scratch: Path) -> None:
    """Those of the Recommender that is imported here, a line of JSON for every line that comes in."""
    write_demo_export(scratch, DemoExport(items=50, users=4))
    now, told = Bundle.open(scratch).manifest.as_of, 0
    with Recommender.load(scratch) as recommender:

        def call(first: int, count: int) -> None:
            events = range(first, first + count)
            recommender.append([n % 5000 for n in events], [1001] * count, [now] * count)

        def rate(calls: int, count: int, threads: int = 1) -> float:
            nonlocal told
            told += calls * count
            with ThreadPoolExecutor(threads) as pool:
                began = time.perf_counter()
                list(pool.map(lambda n: call(n * count, count), range(calls)))
                return calls * count / (time.perf_counter() - began)

        for _ in sys.stdin:
            rates = {"one caller, an event each": rate(50, 1), "32 callers, an event each": rate(320, 1, 32)}
            print(json.dumps(rates | {"one caller, 100 events each": rate(10, 100)}), flush=True)
    with Recommender.load(scratch, read_only=True) as recommender:
        assert recommender.info()["recent_events"] == told


def opening(other: Path, scratch: Path) -> tuple[str, list[Aim], Any]:
    """Seconds from an export on disk to its first answer, of both in turn; each has written its own."""
    found: dict[str, list[float]] = {"other": [], "this": []}
    command = [str(Path(__file__).resolve()), "--here"]
    for side, place in sides(other).items():
        against.run(place, [*command, "write", str(scratch / side)])
    for _ in range(OPENINGS):
        for side, place in sides(other).items():
            found[side].append(float(against.run(place, [*command, "open", str(scratch / side)]).splitlines()[-1]))
    old, new = (min(found[side]) for side in ("other", "this"))
    table = harness.table(["before, s", "now, s", "now / before"], [[f"{old:.2f}", f"{new:.2f}", f"{new / old:.2f}"]])
    text = (
        f"An export of {OPENED:,} items (d = 64, flat index) from `Recommender.load` to the first answer, files "
        f"verified as by default; commit {against.commit(other)} (*before*) against this one (*now*), the best of "
        f"{OPENINGS} each, taken in turn, the files in the system's cache.\n\n{table}"
    )
    return text, [Aim("opening: this over the other", new / old, OPEN_AIM, at_most=True)], found


def write_large(place: Path) -> None:
    """An export of many items."""
    model = DemoExport().model | {"dim": 64}
    write_demo_export(place, DemoExport(items=OPENED, users=64, model=model))


def open_large(place: Path) -> None:
    """Say how long it takes to the first answer."""
    began = time.perf_counter()
    with Recommender.load(place, read_only=True) as recommender:
        recommender.recommend([0], recommender.manifest.as_of, k=10)
        print(time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
