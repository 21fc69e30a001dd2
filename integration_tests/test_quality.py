"""A model learns what is in the data: it closes half of the gap between simple rules and the best ranking there is."""

from pathlib import Path

import pytest

from fuxi_torchrec.config import load_config
from fuxi_torchrec.data.prepare import prepare_synthetic
from fuxi_torchrec.data.synthetic import SyntheticConfig, oracle_hit_rate
from fuxi_torchrec.worker_group import WorkerGroup
from integration_tests import runs

SET = SyntheticConfig(*(1200, 0, 100, 10), median_length=120, length_sigma=0.5, window=10, drift_days=40, repeat=0.1)
DEMO = Path(__file__).parents[1] / "configs" / "demo.yaml"
SETTINGS = ["batch.max_length=256", "train.epochs=4", "validation.users=200", "logging.tensorboard=false"]


@pytest.mark.timeout(600)
def test_half_of_what_can_be_known_is_learned_and_not_without_the_time(tmp_path):
    prepare_synthetic(SET, tmp_path / "set")
    data = f"data.path={tmp_path / 'set'}"
    with WorkerGroup(2, timeout_seconds=280) as group:
        found = group.run(hit_rates, tmp_path / "whole", [data, *SETTINGS])[0]
        without = group.run(hit_rates, tmp_path / "without", [data, *SETTINGS, "model.use_temporal=false"])[0]
    simple, best = max(found["popularity"], found["recent items"]), oracle_hit_rate(SET)
    share = (found["model"] - simple) / (best - simple)
    assert share > 0.5, (found, best)
    assert found["model"] > without["model"] + 0.03, (found, without)


def hit_rates(run_dir, settings):
    """HR@10 of the model and of simple rules on every user's last event."""
    from fuxi_torchrec.evaluation.evaluate import evaluate
    from fuxi_torchrec.evaluation.loading import load
    from fuxi_torchrec.evaluation.validation import validate
    from fuxi_torchrec.training.run_directory import RunDirectory
    from fuxi_torchrec.training.trainer import Trainer

    directory = RunDirectory(run_dir)
    Trainer(load_config(DEMO, settings), directory, runs.here(), validate).train()
    directory.unlock()
    result = evaluate(load(run_dir, runs.here()), "test", ["target"])
    return {"model": result["target"]["hr@10"], **{name: m["hr@10"] for name, m in result["baselines"].items()}}
