"""Whether what `pipelines.plan` says of memory is so: its formula against the peak of processes that train.

    python -m benchmarks.planning

Exit code 1 if the formula is off by more than 30 %.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Aim
from benchmarks.training import QUIET, peak
from fuxi_torchrec.config import load_config
from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.prepare import prepare_synthetic
from fuxi_torchrec.data.synthetic import SyntheticConfig
from fuxi_torchrec.worker_group import WorkerGroup

FEW, MANY = 20_000, 1_000_000
PERIODS = "model.temporal_periods=[3600, 14400, 86400, 604800, 2592000, 7776000, 31536000, 126144000]"
OFF_AIM = 0.3


def settings(dim: int, layers: int, events: int, processes: int = 1, *more: str) -> list[str]:
    """A run in which every process trains one history of so many events a step."""
    return [
        *(f"model.dim={dim}", f"model.num_layers={layers}", "model.num_heads=4", f"model.max_positions={events}"),
        *(PERIODS, f"batch.max_length={events}", f"batch.events={events * processes}", f"batch.streams={processes}"),
        *("loss.negatives=shared", "loss.num_negatives=1024", "train.max_steps=3", *QUIET, *more),
    ]


# name, ranks, items, settings
CASES = (
    ("d = 64, L = 2, 8,192 events", 1, FEW, settings(64, 2, 8192)),
    ("d = 128, L = 4, 16,384 events", 1, FEW, settings(128, 4, 16384)),
    ("the same, dropout", 1, FEW, settings(128, 4, 16384, 1, "model.dropout=0.1")),
    ("the same, activation checkpointing", 1, FEW, settings(128, 4, 16384, 1, "model.activation_checkpointing=true")),
    ("many items, d = 64, L = 2, 2,048 events, adamw", 1, MANY, settings(64, 2, 2048)),
    ("the same on two processes", 2, MANY, settings(64, 2, 2048, 2)),
    ("the same, rowwise_adagrad", 2, MANY, settings(64, 2, 2048, 2, "optimizer.kind=rowwise_adagrad")),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, publish them."""
    from fuxi_torchrec.training.planning import GB, Cluster, described_tables, estimate

    argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__.splitlines()[0]).parse_args(
        arguments
    )
    scratch = Path(tempfile.mkdtemp(prefix="planning-benchmark-"))
    rows: list[list[object]] = []
    raw, aims = {}, []
    try:
        for items, users, length in ((FEW, 24, 16_400), (MANY, 1200, 2100)):
            long = SyntheticConfig(users, items=items, median_length=length, length_sigma=0.0, max_length=length)
            prepare_synthetic(long, scratch / str(items))
        for name, processes, items, given in CASES:
            config = load_config(None, [*given, f"data.path={scratch / str(items)}"])
            seen = Dataset.open(scratch / str(items)).info.items
            expected = estimate(config, described_tables(config, seen, {}), Cluster(1, processes, "cpu", 16 * GB))
            with WorkerGroup(processes, timeout_seconds=900) as group:
                found = group.run(peak, scratch / f"run-{len(rows)}", [*given, f"data.path={scratch / str(items)}"])
            measured = max(each["bytes"] for each in found)
            raw[name] = {"items": seen, "measured": measured, "parts": expected.memory}
            off = abs(expected.total / measured - 1)
            print(f"{name}: {expected.total / 1e9:.2f} GB expected, {measured / 1e9:.2f} GB found", flush=True)
            shares = [expected.memory[part] for part in ("activations", "libraries")]
            rows.append(
                [name, processes, f"{seen:,}", *(f"{x / 1e9:.2f}" for x in (expected.total, measured, *shares))]
            )
            rows[-1].append(f"{100 * (expected.total / measured - 1):+.0f} %")
            aims.append(Aim(f"{name}: off by", off, OFF_AIM, at_most=True))
    finally:
        shutil.rmtree(scratch)
    text = (
        f"`python -m benchmarks.planning`, float32, one thread each. {harness.machine()}.\n\nPeak memory of a "
        "process that trains one history a step, everything included, against the formula of `pipelines.plan` "
        "(`fuxi_torchrec/training/planning.py`). What a block keeps is counted from saved tensors, what is "
        "in flight comes from the encoder's benchmark (b), and the 0.55 GB of libraries was set after a first round of "
        "these runs (0.45 had given -23 % to 0 %).\n\n"
    )
    head = ["run", "processes", "items", "formula, GB", "found, GB", "of it activations", "of it libraries", "off by"]
    harness.publish("planning", "Planning memory", text + harness.table(head, rows), raw)
    return harness.conclude(aims)


if __name__ == "__main__":
    sys.exit(main())
