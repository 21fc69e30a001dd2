"""Items and users with features: prepared, trained, evaluated, exported, served; and items that nobody has had."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fuxi_torchrec.data.prepare import PrepareOptions, prepare
from fuxi_torchrec.events.sources import events
from fuxi_torchrec.export.bundle import Bundle, ExportError
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.store import read_store
from integration_tests import retrieval_runs as small
from integration_tests import runs

START, CUT, EARLY, END = 1_600_000_000, 1_600_080_000, 1_600_090_000, 1_600_100_000
ITEM = {"brand": {}, "tags": {"pooling": "mean"}, "price": {}, "text": {}, "level": {}}
SETTINGS = [
    "data.split=by_time",
    f"data.test_from={CUT}",
    "data.min_item_events=2",
    f"features.item={json.dumps(ITEM)}",
    "features.item.brand.sharding=row_wise",
]
WHOLE = ["batch.max_length=64", "model.max_positions=64"]  # no history is longer
USER = "features.user={age: {}, income: {}}"


def features_of(items, seed=5):
    draw = np.random.default_rng(seed)
    return {
        "item_id": list(items),
        "brand": [f"b{draw.integers(12)}" if n % 7 else None for n in range(len(items))],
        "tags": ["|".join(f"t{t}" for t in draw.integers(0, 6, draw.integers(4))) for _ in items],
        "price": [float(draw.normal()) if n % 5 else None for n in range(len(items))],
        "text": [draw.normal(size=4).tolist() for _ in items],
        "level": [int(draw.integers(50)) for _ in items],
        "title": [f"item number {item}" for item in items],
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dataset of 30 users and 60 items; the last 10 items are new in the held-out period."""
    path = tmp_path_factory.mktemp("features")
    draw, lines = np.random.default_rng(1), ["user_id,item_id,timestamp"]
    for user in range(30):
        for time in np.sort(draw.integers(START, END, 40)):
            item = int(draw.integers(1, 51)) if time < CUT or draw.random() < 0.6 else int(draw.integers(51, 61))
            lines.append(f"{user},{item},{time}")
    (path / "log.csv").write_text("\n".join(lines) + "\n")
    pq.write_table(pa.table(features_of(range(1, 61))), path / "items.parquet")
    ages = {
        "user_id": list(range(0, 30, 2)),
        "age": ["old", "young", None] * 5,
        "income": [float(n) for n in range(15)],
    }
    pq.write_table(pa.table(ages), path / "users.parquet")
    options = PrepareOptions(
        item_features=str(path / "items.parquet"),
        item_columns="brand tags:id:| price text level:bucket:4 title:display",
        user_features=str(path / "users.parquet"),
        train_until=str(CUT),
    )
    prepare(events(str(path / "log.csv"), "user_id", "item_id", "timestamp", "s"), path / "data", options)
    return path


def evaluated(run_dir, **options):
    from fuxi_torchrec.evaluation.evaluate import evaluate

    return evaluate(small.load(run_dir), request_times=["target"], **options)


def exported(run_dir, output, **options):
    from fuxi_torchrec.export import export as exporting
    from fuxi_torchrec.export.options import ExportOptions

    return exporting.export(
        small.load(run_dir), output, ExportOptions(programs=False, state_min_events=5, **options)
    ).items


def settings(place, *more):
    return [f"data.path={place / 'data'}", *SETTINGS, *more]


@pytest.fixture(scope="module")
def run(place, workers):
    workers(1).run(small.train, place / "run", settings(place, "train.max_steps=6"))
    workers(2).run(exported, place / "run", place / "export")
    return place / "run"


@pytest.mark.timeout(300)
def test_losses_and_ranks_are_the_same_on_any_number_of_ranks(place, workers):
    found = []
    for world in (1, 2, 4):
        where = place / f"run-{world}"
        workers(world).run(small.train, where, settings(place, USER, "train.max_steps=4", "features.id_dropout=0.3"))
        found.append(([*runs.losses(where).values()], workers(world).run(evaluated, where)[0]["target"]))
    for losses, metrics in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=2e-4)
        assert metrics["mrr"] == pytest.approx(found[0][1]["mrr"], rel=0.02)
    assert found[0][1]["by_target"]["cold"]["users"] > 0


