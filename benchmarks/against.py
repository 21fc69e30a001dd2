"""This checkout against another one, in one run: encoder, appends, reader, opening of an export, training, in turn.

    git worktree add ../old COMMIT
    python -m benchmarks.against ../old [--only encoder,reader] [--topic speed]

Both sides run the same public names and command lines in processes of their own, so the other checkout may be of any
version that has them. Exit code 1 if this one is slower than LEAST allows.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
ONE_SIDE = Path(__file__).with_name("one_side.py").resolve()
MOVIES = [
    *("--users", "6040", "--items", "3700", "--groups", "20", "--median-length", "96"),
    *("--length-sigma", "1.05", "--max-length", "2314"),
]
TRAINING = [
    *("model.dim=64", "model.num_layers=2", "model.num_heads=2", "model.max_positions=200", "model.dropout=0.2"),
    "model.temporal_periods=[1, 16, 256, 4096, 65536, 1048576, 16777216, 268435456]",
    *("batch.users=128", "batch.max_length=200", "loss.negatives=shared", "loss.num_negatives=1024"),
    *("logging.tensorboard=false", "validation.every_epochs=null", "checkpoint.every_steps=null"),
    *("logging.every_steps=5", "logging.level=warning", "train.epochs=100"),
]
STEPS, WARM_UP = 45, 10
TURNS = 15  # of each side in a round; the disk is fast and slow from second to second
# of the other one's speed: checksums may cost a tenth of reading and half as much again of opening
LEAST = {"encoder": 0.95, "appends": 1.0, "reader": 0.9, "opening": 1 / 1.5, "training": 0.95}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both in turn and write the ratios down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="another checkout of this repository")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured; the best counts")
    parser.add_argument("--topic", default="", help="of the section of RESULTS.md: commits differ from topic to topic")
    parser.add_argument("--only", default=",".join(LEAST), help="what is measured")
    options = parser.parse_args(arguments)
    if not (options.other / "fuxi_torchrec").is_dir():
        parser.error(f"{options.other}: no checkout of this repository")
    from benchmarks import harness

    other = options.other.resolve()
    with tempfile.TemporaryDirectory(prefix="against-") as scratch:
        found = measure({"other": other, "this": HERE}, Path(scratch), options.rounds, options.only.split(","))
    rows, aims = [], []
    for name in found["this"]:
        old, new = (found[side][name] for side in ("other", "this"))
        rows.append([name, f"{old:,.0f}", f"{new:,.0f}", f"{new / old:.2f}"])
        aims.append(harness.Aim(f"{name}: this over the other", new / old, LEAST[re.split(r"[ ,]", name)[0]]))
    about = (
        f"`python -m benchmarks.against`, float32. {harness.machine()}. Commit {commit(other)} (*before*) against "
        f"{commit(HERE)} (*now*), the best of {options.rounds} rounds each, taken in turn. Encoder on one thread; "
        f"appends until they are on disk, an event a call, the median of {TURNS * options.rounds} turns of each side; "
        "opening in items/s until the Recommender answers; "
        "training with synthetic histories of MovieLens-1M's size (d = 64, 128 users a step, 1,024 shared negatives) "
        "through `pipelines.train` under torchrun.\n\n"
        + harness.table(["what", "before, a second", "now, a second", "now / before"], rows)
    )
    text = "\n\n".join([about, "\n".join(f"* {aim}" for aim in aims)])
    name, title = f"against-{options.topic}".rstrip("-"), f"Before and now: {options.topic}".rstrip(": ")
    harness.publish(name, title, text, found)
    return harness.conclude(aims)


def measure(sides: dict[str, Path], scratch: Path, rounds: int, wanted: Sequence[str]) -> dict[str, dict[str, float]]:
    """What is done in a second, by side."""
    best: dict[str, dict[str, float]] = {side: {} for side in sides}
    for side, place in sides.items():
        (scratch / side).mkdir()
        if "training" in wanted:
            run(place, ["-m", "pipelines.prepare", "synthetic", *MOVIES, "--output", str(scratch / side / "movies")])
    for number in range(rounds):
        for side, place in sides.items():
            rates: dict[str, float] = {}
            for name in wanted:
                if name not in ("training", "appends"):
                    rates |= json.loads(run(place, [str(ONE_SIDE), name, str(scratch / side)]).splitlines()[-1])
            for ranks in (1, 2) if "training" in wanted else ():
                folder = scratch / f"run-{side}-{ranks}"
                shutil.rmtree(folder, ignore_errors=True)
                speed = training_speed(place, folder, scratch / side / "movies", ranks)
                rates[f"training, {ranks} rank{'s' * (ranks > 1)}"] = speed
            for name, value in rates.items():
                best[side][name] = max(value, best[side].get(name, 0.0))
            print(f"round {number + 1} of {rounds}, {side}: {json.dumps({k: round(v) for k, v in rates.items()})}")
    if "appends" in wanted:
        for side, rates in in_turns(sides, scratch, TURNS * rounds).items():
            best[side] |= rates
    return best


def in_turns(sides: dict[str, Path], scratch: Path, count: int) -> dict[str, dict[str, float]]:
    """Appends of both sides, one after the other again and again: medians."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with contextlib.ExitStack() as stack:
        running = {side: stack.enter_context(begin(sides[side], scratch / side)) for side in sides}
        for process in running.values():
            _answer(process)  # it is ready
        for _ in range(count + 1):
            for side, process in running.items():
                print("go", file=process.stdin, flush=True)
                found[side].append(_answer(process))
        for process in running.values():
            process.kill()
    names = list(found["this"][0])
    return {
        side: {name: statistics.median(each[name] for each in turns[1:]) for name in names}
        for side, turns in found.items()
    }


def _answer(process: "subprocess.Popen[str]") -> dict[str, float]:
    assert process.stdout is not None
    said: dict[str, float] = json.loads(process.stdout.readline())
    return said


def begin(place: Path, scratch: Path) -> "subprocess.Popen[str]":
    """The side of a checkout that waits for its turn."""
    pipe = subprocess.PIPE
    command = [sys.executable, str(ONE_SIDE), "appends", str(scratch)]
    return subprocess.Popen(command, cwd=place, env=environment(place), stdin=pipe, stdout=pipe, text=True)


def environment(place: Path) -> dict[str, str]:
    """Of a checkout's processes."""
    return {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}


def run(place: Path, arguments: Sequence[str]) -> str:
    """Python in a checkout; its output."""
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=place, env=environment(place), capture_output=True, text=True, timeout=1200, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{place}: {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def training_speed(place: Path, folder: Path, data: Path, ranks: int) -> float:
    """The median of the logged events a second, after the first steps."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "pipelines.train"]
    settings = [f"data.path={data}", f"train.max_steps={STEPS}", *TRAINING]
    run(place, [*launch, "--run-dir", str(folder), *settings])
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(e["events_per_second"] for e in entries if "loss" in e and e["step"] > WARM_UP)


def commit(place: Path) -> str:
    """The short name of a checkout's commit."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=place, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
