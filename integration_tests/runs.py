"""Training runs inside the processes of a worker group, for tests."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fuxi_torchrec.config import load_config
from fuxi_torchrec.data.prepare import prepare_synthetic
from fuxi_torchrec.data.synthetic import SyntheticConfig
from fuxi_torchrec.distributed import World

# small enough for many runs, with every part in use
SMALL = (
    "batch.events=2048",
    "batch.max_length=256",
    "model.dim=32",
    "model.max_positions=128",
    "loss.num_negatives=128",
    "logging.every_steps=1",
    "logging.tensorboard=false",
    "validation.every_epochs=null",
    "checkpoint.every_steps=null",
    "optimizer.lr=3e-3",
)
ENCODER = ("model.num_layers=2", "model.num_heads=2")  # of the default kind


def small_dataset(path: Path, users: int = 160, seed: int = 3, items: int = 500, groups: int = 10) -> Path:
    """A synthetic dataset of about 10,000 events."""
    prepare_synthetic(SyntheticConfig(users, seed, items, groups, median_length=40, length_sigma=1.0), path)
    return path


def here() -> World:
    """This process in the worker group."""
    return World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"), dist.get_world_size())


def run(run_dir: Path, overrides: list[str], fresh: bool = False, init_from: Path | None = None) -> dict[int, float]:
    """Train in this worker group; the loss of every step so far."""
    trainer(run_dir, overrides, fresh, init_from)[0].train()
    return losses(run_dir)


def trainer(run_dir: Path, overrides: list[str], fresh: bool = False, init_from: Path | None = None) -> Any:
    """A trainer and its run directory."""
    from fuxi_torchrec.evaluation.validation import validate
    from fuxi_torchrec.training.run_directory import RunDirectory
    from fuxi_torchrec.training.trainer import Trainer

    logging.getLogger("torchrec").setLevel(logging.ERROR)
    world = here()
    if world.rank == 0 and fresh:
        shutil.rmtree(run_dir, ignore_errors=True)
    dist.barrier()
    directory = RunDirectory(run_dir)
    own_kind = any(each.startswith("model.kind=") for each in overrides)
    settings = [*SMALL, *(() if own_kind else ENCODER), *overrides]
    made = Trainer(load_config(None, settings), directory, world, validate, init_from)
    directory.unlock()  # many runs in one process
    return made, directory


def losses(run_dir: Path) -> dict[int, float]:
    """Of metrics.jsonl."""
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}
