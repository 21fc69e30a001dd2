"""Runs and their checkpoints: what is resumed, and what is evaluated."""

from pathlib import Path
from typing import Any

from benchmarks.fuzz.formats import Format
from fuxi_torchrec.distributed import process_group
from fuxi_torchrec.evaluation.evaluate import evaluate
from fuxi_torchrec.evaluation.loading import load
from fuxi_torchrec.training.checkpoint.store import state_of
from fuxi_torchrec.training.run import Run
from fuxi_torchrec.training.run_directory import RunDirectory

STEP = "checkpoints/step-000000006"
PLACES = ("seconds", "dataset_path")  # of a result: differ from run to run


def resume(place: Path, _: Path) -> Any:
    """Where a run stands: its progress, and every tensor with the moments of the optimizer."""
    directory = RunDirectory(place)
    with process_group(60, "cpu") as world:
        try:
            run = Run(directory.read_config(), directory, world)
        finally:
            directory.unlock()
        state = {name: _tensor(value).clone() for name, value in state_of(run.model, run.optimizer).items()}
        return [run.progress, run.identity, run.data.items, state]


def measure(place: Path, _: Path) -> Any:
    """What a run's best checkpoint reaches on the test targets, and its weights."""
    with process_group(60, "cpu") as world:
        run = load(place, world)
        found = evaluate(run, "test", users=10)
        state = {name: _tensor(value).clone() for name, value in run.model.state_dict().items()}
    return [{name: value for name, value in found.items() if name not in PLACES}, state]


def resume_and_measure(place: Path, fixtures: Path) -> Any:
    """Both; measured first, since resuming writes files anew."""
    return [measure(place, fixtures), resume(place, fixtures)]


def _tensor(value: Any) -> Any:
    return value.local_shards()[0].tensor if hasattr(value, "local_shards") else value


FORMATS = [
    Format("checkpoint-json", "run", (f"{STEP}/checkpoint.json",), resume, "json"),
    Format("checkpoint-metadata", "run", (f"{STEP}/.metadata",), resume),
    Format("checkpoint-tensors", "run", (f"{STEP}/*.distcp",), resume),
    Format("checkpoint-pointers", "run", ("checkpoints/latest", "checkpoints/best"), resume_and_measure),
    Format("run-config", "run", ("config.yaml",), resume_and_measure, "yaml"),
    Format("run-items", "run", ("items.parquet",), resume_and_measure),
    Format("run-notes", "run", ("plan.json", "summary.json", "metrics.jsonl", ".lock"), resume_and_measure),
]