@pytest.mark.timeout(120)
def test_evaluation_ranks_cold_items_and_tells_them_apart(place, run, workers):
    found = workers(2).run(evaluated, run)[0]
    parts = found["target"]["by_target"]
    assert found["candidates"] == 60
    assert parts["warm"]["users"] + parts["cold"]["users"] == found["target"]["users"]
    assert parts["cold"]["users"] > 0 and parts["cold"]["unknown_targets"] == 0
    cold = workers(2).run(evaluated, run, targets="cold", candidates="cold")[0]
    assert cold["candidates"] == 10
    assert cold["target"]["by_target"]["warm"]["users"] == 0
    assert cold["target"]["hr@10"] == 1.0
    assert cold["baselines"]["new items by brand"]["hr@10"] == 1.0


def vectors(export):
    parts = [pq.read_table(path) for path in sorted((export / "items").glob("*.parquet"))]
    table = pa.concat_tables(parts)
    return dict(zip(table["item_id"].to_pylist(), table["embedding"].to_pylist(), strict=True))


def record(table, n):
    return {name: column[n] for name, column in table.items()}


@pytest.mark.timeout(120)
def test_an_added_item_is_what_an_export_that_has_it_says(place, run):
    table = features_of(range(1, 61))
    with Recommender.load(place / "export", log_dir=place / "log-1") as recommender:
        twins = [record(table, n - 1) | {"item_id": n + 1000} for n in range(51, 61)]
        before = recommender.recommend([3], END, k=60)[0]
        done = recommender.add_items(twins)
        assert (done.added, done.known, done.replaced) == (10, 0, 0)
        after = recommender.recommend([3], END, k=70)[0]
        scores = dict(zip(after.items, after.scores, strict=True))
        assert set(before.items) | {n + 1000 for n in range(51, 61)} == set(after.items)
        for n in range(51, 61):  # cold in the export too: known by the same features
            assert scores[n + 1000] == pytest.approx(scores[n], abs=1e-4)
        assert after.display[0]["title"].startswith("item number")
        assert recommender.similar_items(1051, 1).items == [51]
        recommender.append([3], [1051], [END + 5])
        answer = recommender.recommend([3], END + 9)[0]
        again = recommender.add_items([twins[0], twins[1] | {"price": 9.0, "title": "dear"}, record(table, 0)])
        assert (again.added, again.replaced, again.known) == (0, 2, 1)
        expected = recommender.recommend([3], END + 9)[0]
    with Recommender.load(place / "export", log_dir=place / "log-1") as recommender:  # nothing acknowledged is lost
        assert recommender.info()["items"] == 70
        found = recommender.recommend([3], END + 9)[0]
        assert found.items == expected.items
        assert answer.events == found.events


def test_new_items_that_cannot_be_taken_are_refused_and_leave_nothing(place, run):
    table = features_of(range(1, 61))
    with Recommender.load(place / "export", log_dir=place / "log-2") as recommender:
        item = record(table, 50) | {"item_id": 2000}
        bad = {
            "text has 3 elements": item | {"text": [1.0, 2.0, 3.0]},
            "price of 2000 is nan": item | {"price": float("nan")},
            "colour is no feature": item | {"colour": "red"},
            "item_id must be int64": item | {"item_id": "x"},
            "without 'item_id'": {"brand": "b1"},
        }
        for said, record_ in bad.items():
            with pytest.raises(ValueError, match=said):
                recommender.add_items([record_])
        with pytest.raises(ValueError, match="2000 is there twice, with other features"):
            recommender.add_items([item, item | {"brand": "other"}])
        with pytest.raises(ValueError, match="2000 is not in the catalogue"):
            recommender.similar_items(2000)
        assert recommender.info()["items"] == 60
        done = recommender.add_items([item | {"brand": "never seen"}])
        assert done.added == 1 and done.unknown_values == 1
    assert len(read_store(place / "log-2").items) == 1


