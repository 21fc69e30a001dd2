import dataclasses
import json
import os

import numpy as np
import pytest

from fuxi_torchrec import strict_yaml
from fuxi_torchrec.config import FeaturesConfig, TrainConfig, load_config
from fuxi_torchrec.data.tests.small import make_dataset, random_histories
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.vocabulary import Vocabulary
from fuxi_torchrec.training.checkpoint.info import Identity, Info, Progress
from fuxi_torchrec.training.run_directory import CONFIG, ITEMS, METRICS, KnownItems, RunDirectory, RunError

# --- the lock --------------------------------------------------------------------------------------------------------

_held = []


def hold(path):
    directory = RunDirectory(path)
    directory.lock()
    _held.append(directory)
    return os.getpid()


def let_go():
    while _held:
        _held.pop().unlock()


def test_a_locked_directory_names_the_process_that_holds_it(workers, tmp_path):
    (holder,) = workers(1).run(hold, tmp_path / "run")
    try:
        for _ in range(2):  # a refusal changes nothing
            with pytest.raises(RunError) as refused:
                RunDirectory(tmp_path / "run").lock()
            assert f"is locked by process {holder} on {os.uname().nodename}" in str(refused.value)
            assert str(tmp_path / "run") in str(refused.value) and "--run-dir" in str(refused.value)
    finally:
        workers(1).run(let_go)
    ours = RunDirectory(tmp_path / "run")
    ours.lock()
    assert f"process {os.getpid()} " in (tmp_path / "run" / ".lock").read_text()
    with pytest.raises(RunError, match=f"process {os.getpid()}"):
        RunDirectory(tmp_path / "run").lock()
    ours.unlock()


def test_a_lock_whose_process_ended_holds_nobody_back(tmp_path):
    (tmp_path / ".lock").write_text("process 1 on elsewhere and a longer name\n")
    directory = RunDirectory(tmp_path)
    directory.lock()
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {os.uname().nodename}\n"
    directory.unlock()
    directory.unlock()


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/run: cannot write to the run directory: Not a directory"):
        RunDirectory(tmp_path / "file" / "run").lock()


# --- the configuration -----------------------------------------------------------------------------------------------


MODEL = "model.temporal_periods=[3600, 86400]"
SAME = ["seed=3", MODEL, "features.event={action: {pooling: mean}}"]


@pytest.fixture
def directory(tmp_path):
    found = RunDirectory(tmp_path)
    found.write_config(load_config(None, SAME))
    return found


def test_what_decides_the_result_must_stay_and_the_difference_is_shown(directory):
    before = (directory.path / CONFIG).read_bytes()
    changed = [
        "seed=4",
        MODEL,
        "model.dim=64",
        "optimizer.lr=0.5",
        "train.epochs=3",
        "features.event={action: {pooling: sum}}",
    ]
    with pytest.raises(RunError) as refused:
        directory.check_config(load_config(None, changed))
    lines = str(refused.value).splitlines()
    assert "  seed: 3 in the run, 4 now" in lines
    assert "  model.dim: 128 in the run, 64 now" in lines
    assert "  optimizer.lr: 0.001 in the run, 0.5 now" in lines
    assert "  features.event.action.pooling: 'mean' in the run, 'sum' now" in lines
    assert "train.epochs" not in str(refused.value) and "--run-dir" in lines[-1]
    assert (directory.path / CONFIG).read_bytes() == before


def test_a_feature_more_or_less_is_another_run(directory):
    for features in ("{}", "{action: {pooling: mean}, tags: {}}", "{tags: {pooling: mean}}"):
        with pytest.raises(RunError, match=r"features\.event"):
            directory.check_config(load_config(None, ["seed=3", MODEL, f"features.event={features}"]))


@pytest.mark.parametrize(
    "change",
    [
        "train.epochs=99",
        "train.max_steps=5",
        "data.path=elsewhere",
        "data.num_workers=2",
        "batch.max_events_per_rank=100",
        "tables.sharding=data_parallel",
        "features.event={action: {pooling: mean, sharding: row_wise}}",
        "model.retention_chunk=8",
        "model.activation_checkpointing=true",
        "checkpoint.keep_last=7",
        "distributed.timeout_seconds=5",
        "logging.level=debug",
    ],
)
def test_how_it_is_computed_may_change(directory, change):
    config = load_config(None, [*SAME, change])
    directory.check_config(config)
    directory.write_config(config)
    assert directory.read_config() == config


