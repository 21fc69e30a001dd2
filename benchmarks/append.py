"""Appending to a Recommender: this checkout against another one, in one run.

    git worktree add ../old COMMIT
    python -m benchmarks.append ../old

Exit code 1 if this one is slower by more than a twentieth.
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both in turn and write the ratios down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.append", description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?", help="another checkout of this repository")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)  # in a child
    options = parser.parse_args(arguments)
    if options.here:
        append_rates(options.here)
        return 0
    if options.other is None or not (options.other / "fuxi_torchrec").is_dir():
        parser.error(f"{options.other}: no checkout of this repository")
    return harness.run_sections("serving", {"append": partial(append, options.other.resolve())}, ["append"], "")


def append(other: Path, scratch: Path) -> tuple[str, list[Aim], Any]:
    """Acknowledged events a second of this checkout and another one, in short turns: the disk may be others' too."""
    best: dict[str, dict[str, float]] = {"other": {}, "this": {}}
    places = {"other": other, "this": Path(__file__).resolve().parents[1]}
    children = {
        side: subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--here", str(scratch / side)],
            env={**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for side, place in places.items()
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


if __name__ == "__main__":
    sys.exit(main())