@pytest.mark.timeout(120)
def test_a_refresh_with_items_is_what_a_service_with_them_is(place, run, capsys):
    from pipelines import recommend, refresh

    table = features_of(range(1, 61))
    new = [record(table, n) | {"item_id": 3000 + n} for n in range(40, 60)]
    pq.write_table(pa.Table.from_pylist([*new, record(table, 3)]), place / "new.parquet")
    given = ["--export", str(place / "export"), "--items", str(place / "new.parquet"), "--output", str(place / "more")]
    assert refresh.main(given) == 0
    assert "20 new items; 1 that the export has stay as they are" in capsys.readouterr().out
    Bundle.open(place / "more").check()
    with (
        Recommender.load(place / "more", log_dir=place / "log-3") as refreshed,
        Recommender.load(place / "export", log_dir=place / "log-4") as service,
    ):
        service.add_items(new)
        for user in (1, 2, 77):
            one, other = (each.recommend([user], END + 9, k=80)[0] for each in (refreshed, service))
            assert one.items[:10] == other.items[:10] and set(one.items) == set(other.items)
            assert one.scores == pytest.approx(other.scores, abs=1e-5)
    assert recommend.main(["--export", str(place / "more"), "--similar-to", "3055", "-k", "1"]) == 0
    assert "56" in capsys.readouterr().out.splitlines()[-1]  # of the same features, and never trained either


def test_neighbours_are_the_users_with_the_nearest_vectors(place, run, capsys):
    from starlette.testclient import TestClient

    from fuxi_torchrec.serving.http.service import create_app
    from pipelines import recommend

    table = pa.concat_tables([pq.read_table(path) for path in sorted((place / "export" / "users").glob("*.parquet"))])
    rows = np.array(table["embedding"].to_pylist(), np.float32)
    ids, own = table["user_id"].to_pylist(), table["user_id"].to_pylist().index(4)
    expected = [ids[n] for n in np.argsort(-(rows @ rows[own])).tolist() if n != own][:5]
    with Recommender.load(place / "export", log_dir=place / "log-5") as recommender:
        assert recommender.similar_users(4, recommender.manifest.as_of, 5).users == expected
        with pytest.raises(ValueError, match="user_id 999 has no events"):
            recommender.similar_users(999, recommender.manifest.as_of)
    assert recommend.main(["--export", str(place / "export"), "--neighbours-of", "4", "-k", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1]) for line in lines[-5:]] == expected
    assert recommend.main(["--export", str(place / "export"), "--neighbours-of", "999"]) == 1
    recommender = Recommender.load(place / "export", log_dir=place / "log-5")
    with TestClient(create_app(recommender)) as client:
        asked = {"user_id": 4, "time": recommender.manifest.as_of, "k": 5}
        said = client.post("/similar-users", json=asked).json()
        assert said["user"] == 4 and [each["user_id"] for each in said["users"]] == expected
        assert client.post("/similar-users", json=asked | {"user_id": 999}).status_code == 404
        assert client.post("/similar-users", json=asked | {"k": 0}).status_code == 422


def test_new_items_over_http(place, run):
    from starlette.testclient import TestClient

    from fuxi_torchrec.serving.http.service import create_app

    item = record(features_of(range(1, 61)), 55) | {"item_id": 4000}
    recommender = Recommender.load(place / "export", log_dir=place / "log-6")
    with TestClient(create_app(recommender)) as client:
        assert client.post("/similar-items", json={"item_id": 4000}).status_code == 404
        assert client.post("/items", json={"items": [item]}).json()["added"] == 1
        (found,) = client.post("/similar-items", json={"item_id": 4000, "k": 1}).json()["items"]
        assert found["item_id"] == 56 and found["display"] == {"title": "item number 56"}
        assert client.post("/items", json={"items": [item, item | {"brand": "b2"}]}).status_code == 409
        for wrong in ({"text": [1.0]}, {"price": "dear"}, {"item_id": None}, {"colour": "red"}):
            assert client.post("/items", json={"items": [item | wrong]}).status_code == 422
        assert client.get("/health").json()["items"] == 61


