"""The Recommender answers as the model would."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.export.bundle import INDEX, Bundle, describe_file
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.refresh.refresh import refresh
from fuxi_torchrec.serving.requests import Request
from fuxi_torchrec.serving.tests.exports import (
    FEATURES,
    export_of,
    random_log,
)
from fuxi_torchrec.serving.tests.random_export import DAY, START, write_demo_export
from fuxi_torchrec.serving.tests.recommenders import DEMO, GROWING, change_manifest, expected, log_export


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("features", [(), FEATURES], ids=["plain", "features"])
@pytest.mark.parametrize("model", [DEMO.model, GROWING], ids=["constant", "growing"])
@pytest.mark.parametrize("repeats", [{}, {"window": 6, "periods": (DAY,)}], ids=["", "repeats"])
def test_answers_are_the_models(tmp_path, similarity, features, model, repeats):
    demo = replace(DEMO, similarity=similarity, features=features, model=model, repeats=repeats)
    log, last = log_export(tmp_path, demo)
    users = [user for user in range(8) if log.of(user)]
    with Recommender.load(tmp_path / "x") as recommender:
        answers = recommender.recommend(users, last + DAY, k=7)
        for user, answer in zip(users, answers, strict=True):
            items, scores = expected(tmp_path / "x", demo, log.of(user), last + DAY)
            assert answer.items == items[:7]
            torch.testing.assert_close(torch.tensor(answer.scores), scores[:7], atol=1e-4, rtol=1e-4)
            assert answer.known and not answer.before_last_event
            assert answer.model_id == recommender.manifest.model_id
        # events appended one at a time, and many at once
        new = [
            (users[0], 1003, last + 5, {"action": 3, "tags": [1, 2]}),
            (99, 1004, last + 6, {"action": 0, "tags": []}),
        ]
        for user, item, time, feature in new:
            given = [feature] if features else None
            assert recommender.append([user], [item], [time], given).accepted == 1
        for answer, rows in zip(
            recommender.recommend([users[0], 99], last + DAY, k=5),
            (log.of(users[0]) + new[:1], new[1:]),
            strict=True,
        ):
            if len(rows) <= demo.max_length:
                assert answer.items == expected(tmp_path / "x", demo, rows, last + DAY)[0][:5]


def test_text_of_features_is_looked_up(tmp_path):
    demo = replace(DEMO, features=FEATURES, text_features=("action",))
    log, last = log_export(tmp_path, demo)
    user = next(user for user in range(8) if 0 < len(log.of(user)) < 30)
    with Recommender.load(tmp_path / "x") as recommender:
        recommender.append([user, user], [1003, 1004], [last] * 2, [{"action": "value-3"}, {"action": "who knows"}])
        (answer,) = recommender.recommend([user], last, 5)
        with pytest.raises(ValueError, match="feature action must be text"):
            recommender.append([user], [1003], [last], [{"action": 3}])
    new = [(user, 1003, last, {"action": 3, "tags": []}), (user, 1004, last, {"action": 0, "tags": []})]
    assert answer.items == expected(tmp_path / "x", demo, log.of(user) + new, last)[0][:5]
    # the same through refresh, from the log and from a file
    summary = refresh(tmp_path / "x", tmp_path / "x.log", tmp_path / "y")
    assert summary.touched_users == 1
    text = f"user_id,item_id,timestamp,action\n{user},1003,{last},value-3\n{user},1004,{last},\n"
    (tmp_path / "new.csv").write_text(text)
    with pytest.raises(DataError, match="no column tags"):
        refresh(tmp_path / "x", tmp_path / "new.csv", tmp_path / "z")
    with Recommender.load(tmp_path / "y") as recommender:
        assert recommender.recommend([user], last, 5)[0].items == answer.items


def test_feature_values_of_an_old_log_that_the_next_export_lacks_count_as_unknown(tmp_path):
    demo = replace(DEMO, features=FEATURES, feature_rows=20)
    log, last = log_export(tmp_path, demo)
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        features = [{"action": 19, "tags": [3, 19]}, {"action": 7, "tags": []}]
        recommender.append([50, 50], [1003, 1004], [last + 1] * 2, features)
    for number, smaller in enumerate(
        (replace(demo, feature_rows=8), replace(demo, feature_rows=8, text_features=("action",)))
    ):
        path = tmp_path / f"y{number}"
        export_of(path, log, range(8), smaller)
        shutil.copytree(tmp_path / "log", tmp_path / f"log{number}")
        with Recommender.load(path, log_dir=tmp_path / f"log{number}") as recommender:
            (answer,) = recommender.recommend([50], last + DAY, 5)
        known = [(50, 1003, last + 1, {"action": 0, "tags": [3, 0]}), (50, 1004, last + 1, {"action": 7, "tags": []})]
        if smaller.text_features:
            known[1] = (50, 1004, last + 1, {"action": 0, "tags": []})
        assert answer.items == expected(path, smaller, known, last + DAY)[0][:5]


def test_seen_items_are_left_out_exactly(tmp_path):
    log, last = log_export(tmp_path, most=30)
    users = [user for user in range(8) if log.of(user)]
    with Recommender.load(tmp_path / "x") as recommender:
        recommender.append([users[0]], [1007], [last])
        log.rows.append((users[0], 1007, last, {"action": 0, "tags": []}))
        plain = recommender.recommend(users, last, k=50)
        for user, answer, all_items in zip(
            users, recommender.recommend(users, last, k=50, exclude_seen=True), plain, strict=True
        ):
            seen = {row[1] for row in log.of(user)}
            assert answer.items == [item for item in all_items.items if item not in seen]


def test_an_approximate_index_is_used_and_can_be_left_alone(tmp_path):
    import faiss

    write_demo_export(tmp_path / "x", replace(DEMO, items=400))
    bundle = Bundle.open(tmp_path / "x")
    with Recommender.load(tmp_path / "x") as exact:
        assert exact._catalogue._faiss is None  # a flat index is searched by scoring every item
        vectors = exact._catalogue.vectors.numpy()
        want = exact.recommend([1, 2, 3], bundle.manifest.as_of, k=5, exclude_seen=True)
    flat = faiss.IndexFlatIP(16)
    inverted = faiss.IndexIVFFlat(flat, 16, 20, faiss.METRIC_INNER_PRODUCT)
    inverted.train(vectors)
    inverted.add_with_ids(vectors, np.arange(1, 401))
    inverted.nprobe = 20
    faiss.write_index(inverted, str(tmp_path / "x" / INDEX))
    change_manifest(tmp_path / "x", files={INDEX: vars(describe_file(tmp_path / "x" / INDEX))})
    with Recommender.load(tmp_path / "x") as recommender:
        assert recommender._catalogue._faiss is not None
        one = recommender.recommend([1, 2, 3], bundle.manifest.as_of, k=5)
        assert [a.items for a in recommender.recommend([1, 2, 3], bundle.manifest.as_of, 5, True)] == [
            a.items for a in want
        ]
    with Recommender.load(tmp_path / "x", search="exact") as recommender:
        other = recommender.recommend([1, 2, 3], bundle.manifest.as_of, k=5)
    assert [answer.items for answer in one] == [answer.items for answer in other]


def test_leaving_out_seen_items_makes_nobody_elses_search_exact(tmp_path, monkeypatch):
    write_demo_export(tmp_path / "x", replace(DEMO, items=400))

    class Index:
        """Finds the last items only."""

        def search(self, vectors, k):
            asked.append(len(vectors))
            return np.zeros((len(vectors), k), np.float32), np.tile(400 - np.arange(k), (len(vectors), 1))

    asked = []
    with Recommender.load(tmp_path / "x") as recommender:
        time = recommender.manifest.as_of
        requests = [Request(user, time, 4, exclude_seen=user == 2) for user in (1, 2, 3)]
        exact = recommender.answer(requests)
        monkeypatch.setattr(recommender._catalogue, "_faiss", Index())
        one, two, three = recommender.answer(requests)
        assert asked == [2]
        assert one.items == three.items == [1400, 1399, 1398, 1397] and two.items == exact[1].items
        assert two.scores == pytest.approx(exact[1].scores, abs=1e-4)


def test_a_history_that_nobody_stores(tmp_path):
    log, last = log_export(tmp_path, most=30)
    user = next(user for user in range(8) if 3 < len(log.of(user)) < 30)
    rows = log.of(user)
    with Recommender.load(tmp_path / "x") as recommender:
        (stored,) = recommender.recommend([user], last, 5)
        answer = recommender.recommend_history([r[1] for r in rows], [r[2] for r in rows], last, 5)
        assert answer.items == stored.items and answer.user_id is None
        unknown = recommender.recommend_history([5, 1001], [last, last], last, 5)
        assert unknown.unknown_items == 1 and unknown.events == 2
        assert recommender.recommend_history([], [], last, 5).items == [1001, 1002, 1003, 1004, 1005]
        assert recommender.info()["recent_events"] == 0
        with pytest.raises(ValueError, match=r"must not fall: timestamps\[1\]"):
            recommender.recommend_history([1001, 1002], [last, last - 1], last, 5)
        with pytest.raises(ValueError, match="2 items, 1 timestamps: there must be one of each"):
            recommender.recommend_history([1001, 1002], [last], last, 5)


def test_a_long_history_that_nobody_stores_counts_from_the_same_event_on(tmp_path):
    log, last = log_export(tmp_path, most=120)
    user = next(user for user in range(8) if len(log.of(user)) > 70)  # of which 48 are encoded
    items, times = [row[1] for row in log.of(user)], [row[2] for row in log.of(user)]
    with Recommender.load(tmp_path / "x") as recommender:
        (stored,) = recommender.recommend([user], last, 30)
        answer = recommender.recommend_history(items, times, last, 30)
        assert (answer.items, answer.events) == (stored.items, stored.events) and answer.events == 48
        assert answer.scores == pytest.approx(stored.scores, abs=1e-4)
        answer = recommender.recommend_history(items, times, last, 30, exclude_seen=True)
        assert answer.events == 48 and answer.items and not {*items} & {*answer.items}, "whatever was given is left out"


def test_an_unknown_user_is_served_as_new_and_that_is_said(export):
    with Recommender.load(export) as recommender:
        (answer,) = recommender.recommend([12345], recommender.manifest.as_of, 3)
        assert (answer.known, answer.events, answer.items, answer.scores) == (False, 0, [1001, 1002, 1003], [0.0] * 3)


def test_a_request_before_the_last_event_counts_as_no_time_passed(tmp_path):
    log, _last = log_export(tmp_path)
    user = next(user for user in range(8) if len(log.of(user)) > 5)
    mine = log.of(user)[-1][2]
    with Recommender.load(tmp_path / "x") as recommender:
        early, now = (recommender.recommend([user], time, 5)[0] for time in (mine - DAY, mine))
        assert early.before_last_event and not now.before_last_event
        assert early.items == expected(tmp_path / "x", DEMO, log.of(user), mine - DAY)[0][:5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], 1_700_000_000_000, 5), "looks like milliseconds: this export has its times in seconds"),
        (([1], -1, 5), r"time -1 must be \d+ to \d+, in seconds since 1970"),
        (([1], 1_700_000_000.5, 5), "has no len|must be an integer|not iterable"),
        (([1], float("nan"), 5), "has no len|must be an integer|not iterable"),
        (([1], START, 0), "k must be a positive integer, not 0"),
        (([1], START, True), "k must be a positive integer"),
        ((["x"], START, 5), "user id must be an integer of 64 bits, as in the export, not 'x'"),
        (([2**70], START, 5), "user id must be an integer of 64 bits"),
        (([1, 2], [START], 5), "time has 1 entries for 2 users"),
        (("ab", START, 5), "a list is needed"),
    ],
)
def test_bad_requests_are_refused(export, arguments, message):
    with Recommender.load(export) as recommender, pytest.raises((ValueError, TypeError), match=message):
        recommender.recommend(*arguments)


def test_a_time_in_seconds_for_an_export_in_milliseconds(tmp_path):
    log = random_log(np.random.default_rng(0), DEMO, range(4), 20)
    log.rows = [(u, i, t * 1000, s) for u, i, t, s in log.rows]
    export_of(tmp_path / "x", log, range(4), replace(DEMO, time_unit="ms"))
    with Recommender.load(tmp_path / "x") as recommender:
        with pytest.raises(ValueError, match=r"time 1700000000 looks like seconds: this export has .* milliseconds"):
            recommender.recommend([1], 1_700_000_000, 5)
        with pytest.raises(ValueError, match="timestamp 0 1700000000000000 looks like microseconds"):
            recommender.append([1], [1001], [1_700_000_000_000_000])


def test_more_items_than_there_are(export):
    with Recommender.load(export) as recommender:
        (answer,) = recommender.recommend([1], recommender.manifest.as_of, 10_000)
        assert len(answer.items) == len(set(answer.items)) == 50
