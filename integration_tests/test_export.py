"""Exports: the model's own answers from files alone, on any number of processes; and what is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from fuxi_torchrec.artifacts import NewDirectory
from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.export.bundle import Bundle, scaled
from fuxi_torchrec.export.parts import read_histories, read_users
from fuxi_torchrec.export.states import StateFile
from fuxi_torchrec.serving.catalogue import feature_values
from fuxi_torchrec.serving.encoding import UserModel
from integration_tests import retrieval_runs as small

pytestmark = pytest.mark.timeout(300)  # the first test starts processes and trains
FEATURE = ["features.event.action.pooling=sum", "features.event.action.sharding=row_wise"]


def export(run_dir, output, load_options=None, **options):
    from fuxi_torchrec.evaluation import encoding
    from fuxi_torchrec.export import export as exporting
    from fuxi_torchrec.export import users
    from fuxi_torchrec.export.options import ExportOptions

    run = small.load(run_dir, **(load_options or {}))
    options = {"state_min_events": 10, "programs": False, **options}
    encoding._EVENTS, users._PART_USERS = 200, 9  # several parts a rank
    return exporting.export(run, output, ExportOptions(**options)).users


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small.dataset(tmp_path_factory.mktemp("export") / "set", feature="single").path


@pytest.fixture(scope="module")
def trained(workers, data, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "run"
    workers(2).run(small.train, run, [f"data.path={data}", *FEATURE, "train.max_steps=8"])
    return run


@pytest.fixture(scope="module")
def exports(workers, trained, tmp_path_factory):
    """The same run exported by 1, 2 and 4 processes."""
    place = tmp_path_factory.mktemp("exports")
    for processes in (1, 2, 4):
        assert workers(processes).run(export, trained, place / str(processes)) == [40] * processes
    return {n: Bundle.open(place / str(n), verify="checksums") for n in (1, 2, 4)}


def columns(bundle, folder, *names):
    tables = [pq.read_table(path) for path in bundle.parts(folder)]
    return [np.concatenate([np.array(t[name].to_pylist()) for t in tables if len(t)]) for name in names]


@pytest.fixture(scope="module")
def steps(workers, data, tmp_path_factory):
    """A run with checkpoints of steps 2, 4 and 6, of which 2 is the best."""
    run = tmp_path_factory.mktemp("runs") / "steps"
    settings = [f"data.path={data}", *FEATURE, "checkpoint.every_steps=2", "checkpoint.keep_last=3"]
    workers(2).run(train_best, run, [*settings, "train.max_steps=2"])
    workers(2).run(small.train, run, [*settings, "train.max_steps=6"])
    return run


def train_best(run_dir, settings):
    from integration_tests import runs

    made, _ = runs.trainer(run_dir, [*small.SETTINGS, *settings])
    made.train()
    made._saved_at = -1  # again, as the best
    made.save(best=True)
    made.saver.wait()


@pytest.mark.parametrize(("which", "step"), [("best", 2), ("latest", 6), ("4", 4), (None, 2)])
def test_the_checkpoint_that_was_named_is_exported(workers, steps, data, tmp_path, which, step):
    workers(2).run(export, steps, tmp_path / "out", {"which": which})
    bundle = Bundle.open(tmp_path / "out")
    tables, encoder = load_file(bundle.path / "tables.safetensors"), load_file(bundle.path / "encoder.safetensors")
    run = small.plain(steps, data, step)
    assert bundle.manifest.run["step"] == step
    assert torch.equal(tables["item_table"], run.table)
    assert all(torch.equal(encoder[name], value) for name, value in run.encoder.state_dict().items())
    others = [small.plain(steps, data, other).table for other in (2, 4, 6) if other != step]
    assert not any(torch.equal(tables["item_table"], other) for other in others)


def test_the_programs_take_the_checkpoint_that_was_named(steps, data, tmp_path):
    """On the command line: of an export the best one, of an evaluation a step."""
    options = ["--output", tmp_path / "out", "--no-programs", "--no-index", "--checkpoint", "best"]
    evaluation = ["--output", tmp_path / "eval.json", "--request-time", "target", "--checkpoint", "4"]
    for command, more in (("export", options), ("evaluate", evaluation)):
        line = [sys.executable, "-m", f"pipelines.{command}", "--run-dir", steps, *more]
        done = subprocess.run(line, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["run"]["step"] == 2
    found, run = json.loads((tmp_path / "eval.json").read_text()), small.plain(steps, data, 4)
    expected = small.metrics(small.ranks(run, "test", "target", False))
    assert found["step"] == 4 and {k: found["target"][k] for k in expected} == pytest.approx(expected)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_inner_products_of_the_files_give_the_models_own_top_10(exports, trained, data, processes):
    bundle, run = exports[processes], small.plain(trained, data)
    index, vectors = columns(bundle, "items", "index", "embedding")
    ids, users = columns(bundle, "users", "user_id", "embedding")
    assert ids.tolist() == [user for user, *_ in run.histories]
    known = np.flatnonzero(run.known)
    assert index.tolist() == known.tolist()
    own = small.vectors(run, [(i, t, a, bundle.manifest.as_of) for _, i, t, a in run.histories])
    assert np.abs(own.numpy() - users).max() < 1e-5
    scores = own @ small.candidates(run)[known].T
    expected = known[scores.topk(10).indices.numpy()]
    assert index[np.argsort(-(users @ vectors.T), axis=1)[:, :10]].tolist() == expected.tolist()
    found = faiss.read_index(str(bundle.path / "index.faiss")).search(users.astype(np.float32), 10)[1]
    assert found.tolist() == expected.tolist()
    assert bundle.manifest.index["recall@100"] > 0.999  # two items may round to the same hundredth place


def test_the_number_of_processes_decides_the_files_and_nothing_else(exports):
    one = exports[1]
    for processes in (2, 4):
        other = exports[processes]
        assert len(other.parts("items")) == processes
        assert len(other.parts("users")) >= 4
        for name in ("tables.safetensors", "encoder.safetensors", "index.faiss"):
            assert other.manifest.files[name] == one.manifest.files[name], name
        assert other.manifest.model_id == one.manifest.model_id
        for name in ("item_id", "index", "embedding"):
            assert np.array_equal(*(columns(each, "items", name)[0] for each in (one, other)))
        for name in ("user_id", "as_of", "anchor_time", "anchor_count", "events", "last_time"):
            assert np.array_equal(*(columns(each, "users", name)[0] for each in (one, other))), name
        assert np.abs(np.subtract(*(columns(each, "users", "embedding")[0] for each in (one, other)))).max() < 1e-6


def test_raw_ids_anchors_and_counts_are_those_of_the_data(exports, trained, data):
    bundle, run = exports[2], small.plain(trained, data)
    index, ids = columns(bundle, "items", "index", "item_id")
    assert (ids == index * 100).all()  # as the dataset was made
    most = bundle.manifest.max_length
    rows = zip(*columns(bundle, "users", "anchor_time", "anchor_count", "events", "last_time", "as_of"), strict=True)
    last = max(times[-1] for _, _, times, _ in run.histories)
    for (_, _, times, _), found in zip(run.histories, rows, strict=True):
        n = min(len(times), most)
        assert found == (times[-n], len(times) - n, n, times[-1], last)


def test_states_and_histories_are_enough_to_go_on(exports):
    bundle = exports[2]
    model, states = UserModel(bundle), 0
    for path in bundle.parts("users"):
        users = read_users(path)
        histories = read_histories(bundle.path / "histories" / path.name, users.ids, bundle.manifest.features)
        again = model.encode(histories)
        assert np.abs(model.vectors(again, users.as_of).numpy() - users.embedding).max() < 1e-5
        kept = np.flatnonzero(users.events >= 10)
        assert ((users.state_row >= 0) == (users.events >= 10)).all()
        with StateFile.open(bundle.path / "states" / f"{path.stem}.bin", bundle.manifest.model_id) as file:
            assert len(file) == len(kept)
            records, whole = file.get(users.state_row[kept])
        assert whole.all()
        stored = model.vectors(model.read(records), users.as_of[kept]).numpy()
        assert np.abs(stored - users.embedding[kept]).max() < 1e-6
        states += len(kept)
    assert states == bundle.manifest.states > 0


def test_tables_are_the_checkpoints(exports, trained, data):
    run, tables = small.plain(trained, data), load_file(exports[4].path / "tables.safetensors")
    assert torch.equal(tables["item_table"], run.table)
    assert torch.equal(tables["feature_action"], run.features["feature_action"])
    assert run.features["feature_action"].abs().sum() > 0
    _, vectors = columns(exports[4], "items", "index", "embedding")
    assert np.array_equal(vectors, scaled(run.table[run.known], "cosine").numpy().astype(np.float64))


def test_truncated_exports_are_as_if_made_then(workers, trained, data, tmp_path):
    run = small.plain(trained, data)
    as_of = int(np.median([t for _, _, times, _ in run.histories for t in times]))
    workers(2).run(export, trained, tmp_path / "out", as_of=str(as_of), truncate=True)
    bundle = Bundle.open(tmp_path / "out")
    then = [(u, [x for x in t if x <= as_of]) for u, _, t, _ in run.histories]
    then = [(u, t) for u, t in then if t]
    ids, last, embedding = columns(bundle, "users", "user_id", "last_time", "embedding")
    assert list(zip(ids.tolist(), last.tolist(), strict=True)) == [(u, t[-1]) for u, t in then]
    users = [(i[: len(t)], t, a[: len(t)], as_of) for (_, t), (_, i, _, a) in zip(then, by_id(run, then), strict=True)]
    assert np.abs(small.vectors(run, users).numpy() - embedding).max() < 1e-5


def by_id(run, users):
    all_users = {user[0]: user for user in run.histories}
    return [all_users[u] for u, _ in users]


def test_large_catalogues_get_hnsw_and_int8_its_measured_loss(workers, trained, tmp_path):
    workers(1).run(export, trained, tmp_path / "out", exact_items=10, quantize="int8", as_of="2033-05-18")
    bundle = Bundle.open(tmp_path / "out", verify="checksums")
    about = bundle.manifest.index
    assert about["kind"] == "hnsw" and 0.9 < about["recall@100"] <= 1
    assert about["int8"]["recall_lost"] == pytest.approx(1 - about["int8"]["recall@100"])
    assert 0.8 < about["int8"]["recall@100"] <= 1
    assert bundle.manifest.as_of == 1_999_987_200
    small_index = faiss.read_index(str(bundle.path / about["int8"]["file"]))
    users, index = columns(bundle, "users", "embedding")[0], columns(bundle, "items", "index")[0]
    assert set(small_index.search(users.astype(np.float32), 5)[1].reshape(-1)) <= set(index.tolist())


def test_a_run_that_knows_fewer_items_than_processes(workers, tmp_path):
    histories = [([1, 2, 1, 2, 1], np.arange(5) + 1_600_000_000)] * 6
    path = small.make_dataset(tmp_path / "set", histories, 2).path
    settings = [f"data.path={path}", "data.min_item_events=1", "tables.sharding=data_parallel", "batch.streams=4"]
    workers(4).run(small.train, tmp_path / "run", settings)
    workers(4).run(export, tmp_path / "run", tmp_path / "out")
    bundle = Bundle.open(tmp_path / "out", verify="checksums")
    assert columns(bundle, "items", "index")[0].tolist() == [1, 2]
    assert bundle.manifest.users == 6


def test_text_of_another_dataset_is_exported_in_the_runs_own_indices(workers, tmp_path):
    histories = small.random_histories(4, 40, 70, small.ITEMS)
    own = small.make_dataset(tmp_path / "own", histories, small.ITEMS, 11, texts=["a", "b", "c", "d"]).path
    other = small.make_dataset(tmp_path / "other", histories, small.ITEMS, 11, texts=["d", "x", "b", "a", "c"]).path
    workers(2).run(small.train, tmp_path / "run", [f"data.path={own}", *FEATURE])
    workers(2).run(export, tmp_path / "run", tmp_path / "1")
    options = {"data": other, "allow_other_data": True}
    workers(2).run(export, tmp_path / "run", tmp_path / "2", options)
    one, two = (Bundle.open(tmp_path / name, verify="checksums") for name in "12")
    assert one.manifest.dataset != two.manifest.dataset
    assert feature_values(two) == feature_values(one) == {"action": {"a": 1, "b": 2, "c": 3, "d": 4}}
    assert np.array_equal(*(columns(each, "users", "embedding")[0] for each in (one, two)))
    for name in ("item", "action"):
        assert [pq.read_table(path)[name].to_pylist() for path in one.parts("histories")] == [
            pq.read_table(path)[name].to_pylist() for path in two.parts("histories")
        ]
    shutil.rmtree(own)
    said = "values of the feature action are matched through those of the run's own dataset"
    refused(workers, tmp_path / "run", tmp_path / "3", said, load_options=options)
    small.make_dataset(own, histories[1:], small.ITEMS, 11, texts=["b", "a", "c", "d"])  # something else in its place
    refused(workers, tmp_path / "run", tmp_path / "3", said, "fingerprint", load_options=options)


# --- portable programs -----------------------------------------------------------------------------------------------

CLEAN = """
import sys, torch
arguments, programs = torch.load(sys.argv[1]), sys.argv[2]
query, append = (torch.export.load(f"{programs}/{name}.pt2").module() for name in ("query", "append"))
found = [(append(state, rows, times), query(state, times + 60)) for state, rows, times in arguments]
assert not any(name.partition(".")[0] in ("fuxi_torchrec", "torchrec", "fbgemm_gpu") for name in sys.modules)
torch.save(found, sys.argv[3])
"""


def test_programs_run_without_this_package_and_give_the_eager_results(workers, trained, tmp_path):
    from fuxi_torchrec.export.programs import example

    workers(1).run(export, trained, tmp_path / "out", programs=True)
    bundle = Bundle.open(tmp_path / "out", verify="checksums")
    encoder = bundle.encoder()
    given = [example(encoder, users, seed=users) for users in (1, 2, 5, 33)]
    torch.save([(state.flat(), rows, times) for state, rows, times in given], tmp_path / "given.pt")
    (tmp_path / "clean.py").write_text(CLEAN)
    command = [sys.executable, "clean.py", "given.pt", bundle.path / "programs", "found.pt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for (state, rows, times), (after, vectors) in zip(given, torch.load(tmp_path / "found.pt"), strict=True):
        eager = encoder.append(state, rows, torch.arange(len(state) + 1), times)
        for ours, theirs in zip(eager.flat(), after, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
        expected = scaled(encoder.query(state, times + 60), bundle.manifest.similarity)
        assert torch.allclose(expected, vectors, rtol=0, atol=1e-6)


# --- bad input -------------------------------------------------------------------------------------------------------


def refused(workers, trained, output, *words, **options):
    found = workers(2).run(small.attempt, export, trained, output, **options)
    assert all(each is not None for each in found)
    assert any(all(word in each for word in words) for each in found), found
    assert not list(output.parent.glob(f".{output.name}*"))


def test_an_output_that_exists_is_never_touched(workers, trained, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("!")
    refused(workers, trained, tmp_path / "out", "exists", "choose another output")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("as_of", "words"),
    [
        ("1600000101", ["before the data's last event", "--truncate"]),
        ("2020-09-13T12:30", ["before the data's last event"]),
        ("1600009999000", ["looks like milliseconds"]),
        ("1600009", ["before the data's first event", "times are in seconds"]),
        ("9999999999", ["after the year 2200", "in seconds"]),
        ("yesterday", ["is no time"]),
        ("-5", ["before the data's first event"]),
    ],
)
def test_implausible_times_are_refused(workers, trained, tmp_path, as_of, words):
    refused(workers, trained, tmp_path / "out", *words, as_of=as_of)
    assert not (tmp_path / "out").exists()


def test_other_bad_options_are_refused(workers, trained, tmp_path, data):
    refused(workers, trained, tmp_path / "out", "--state-min-events must be at least 1", state_min_events=0)
    other = small.dataset(tmp_path / "set", feature="single", seed=5).path
    refused(workers, trained, tmp_path / "out", "fingerprint", load_options={"data": other})
    found = workers(2).run(export, trained, tmp_path / "out", {"data": other, "allow_other_data": True})
    assert found == [40, 40]
    assert Bundle.open(tmp_path / "out").manifest.dataset == Dataset.open(other).info.fingerprint


def test_two_exports_into_one_output(workers, trained, tmp_path):
    other = NewDirectory(tmp_path / "out")
    place = other.begin()
    found = workers(2).run(small.attempt, export, trained, tmp_path / "out")
    assert all("another job is writing it: wait for it, or choose another output" in each for each in found)
    assert place.exists()  # the other one's
    other.end()
    assert workers(2).run(export, trained, tmp_path / "out") == [40, 40]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_everything_is_on_disk_before_the_manifest_is(workers, trained, tmp_path):
    synced = workers(2).run(recorded_export, trained, tmp_path / "out", NewDirectory(tmp_path / "out").place)
    last = synced[0].index(".manifest.json.new")
    before = {*synced[0][:last], *synced[1]}
    bundle = Bundle.open(tmp_path / "out")
    assert {"index.faiss", "index-int8.faiss", "programs/query.pt2"} <= bundle.manifest.files.keys()
    assert before >= bundle.manifest.files.keys()
    assert before >= {"items", "users", "histories", "states", "programs"}
    assert "." in synced[0][last:]


def recorded_export(run_dir, output, place):
    """Export, and say which files and directories below a place were written to disk, in order."""
    import os

    names, fsync = [], os.fsync

    def recording(handle):
        path = os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), place)
        if not path.startswith(".."):
            names.append(path)
        fsync(handle)

    os.fsync = recording
    try:
        export(run_dir, output, quantize="int8", programs=True)
    finally:
        os.fsync = fsync
    return names


def test_a_failure_on_one_process_leaves_nothing(workers, trained, tmp_path):
    found = workers(2).run(small.attempt, failing_export, trained, tmp_path / "out")
    assert "disk on fire" in found[1] and "rank 1" in found[0]
    assert list(tmp_path.iterdir()) == []


def failing_export(run_dir, output):
    import torch.distributed as dist

    from fuxi_torchrec.export import users

    def broken(*_):
        raise OSError("disk on fire")

    before = users.write_users
    users.write_users = broken if dist.get_rank() == 1 else before
    try:
        export(run_dir, output)
    finally:
        users.write_users = before


def test_the_program_runs_under_torchrun(trained, tmp_path):
    run = [Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node=2", "-m", "pipelines.export"]
    options = ["--run-dir", trained, "--output", tmp_path / "out", "--no-programs", "--state-min-events", "10"]
    done = subprocess.run([*run, *options], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "states of" in done.stderr and "KiB each" in done.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["users"] == 40 and manifest["run"]["checkpoint"] == "step-000000008"
    shutil.rmtree(tmp_path / "out")