def test_rows_of_an_export_have_features(place, run):
    from safetensors.torch import load_file

    plain = small.plain(run, place / "data")
    tables = load_file(place / "export" / "tables.safetensors")
    assert not torch.allclose(tables["item_table"][1], plain.table[1])
    assert torch.equal(tables["item_table"][0], plain.table[0])
    found = torch.nn.functional.normalize(tables["item_table"], dim=1)
    index = Bundle.open(place / "export").manifest.items
    assert index == 60
    for row, vector in enumerate(vectors(place / "export").values(), 1):
        torch.testing.assert_close(torch.tensor(vector), found[row])


@pytest.mark.timeout(120)
def test_an_approximate_index_finds_added_items_too(place, run, workers):
    workers(1).run(exported, run, place / "hnsw", exact_items=1)
    table = features_of(range(1, 61))
    with Recommender.load(place / "hnsw", log_dir=place / "log-9") as recommender:
        assert recommender._catalogue._faiss is not None
        recommender.add_items([record(table, n - 1) | {"item_id": n + 1000} for n in range(51, 61)])
        found = recommender.recommend([3], END, k=70)[0]
    with Recommender.load(place / "hnsw", log_dir=place / "log-9", search="exact") as recommender:
        expected = recommender.recommend([3], END, k=70)[0]
    assert set(found.items) == set(expected.items) and {n + 1000 for n in range(51, 61)} < set(found.items)
    assert found.scores == pytest.approx(expected.scores, abs=1e-4)


@pytest.mark.timeout(200)
def test_an_added_item_that_comes_back_has_the_bias_of_one_that_the_export_has(place, workers):
    """Item 51 is cold in the export and 1051 has its features: histories with either are answered alike."""
    from fuxi_torchrec.serving.refresh.refresh import refresh

    bias = ("task.repeats.window=8", "task.repeats.periods=[86400]", "optimizer.scalar_lr=0.1", "train.max_steps=12")
    workers(1).run(small.train, place / "back", settings(place, *WHOLE, *bias))
    workers(2).run(exported, place / "back", place / "back-export")
    twin = record(features_of(range(1, 61)), 50) | {"item_id": 1051}
    live, refreshed, again = {}, {}, {}
    for item in (51, 1051):
        log_dir, later = place / f"log-back-{item}", place / f"back-{item}"
        with Recommender.load(place / "back-export", log_dir=log_dir) as recommender:
            assert recommender.add_items([twin]).added == 1
            before = recommender.recommend([3], END + 9, k=61)[0]
            recommender.append([3, 3, 3], [item, 7, item], [END, END + 1, END + 2])
            live[item] = recommender.recommend([3], END + 9, k=61)[0]
        assert refresh(place / "back-export", log_dir, later, requery_all=True).added_items == 1
        assert refresh(place / "back-export", log_dir, later, requery_all=True).already_done
        Bundle.open(later).check()
        for answers, log in ((refreshed, place / f"log-empty-{item}"), (again, log_dir)):
            with Recommender.load(later, log_dir=log) as recommender:
                answers[item] = recommender.recommend([3], END + 9, k=61)[0]
    assert not list(place.glob(".back-*"))
    swap = {51: 1051, 1051: 51}
    for answers in (live, refreshed, again):  # the one export's store says nothing that the other one does not have
        one, other = (dict(zip(a.items, a.scores, strict=True)) for a in answers.values())
        assert {swap.get(item, item): score for item, score in one.items()} == pytest.approx(other, abs=1e-4)
        assert answers[1051].items == live[1051].items and answers[1051].events == live[1051].events
        assert answers[1051].scores == pytest.approx(live[1051].scores, abs=1e-4)
    unlike = dict(zip(before.items, before.scores, strict=True))
    assert unlike[1051] == pytest.approx(unlike[51], abs=1e-4)
    now = dict(zip(live[1051].items, live[1051].scores, strict=True))
    assert abs(now[1051] - now[51]) > 0.01  # of equal rows, but one is in the window


