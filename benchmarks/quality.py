"""Quality: how much of what can be known the demo's model learns, with and without its temporal channel.

    python -m benchmarks.quality [--seeds 0,1,2]

The synthetic set's oracle says what the best ranking reaches, baselines what is reached without learning. Exit code 1
if the model does not close half of the gap between them, or is not better than without the temporal channel.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import Aim
from benchmarks.training import make_trainer
from fuxi_torchrec.data.prepare import prepare_synthetic
from fuxi_torchrec.data.synthetic import SyntheticConfig, oracle_hit_rate
from fuxi_torchrec.worker_group import WorkerGroup

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"
METRIC, GAP_AIM = "hr@10", 0.5
VARIANTS = {"whole": [], "without temporal": ["model.use_temporal=false"]}


def synthetic(seed: int) -> SyntheticConfig:
    """The demo's set."""
    return SyntheticConfig(
        *(4000, seed, 200, 10), median_length=200, length_sigma=1.2, window=10, drift_days=40, repeat=0.1
    )


def quality(scratch: Path, seeds: Sequence[int]) -> tuple[str, list[Aim], Any]:
    """Train every variant on every seed's set."""
    raw: dict[str, dict[str, float]] = {}
    for seed in seeds:
        config = synthetic(seed)
        prepare_synthetic(config, scratch / f"data-{seed}")
        raw[str(seed)] = found = {
            "oracle": oracle_hit_rate(config),
            "oracle without time": oracle_hit_rate(config, know_time=False),
        }
        for name, settings in VARIANTS.items():
            given = [f"data.path={scratch / f'data-{seed}'}", f"seed={seed}", *settings]
            with WorkerGroup(2, timeout_seconds=1800) as group:
                result, seconds = group.run(train_and_evaluate, scratch / f"run-{seed}-{name.split()[0]}", given)[0]
            found[name], found[f"{name}, queried at the last event"] = (result[t][METRIC] for t in ("target", "last"))
            found[f"{name}, seconds"] = seconds
            found |= {baseline: metrics[METRIC] for baseline, metrics in result["baselines"].items()}
            print(f"seed {seed}, {name}: {found[name]:.4f} in {seconds:.0f} s", flush=True)
        best = max(found["popularity"], found["recent items"])
        found["share"] = (found["whole"] - best) / (found["oracle"] - best)
    rows = [[name, *(f"{raw[str(seed)][name]:.3f}" for seed in seeds)] for name in next(iter(raw.values()))]
    rows = [[*row, f"{statistics.mean(float(cell) for cell in row[1:]):.3f}"] for row in rows]
    what = (
        f"HR@10 on the demo's synthetic set ({synthetic(0).users:,} users, {synthetic(0).items} items, every user's "
        "last event), `configs/demo.yaml` on two processes of one thread. The oracle knows the users' hidden tables, "
        "which a model can only infer; *share* is how much of the gap between the better of popularity and recent "
        "items and the oracle is closed."
    )
    aims = [Aim(f"seed {seed}: share of the gap closed", found["share"], GAP_AIM) for seed, found in raw.items()]
    aims += [
        Aim(f"seed {seed}: gain by the temporal channel", found["whole"] - found["without temporal"], 0.01)
        for seed, found in raw.items()
    ]
    return f"{what}\n\n{harness.table(['', *(f'seed {seed}' for seed in seeds), 'mean'], rows)}", aims, raw


def train_and_evaluate(run_dir: Path, settings: list[str]) -> tuple[dict[str, Any], float]:
    """The test metrics of a run's best checkpoint, and how long training took."""
    from fuxi_torchrec.evaluation.evaluate import evaluate
    from fuxi_torchrec.evaluation.loading import load

    torch.set_num_threads(1)
    trainer = make_trainer(run_dir, [*settings, "logging.tensorboard=false"], CONFIG)
    summary = trainer.train()
    trainer.directory.unlock()
    return evaluate(load(run_dir, trainer.world), "test"), float(summary["seconds"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    seeds = [int(seed) for seed in parser.parse_args(arguments).seeds.split(",")]
    sections = {"synthetic": lambda scratch: quality(scratch, seeds)}
    return harness.run_sections("quality", sections, list(sections), "")


if __name__ == "__main__":
    sys.exit(main())
