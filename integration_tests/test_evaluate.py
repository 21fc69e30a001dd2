"""Exact evaluation: equal to counting, from any checkpoint on any number of ranks; and what is refused."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest

from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.tests.small import describe
from fuxi_torchrec.evaluation.baselines import NAMES
from fuxi_torchrec.schema import sealed
from integration_tests import retrieval_runs as small
from integration_tests import runs

pytestmark = pytest.mark.timeout(300)  # the first test starts processes and trains
SHARDINGS = ["row_wise", "table_wise", "column_wise", "data_parallel"]


def evaluate(run_dir, splits=("test",), filters=(False, True), **options):
    from fuxi_torchrec.evaluation.evaluate import evaluate as run_it

    run = small.load(run_dir, **options)
    return {(split, seen): run_it(run, split, filter_seen=seen) for split in splits for seen in filters}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small.dataset(tmp_path_factory.mktemp("evaluate") / "set").path


@pytest.fixture(scope="module")
def trained(workers, data, tmp_path_factory):
    """A run whose items are small integers with many equal rows, saved under each sharding."""
    place = tmp_path_factory.mktemp("runs")
    for sharding in SHARDINGS:
        settings = [f"data.path={data}", f"tables.sharding={sharding}", "loss.similarity=dot"]
        workers(2).run(small.train, place / sharding, settings, pattern=True)
    return place


@pytest.fixture(scope="module")
def counted(trained, data):
    """Metrics by counting, of the same weights: by sharding, filter and request time."""
    found = {}
    for sharding in SHARDINGS:
        run = small.plain(trained / sharding, data)
        for seen in (False, True):
            for request_time in ("target", "last"):
                found[sharding, seen, request_time] = small.bucketed(run, small.ranks(run, "test", request_time, seen))
    assert found["row_wise", False, "last"]["unknown_targets"] > 0
    assert found["row_wise", False, "last"] != found["row_wise", True, "last"]
    assert found["row_wise", False, "last"]["by_distance"].keys() == {"never", "1-10", "11-100", "unknown"}
    assert len(found["row_wise", False, "last"]["by_repeats"]) >= 3
    return found


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_metrics_are_those_of_counting(workers, trained, counted, sharding, processes):
    results = workers(processes).run(evaluate, trained / sharding)
    assert all(each.keys() == results[0].keys() for each in results)
    for (_, seen), found in results[0].items():
        assert found["users_without_target"] == 1
        for request_time in ("target", "last"):
            wanted = dict(counted[sharding, seen, request_time])
            for kind in small.KINDS:
                groups, wanted_groups = found[request_time].pop(kind), wanted.pop(kind)
                assert groups.keys() == wanted_groups.keys()
                for name, metrics in groups.items():
                    assert metrics == pytest.approx(wanted_groups[name])
            assert found[request_time] == pytest.approx(wanted)


def test_ties_occur_in_these_tests(trained, data):
    run = small.plain(trained / "row_wise", data)
    assert len(run.table.unique(dim=0)) == small.PATTERNS < run.known.sum()


def test_validation_targets_are_ranked_as_training_ranks_them(workers, trained, data):
    (found,) = workers(1).run(evaluate, trained / "row_wise", ("valid",))
    run = small.plain(trained / "row_wise", data)
    for seen in (False, True):
        expected = small.metrics(small.ranks(run, "valid", "target", seen))
        assert {k: found["valid", seen]["target"][k] for k in expected} == pytest.approx(expected)
        (trainer,) = workers(1).run(validated, trained / "row_wise", data, seen)
        assert trainer == pytest.approx(expected)


def validated(run_dir, data, seen):
    settings = [*small.SETTINGS, f"data.path={data}", "loss.similarity=dot", "validation.every_epochs=1"]
    settings += [f"validation.filter_seen={str(seen).lower()}"]
    trainer, _ = runs.trainer(run_dir, settings)
    return trainer.validator(trainer, lambda: None)


def test_baselines_stand_beside_the_model(workers, trained):
    (found,) = workers(1).run(evaluate, trained / "row_wise")
    two = workers(2).run(evaluate, trained / "row_wise")[0]
    for seen in (False, True):
        baselines = found["test", seen]["baselines"]
        assert baselines.keys() == set(NAMES)
        if not seen:  # up to 10 events back, the user's latest items are among the first 10
            assert baselines["recent items"]["by_distance"]["1-10"]["hr@10"] == 1
        for name, metrics in baselines.items():
            others = two["test", seen]["baselines"][name]
            for kind in small.KINDS:
                groups, others_groups = metrics.pop(kind), others.pop(kind)
                assert groups.keys() == others_groups.keys()
                assert all(groups[each] == pytest.approx(others_groups[each]) for each in groups)
            assert metrics == pytest.approx(others)


def ranked_to(run_dir, file):
    from fuxi_torchrec.evaluation.evaluate import evaluate as run_it

    return run_it(small.load(run_dir), ranks_file=file)


@pytest.mark.parametrize("processes", [1, 4])
def test_ranks_of_single_users_are_those_of_counting(workers, trained, data, tmp_path, processes):
    import pyarrow.parquet as pq

    workers(processes).run(ranked_to, trained / "row_wise", tmp_path / "ranks.parquet")
    found, run = pq.read_table(tmp_path / "ranks.parquet"), small.plain(trained / "row_wise", data)
    with_target = [user for user in run.histories if len(user[1]) > 1]
    assert found["user_id"].to_pylist() == [user for user, *_ in with_target]
    raw = [items[-1] * 100 if run.known[items[-1]] else None for _, items, *_ in with_target]
    assert found["item_id"].to_pylist() == raw and None in raw
    for request_time in ("target", "last"):
        wanted = small.ranks(run, "test", request_time, False)
        assert found[f"rank_{request_time}"].to_pylist() == [rank for rank, _ in wanted]
        assert found["events"].to_pylist() == [length for _, length in wanted]
    assert {"rank_popularity", "rank_frequent_items", "rank_transitions"} < set(found.column_names)


def test_the_program_writes_a_file_and_prints_a_table(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained / "row_wise", run)
    command = [sys.executable, "-m", "pipelines.evaluate", "--run-dir", run, "--filter-seen", "--request-time", "last"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    found = json.loads((run / "eval-test.json").read_text())
    assert found["filter_seen"] and "target" not in found
    for words in ("queried at the last event's time", "popularity", "recent items", "transitions", "<=50", "hr@200"):
        assert words in done.stdout
    for words in ("HR@10/NDCG@10 by share of repeats in the history", "by events back to the target", "never"):
        assert words in done.stdout


# --- bad input -------------------------------------------------------------------------------------------------------


def refused(workers, run_dir, *words, processes=2, **options):
    found = workers(processes).run(small.attempt, evaluate, run_dir, **options)
    assert all(each is not None for each in found)
    assert any(all(word in each for word in words) for each in found), found


def test_checkpoints_that_cannot_be_used_are_refused(workers, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained / "row_wise", run)
    refused(workers, run, "no complete checkpoint 'best'", "step-000000002", which="best")
    refused(workers, run, "no complete checkpoint '77'", which="77")
    refused(workers, tmp_path / "nothing", "no run here")
    description = run / "checkpoints" / "step-000000002" / "checkpoint.json"
    about = json.loads(description.read_text())
    description.write_text(json.dumps({**about, "format": 99}))
    refused(workers, run, "format 99, this software reads format 3")
    about["identity"]["encoder"] = "7"
    description.write_text(json.dumps(about))
    refused(workers, run, "checkpoint.json: damaged, or changed since it was written")
    del about["checksum"]
    description.write_text(sealed(about))
    refused(workers, run, "another version of this software")


def test_bad_options_are_refused_before_the_work(trained, tmp_path):
    command = [sys.executable, "-m", "pipelines.evaluate", "--run-dir", str(trained / "row_wise")]
    done = subprocess.run([*command, "--users", "-1"], capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (1, "evaluate: --users must be at least 1, not -1\n")
    command += ["--output", tmp_path / "nowhere" / "e.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode and "there is no directory" in done.stderr and "nowhere" in done.stderr
    assert "evaluated" not in done.stderr and "processes" not in done.stderr


def test_other_data_is_refused_or_matched_by_raw_ids(workers, trained, tmp_path, data):
    """The same events under other indices: with two items that the run has never seen."""
    import numpy as np
    import pyarrow.parquet as pq

    from fuxi_torchrec.data.tests.small import replace_table

    run, other = small.plain(trained / "row_wise", data), str(tmp_path / "other")
    order = np.random.default_rng(0).permutation(small.ITEMS) + 1  # new index of each item
    histories = [(order[np.array(items) - 1], np.array(times)) for _, items, times, _ in run.histories]
    made = small.make_dataset(other, histories, small.ITEMS + 2, block_users=7)
    table = pq.read_table(made.file("items.parquet"))
    raw = np.concatenate([(np.argsort(order) + 1) * 100, [77, 78]])
    replace_table(made, "items.parquet", table.set_column(0, "item_id", [raw.tolist()]))

    refused(workers, trained / "row_wise", "fingerprint", "--allow-other-data", data=other)
    expected = workers(1).run(evaluate, trained / "row_wise")[0]
    for processes in (1, 2):
        found = workers(processes).run(evaluate, trained / "row_wise", data=other, allow_other_data=True)[0]
        for seen in (False, True):
            assert found["test", seen]["unknown_items"] == 2
            assert not found["test", seen]["own_data"]
            for request_time in ("target", "last"):
                assert found["test", seen][request_time]["mrr"] == pytest.approx(
                    expected["test", seen][request_time]["mrr"]
                )


def test_times_of_another_unit_are_refused(workers, trained, tmp_path, data):
    other = tmp_path / "set"
    shutil.copytree(data, other)
    made = Dataset.open(other)
    describe(made, log=dataclasses.replace(made.info.log, time_unit="ms"))
    refused(workers, trained / "row_wise", "times are in ms, the run's in s", data=str(other), allow_other_data=True)


def test_nothing_to_evaluate_is_an_error(workers, tmp_path, trained):
    lonely = small.make_dataset(tmp_path / "set", [([3], [1_600_000_000])] * 3, small.ITEMS).path
    refused(workers, trained / "row_wise", "no user has a test target", data=lonely, allow_other_data=True)