def test_a_vocabulary_past_its_table_is_refused(place, run):
    from fuxi_torchrec.events import parquet
    from fuxi_torchrec.export.bundle import describe_file, write_manifest

    forged, name = place / "forged", "item-features/brand.parquet"
    shutil.copytree(place / "export", forged)
    table, manifest = pq.read_table(forged / name), Bundle.open(forged).manifest
    more = pa.table({"value": ["one more"], "index": pa.array([len(table) + 1], table["index"].type)})
    (forged / name).unlink()
    parquet.write_table(forged / name, pa.concat_tables([table, more]))
    write_manifest(forged, replace(manifest, files={**manifest.files, name: describe_file(forged / name)}))
    with pytest.raises(ExportError, match=r"brand has \d+ values and \d+ rows"):
        Recommender.load(forged, log_dir=place / "log-10")


# --- features of users ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def users_run(place, workers):
    """A run with features of users, exported with everything, and with what happened before EARLY."""
    workers(1).run(small.train, place / "users", settings(place, USER, *WHOLE, "train.max_steps=6"))
    workers(2).run(exported, place / "users", place / "users-export")
    workers(1).run(exported, place / "users", place / "users-early", as_of=str(EARLY), truncate=True)
    return place / "users"


def oracle_rows(place):
    """What features add to the query of users 0, 2, 4, ...: by hand, from the plain checkpoint."""
    from fuxi_torchrec.training.checkpoint.info import find_checkpoint
    from fuxi_torchrec.training.checkpoint.unshard import read_plain

    weights = read_plain(find_checkpoint(place / "users" / "checkpoints", "latest"))
    ages, incomes = ["old", "young", None] * 5, np.arange(15.0)
    scaled = (incomes - incomes.mean()) / incomes.std()
    (projection,) = (value for name, value in weights.items() if "user_projection" in name)
    vocabulary = {"old": 1, "young": 2, None: 0}
    rows = weights["user_feature_age"][[vocabulary[age] for age in ages]]
    rows = rows + torch.tensor(scaled, dtype=torch.float32)[:, None] * projection[:, 0]
    return {2 * n: row for n, row in enumerate(rows)}


def embeddings(export):
    table = pa.concat_tables([pq.read_table(path) for path in sorted((export / "users").glob("*.parquet"))])
    return dict(zip(table["user_id"].to_pylist(), np.array(table["embedding"].to_pylist(), np.float32), strict=True))


@pytest.mark.timeout(300)
def test_features_of_users_are_part_of_exported_vectors_and_of_every_answer(place, users_run):
    from starlette.testclient import TestClient

    from fuxi_torchrec.serving.http.service import create_app

    found, rows = embeddings(place / "users-export"), oracle_rows(place)
    assert max(float(row.abs().max()) for row in rows.values()) > 0.01
    recommender = Recommender.load(place / "users-export", log_dir=place / "log-7")
    as_of, catalogue = recommender.manifest.as_of, recommender._catalogue
    with TestClient(create_app(recommender)) as client:
        for user in range(30):
            query = recommender._model.encoder.query(recommender.states([user]), torch.tensor([as_of]))[0]
            vector = torch.nn.functional.normalize(query + rows.get(user, torch.zeros(len(query))), dim=0)
            torch.testing.assert_close(torch.tensor(found[user]), vector, atol=1e-5, rtol=1e-5)
            scores = catalogue.vectors @ vector / recommender.manifest.temperature
            answer = recommender.recommend([user], as_of, k=5)[0]
            assert answer.scores == pytest.approx(scores.topk(5).values.tolist(), abs=1e-4)
            said = client.post("/recommend", json={"user_id": user, "time": as_of, "k": 5}).json()
            assert [each["item_id"] for each in said["items"]] == answer.items
        # a user that is forgotten has no features either, and whom the file does not have never had any
        recommender.forget([4])
        recommender.append([4, 999], [7, 7], [as_of + 1] * 2)
        one, other = recommender.recommend([4, 999], as_of + 5)
        assert (one.items, one.scores) == (other.items, other.scores)


