"""Running a row: timing, a grid, the training that is ranked. What is done is on disk, and is not done again.

What a row has is below runs/paper/NAME@MINUTES: plan.json, grid-0 to grid-3, final. A killed row goes on where it was:
a training from its last checkpoint, and what it had chosen and measured stays.
"""

import base64
import json
import shlex
import shutil
import sys
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks import experiments, harness, report
from benchmarks.paper import plan, sizes
from benchmarks.paper.rows import GRID, Timed
from fuxi_torchrec.artifacts import write_atomically
from fuxi_torchrec.config import load_config

RUNS, FILE = Path("runs/paper"), "paper.json"
LAUNCH = "env OMP_NUM_THREADS=1 python -m {}"  # a row has one core
METRIC = "ndcg@10"
TIMED = 60  # steps of which the cost is measured
_WORST = 2**16 - 1  # ranks beyond count as this one: nothing looks so far
_WRITING = threading.Lock()


@dataclass(frozen=True)
class Place:
    """Where a row's work and the results are.

    Attributes:
        runs: below the root, for commands that people can type.
        results: the directory of the results' file.
        timed: steps of which the cost is measured.
    """

    runs: Path = RUNS
    results: Path = experiments.RESULTS
    timed: int = TIMED

    def of(self, row: Timed, minutes: float) -> Path:
        """The row's own directory."""
        return self.runs / f"{row.name}@{minutes:g}"

    def found(self) -> dict[str, Any]:
        """All results so far."""
        return report.read(self.results, FILE)


def state(row: Timed, minutes: float, place: Place) -> str:
    """``done``, ``open``, or how far it is."""
    result = place.found().get(row.name)
    if result is not None and result["minutes"] == minutes:
        return "done"
    own = experiments.ROOT / place.of(row, minutes)
    if not (own / "plan.json").exists():
        return "open" if result is None else f"open; done with {result['minutes']:g} minutes"
    points = sum((own / f"grid-{n}" / "ranked.json").exists() for n in range(len(GRID)))
    return "started" + (f": {points} of {len(GRID)} points of the grid" if row.tuned else "")


def run_row(row: Timed, minutes: float, place: Place | None = None) -> bool:
    """Run what is not done yet and write down what came out; whether all went well."""
    place = place or Place()
    if state(row, minutes, place) == "done":
        print(f"{row.name}: done", flush=True)
        return True
    own = place.of(row, minutes)
    whole = planned(row, minutes, place)
    if whole is None:
        return False
    points: dict[int, float] = {}
    for number in range(len(GRID)) if row.tuned else ():
        settings = plan.choosing(row, number, whole["steps"])
        if not ranked(row, own / f"grid-{number}", settings, "valid"):
            return False
        points[number] = result_of(own / f"grid-{number}")["target"][METRIC]
    chosen = plan.best(points) if points else None
    settings = plan.final(row, chosen, whole["steps"])
    if not ranked(row, own / "final", settings, row.split):
        return False
    found = {
        "minutes": minutes,
        "plan": whole,
        "machine": harness.machine(),
        "commands": commands(row, own / "final", settings, row.split),
        **({} if chosen is None else {"grid": [round(points[n], 5) for n in sorted(points)], "chosen": chosen}),
        **essence(own / "final"),
    }
    with _WRITING:
        report.add(place.results, row.name, found, FILE)
    print(f"{row.name}: NDCG@10 {found['metrics'][METRIC]:.4f}", flush=True)
    return True


def planned(row: Timed, minutes: float, place: Place) -> dict[str, Any] | None:
    """How many steps the budget is: as planned before, here or in the results; else measured now."""
    file = experiments.ROOT / place.of(row, minutes) / "plan.json"
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    recorded = place.found().get(row.name)
    if recorded is not None and recorded["minutes"] == minutes:
        found = recorded["plan"]
    else:
        cost = measured(row, place.of(row, minutes) / "timing", place.timed)
        if cost is None:
            return None
        found = {"seconds_per_step": round(cost, 6), "steps": plan.steps(minutes, cost)}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(found) + "\n")
    return found


