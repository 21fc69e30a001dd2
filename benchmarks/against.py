"""This checkout against another one, in one run: the encoder's passes, training and acknowledged appends, in turn.

    git worktree add ../old COMMIT
    python -m benchmarks.against ../old

Both sides run the same public names and command lines in processes of their own, so the other checkout may be of any
version that has them. Exit code 1 if this one is slower by more than a twentieth.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
# name: width, blocks, heads, users, events of each
SHAPES = {
    "d = 64, 86 x 160": (64, 2, 2, 86, 160),
    "d = 128, 8 x 1,024": (128, 4, 4, 8, 1024),
    "d = 256, 4 x 1,024": (256, 2, 4, 4, 1024),
}
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
CALLERS, APPENDS = 32, 40  # events of each caller
LEAST = 0.95  # of the other one's speed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both in turn and write the ratios down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?", help="another checkout of this repository")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured; the best counts")
    parser.add_argument("--only", default="encoder,appends,training", help="what is measured")
    parser.add_argument("--here", choices=("encoder", "appends"), help=argparse.SUPPRESS)  # in a child
    options = parser.parse_args(arguments)
    if options.here:
        print(json.dumps(encoder_times() if options.here == "encoder" else append_rates()))
        return 0
    if options.other is None or not (options.other / "fuxi_torchrec").is_dir():
        parser.error(f"{options.other}: no checkout of this repository")
    from benchmarks import harness

    other = options.other.resolve()
    with tempfile.TemporaryDirectory(prefix="against-") as scratch:
        found = measure({"other": other, "this": HERE}, Path(scratch), options.rounds, options.only.split(","))
    rows, aims = [], []
    for name in found["this"]:
        old, new = (found[side][name] for side in ("other", "this"))
        rows.append([name, f"{old:,.0f}", f"{new:,.0f}", f"{new / old:.2f}"])
        aims.append(harness.Aim(f"{name}: this over the other", new / old, LEAST))
    about = (
        f"`python -m benchmarks.against`, float32. {harness.machine()}. Commit {commit(other)} (*before*) against "
        f"{commit(HERE)} (*now*), the best of {options.rounds} rounds each, taken in turn; encoder on one thread, "
        "appended events until they are on disk, by one caller and by 32 at a time; "
        "training with synthetic histories of MovieLens-1M's size (d = 64, 128 users a step, 1,024 shared negatives) "
        "through `pipelines.train` under torchrun.\n\n"
        + harness.table(["what", "before, events/s", "now, events/s", "now / before"], rows)
    )
    text = "\n\n".join([about, "\n".join(f"* {aim}" for aim in aims)])
    harness.publish("against", "Before and now", text, found)
    return harness.conclude(aims)


def measure(sides: dict[str, Path], scratch: Path, rounds: int, wanted: Sequence[str]) -> dict[str, dict[str, float]]:
    """Events a second of everything, by side."""
    best: dict[str, dict[str, float]] = {side: {} for side in sides}
    for side, place in sides.items():
        if "training" in wanted:
            run(place, ["-m", "pipelines.prepare", "synthetic", *MOVIES, "--output", str(scratch / side)])
    for number in range(rounds):
        for side, place in sides.items():
            times: dict[str, float] = {}
            for name in {"encoder", "appends"} & {*wanted}:
                times |= json.loads(run(place, [str(Path(__file__)), "--here", name]).splitlines()[-1])
            for ranks in (1, 2) if "training" in wanted else ():
                folder = scratch / f"run-{side}-{ranks}"
                shutil.rmtree(folder, ignore_errors=True)
                times[f"training, {ranks} rank{'s' * (ranks > 1)}"] = training_speed(
                    place, folder, scratch / side, ranks
                )
            for name, value in times.items():
                best[side][name] = max(value, best[side].get(name, 0.0))
            print(f"round {number + 1} of {rounds}, {side}: {json.dumps({k: round(v) for k, v in times.items()})}")
    return best


def run(place: Path, arguments: Sequence[str]) -> str:
    """Python in a checkout; its output."""
    environment = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=place, env=environment, capture_output=True, text=True, timeout=1200
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


def encoder_times() -> dict[str, float]:
    """Events a second of forward, and of forward and backward, of the encoder that is imported here."""
    import torch

    from fuxi_torchrec import FuXiLinearConfig, FuXiLinearEncoder, geometric_periods

    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for name, (dim, layers, heads, users, events) in SHAPES.items():
        torch.manual_seed(0)
        periods = geometric_periods(1024, 8, 8)
        encoder = FuXiLinearEncoder(
            FuXiLinearConfig(
                dim=dim, num_layers=layers, num_heads=heads, max_positions=events, temporal_periods=periods
            )
        )
        offsets = torch.arange(users + 1) * events
        times = 1_700_000_000 + torch.randint(20_000, (users, events)).cumsum(1)
        x = (torch.randn(users * events, dim) * 0.1).requires_grad_()
        batch: Any = (offsets, times.flatten(), times[:, -1] + 3600)

        def forward() -> None:
            with torch.no_grad():
                encoder(x, *batch, validate=False)  # noqa: B023

        def both() -> None:
            encoder(x, *batch, validate=False).sum().backward()  # noqa: B023

        for what, function in (("forward", forward), ("forward and backward", both)):
            found[f"encoder, {name}, {what}"] = users * events / fastest(function)
    return found


def append_rates() -> dict[str, float]:
    """Events a second that a Recommender has on disk, one a call."""
    from fuxi_torchrec import Recommender
    from fuxi_torchrec.serving.tests.random_export import DemoExport, write_demo_export

    with tempfile.TemporaryDirectory(prefix="against-", dir=Path.cwd()) as scratch:
        place = Path(scratch)
        write_demo_export(place / "export", DemoExport(items=1000, users=CALLERS))
        with Recommender.load(place / "export") as recommender:
            first = recommender.manifest.as_of

            def append(user: int, events: int, hour: int) -> None:
                for second in range(events):
                    recommender.append([user], [1001], [first + 3600 * hour + second])

            def together(hour: int) -> None:
                callers = [threading.Thread(target=append, args=(u, APPENDS, hour)) for u in range(CALLERS)]
                for caller in callers:
                    caller.start()
                for caller in callers:
                    caller.join()

            hours = iter(range(1, 100))
            alone, all_of_them = 8 * APPENDS, CALLERS * APPENDS
            return {
                "appends, one caller": alone / fastest(lambda: append(0, alone, next(hours))),
                f"appends, {CALLERS} callers": all_of_them / fastest(lambda: together(next(hours))),
            }


def fastest(function: Any, repeats: int = 5) -> float:
    """Seconds of the best of several calls, after one that is not timed."""
    function()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def commit(place: Path) -> str:
    """The short name of a checkout's commit."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=place, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
