"""What training refuses or survives: every process fails, soon, says why, and what was on disk stays as it was."""

import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from fuxi_torchrec.config import load_config
from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.tests.small import make_dataset, random_histories, replace_rows, replace_table
from fuxi_torchrec.evaluation.validation import validate
from fuxi_torchrec.events import parquet
from fuxi_torchrec.training.checkpoint.info import named
from fuxi_torchrec.training.run_directory import RunDirectory
from fuxi_torchrec.training.trainer import Trainer
from integration_tests.runs import here, losses

ROOT = Path(__file__).parents[1]
ITEMS = 50
SMALL = (
    *("batch.events=200", "batch.max_length=32", "batch.streams=4"),
    *("model.dim=8", "model.num_layers=1", "model.num_heads=2", "model.max_positions=32"),
    *("model.temporal_periods=[3600, 86400]", "loss.num_negatives=16", "optimizer.lr=3e-3"),
    *("train.epochs=50", "validation.every_epochs=null", "checkpoint.every_steps=2"),
    *("logging.every_steps=1", "logging.tensorboard=false", "distributed.timeout_seconds=60"),
)


def changed(*overrides):
    """The small settings with some replaced."""
    named = {setting.partition("=")[0] for setting in overrides}
    return [setting for setting in SMALL if setting.partition("=")[0] not in named] + list(overrides)


# --- in the processes of a worker group ------------------------------------------------------------------------------


def attempt(run_dir, settings, prepare=None, *arguments):
    """Train; the error of this process as (kind, message), or None. ``prepare`` may do something to the trainer."""
    directory = RunDirectory(run_dir)
    try:
        trainer = Trainer(load_config(None, settings), directory, here(), validate)
        if prepare is not None:
            prepare(trainer, *arguments)
        trainer.train()
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        directory.unlock()  # many runs in one process
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return None


def poison(trainer):
    """Weights that are not numbers, on one process."""
    if trainer.world.rank == 0:
        with torch.no_grad():
            next(trainer.model.module.head.parameters()).fill_(torch.nan)


def spoil_gradients(trainer):
    """Gradients that are not numbers in the fifth step, on all processes: its loss is still one."""
    update = trainer.optimizer.step

    def spoiled(*args, **kwargs):
        if trainer.progress.step == 4:
            for parameter in trainer.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.nan)
        return update(*args, **kwargs)

    trainer.optimizer.step = spoiled


def stand_still(trainer):
    """One process hangs inside a background save."""
    save = trainer.checkpoints.save

    def slow(*args, **kwargs):
        if trainer.world.rank == 1:
            time.sleep(12)
        return save(*args, **kwargs)

    trainer.checkpoints.save = slow


def fail_reading(trainer):
    """Data that cannot be read, while the checkpoint of the step before is being written."""
    save, read = trainer.checkpoints.save, trainer.loader.step

    def slow(*args, **kwargs):
        time.sleep(2)
        return save(*args, **kwargs)

    def broken(position):
        if position.step == 3:
            raise OSError("the disk is gone")
        return read(position)

    trainer.checkpoints.save, trainer.loader.step = slow, broken


