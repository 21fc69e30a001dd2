"""An encoder that nobody but its own file knows: through every pipeline, by its path in ``model.kind`` alone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fuxi_torchrec.data.prepare import prepare
from fuxi_torchrec.encoders.tests.causal_mean import KIND, CausalMean
from fuxi_torchrec.events.sources import events
from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.tests.exports import users_of
from integration_tests import retrieval_runs as small

ROOT = Path(__file__).parents[1]
CUT = 1_600_075_000
DAY = 86_400

pytestmark = pytest.mark.timeout(300)  # the first test starts processes and trains


def log(users=24):
    """Rows of users, items and times; the last users come after the cut."""
    draw, rows = np.random.default_rng(0), []
    for user in range(users):
        first = 1_600_000_000 + (80_000 if user >= users - 3 else int(draw.integers(0, 20_000)))
        for time in first + np.sort(draw.integers(0, 1_600_100_000 - first, draw.integers(2, 60))):
            rows.append((f"u{user}", f"i{draw.integers(30)}", int(time)))
    return rows


def write(path, rows):
    path.write_text("\n".join(["user_id,item_id,timestamp", *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def evaluate(run_dir):
    from fuxi_torchrec.evaluation.evaluate import evaluate as run_it

    return run_it(small.load(run_dir), "test", filter_seen=False)


def export(run_dir, output, as_of=None):
    from fuxi_torchrec.export import export as exporting
    from fuxi_torchrec.export.options import ExportOptions

    options = ExportOptions(as_of=as_of, truncate=True, state_min_events=5)
    return exporting.export(small.load(run_dir), output, options).states


def run_pipeline(name, *options):
    command = [sys.executable, "-m", f"pipelines.{name}", *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def place(workers, tmp_path_factory):
    """Prepared, trained on two ranks, exported as of now and as of the cut."""
    place, rows = tmp_path_factory.mktemp("second"), log()
    source = events(str(write(place / "all.csv", rows)), "user_id", "item_id", "timestamp", "s")
    prepare(source, place / "data")
    settings = [f"data.path={place / 'data'}", "batch.max_length=64", "train.max_steps=6", "optimizer.weight_decay=0.1"]
    workers(2).run(small.train, place / "run", [f"model.kind={KIND}", "model.per_day=0.25", *settings])
    assert workers(2).run(export, place / "run", place / "today") == [0, 0]
    assert workers(2).run(export, place / "run", place / "yesterday", str(CUT)) == [0, 0]
    new = write(place / "new.csv", [row for row in rows if row[2] > CUT])
    options = ["--events", new, "--output", place / "refreshed", "--requery-all"]
    run_pipeline("refresh", "--export", place / "yesterday", "--encoder", KIND, *options)
    return place


def test_evaluation_is_that_of_counting(workers, place):
    run = small.plain(place / "run", place / "data")
    assert isinstance(run.encoder, CausalMean) and run.config.model.per_day == 0.25
    found = workers(2).run(evaluate, place / "run")
    for request_time in ("target", "last"):
        expected = small.metrics(small.ranks(run, "test", request_time, False))
        for each in found:
            assert {name: each[request_time][name] for name in expected} == pytest.approx(expected)


def test_an_export_has_vectors_and_histories_and_no_states(place):
    bundle, run = Bundle.open(place / "today", verify="checksums"), small.plain(place / "run", place / "data")
    manifest = bundle.manifest
    assert next(iter(manifest.model.items())) == ("kind", KIND)
    assert (manifest.states, manifest.state_bytes) == (0, 0)
    assert not [name for name in manifest.files if name.startswith(("states", "programs"))]
    found = users_of(place / "today")
    own = small.vectors(run, [(i, t, a, manifest.as_of) for _, i, t, a in run.histories])
    for (user, items, times, _), vector in zip(run.histories, own.numpy(), strict=True):
        assert np.abs(found[user].row["embedding"] - vector).max() < 1e-5
        assert found[user].history.times.tolist() == times
        assert found[user].history.items.tolist() == [item if run.known[item] else 0 for item in items]


def test_a_refreshed_user_is_as_in_a_full_export(place):
    today, refreshed = users_of(place / "today"), users_of(place / "refreshed")
    assert len(users_of(place / "yesterday")) < len(today) == len(refreshed)
    for user, one in today.items():
        other = refreshed[user]
        numbers = ("as_of", "anchor_time", "anchor_count", "events", "last_time", "state_row")
        assert [one.row[name] for name in numbers] == [other.row[name] for name in numbers]
        assert one.history.items.tolist() == other.history.items.tolist()
        assert np.abs(one.row["embedding"] - other.row["embedding"]).max() < 1e-6


def test_answers_are_the_models_also_for_what_was_appended(place):
    """Yesterday's export with today's events appended, beside a plain restatement of the model."""
    run, late = small.plain(place / "run", place / "data"), [row for row in log() if row[2] > CUT]
    as_of = Bundle.open(place / "today").manifest.as_of + DAY
    known = np.flatnonzero(run.known)
    queries = small.vectors(run, [(i, t, a, as_of) for _, i, t, a in run.histories])
    scores = queries @ small.candidates(run)[known].T / run.config.loss.temperature
    users = [user for user, *_ in run.histories]
    with Recommender.load(place / "yesterday", cache_mib=1) as live:
        for begin in range(0, len(late), 7):
            some = late[begin : begin + 7]
            assert live.append(*zip(*some, strict=True)).accepted == len(some)
            live.recommend([some[0][0]], as_of, 1)  # a state in the cache, to go on from
        for answer, (_, items, _, _), row in zip(live.recommend(users, as_of, 5), run.histories, scores, strict=True):
            np.testing.assert_allclose(answer.scores, row.topk(5).values.numpy(), atol=1e-3)
            assert answer.events == len(items)
    said = run_pipeline("recommend", "--export", place / "refreshed", "--user", users[0], "--json", "--encoder", KIND)
    assert json.loads(said)["as_of"] == as_of - DAY


def test_an_encoder_with_nothing_to_show_says_so(place):
    said = run_pipeline("explain", "--run-dir", place / "run", "--encoder", KIND)
    assert f"an encoder of kind {KIND} has nothing to show" in said


@pytest.mark.parametrize("command", ["explain", "recommend", "refresh", "train"])
def test_code_that_only_a_file_names_is_not_run(place, tmp_path, command):
    module = KIND.partition(":")[0]
    asked = {
        "explain": ["--run-dir", place / "run"],
        "train": ["--run-dir", place / "run"],
        "recommend": ["--export", place / "today", "--user", "u0"],
        "refresh": ["--export", place / "today", "--events", place / "new.csv", "--output", tmp_path / "out"],
    }
    program = f"import sys; from pipelines.{command} import main; code = 1\ntry: code = main(sys.argv[1:])\n"
    program += f"finally: assert {module!r} not in sys.modules\nsys.exit(code)"
    options = map(str, asked[command])
    done = subprocess.run(
        [sys.executable, "-c", program, *options], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1 and f"give --encoder {KIND}" in done.stderr
    assert not (tmp_path / "out").exists()
