"""Events with ids, buckets, numbers and vectors: on any number of ranks; refresh and appends are a full export."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuxi_torchrec.data.prepare import PrepareOptions, prepare
from fuxi_torchrec.events.sources import events
from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.refresh.refresh import refresh
from integration_tests import retrieval_runs as small
from integration_tests import runs
from integration_tests.test_features import embeddings, exported

START, EARLY, END = 1_600_000_000, 1_600_070_000, 1_600_100_000
KINDS = ["action", "tags:id:|", "watched:bucket:4", "price:number", "scene:vector"]
NAMES = ("action", "tags", "watched", "price", "scene")
EVENT = {"action": {}, "tags": {"pooling": "mean"}, "watched": {}, "price": {}, "scene": {}}


def log():
    """24 users of up to 40 events, with something missing here and there, and values that only late events have."""
    draw, rows = np.random.default_rng(3), []
    for user in range(24):
        for time in np.sort(draw.integers(START, END, 10 + user)).tolist():
            late = time > EARLY
            rows.append(
                {
                    "user_id": user,
                    "item_id": int(draw.integers(1, 41)),
                    "timestamp": time,
                    "action": f"a{draw.integers(4 + late)}" if draw.random() < 0.9 else None,
                    "tags": "|".join(f"t{t}" for t in draw.integers(0, 5, draw.integers(3))),
                    "watched": float(draw.exponential()) if draw.random() < 0.8 else None,
                    "price": float(draw.normal(5, 2)) if draw.random() < 0.8 else None,
                    "scene": draw.normal(size=3).round(3).tolist() if draw.random() < 0.8 else None,
                }
            )
    return rows


@pytest.fixture(scope="module")
def place(tmp_path_factory, workers):
    path, rows = tmp_path_factory.mktemp("events"), log()
    pq.write_table(pa.Table.from_pylist(rows), path / "log.parquet")
    later = [row for row in rows if row["timestamp"] > EARLY]
    pq.write_table(pa.Table.from_pylist(later), path / "later.parquet")
    source = events(str(path / "log.parquet"), "user_id", "item_id", "timestamp", "s", KINDS)
    prepare(source, path / "data", PrepareOptions(train_until=str(EARLY)))
    workers(1).run(small.train, path / "run", settings(path, "train.max_steps=5"))
    workers(2).run(exported, path / "run", path / "full")
    workers(1).run(exported, path / "run", path / "early", as_of=str(EARLY), truncate=True)
    return path


def settings(place, *more):
    whole = ["batch.max_length=64", "model.max_positions=64"]
    return [f"data.path={place / 'data'}", f"features.event={json.dumps(EVENT)}", *whole, *more]


def same(found, expected):
    assert found.keys() == expected.keys()
    for user, vector in expected.items():
        np.testing.assert_allclose(found[user], vector, atol=1e-5)


@pytest.mark.timeout(400)
def test_a_refresh_with_all_kinds_is_a_full_export(place):
    refresh(place / "early", place / "later.parquet", place / "late", requery_all=True)
    Bundle.open(place / "late").check()
    same(embeddings(place / "late"), embeddings(place / "full"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("http", [False, True])
def test_appends_with_all_kinds_are_a_full_export(place, http):
    from starlette.testclient import TestClient

    from fuxi_torchrec.serving.http.service import create_app

    later = pq.read_table(place / "later.parquet").to_pylist()
    given = [{name: row[name] for name in NAMES if row[name] is not None} for row in later]
    for each in given:
        each["tags"] = [tag for tag in each["tags"].split("|") if tag]
    log_dir, expected = place / f"log-{http}", embeddings(place / "full")
    recommender = Recommender.load(place / "early", log_dir=log_dir)
    if http:
        new = [
            {"user_id": row["user_id"], "item_id": row["item_id"], "timestamp": row["timestamp"], "features": features}
            for row, features in zip(later, given, strict=True)
        ]
        with TestClient(create_app(recommender)) as client:
            assert client.post("/append", json={"events": new}).json()["accepted"] == len(new)
            for wrong in ({"price": "dear"}, {"scene": [1.0]}, {"watched": None, "scene": "x"}, {"colour": 3}):
                assert client.post("/append", json={"events": [new[0] | {"features": wrong}]}).status_code == 422
        recommender = Recommender.load(place / "early", log_dir=log_dir)  # from the store
    else:
        for wrong, said in (({"price": "dear"}, "finite number"), ({"scene": [1.0]}, "must be 3 numbers")):
            with pytest.raises(ValueError, match=said):
                recommender.append([1], [1], [END], [wrong])
        columns = ([row[name] for row in later] for name in ("user_id", "item_id", "timestamp"))
        assert recommender.append(*columns, given).accepted == len(later)
    with recommender:
        as_of, users = Bundle.open(place / "full").manifest.as_of, list(expected)
        vectors = recommender._model.vectors(recommender.states(users), np.full(len(users), as_of), users)
        same(dict(zip(users, vectors.numpy(), strict=True)), expected)
    refresh(place / "early", log_dir, place / f"stored-{http}", requery_all=True)
    same(embeddings(place / f"stored-{http}"), expected)


@pytest.mark.timeout(400)
def test_losses_and_ranks_are_the_same_on_any_number_of_ranks(place, workers):
    from integration_tests.test_evaluate import evaluate

    found = []
    for world in (1, 2, 4):
        where = place / f"run-{world}"
        workers(world).run(small.train, where, settings(place, "train.max_steps=3"))
        metrics = workers(world).run(evaluate, where, filters=(False,))[0]["test", False]
        found.append(([*runs.losses(where).values()], metrics["last"]["mrr"]))
    for losses, mrr in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=2e-4)
        assert mrr == pytest.approx(found[0][1], rel=0.02)


@pytest.mark.timeout(200)
def test_warm_start_on_an_extended_dataset_keeps_what_was_learned(place, workers):
    """Statistics and vocabularies are those of the first dataset, under another sharding and on more ranks."""
    source = events(str(place / "log.parquet"), "user_id", "item_id", "timestamp", "s", KINDS)
    if (place / "more").exists():
        shutil.rmtree(place / "more")
    info = prepare(source, place / "more", PrepareOptions(extend=str(place / "data")))
    first = {f.name: f for f in Bundle.open(place / "full").manifest.features}
    for feature in info.features:
        assert feature.boundaries == first[feature.name].boundaries
        assert (feature.mean, feature.deviation) == (first[feature.name].mean, first[feature.name].deviation)
    wanted = [f"data.path={place / 'more'}", "train.max_steps=1", "tables.sharding=table_wise"]
    workers(2).run(warm, place / "warm", settings(place, *wanted), place / "run")
    assert runs.losses(place / "warm")


def warm(run_dir, given, other):
    made, _ = runs.trainer(run_dir, [*small.SETTINGS, *given], init_from=other)
    return made.train()["step"]