@pytest.mark.timeout(120)
def test_a_refresh_with_features_of_users_is_a_full_export(place, users_run):
    from fuxi_torchrec.serving.refresh.refresh import refresh

    header, *lines = (place / "log.csv").read_text().splitlines()
    later = [line for line in lines if int(line.rsplit(",", 1)[1]) > EARLY]
    (place / "later.csv").write_text("\n".join([header, *later]) + "\n")
    refresh(place / "users-early", place / "later.csv", place / "users-late", requery_all=True)
    found, expected = (embeddings(place / name) for name in ("users-late", "users-export"))
    assert found.keys() == expected.keys()
    for user, vector in expected.items():
        np.testing.assert_allclose(found[user], vector, atol=1e-5)


@pytest.mark.timeout(120)
def test_users_with_other_features_are_those_of_the_file_after_a_refresh(place, users_run, capsys):
    from pipelines import refresh

    # user 1 as user 0, whom it was unlike; 0 has lost them; 500 is nobody yet; 2 has a value that nobody had
    table = {"user_id": [1, 0, 500, 2], "age": ["old", None, "old", "new"], "income": [0.0, None, 0.0, 1.0]}
    pq.write_table(pa.table(table), place / "changed.parquet")
    given = ["--export", str(place / "users-export"), "--users", str(place / "changed.parquet")]
    (place / "gone").write_text("6\n")
    given += ["--output", str(place / "changed"), "--forget", str(place / "gone")]
    assert refresh.main(given) == 0
    said = capsys.readouterr().out
    assert (
        "4 users with features of the file" in said and "1 values of features" in said and "1 users forgotten" in said
    )
    Bundle.open(place / "changed").check()
    rows, before, after = oracle_rows(place), *(embeddings(place / name) for name in ("users-export", "changed"))
    with Recommender.load(place / "changed", log_dir=place / "log-8") as recommender:
        kept = recommender._model.user_rows
        torch.testing.assert_close(kept.of([1]), rows[0][None])
        torch.testing.assert_close(kept.of([500]), rows[0][None])
        assert not kept.of([6]).any() and 6 not in after
        as_of = recommender.manifest.as_of
        query = recommender._model.encoder.query(recommender.states([1]), torch.tensor([as_of]))[0]
        vector = torch.nn.functional.normalize(query + rows[0], dim=0)
        torch.testing.assert_close(torch.tensor(after[1]), vector, atol=1e-5, rtol=1e-5)
    for user in (3, 8):
        np.testing.assert_allclose(after[user], before[user], atol=1e-6)
    assert np.abs(after[1] - before[1]).max() > 1e-4
    given[-3] = str(place / "nothing")
    assert refresh.main([*given[:3], str(place / "items.parquet"), *given[4:]]) == 1
    assert "no id column 'user_id'" in capsys.readouterr().err
    assert refresh.main(["--export", str(place / "users-export"), "--output", str(place / "nothing")]) == 1
    assert "give --events, --users or both" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_features_that_are_not_there_are_named(place, workers):
    said = workers(1).run(small.attempt, small.train, place / "none", settings(place, "features.item={colour: {}}"))[0]
    assert "features.item: the dataset has no feature colour; there are brand, level" in said


def test_an_export_without_features_takes_no_new_items(place, workers):
    workers(1).run(small.train, place / "bare", settings(place, "features.item={}", "train.max_steps=1"))
    workers(1).run(exported, place / "bare", place / "bare-export")
    with (
        Recommender.load(place / "bare-export") as recommender,
        pytest.raises(ExportError, match="reads no features of items"),
    ):
        recommender.add_items([{"item_id": 7}])
