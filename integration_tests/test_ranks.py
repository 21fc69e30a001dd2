"""What ranks read, and what they tell each other, beside the model's own communication."""

import json
import sys
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from integration_tests import runs

COLLECTIVES = ("all_gather", "all_reduce", "broadcast", "all_gather_object", "broadcast_object_list", "barrier")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return f"data.path={runs.small_dataset(tmp_path_factory.mktemp('ranks') / 'data')}"


def row_groups_read(job, *arguments):
    """Row groups that this rank reads while a job is made ready."""
    read, count = pq.ParquetFile.read_row_group, []

    def counted(self, *args, **kwargs):
        count.append(1)
        return read(self, *args, **kwargs)

    pq.ParquetFile.read_row_group = counted
    try:
        made = job(*arguments)
    finally:
        pq.ParquetFile.read_row_group = read
    return len(count), len(made)


def ready_to_train(run_dir, settings):
    trainer, _ = runs.trainer(run_dir, settings, fresh=True)
    return trainer.data.maker.reader.groups


def ready_to_evaluate(run_dir):
    from fuxi_torchrec.evaluation.loading import load

    run = load(run_dir, runs.here())
    assert len(run.lengths()) == len(run.users_with("test")[0])
    return run.maker.reader.groups


def test_rank_0_reads_the_dataset_once_for_all(workers, data, tmp_path):
    settings = [data, "validation.every_epochs=1", "loss.negatives=in_batch", "tables.sharding=data_parallel"]
    found = workers(4).run(row_groups_read, ready_to_train, tmp_path / "run", settings)
    groups = found[0][1]
    assert [count for count, _ in found] == [groups, 0, 0, 0]
    workers(4).run(runs.run, tmp_path / "run", [*settings, "train.max_steps=1"])
    found = workers(4).run(row_groups_read, ready_to_evaluate, tmp_path / "run")
    assert [count for count, _ in found] == [2 * groups, 0, 0, 0]


def calls_of_a_step(run_dir, settings):
    """Collectives of our own in a step that is not logged, by name."""
    trainer, _ = runs.trainer(run_dir, settings, fresh=True)
    steps, calls = trainer.begin(), []
    for _ in range(3):
        done = steps.train()
        trainer.progress = replace(trainer.progress, step=done.step, position=done.position)
    real = {name: getattr(dist, name) for name in COLLECTIVES}

    def counted(name):
        def call(*args, **kwargs):
            if sys._getframe(1).f_globals["__name__"].startswith("fuxi_torchrec"):
                calls.append(name)
            return real[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counted(name))
    try:
        steps.train()
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    return calls


@pytest.mark.parametrize("settings", [[], ["batch.max_events_per_rank=400"], ["train.pipeline=sparse_dist"]], ids=str)
def test_one_exchange_a_step(workers, data, tmp_path, settings):
    assert workers(2).run(calls_of_a_step, tmp_path / "run", [data, *settings]) == [["all_gather"]] * 2


def test_losses_with_auto_are_those_of_the_sharding_it_chose(workers, data, tmp_path):
    steps = [data, "train.max_steps=5"]
    auto = workers(2).run(runs.run, tmp_path / "auto", [*steps, "tables.sharding=auto"])[0]
    plan = json.loads((tmp_path / "auto" / "plan.json").read_text())
    (chosen,) = {part["sharding"] for part in plan["placements"]}
    explicit = workers(2).run(runs.run, tmp_path / "explicit", [*steps, f"tables.sharding={chosen}"])[0]
    assert auto == explicit and len(auto) == 5