def test_a_new_directory_takes_any_configuration(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.check_config(load_config(None, ["seed=9"]))
    assert not (tmp_path / CONFIG).exists()  # checking is not writing
    with pytest.raises(RunError, match=r"no run here: config\.yaml is missing"):
        directory.read_config()


# --- metrics ---------------------------------------------------------------------------------------------------------


def entries(path):
    return [json.loads(line) for line in (path / METRICS).read_text().splitlines()]


def test_metrics_are_cut_where_a_resumed_run_begins(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.forget_metrics_after(3)  # nothing there yet
    for step in range(1, 8):
        directory.log({"step": step, "loss": 1.0 / step})
        if step % 2 == 0:
            directory.log({"step": step, "validation": {"mrr": 0.5}})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 8, "lo')  # the process was killed
    directory.forget_metrics_after(4)
    assert [e["step"] for e in entries(tmp_path)] == [1, 2, 2, 3, 4, 4]
    directory.log({"step": 5, "loss": 2.0})
    assert entries(tmp_path)[-1] == {"step": 5, "loss": 2.0}


@pytest.mark.parametrize("line", [b"\xff\xfe", b"5", b'["step"]', b'{"step": "x"}', b"[" * 5000, b"9" * 5000])
def test_a_damaged_line_of_metrics_is_left_out(tmp_path, line):
    directory = RunDirectory(tmp_path)
    (tmp_path / METRICS).write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    directory.forget_metrics_after(2)
    assert [e["step"] for e in entries(tmp_path)] == [1, 2]


@pytest.mark.parametrize("torn", ['{"step": 2', "{", '{"step": 2, "loss": 1.0}', "", "\n"])
def test_a_torn_last_line_does_not_spoil_the_next(tmp_path, torn):
    directory = RunDirectory(tmp_path)
    directory.log({"step": 1})
    with (tmp_path / METRICS).open("a") as file:
        file.write(torn)
    directory.forget_metrics_after(2)
    directory.log({"step": 3})
    steps = [e["step"] for e in entries(tmp_path)]
    assert steps == ([1, 2, 3] if torn.endswith("}") else [1, 3])


def test_settings_that_a_checkpoint_was_not_trained_with_are_refused_by_name(tmp_path):
    directory, trained = RunDirectory(tmp_path), load_config(None, ["seed=3", "features.event={action: {}}"])
    identity = Identity("data", "items", "s", 5, "encoder")
    info = Info(Progress(), identity, {}, strict_yaml.to_dict(trained), 1)
    checkpoint = tmp_path / "checkpoints" / "step-000000006"
    directory.check_trained(trained, info, checkpoint)
    directory.check_trained(dataclasses.replace(trained, train=TrainConfig(epochs=99)), info, checkpoint)
    told = r"config.yaml: seed is 4, step-000000006 was trained with 3: put back"
    with pytest.raises(RunError, match=told):
        directory.check_trained(dataclasses.replace(trained, seed=4), info, checkpoint)
    with pytest.raises(RunError, match=r"features.event is \{\}"):
        directory.check_trained(dataclasses.replace(trained, features=FeaturesConfig()), info, checkpoint)


# --- known items -----------------------------------------------------------------------------------------------------


def test_known_items_are_read_as_they_were_written(tmp_path):
    dataset = make_dataset(tmp_path / "data", random_histories(0, users=5, longest=9), items=50)
    known = np.random.default_rng(0).random(51) < 0.5
    known[0] = False
    items = KnownItems(known, np.arange(51) * known)
    directory = RunDirectory(tmp_path)
    assert not directory.has_items()
    directory.write_items(dataset.vocabulary(), items)
    assert directory.has_items()
    found = directory.read_items()
    np.testing.assert_array_equal(found.known, known)
    np.testing.assert_array_equal(found.counts, items.counts)
    assert found.fingerprint == items.fingerprint
    assert found.ids.tolist() == np.flatnonzero(known).tolist()
    assert Vocabulary.read(str(tmp_path / ITEMS)).ids.equals(dataset.vocabulary().ids)


def test_the_fingerprint_is_of_which_items_are_known():
    known = np.array([False, True, False, True])
    prints = {
        KnownItems(known, np.zeros(4)).fingerprint,
        KnownItems(known, np.ones(4)).fingerprint,
        KnownItems(np.append(known, False), np.zeros(5)).fingerprint,
        KnownItems(~known, np.zeros(4)).fingerprint,
    }
    assert len(prints) == 3


def test_items_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / ITEMS).write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"items\.parquet: damaged.*put a copy in its place"):
        RunDirectory(tmp_path).read_items()


def test_the_peaks_of_a_summary_never_fall(tmp_path):
    directory = RunDirectory(tmp_path)
    summary = {"step": 4, "peak_memory_mb": 511, "longest_pause_of_a_save": 0.0}
    assert directory.larger_peaks(summary) == {}
    before = {"step": 4, "peak_memory_mb": 500, "longest_pause_of_a_save": 0.25}
    (tmp_path / "summary.json").write_text(json.dumps(before))
    assert summary | directory.larger_peaks(summary) == {**summary, "longest_pause_of_a_save": 0.25}