def measured(row: Timed, run_dir: Path, steps: int) -> float | None:
    """Processor seconds of a step."""
    shutil.rmtree(experiments.ROOT / run_dir, ignore_errors=True)  # one that was interrupted says nothing
    settings = plan.final(row, 0 if row.tuned else None, plan.LEAST)
    words = [row.config, str(run_dir), str(steps), *settings]
    printed = experiments.run_command(row.name, f"{LAUNCH.format('benchmarks.paper.timing')} {shlex.join(words)}")
    if printed is None:
        return None
    shutil.rmtree(experiments.ROOT / run_dir, ignore_errors=True)
    return float(json.loads(printed.splitlines()[-1])["seconds_per_step"])


def commands(row: Timed, run_dir: Path, settings: Sequence[str], split: str) -> list[str]:
    """A training and its evaluation, as a person would type them."""
    evaluate = f"{LAUNCH.format('pipelines.evaluate')} --run-dir {run_dir} --split {split} --request-time target"
    seen = " --filter-seen" if row.set == "ml-1m" else ""
    output = f" --ranks {run_dir}/ranks.parquet --output {run_dir}/ranked.json"
    return [experiments.train_command(row.config, run_dir, settings, LAUNCH), evaluate + seen + output]


def ranked(row: Timed, run_dir: Path, settings: Sequence[str], split: str) -> bool:
    """Train and rank, if that is not done; whether it is."""
    absolute = experiments.ROOT / run_dir
    if (absolute / "ranked.json").exists():
        return True
    if experiments.stale(row.config, absolute, settings):
        print(f"{row.name}: {run_dir} is a run of other settings: remove it first", file=sys.stderr)
        return False
    train, evaluate = commands(row, run_dir, settings, split)
    if experiments.run_command(row.name, train) is None or experiments.trained(row.name, absolute) is None:
        return False
    return experiments.run_command(row.name, evaluate) is not None


def result_of(run_dir: Path) -> dict[str, Any]:
    """What an evaluation wrote."""
    found: dict[str, Any] = json.loads((experiments.ROOT / run_dir / "ranked.json").read_text())
    return found


def essence(run_dir: Path) -> dict[str, Any]:
    """What the page needs of a run, every user's rank included."""
    absolute, measured = experiments.ROOT / run_dir, result_of(run_dir)
    summary = json.loads((absolute / "summary.json").read_text())
    model = load_config(absolute / "config.yaml").model
    settings = {name: value for name, value in vars(model).items() if name != "kind"}
    ranks = pq.read_table(absolute / "ranks.parquet", columns=["user_id", "rank_target"]).sort_by("user_id")
    return {
        "metrics": report.ranked(measured["target"]),
        "baselines": {name: report.ranked(each) for name, each in measured["baselines"].items()},
        "users": measured["users"],
        "events": round(summary["events_per_second"] * summary["seconds"]),
        "seconds": round(summary["seconds"], 1),
        "peak_memory_mb": summary["peak_memory_mb"],
        "parameters": sizes.parameters(model.kind, settings),
        "ranks": packed(ranks["rank_target"].to_pylist()),
    }


def packed(ranks: Sequence[int | None]) -> str:
    """Ranks as text: 16 bits each, 0 for a target that is no candidate, compressed.

    Example:
        >>> unpacked(packed([1, None, 70_000]))
        [1, None, 65535]
    """
    numbers = np.array([0 if rank is None else min(rank, _WORST) for rank in ranks], dtype="<u2")
    return base64.b64encode(zlib.compress(numbers.tobytes(), 9)).decode()


def unpacked(text: str) -> list[int | None]:
    """The ranks again."""
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<u2")
    return [int(number) or None for number in numbers]