def fill_disk(trainer, ranks):
    """No room for the second checkpoint on some processes."""
    save, calls = trainer.checkpoints.save, []

    def limited(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2 and trainer.world.rank in ranks:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
        return save(*args, **kwargs)

    trainer.checkpoints.save = limited


def refused(workers, run_dir, settings, kind, *words, world=2, both=False, prepare=None, arguments=()):
    """Every process must fail, one of them with this error; the others with the same or a report of it."""
    found = workers(world).run(attempt, run_dir, settings, prepare, *arguments)
    assert None not in found, found
    kinds = {name for name, _ in found}
    assert kind in kinds and kinds <= {kind, "PeerError", "PeerRefusedError"}, found
    if both:
        assert kinds == {kind}
    for _, message in found:  # reports hold the message
        for word in words:
            assert word in message, message
    return found


def snapshot(path):
    """Every file but the lock."""
    return {
        str(p.relative_to(path)): p.read_bytes() for p in Path(path).rglob("*") if p.is_file() and p.name != ".lock"
    }


# --- data and runs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "set"
    make_dataset(path, random_histories(0, users=60, longest=30, items=ITEMS), items=ITEMS)
    return path


@pytest.fixture(scope="module")
def expected(workers, data, tmp_path_factory):
    """The losses of six steps."""
    path = tmp_path_factory.mktemp("whole")
    assert workers(2).run(attempt, path, changed(f"data.path={data}", "train.max_steps=6")) == [None, None]
    return losses(path)


@pytest.fixture(scope="module")
def trained(workers, data, tmp_path_factory):
    """A run of four steps, with checkpoints at the second and at the fourth."""
    path = tmp_path_factory.mktemp("runs") / "trained"
    assert workers(2).run(attempt, path, changed(f"data.path={data}", "train.max_steps=4")) == [None, None]
    return path


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def resumes(workers, run, data, expected):
    """The run goes on as if nothing had been."""
    assert workers(2).run(attempt, run, changed(f"data.path={data}", "train.max_steps=6")) == [None, None]
    return losses(run) == expected


def test_a_copied_run_resumes(workers, run, data, expected):
    assert resumes(workers, run, data, expected)


# --- a first start that cannot be ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "kind", "words"),
    [
        (
            ["tables.sharding=column_wise", "model.dim=6", "model.temporal_periods=[3600]"],
            "ShardingError",
            ["tables.sharding", "column_wise needs model.dim to be a multiple of 4, not 6"],
        ),
        (["batch.streams=1"], "DataError", ["2 ranks need at least as many streams, there are 1"]),
        (["model.dim=65536"], "TrainingError", ["tables, encoder and their optimizer take", "model.dim=", "would fit"]),
        (
            ["model.max_positions=134217728", "batch.max_length=32"],
            "TrainingError",
            ["GB a rank, a rank has", "model.max_positions=", "would fit"],
        ),
        (["train.precision=bfloat16"], "TrainingError", ["train.precision = bfloat16", "cpu", "take float32"]),
        (["data.time_unit=ms"], "DataError", ["times are in s", "data.time_unit = ms"]),
        (["data.min_item_events=100000"], "DataError", ["no item has 100000 training events"]),
        (["features.event={genre: {}}"], "DataError", ["no feature genre", "there are none"]),
        (["data.path=nowhere/at/all"], "DataError", ["nowhere/at/all", "dataset.json is missing", "pipelines.prepare"]),
        (['data.path=""'], "DataError", ["data.path is not set"]),
        (
            [
                *("data.split=by_time", "data.valid_from=8000000000", "data.test_from=9000000000"),
                "validation.every_epochs=1",
            ],
            "DataError",
            ["no user has an event to validate on", "data.valid_from = 8000000000", "validation.every_epochs=null"],
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_and_can_be_corrected(workers, data, tmp_path, overrides, kind, words):
    settings = changed(f"data.path={data}", "train.max_steps=1", *overrides)
    if any(o.startswith("data.path=") for o in overrides):
        settings.remove(f"data.path={data}")
    refused(workers, tmp_path / "run", settings, kind, *words, both=True)
    assert snapshot(tmp_path / "run") == {}
    good = changed(f"data.path={data}", "train.max_steps=1")
    assert workers(2).run(attempt, tmp_path / "run", good) == [None, None]


def test_more_processes_than_rows(workers, tmp_path):
    make_dataset(tmp_path / "set", random_histories(0, users=20, longest=9, items=4), items=4)
    settings = changed(f"data.path={tmp_path / 'set'}")
    words = ("tables.sharding", "item_table has 5 rows", "4 ranks", "tables.sharding=data_parallel")
    refused(workers, tmp_path / "run", settings, "ShardingError", *words, world=4, both=True)


@pytest.mark.parametrize("events", [1, 2])
def test_a_dataset_without_anything_to_predict(workers, tmp_path, events):
    history = ([1, 2][:events], [1_600_000_000, 1_600_000_001][:events])
    make_dataset(tmp_path / "set", [history] * 9)
    settings = changed(f"data.path={tmp_path / 'set'}")
    words = (str(tmp_path / "set"), "nothing to train on: no user has two events in the training split")
    refused(workers, tmp_path / "run", settings, "DataError", *words, both=True)


def test_a_row_that_is_broken_from_the_start(workers, tmp_path):
    settings = changed(f"data.path={broken_copy(None, tmp_path / 'set')}", "train.max_steps=3")
    words = ("part-00000.parquet", "1 bad rows, the first is row 59: an item is not in 1 .. 50", "on_bad_rows")
    refused(workers, tmp_path / "run", settings, "DataError", *words)
    left_out = [*settings, "data.on_bad_rows=skip"]
    assert workers(2).run(attempt, tmp_path / "run", left_out) == [None, None]


# --- a run that cannot go on -----------------------------------------------------------------------------------------


def broken_copy(data, path):
    """The same dataset with a bad item in its last row, and the same fingerprint."""
    if data is None:
        make_dataset(path, random_histories(0, users=60, longest=30, items=ITEMS), items=ITEMS)
    else:
        shutil.copytree(data, path)
    table = pq.read_table(path / "part-00000.parquet")
    column = table.schema.get_field_index("item")
    items = table["item"].to_pylist()
    items[-1][0] = ITEMS + 1
    table = table.set_column(column, "item", pa.array(items, table["item"].type))
    replace_rows(Dataset.open(path), table, block_users=3)
    return path


def test_a_broken_row_that_only_one_process_reads(workers, run, data, tmp_path, expected):
    before = snapshot(run)
    other = broken_copy(data, tmp_path / "set")
    settings = changed(f"data.path={other}", "train.max_steps=40", "checkpoint.every_steps=null")
    found = workers(2).run(attempt, run, settings)
    assert [kind for kind, _ in found] == ["PeerRefusedError", "DataError"]
    assert "row 59: an item is not in 1 .. 50" in found[1][1]
    assert "reading training data failed on 1 of 2 ranks: rank 1: " in found[0][1] and found[1][1] in found[0][1]
    after = snapshot(run)
    assert {name for name in after if after[name] != before.get(name)} <= {"config.yaml", "metrics.jsonl"}
    assert resumes(workers, run, data, expected)


@pytest.mark.parametrize(
    ("items", "seed", "unit", "overrides", "kind", "words"),
    [
        (ITEMS, 1, "s", [], "CheckpointError", ["the dataset's fingerprint is", "--run-dir", "--init-from"]),
        (ITEMS + 1, 0, "s", [], "RunError", ["knows a vocabulary of 50 items", "has 51", "--init-from"]),
        (ITEMS, 0, "ms", [], "DataError", ["times are in ms, the config says data.time_unit = s"]),
        (ITEMS, 0, "ms", ["data.time_unit=ms"], "RunError", ["data.time_unit: 's' in the run, 'ms' now"]),
        (ITEMS, 0, "s", ["seed=5", "model.kernel_dim=16"], "RunError", ["seed: 0 in the run, 5 now", "kernel_dim: 32"]),
    ],
    ids=["fingerprint", "vocabulary", "time unit", "time unit of both", "settings"],
)
def test_a_run_is_not_resumed_with_something_else(
    workers, run, data, tmp_path, expected, items, seed, unit, overrides, kind, words
):
    other = tmp_path / "other"
    make_dataset(other, random_histories(seed, users=60, longest=30, items=ITEMS), items=items)
    description = json.loads((other / "dataset.json").read_text())
    description["log"]["time_unit"] = unit
    (other / "dataset.json").write_text(json.dumps(description))
    before = snapshot(run)
    settings = changed(f"data.path={other}", "train.max_steps=6", *overrides)
    refused(workers, run, settings, kind, *words)
    assert snapshot(run) == before
    assert resumes(workers, run, data, expected)


def test_other_known_items_are_refused(workers, run, data, expected):
    before = snapshot(run)
    table = pq.read_table(run / "items.parquet")
    known = [False, *table["known"].to_pylist()[1:]]
    parquet.write_table(
        run / "items.parquet", table.set_column(table.schema.get_field_index("known"), "known", [known])
    )
    settings = changed(f"data.path={data}", "train.max_steps=6")
    refused(workers, run, settings, "CheckpointError", "the known items is", "this is another run")
    (run / "items.parquet").write_bytes(before["items.parquet"])
    assert snapshot(run) == before
    assert resumes(workers, run, data, expected)


# --- damaged checkpoints ---------------------------------------------------------------------------------------------


def flip(checkpoint):
    file = checkpoint / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    for place in (100, len(content) // 2):
        content[place] ^= 0xFF
    file.write_bytes(content)
    return "__1_0.distcp has another checksum"


def truncate(checkpoint):
    file = checkpoint / "__0_0.distcp"
    size = file.stat().st_size
    os.truncate(file, size // 2)
    return f"__0_0.distcp has {size // 2} bytes where {size} were written"


def remove_part(checkpoint):
    (checkpoint / "__1_0.distcp").unlink()
    return "__1_0.distcp is missing"


def remove_metadata(checkpoint):
    (checkpoint / ".metadata").unlink()
    return ".metadata is missing"


def remove_description(checkpoint):
    (checkpoint / "checkpoint.json").unlink()
    return "checkpoint.json is missing"


def cut_description(checkpoint):
    os.truncate(checkpoint / "checkpoint.json", 100)
    return "checkpoint.json: not readable as JSON"


def garble_description(checkpoint):
    (checkpoint / "checkpoint.json").write_bytes(b"\xff\xfe{}")
    return "checkpoint.json: not readable as JSON"


def newer_format(checkpoint):
    plain = json.loads((checkpoint / "checkpoint.json").read_text())
    (checkpoint / "checkpoint.json").write_text(json.dumps({**plain, "format": 99}))
    return "format 99, this software reads"


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        truncate,
        remove_part,
        remove_metadata,
        remove_description,
        cut_description,
        garble_description,
        newer_format,
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_serves(workers, run, data, expected, damage):
    latest = run / "checkpoints" / "step-000000004"
    words = [damage(latest), str(latest)]
    if damage is not newer_format:
        words.append("remove its directory to continue from an earlier one")
    before = snapshot(run)
    settings = changed(f"data.path={data}", "train.max_steps=6")
    refused(workers, run, settings, "CheckpointError", *words)
    assert snapshot(run) == before
    shutil.rmtree(latest)
    assert resumes(workers, run, data, expected)


def test_the_only_checkpoint_without_description_is_not_overwritten(workers, run, data):
    shutil.rmtree(run / "checkpoints" / "step-000000002")
    (run / "checkpoints" / "step-000000004" / "checkpoint.json").unlink()
    before = snapshot(run)
    settings = changed(f"data.path={data}", "train.max_steps=6")
    refused(workers, run, settings, "CheckpointError", "step-000000004/checkpoint.json is missing", both=True)
    assert snapshot(run) == before


# --- in mid-training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)], ids=["everywhere", "process 0", "process 1"])
def test_a_full_disk_leaves_the_last_checkpoint(workers, data, tmp_path, expected, ranks):
    settings = changed(f"data.path={data}", "train.max_steps=6")
    words = ("step-000000004: the checkpoint could not be written", "step-000000002, stands")
    found = refused(
        workers, tmp_path, settings, "CheckpointError", *words, both=True, prepare=fill_disk, arguments=(ranks,)
    )
    assert any("File too large" in message or "write" in message for _, message in found)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-000000002"]
    assert resumes(workers, tmp_path, data, expected)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["batch.max_events_per_rank=20"],
        ["logging.every_steps=100"],  # the loss is not read back: the next exchange tells
        ["logging.every_steps=100", "train.pipeline=sparse_dist"],
    ],
    ids=["plain", "parts", "unlogged", "ahead"],
)
def test_a_loss_that_is_no_number_stops_training_and_names_the_users(workers, run, data, expected, settings):
    before = snapshot(run)
    settings = changed(f"data.path={data}", "train.max_steps=6", *settings)
    words = ("the loss of step 5 is nan", "failed-step-5-rank-*.json", "step-000000004 is the last checkpoint")
    refused(workers, run, settings, "TrainingError", *words, both=True, prepare=poison)
    reports = [json.loads((run / f"failed-step-5-rank-{rank}.json").read_text()) for rank in range(2)]
    assert [report["own_loss"] for report in reports] == ["nan", reports[1]["own_loss"]]
    users = workers(2).run(users_of_step, run, changed(f"data.path={data}"))
    assert [sorted(report["user_rows"]) for report in reports] == users
    after = snapshot(run)
    for name, content in before.items():
        assert name == "config.yaml" or after[name] == content
    assert resumes(workers, run, data, expected)


def users_of_step(run_dir, settings):
    """Of the next step."""
    directory = RunDirectory(run_dir)
    trainer = Trainer(load_config(None, settings), directory, here(), validate)
    directory.unlock()
    (batch,) = trainer.loader.step(trainer.progress.position)
    dist.barrier()
    return sorted(batch.users.tolist())


@pytest.mark.parametrize(
    ("clip", "every", "step", "words"),
    [
        ("null", 1, 5, "after step 5 weights are not finite"),
        ("null", 4, 6, "the loss of step 6 is nan"),
        ("1.0", 1, 5, "the norm of the gradients of step 5 is nan"),
    ],
)
def test_gradients_that_are_no_numbers_do_not_reach_a_checkpoint(workers, run, data, clip, every, step, words):
    settings = (
        "train.max_steps=8",
        f"checkpoint.every_steps={every}",
        "checkpoint.keep_last=1",
        f"optimizer.clip_norm={clip}",
    )
    shutil.rmtree(run)  # clipping is part of what a run is
    settings = changed(f"data.path={data}", *settings)
    last = "step-000000004 is the last checkpoint"
    named = f"failed-step-{step}-rank-*.json"
    refused(workers, run, settings, "TrainingError", words, named, last, both=True, prepare=spoil_gradients)
    assert all((run / f"failed-step-{step}-rank-{rank}.json").exists() for rank in range(2))
    assert workers(2).run(attempt, run, settings) == [None, None]
    assert list(losses(run)) == list(range(1, 9))


def test_a_process_that_hangs_in_a_background_save_is_an_error_for_all(workers, data, tmp_path):
    settings = changed(f"data.path={data}", "train.max_steps=4", "distributed.timeout_seconds=5")
    words = ("the checkpoint could not be written", "there is no earlier one")
    refused(workers, tmp_path, settings, "CheckpointError", *words, both=True, prepare=stand_still)


def test_a_failure_waits_for_the_checkpoint_that_is_being_written(workers, data, tmp_path):
    settings = changed(f"data.path={data}", "train.max_steps=8")
    refused(workers, tmp_path, settings, "OSError", "the disk is gone", prepare=fail_reading)
    assert named(tmp_path / "checkpoints", "latest").name == "step-000000002"


def test_a_learning_rate_beyond_reason_is_no_number_soon(workers, data, tmp_path):
    settings = changed(f"data.path={data}", "train.max_steps=20", "optimizer.lr=1e30")
    refused(workers, tmp_path, settings, "TrainingError", "is nan", "optimizer.lr", "optimizer.clip_norm", both=True)
    assert list(tmp_path.glob("failed-step-*-rank-0.json")) and list(tmp_path.glob("failed-step-*-rank-1.json"))


def test_metrics_of_a_run_that_died_before_its_first_checkpoint_are_cut(workers, data, tmp_path, expected):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 99.0}\n{"step": 2, "loss": 98.0}\n{"step": 3, "lo')
    assert resumes(workers, tmp_path, data, expected)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_run_that_died_before_its_first_checkpoint_takes_the_dataset_that_is_there_now(workers, data, tmp_path):
    settings = changed("train.max_steps=1", f"data.path={tmp_path / 'set'}")
    shutil.copytree(data, tmp_path / "set")
    assert workers(2).run(attempt, tmp_path / "run", settings) == [None, None]
    before = pq.read_table(tmp_path / "run" / "items.parquet")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    items = pq.read_table(tmp_path / "set" / "items.parquet")
    other = items.set_column(0, "item_id", items["item_id"].take(pa.array(range(len(items) - 1, -1, -1))))
    replace_table(Dataset.open(tmp_path / "set"), "items.parquet", other)
    assert workers(2).run(attempt, tmp_path / "run", settings) == [None, None]
    after = pq.read_table(tmp_path / "run" / "items.parquet")
    assert after["item_id"].to_pylist() == before["item_id"].to_pylist()[::-1]


# --- real processes --------------------------------------------------------------------------------------------------


def launch(*command, timeout=90):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment,
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


TRAIN = ("-m", "pipelines.train", "--run-dir")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)


def test_an_unknown_key_ends_the_program(data, tmp_path):
    done = launch(sys.executable, *TRAIN, tmp_path / "run", f"data.path={data}", "optimizer.lrr=1")
    assert done.returncode == 1, done.stdout
    assert "command line: unknown key optimizer.lrr; did you mean optimizer.lr?" in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_locked_run_directory_ends_all_programs(run, data):
    before = snapshot(run)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 77 on somewhere\n")
        lock.flush()
        done = launch(*TORCHRUN, *TRAIN, run, *changed(f"data.path={data}"))
    assert done.returncode != 0, done.stdout
    assert "is locked by process 77 on somewhere: wait for that job, stop it, or take another --run-dir" in done.stdout
    assert "Traceback" not in done.stdout
    assert snapshot(run) == before


def test_a_missing_dataset_ends_a_launched_job(tmp_path):
    once = ("--env", "OMP_NUM_THREADS=1")  # without restarts
    job = ("dist.ddp", "-j", "1x2", *once, "-m", "pipelines.train", "--", "--run-dir", tmp_path / "run")
    done = launch("torchx", "run", *job, *changed(f"data.path={tmp_path / 'missing'}"), timeout=110)
    assert done.returncode == 1, done.stdout
    assert f"train: {tmp_path / 'missing'}: no dataset here: dataset.json is missing" in done.stdout
    assert snapshot(tmp_path / "run") == {}
