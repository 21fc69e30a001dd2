"""A kill during a save, at any moment of it, leaves a complete checkpoint, and the run ends as if undisturbed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests import killed_saves, runs


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run directory for every moment, left by killed processes; and the settings."""
    path = tmp_path_factory.mktemp("killed")
    settings = killed_saves.settings(str(runs.small_dataset(path / "set")))
    done = subprocess.run(
        [sys.executable, "-m", "integration_tests.killed_saves", path, *settings],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    reached = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert reached == [{"moment": m, "reached": True} for m in killed_saves.MOMENTS], done.stdout + done.stderr
    return path, settings


@pytest.fixture(scope="module")
def undisturbed(killed, workers):
    path, settings = killed
    return workers(2).run(runs.run, path / "undisturbed", settings)[0]


@pytest.mark.parametrize(("moment", "resumed_from"), killed_saves.MOMENTS.items())
def test_a_kill_during_a_save_leaves_a_loadable_checkpoint(workers, killed, undisturbed, moment, resumed_from):
    path, settings = killed
    started = workers(2).run(started_from, path / moment, settings)
    assert started == [resumed_from, resumed_from]
    found = runs.losses(path / moment)
    assert found == undisturbed
    checkpoints = path / moment / "checkpoints"
    assert {each.name for each in checkpoints.iterdir()} == {"latest", f"step-{killed_saves.STEPS:09d}"}


def started_from(run_dir, settings):
    """The step of the checkpoint that a resumed run has loaded; then it is trained to its end."""
    made, _ = runs.trainer(run_dir, settings)
    step = made.progress.step
    made.train()
    return step
