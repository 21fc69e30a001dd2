"""A trained run, exported as of yesterday and refreshed with today's log, is the run exported today."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fuxi_torchrec.data.prepare import prepare
from fuxi_torchrec.events.sources import events
from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.tests.exports import users_of
from integration_tests import retrieval_runs as small

ROOT = Path(__file__).parents[1]
SETTINGS = ["batch.max_length=90", "features.event.action.pooling=sum", "features.event.action.sharding=row_wise"]


def log(seed=0, users=30):
    """Rows of users, items, times, actions: text everywhere, new users and items at the end."""
    draw = np.random.default_rng(seed)
    rows = []
    for user in range(users):
        first = 1_600_000_000 + (80_000 if user >= users - 3 else int(draw.integers(0, 20_000)))
        for time in first + np.sort(draw.integers(0, 100_000 - (first - 1_600_000_000), draw.integers(2, 80))):
            rows.append((f"u{user}", f"i{draw.integers(40)}", int(time), ("view", "click", "buy")[draw.integers(3)]))
    return rows


def write(path, rows):
    path.write_text("\n".join(["user_id,item_id,timestamp,action", *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def export(run_dir, output, as_of=None):
    from fuxi_torchrec.evaluation import encoding
    from fuxi_torchrec.export import export as exporting
    from fuxi_torchrec.export import users
    from fuxi_torchrec.export.options import ExportOptions

    encoding._EVENTS, users._PART_USERS = 200, 9  # several parts a rank
    options = ExportOptions(as_of=as_of, truncate=True, state_min_events=20, programs=False)
    return exporting.export(small.load(run_dir), output, options).users


@pytest.mark.timeout(240)
def test_refreshed_equals_exported(workers, tmp_path):
    rows = log()
    cut = 1_600_075_000
    source = events(str(write(tmp_path / "all.csv", rows)), "user_id", "item_id", "timestamp", "s", ["action"])
    prepare(source, tmp_path / "data")
    workers(2).run(small.train, tmp_path / "run", [f"data.path={tmp_path / 'data'}", *SETTINGS])
    workers(2).run(export, tmp_path / "run", tmp_path / "today")
    workers(2).run(export, tmp_path / "run", tmp_path / "yesterday", str(cut))
    new = write(tmp_path / "new.csv", [row for row in rows if row[2] > cut])
    command = [sys.executable, "-m", "pipelines.refresh", "--export", str(tmp_path / "yesterday")]
    command += ["--events", str(new), "--output", str(tmp_path / "refreshed"), "--requery-all"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    today, refreshed = users_of(tmp_path / "today"), users_of(tmp_path / "refreshed")
    assert len(today) == 30 and today.keys() == refreshed.keys()
    assert len(users_of(tmp_path / "yesterday")) < 30
    for user, one in today.items():
        other = refreshed[user]
        numbers = ("as_of", "anchor_time", "anchor_count", "events", "last_time")
        assert [one.row[name] for name in numbers] == [other.row[name] for name in numbers]
        assert one.history.items.tolist() == other.history.items.tolist()
        assert one.history.features["action"].tolist() == other.history.features["action"].tolist()
        assert np.abs(one.row["embedding"] - other.row["embedding"]).max() < 1e-5
        assert (one.state is None) == (other.state is None)
    # and live: yesterday's export with the same events appended answers as today's
    as_of = Bundle.open(tmp_path / "today").manifest.as_of
    late = [row for row in rows if row[2] > cut]
    users = sorted(today)
    with Recommender.load(tmp_path / "yesterday") as live, Recommender.load(tmp_path / "today") as full:
        features = [{"action": row[3]} for row in late]
        done = live.append([row[0] for row in late], [row[1] for row in late], [row[2] for row in late], features)
        assert (done.accepted, done.late) == (len(late), 0)
        for one, other in zip(live.recommend(users, as_of, 5), full.recommend(users, as_of, 5), strict=True):
            np.testing.assert_allclose(one.scores, other.scores, atol=1e-4)
            assert one.events == other.events
    command = [sys.executable, "-m", "pipelines.recommend", "--export", str(tmp_path / "refreshed"), "--user", "u3"]
    said = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(said.stdout)["as_of"] == as_of
