import dataclasses

import numpy as np
import pytest
import torch

from fuxi_torchrec.config import load_config
from fuxi_torchrec.data.dataset import Dataset, Feature
from fuxi_torchrec.data.prepare import prepare_synthetic
from fuxi_torchrec.data.synthetic import SyntheticConfig
from fuxi_torchrec.distributed import World
from fuxi_torchrec.training.run_data import RunData, remarks
from fuxi_torchrec.training.run_directory import RunDirectory

PERIODS = "model.temporal_periods=[3600, 86400]"
EQUAL = ["batch.max_length=64", "model.max_positions=64", PERIODS]


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    path = tmp_path_factory.mktemp("remarks") / "data"
    prepare_synthetic(SyntheticConfig(users=3, max_length=8), path)
    return Dataset.open(path).info


def with_feature(info):
    return dataclasses.replace(info, features=(Feature("action", multiple=False, rows=4, vocabulary=True),))


def test_nothing_is_said_of_what_is_meant(info):
    assert remarks(load_config(None, EQUAL), info) == []
    assert remarks(load_config(None, [*EQUAL, "features.event={action: {}}"]), with_feature(info)) == []


def test_positions_that_training_does_not_reach_are_named(info):
    (remark,) = remarks(load_config(None, ["batch.max_length=64", "model.max_positions=100", PERIODS]), info)
    assert "batch.max_length = 64 and model.max_positions = 100" in remark
    assert "positions from 64 on" in remark


def test_features_that_are_not_read_are_named(info):
    (remark,) = remarks(load_config(None, EQUAL), with_feature(info))
    assert "does not read: action; name them in features.event" in remark


def test_in_batch_negatives_are_weighed_by_how_often_known_items_are_targets(tmp_path):
    path = tmp_path / "data"
    prepare_synthetic(SyntheticConfig(users=50, items=40, groups=4, window=5, max_length=30), path)
    given = [*EQUAL, f"data.path={path}", "data.min_item_events=30", "loss.negatives=in_batch"]
    config = load_config(None, given)
    alone = World(0, 1, 0, torch.device("cpu"))
    data = RunData.open(config, RunDirectory(tmp_path / "run"), alone, resumed=False)
    known, counts = data.items.known, data.item_set.target_counts
    assert 0 < known.sum() < 40
    assert (counts[~known] == 0).all()
    pairs = np.concatenate([after for _, after in data.maker.training_pairs()])
    assert counts.tolist() == np.where(known, np.bincount(pairs, minlength=41), 0).tolist()
