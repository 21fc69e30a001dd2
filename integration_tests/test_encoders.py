"""All encoders through every pipeline: prepared, trained on two ranks, evaluated, exported, refreshed, served."""

import json

import httpx
import numpy as np
import pytest

from fuxi_torchrec import encoders
from fuxi_torchrec.data.prepare import prepare
from fuxi_torchrec.events.sources import events
from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.serving.tests.exports import users_of
from integration_tests import retrieval_runs as small
from integration_tests import runs
from integration_tests.services import Service
from integration_tests.test_second_encoder import CUT, evaluate, export, log, write
from pipelines import explain, recommend, refresh

CONSTANT = {"fuxi_linear", "retnet", "mamba4rec", "recblr", "ttt4rec"}
SILENT = {"sasrec", "retnet"}  # nothing to show
SIZES = {
    "fuxi_linear": ["model.num_heads=2"],
    "sasrec": ["model.num_heads=2"],
    "hstu": ["model.num_heads=2", "model.qk_dim=8", "model.value_dim=16"],
    "fuxi_alpha": ["model.num_heads=2", "model.qk_dim=8", "model.value_dim=8"],
    "fuxi_beta": ["model.num_heads=2", "model.value_dim=8", "model.time_function=pow"],
    "retnet": ["model.num_heads=2"],
    "mamba4rec": ["model.state_dim=4"],
    "tim4rec": ["model.state_dim=4", "model.head_dim=8"],
    "recblr": [],
    "ttt4rec": ["model.num_heads=2", "model.mini_batch=8"],
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place, rows = tmp_path_factory.mktemp("encoders"), log()
    write(place / "new.csv", [row for row in rows if row[2] > CUT])
    prepare(events(str(write(place / "all.csv", rows)), "user_id", "item_id", "timestamp", "s"), place / "data")
    return place


@pytest.mark.parametrize("kind", encoders.kinds())
def test_every_pipeline_takes_every_encoder(workers, place, tmp_path, capsys, kind):
    run, today, yesterday, refreshed = (tmp_path / name for name in ("run", "today", "yesterday", "refreshed"))
    settings = [
        f"data.path={place / 'data'}",
        "batch.max_length=64",
        "train.max_steps=20",
        "train.epochs=99",
        f"model.kind={kind}",
    ]
    sizes = [f"model.kind={kind}", "model.dim=16", "model.num_layers=2", "model.max_positions=65", "model.dropout=0.1"]
    workers(2).run(small.train, run, [*settings, *sizes, *SIZES[kind]])
    for found in workers(2).run(evaluate, run):
        assert all(0 <= found[time][metric] <= 1 for time in ("target", "last") for metric in ("ndcg@10", "mrr"))

    states = workers(2).run(export, run, today)
    assert workers(2).run(export, run, yesterday, str(CUT))
    assert (states[0] > 0) == (kind in CONSTANT)
    new = str(place / "new.csv")
    done = refresh.main(["--export", str(yesterday), "--events", new, "--output", str(refreshed), "--requery-all"])
    assert done == 0
    full, short = users_of(today), users_of(refreshed)
    assert len(users_of(yesterday)) < len(full) == len(short)
    for user, one in full.items():
        assert np.abs(one.row["embedding"] - short[user].row["embedding"]).max() < 2e-5, user
        assert one.row["events"] == short[user].row["events"]

    # the export's vectors are those of the plain forward pass
    trained, as_of = small.plain(run, place / "data"), Bundle.open(today).manifest.as_of
    own = small.vectors(trained, [(items, times, a, as_of) for _, items, times, a in trained.histories])
    for (user, *_), vector in zip(trained.histories, own.numpy(), strict=True):
        assert np.abs(full[user].row["embedding"] - vector).max() < 2e-5, user

    capsys.readouterr()
    user = next(row[0] for row in log() if row[2] > CUT)
    assert recommend.main(["--export", str(refreshed), "--user", user, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["as_of"] == as_of
    assert_served(yesterday, user, answer)
    assert explain.main(["--run-dir", str(run)]) == 0
    said = capsys.readouterr().out
    assert ("has nothing to show" in said) == (kind in SILENT)
    assert (run / "explain.png").exists() == (kind not in SILENT)


def assert_served(export, user, wanted):
    """Over HTTP, with the user's events since the export appended: what the refreshed export answers."""
    late = [{"user_id": u, "item_id": item, "timestamp": time} for u, item, time in log() if u == user and time > CUT]
    with Service(export) as service, httpx.Client(base_url=service.url, timeout=30) as http:
        for first in range(0, len(late), 7):
            assert http.post("/append", json={"events": late[first : first + 7]}).status_code == 200
        found = http.post("/recommend", json={"user_id": user, "time": wanted["as_of"]}).json()
    assert (found["known"], found["events"]) == (True, wanted["events"])
    scores = [[item["score"] for item in answer["items"]] for answer in (found, wanted)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


@pytest.mark.parametrize("kind", ["hstu", "mamba4rec"])
def test_losses_are_the_same_on_1_2_and_4_ranks(workers, tmp_path, kind):
    settings = [f"data.path={runs.small_dataset(tmp_path / 'set')}", "train.max_steps=10", "optimizer.lr=1e-3"]
    settings += [f"model.kind={kind}", "model.dim=16", "model.num_layers=2", "model.max_positions=65", *SIZES[kind]]
    found = {n: workers(n).run(runs.run, tmp_path / f"run-{n}", settings)[0] for n in (1, 2, 4)}
    assert len(found[1]) == 10
    for n in (2, 4):
        assert max(abs(found[1][step] - found[n][step]) for step in found[1]) < 1e-5
