"""The Recommender answers as the model would, keeps what it was told, and stays right under threads and crashes."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fuxi_torchrec.encoders.tests import causal_mean
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.times import now
from fuxi_torchrec.export.bundle import INDEX, MANIFEST, STATES, Bundle, ExportError, describe_file, scaled
from fuxi_torchrec.export.parts import part_name
from fuxi_torchrec.schema import CHECKSUM, sealed
from fuxi_torchrec.serving import appending
from fuxi_torchrec.serving.encoding import UserModel
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.refresh.refresh import refresh
from fuxi_torchrec.serving.requests import Event, Request
from fuxi_torchrec.serving.store import MARK_FILE, STORE_FILE, read_store
from fuxi_torchrec.serving.tests.exports import (
    FEATURES,
    Log,
    assert_states_close,
    export_of,
    histories_of,
    random_log,
    users_of,
)
from fuxi_torchrec.serving.tests.random_export import DAY, START, DemoExport, write_demo_export
from fuxi_torchrec.serving.tests.threads import mixed_operations

DEMO = DemoExport(items=50, users=12, events=60, state_min_events=20, users_per_part=5)
GROWING = {"kind": causal_mean.KIND, "dim": 16, "max_positions": 64}
ROOT = Path(__file__).parents[3]


@pytest.fixture
def export(tmp_path):
    write_demo_export(tmp_path / "x", DEMO)
    return tmp_path / "x"


def log_export(tmp_path, demo=DEMO, users=8, most=40, seed=0):
    """An export, its log, and the time of its last event."""
    log = random_log(np.random.default_rng(seed), demo, range(users), most)
    export_of(tmp_path / "x", log, range(users), demo)
    return log, Bundle.open(tmp_path / "x").manifest.as_of


def expected(path, demo, rows, time):
    """Items by falling score and the scores, of a history encoded at once and every item scored."""
    bundle = Bundle.open(path)
    model = UserModel(bundle)
    history = histories_of(Log(rows), [rows[0][0]], demo).last(np.array([bundle.manifest.max_length]))
    y = model.encoder(
        model.rows(history), torch.from_numpy(history.offsets), torch.from_numpy(history.times), torch.tensor([time])
    )
    items = scaled(model.items[1:], bundle.manifest.similarity)
    scores = items @ scaled(y[-1], bundle.manifest.similarity) / bundle.manifest.temperature
    best = torch.argsort(scores, descending=True)
    return (best + 1001).tolist(), scores[best].detach()


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("features", [(), FEATURES], ids=["plain", "features"])
@pytest.mark.parametrize("model", [DEMO.model, GROWING], ids=["constant", "growing"])
def test_answers_are_the_models(tmp_path, similarity, features, model):
    demo = replace(DEMO, similarity=similarity, features=features, model=model)
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


def test_late_events_are_left_out_and_unknown_items_counted(tmp_path):
    _log, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x") as recommender:
        done = recommender.append([1, 1, 1, 2], [1001, 7, 1002, 1001], [last + 5, last + 5, last + 4, last + 9])
        assert (done.accepted, done.late, done.unknown_items) == (3, 1, 1)
        assert recommender.append([1], [1001], [last + 4]).late == 1
        assert recommender.info()["recent_events"] == 3
        with pytest.raises(ValueError, match="item id 1 must be an integer"):
            recommender.append([1, 1], [1001, "x"], [last + 9, last + 9])
        with pytest.raises(ValueError, match="1 users, 2 items"):
            recommender.append([1], [1001, 1002], [last])
        assert recommender.info()["recent_events"] == 3  # nothing of a bad call is kept
    numbers = np.array([3, 4])
    with Recommender.load(tmp_path / "x") as recommender:  # arrays and tensors will do
        assert recommender.append(numbers, numbers + 1000, torch.tensor([last, last])).accepted == 2
        assert len(recommender.recommend(numbers, np.int64(last), 3)) == 2


def test_events_on_disk_are_acknowledged_even_if_they_cannot_be_encoded_yet(tmp_path, monkeypatch):
    _log, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x") as recommender:
        with monkeypatch.context() as patch:
            patch.setattr(appending, "_EAGER", 4)
            patch.setattr(recommender._model.encoder, "append", lambda *_: 1 / 0)
            assert recommender.append([1] * 4, [1001] * 4, [last + 1] * 4).accepted == 4
        before = recommender.recommend([1], last + DAY, 5)
    with Recommender.load(tmp_path / "x") as recommender:
        assert recommender.info()["recent_events"] == 4
        assert [a.items for a in recommender.recommend([1], last + DAY, 5)] == [a.items for a in before]


def test_what_was_appended_survives_a_restart(tmp_path):
    _log, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x") as recommender:
        recommender.append([1, 50, 1], [1001, 1002, 1003], [last + 1, last + 2, last + 3])
        recommender.forget([2])
        before = recommender.recommend([1, 50, 2, 3], last + DAY, 5)
    with Recommender.load(tmp_path / "x") as recommender:
        assert recommender.recommend([1, 50, 2, 3], last + DAY, 5) == before
        assert not before[2].known
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "elsewhere") as recommender:
        assert recommender.recommend([2], last, 5)[0].known


def test_one_writer_many_readers(tmp_path):
    _, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x") as recommender:
        recommender.append([1], [1001], [last + 1])
        with pytest.raises(ExportError, match="another process is appending to this store"):
            Recommender.load(tmp_path / "x")
        reader = Recommender.load(tmp_path / "x", read_only=True)
        assert reader.recommend([1], last + 2, 5) == recommender.recommend([1], last + 2, 5)
        with pytest.raises(ValueError, match="read_only"):
            reader.append([1], [1001], [last + 3])
    with pytest.raises(ValueError, match="closed"):
        recommender.forget([1])


def test_forgetting_leaves_nothing_on_disk_after_a_restart(tmp_path):
    _, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x") as recommender:
        recommender.append([1, 70], [1001, 1002], [last + 1, last + 1])
        assert recommender.forget([1, 70, 71, 1]) == 2
        assert recommender.append([1], [1005], [last - 10 * DAY]).accepted == 1  # a new user, as far as we know
        (back,) = recommender.recommend([1], last, 5)
        assert (back.known, back.events) == (True, 1)
        assert recommender.info()["recent_events"] == 1
    with Recommender.load(tmp_path / "x") as recommender:
        assert recommender.recommend([1], last, 5) == [back]
    content = read_store(tmp_path / "x.log")
    assert {row.user for row in content.forgotten} == {1, 70, 71}
    assert [row.event() for row in content.events] == [Event(1, 1005, last - 10 * DAY)]
    assert not content.state.erased and not traces(tmp_path / "x.log", [last + 1])


def traces(directory, times):
    """Files of a store in which a time of an event is to be found, as SQLite writes it."""
    return [path.name for path in directory.iterdir() for time in times if time.to_bytes(4, "big") in path.read_bytes()]


def test_who_is_forgotten_stays_so_on_later_exports_whatever_they_have(tmp_path):
    log, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        assert recommender.forget([1, 70]) == 1  # 70 is not in the export
    (tmp_path / "new.csv").write_text(f"user_id,item_id,timestamp\n70,1001,{last + 1}\n")
    refresh(tmp_path / "x", tmp_path / "log", tmp_path / "without")
    refresh(tmp_path / "x", tmp_path / "new.csv", tmp_path / "with")  # of raw logs, which know nothing of it
    for export in ("without", "with", "with"):
        with Recommender.load(tmp_path / export, log_dir=tmp_path / "log") as recommender:
            assert [a.known for a in recommender.recommend([1, 70, 2], last + DAY, 5)] == [False, False, True]
            recommender.append([2], [1002], [last + 2])
    assert len(log.of(1))


def test_a_refresh_from_the_log_leaves_nothing_of_forgotten_users(tmp_path):
    log, last = log_export(tmp_path)
    gone, back, other = [user for user in range(8) if len(log.of(user)) >= 20][:3]  # they have states
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        recommender.append([gone, back, 70], [1001, 1002, 1003], [last + 1] * 3)
        recommender.forget([gone, back, 70])
        recommender.append([back, other], [1004, 1005], [last - 9 * DAY, last + 2])  # a new user's first event
        answers = recommender.recommend([gone, back, other], last + DAY, 5)
    summary = refresh(tmp_path / "x", tmp_path / "log", tmp_path / "y")
    assert (summary.forgotten_users, summary.new_users, summary.late_events) == (2, 1, 0)
    found = users_of(tmp_path / "y")
    assert found.keys() == set(range(8)) - {gone}
    assert found[back].history.items.tolist() == [4] and found[back].row["anchor_count"] == 0
    for log_dir in ("fresh", "log"):
        with Recommender.load(tmp_path / "y", log_dir=tmp_path / log_dir) as recommender:
            now = recommender.recommend([gone, back, other], last + DAY, 5)
        assert [(a.known, a.events, a.items) for a in now] == [(a.known, a.events, a.items) for a in answers]
    # once more on the new export: recognised
    again = refresh(tmp_path / "y", saved_log(tmp_path, gone, back, last, other), tmp_path / "z")
    assert again.applied_before and users_of(tmp_path / "z").keys() == found.keys()


def saved_log(tmp_path, gone, back, last, other):
    """A log with the same forgotten users and later events."""
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "same") as recommender:
        recommender.append([70], [1001], [last])
        recommender.forget([70, gone, back])
        recommender.append([back, other], [1004, 1005], [last - 9 * DAY, last + 2])
    return tmp_path / "same"


def logged(tmp_path, user=7, live=False):
    """Items and times of a user's events in a store."""
    events = read_store(tmp_path / "log").events
    return [[row.item, row.time] for row in events if row.user == user and (row.live or not live)]


@pytest.mark.parametrize("way", ["of the log", "of a file", "by two refreshes"])
def test_who_a_refresh_forgot_does_not_come_back_from_the_log(tmp_path, way):
    _log, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        recommender.append([7, 2], [1001, 1002], [last + 1] * 2)
        (tmp_path / "new.csv").write_text(f"user_id,item_id,timestamp\n2,1002,{last + 1}\n")
        events = tmp_path / ("new.csv" if way == "of a file" else "log")
        assert refresh(tmp_path / "x", events, tmp_path / "y", forget=[7]).forgotten_users == 1
        recommender.append([2], [1003], [last + 2])
    if way == "by two refreshes":
        summary = refresh(tmp_path / "y", tmp_path / "log", tmp_path / "z")
        assert (summary.forgotten_events, summary.touched_users, 7 in users_of(tmp_path / "z")) == (1, 1, False)
    new = "z" if way == "by two refreshes" else "y"
    reader = Recommender.load(tmp_path / new, log_dir=tmp_path / "log", read_only=True)
    assert not reader.recommend([7], last + DAY, 5)[0].known and logged(tmp_path)
    for export in (new, new, "x", new):  # a restart, back to the export before, and forth
        with Recommender.load(tmp_path / export, log_dir=tmp_path / "log") as recommender:
            gone, other = recommender.recommend([7, 2], last + DAY, 5)
            assert (gone.known, other.events) == (False, len(_log.of(2)) + 2), export
        assert not logged(tmp_path), "nothing is left on disk"
    refresh(tmp_path / new, tmp_path / "log", tmp_path / "last")
    assert 7 not in users_of(tmp_path / "last")


def test_what_a_user_does_after_being_forgotten_by_a_refresh_is_a_new_history(tmp_path):
    _log, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        recommender.append([7], [1001], [last + 1])
        refresh(tmp_path / "x", tmp_path / "log", tmp_path / "y", forget=[7])
        later = now("s") + DAY
        recommender.append([7], [1002], [later])
    refresh(tmp_path / "y", tmp_path / "log", tmp_path / "z")
    assert users_of(tmp_path / "z")[7].history.items.tolist() == [2]
    for export in ("y", "z", "y", "x", "y"):
        with Recommender.load(tmp_path / export, log_dir=tmp_path / "log") as recommender:
            assert recommender.recommend([7], later, 5)[0].events == 1
        assert logged(tmp_path, live=True) == [[1002, later]]
    # on the export that forgot, an event may have any time: it is a new user's
    with Recommender.load(tmp_path / "y", log_dir=tmp_path / "fresh") as recommender:
        assert recommender.append([7], [1003], [last]).accepted == 1
    with Recommender.load(tmp_path / "y", log_dir=tmp_path / "fresh") as recommender:
        assert recommender.recommend([7], later, 5)[0].events == 1
    refresh(tmp_path / "y", tmp_path / "fresh", tmp_path / "w")
    assert users_of(tmp_path / "w")[7].history.items.tolist() == [3]


def test_the_manifest_remembers_forgotten_users_without_their_ids(tmp_path):
    write_demo_export(tmp_path / "x", replace(DEMO, user_id_type="string"))
    (tmp_path / "new.csv").write_text("user_id,item_id,timestamp\n")
    refresh(tmp_path / "x", tmp_path / "new.csv", tmp_path / "y", forget=["user-7"])
    refresh(tmp_path / "y", tmp_path / "new.csv", tmp_path / "z", forget=["user-8"])
    text = (tmp_path / "z" / MANIFEST).read_text()
    assert "user-7" not in text and "user-8" not in text
    assert len(Bundle.open(tmp_path / "z").manifest.parent["forgotten"]) == 2


def test_a_log_that_only_forgets_makes_an_export_without_these_users(tmp_path):
    log_export(tmp_path)
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        recommender.forget([5])
    assert refresh(tmp_path / "x", tmp_path / "log", tmp_path / "y").forgotten_users == 1
    assert users_of(tmp_path / "y").keys() == set(range(8)) - {5}


def test_the_log_goes_on_with_the_next_export(tmp_path):
    _log, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        recommender.append([1, 2], [1001, 1002], [last + 1, last + 2])
    # the log itself is an event log; the new export has all of it
    summary = refresh(tmp_path / "x", tmp_path / "log", tmp_path / "y")
    assert summary.touched_users == 2
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        recommender.append([1], [1003], [last + 9])
        before = recommender.recommend([1, 2], last + DAY, 5)
    with Recommender.load(tmp_path / "y", log_dir=tmp_path / "log") as recommender:
        assert recommender.info()["recent_events"] == 1
        after = recommender.recommend([1, 2], last + DAY, 5)
    assert [answer.items for answer in after] == [answer.items for answer in before]
    rows = read_store(tmp_path / "log").events
    assert [(row.item, row.live) for row in rows] == [(1001, 0), (1002, 0), (1003, 1)], "y has two, which x has not"
    with Recommender.load(tmp_path / "y", log_dir=tmp_path / "log") as recommender:
        refresh(tmp_path / "y", tmp_path / "log", tmp_path / "z")
    Recommender.load(tmp_path / "z", log_dir=tmp_path / "log").close()
    assert [row.item for row in read_store(tmp_path / "log").events] == [1003], "the others are in both y and z"


def test_events_of_one_time_are_kept_when_the_next_export_has_only_the_first(tmp_path):
    _log, last = log_export(tmp_path)
    time = last + 7
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        recommender.append([3, 3, 4], [1001, 7, 1009], [time] * 3)  # 7 is an item that nobody knows
        refresh(tmp_path / "x", tmp_path / "log", tmp_path / "y")
        recommender.append([3, 3, 3, 3], [1002, 1001, 8, 1003], [time, time, time, time + 1])
        before = recommender.recommend([3, 4], time + DAY, 5)
    for _ in range(2):  # and after a restart
        with Recommender.load(tmp_path / "y", log_dir=tmp_path / "log") as recommender:
            assert [event.item_id for event in recommender.users.recent[3].raw] == [1002, 1001, 8, 1003]
            after = recommender.recommend([3, 4], time + DAY, 5)
        assert [(answer.items, answer.events) for answer in after] == [
            (answer.items, answer.events) for answer in before
        ]


def test_a_running_services_log_can_be_refreshed_from_again_and_again(tmp_path):
    _log, last = log_export(tmp_path)
    time = last + 7
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        recommender.append([3, 3, 4, 70], [1001, 7, 1009, 1004], [time] * 4)  # 7 is an item that nobody knows
        refresh(tmp_path / "x", tmp_path / "log", tmp_path / "y")
        recommender.append([3, 3, 3, 5], [1002, 1001, 1003, 1001], [time, time, time + 1, time])
        summary = refresh(tmp_path / "y", tmp_path / "log", tmp_path / "z")
        recommender.append([3], [1003], [time + 1])
        refresh(tmp_path / "z", tmp_path / "log", tmp_path / "last")
        alive = recommender.recommend([3, 4, 5, 70], time + DAY, 5)
    assert (summary.covered_events, summary.touched_users, summary.late_events) == (4, 2, 0)
    found = users_of(tmp_path / "last")
    assert found[3].history.items[-6:].tolist() == [1, 0, 2, 1, 3, 3]
    assert [found[user].row["events"] for user in (3, 4, 5, 70)] == [answer.events for answer in alive]


def test_what_the_export_before_lacked_is_kept(tmp_path):
    _log, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        recommender.append([1, 2], [1001, 1002], [last + 1, last + 2])
        before = recommender.recommend([1, 2], last + DAY, 5)
    refresh(tmp_path / "x", tmp_path / "log", tmp_path / "y")
    for _ in range(2):  # a restart leaves it alone
        Recommender.load(tmp_path / "y", log_dir=tmp_path / "log").close()
        rows = read_store(tmp_path / "log").events
        assert [row[1:4] for row in rows if not row.live] == [(1, 1001, last + 1), (2, 1002, last + 2)]
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:  # back to the export before
        assert recommender.recommend([1, 2], last + DAY, 5) == before


def test_going_back_and_forth_between_exports_loses_nothing(tmp_path):
    _log, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        recommender.forget([3])
        recommender.append([1, 2, 3], [1001, 1002, 1003], [last + 1, last + 2, last + 1])
    refresh(tmp_path / "x", tmp_path / "log", tmp_path / "y")
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        recommender.append([1, 3], [1004, 1004], [last + 5, last + 5])  # y has not this
    want = [(1, [1001, 1004, 1006]), (2, [1002, 1007]), (3, [1003, 1004])]
    counts_seen = set()
    for number, export in enumerate(("y", "x", "x", "y", "x")):
        with Recommender.load(tmp_path / export, log_dir=tmp_path / "log") as recommender:
            if number == 0:
                assert recommender.append([1, 2], [1006, 1007], [last + 6] * 2).accepted == 2
            recent = {user: [e.item_id for e in held.raw] for user, held in recommender.users.recent.items()}
            counts_seen.add(tuple(answer.events for answer in recommender.recommend([1, 2, 3], last + DAY, 5)))
        if export == "x":
            assert sorted(recent.items()) == want
        else:
            assert sorted(recent.items()) == [(1, [1004, 1006]), (2, [1007]), (3, [1003, 1004])]
    assert len(counts_seen) == 1


def test_nothing_of_forgotten_users_is_kept_for_the_export_before(tmp_path):
    _log, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        recommender.append([1, 2], [1001, 1002], [last + 1, last + 2])
    refresh(tmp_path / "x", tmp_path / "log", tmp_path / "y")
    with Recommender.load(tmp_path / "y", log_dir=tmp_path / "log") as recommender:
        assert len(traces(tmp_path / "log", [last + 1])) == 1
        recommender.forget([1])
    Recommender.load(tmp_path / "y", log_dir=tmp_path / "log").close()
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == [MARK_FILE, STORE_FILE]
    assert not traces(tmp_path / "log", [last + 1])
    assert traces(tmp_path / "log", [last + 2]), "the others' events are still there to go back to"


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("stop", ["DELETE FROM", "UPDATE state", "COMMIT", "VACUUM", "PRAGMA wal_checkpoint"])
def test_a_start_that_is_stopped_loses_nothing_and_keeps_nobody(tmp_path, monkeypatch, forgets, stop):
    """There and back again, each start stopped at every step of writing the store anew."""
    _log, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        recommender.append([1, 2, 3], [1001, 1002, 1003], [last + 1, last + 1, last + 3])
    refresh(tmp_path / "x", tmp_path / "log", tmp_path / "y")

    class Stopped(sqlite3.Connection):
        def execute(self, sql, *values):
            if sql.startswith(stop):
                raise KeyboardInterrupt
            return super().execute(sql, *values)

    def start(export):
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Stopped))
            with pytest.raises(KeyboardInterrupt):
                Recommender.load(tmp_path / export, log_dir=tmp_path / "log")
        return Recommender.load(tmp_path / export, log_dir=tmp_path / "log")

    with start("y") as recommender:
        assert not recommender.users.recent
        recommender.append([2], [1004], [last + 2])
        if forgets:
            recommender.forget([3])
    with start("x") as recommender:
        recent = {user: [event.item_id for event in held.raw] for user, held in recommender.users.recent.items()}
    assert recent == {1: [1001], 2: [1002, 1004], **({} if forgets else {3: [1003]})}
    assert bool(traces(tmp_path / "log", [last + 3])) != forgets


def test_a_log_of_other_ids_is_refused(tmp_path):
    log_export(tmp_path)
    write_demo_export(tmp_path / "text", replace(DEMO, user_id_type="string"))
    Recommender.load(tmp_path / "x", log_dir=tmp_path / "log").close()
    with pytest.raises(ExportError, match="user_id_type int64 and string"):
        Recommender.load(tmp_path / "text", log_dir=tmp_path / "log")
    with Recommender.load(tmp_path / "text") as recommender:
        assert recommender.recommend(["user-3"], recommender.manifest.as_of, 2)[0].known
        with pytest.raises(ValueError, match="user id must be text"):
            recommender.recommend([3], recommender.manifest.as_of, 2)


@pytest.mark.parametrize("model", [DEMO.model, GROWING], ids=["constant", "growing"])
def test_states_out_of_the_cache_are_made_again(tmp_path, model):
    _log, last = log_export(tmp_path, replace(DEMO, model=model))
    with Recommender.load(tmp_path / "x") as recommender:
        limit = recommender.users.cache_bytes = 2 * recommender.states([0]).nbytes
        small = Recommender.recommend
        for round_ in range(3):
            for user in range(8):
                recommender.append([user], [1001 + round_], [last + round_])
                small(recommender, [user, (user + 3) % 8], last + round_, 3)
        held = [cached.state.nbytes for cached in recommender.users._cache.values()]
        assert sum(held) == recommender.users._held and (sum(held) <= limit or len(held) == 1)
        assert len(held) == recommender.info()["cached_states"] > 0
        answers = recommender.recommend(range(8), last + DAY, 10)
    with Recommender.load(tmp_path / "x") as recommender:
        for one, other in zip(answers, recommender.recommend(range(8), last + DAY, 10), strict=True):
            assert one.items == other.items


def test_recent_events_are_bounded(tmp_path):
    _log, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x", max_recent_events=3) as recommender:
        recommender.append([1, 2], [1001, 1002], [last + 1] * 2)
        with pytest.raises(ExportError, match=r"Refresh and restart on the new export"):
            recommender.append([1, 1], [1003, 1004], [last + 2] * 2)
        assert recommender.append([1, 1], [1003, 1004], [last + 2, last - DAY]).accepted == 1  # the other is late
        recommender.forget([2])
        assert recommender.append([1], [1005], [last + 3]).accepted == 1
    refresh(tmp_path / "x", tmp_path / "x.log", tmp_path / "y")
    with Recommender.load(tmp_path / "x", max_recent_events=1) as recommender:  # what was taken is there
        assert recommender.info()["recent_events"] == 3
    with Recommender.load(tmp_path / "y", log_dir=tmp_path / "x.log", max_recent_events=1) as recommender:
        assert recommender.append([1], [1006], [last + 4]).accepted == 1


def test_many_waiting_events_are_encoded_in_calls_of_bounded_size(tmp_path, monkeypatch):
    _log, last = log_export(tmp_path)
    with Recommender.load(tmp_path / "x") as recommender:
        for user in range(8):
            recommender.append([user] * 6, [1001 + n for n in range(6)], [last + n for n in range(6)])
        shutil.copytree(tmp_path / "x.log", tmp_path / "log")
        at_once = recommender.states(range(8))
    monkeypatch.setattr("fuxi_torchrec.serving.encoding.AT_ONCE", 13)
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        append, sizes = recommender._model.append, []

        def counting(state, new):
            if len(new.lengths) and set(new.lengths.tolist()) == {6}:
                sizes.append(len(new.items))
            return append(state, new)

        monkeypatch.setattr(recommender._model, "append", counting)
        assert_states_close(recommender.states(range(8)), at_once)
    assert sizes == [12] * 4


# --- threads ---------------------------------------------------------------------------------------------------------


def test_threads_leave_the_states_of_a_sequential_run(tmp_path):
    assert mixed_operations(tmp_path, operations=100, every=2) > 100


# --- crashes ---------------------------------------------------------------------------------------------------------

APPENDS = """
import sys, threading
from fuxi_torchrec.serving.recommender import Recommender
recommender = Recommender.load("x", warm_up=False)
last = recommender.manifest.as_of
def work(number):
    n = 0
    while True:
        n += 1
        recommender.append([number, 100 + number], [1001, 1002], [last + n, last + n])
        sys.stdout.write(f"{number} {n}\\n"); sys.stdout.flush()
for number in range(4):
    threading.Thread(target=work, args=(number,), daemon=True).start()
threading.Event().wait()
"""


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path):
    _, last = log_export(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", APPENDS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = [process.stdout.readline() for _ in range(60)]
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.readlines()
    process.wait()
    acknowledged = {}
    for line in lines:
        if line.endswith("\n") and len(line.split()) == 2:
            number, n = map(int, line.split())
            acknowledged[number] = n
    with open(tmp_path / "x.log" / f"{STORE_FILE}-wal", "ab") as file:  # a commit that was not finished
        file.write(b"\x00\x00\x00\x01half")
    with Recommender.load(tmp_path / "x") as recommender:
        assert sum(acknowledged.values()) >= 60
        for number, n in acknowledged.items():
            for user in (number, 100 + number):
                times = [event.timestamp - last for event in recommender.users.recent[user].raw]
                assert times == list(range(1, len(times) + 1))
                assert n <= len(times) <= n + 1
        recommender.append([1], [1001], [last + 10**6])
    with Recommender.load(tmp_path / "x") as recommender:  # it goes on
        assert recommender.users.recent[1].raw[-1].timestamp == last + 10**6


# --- damaged exports -------------------------------------------------------------------------------------------------


def change_manifest(path, files=None, **changes):
    plain = json.loads((path / MANIFEST).read_text())
    plain["files"].update(files or {})
    del plain[CHECKSUM]
    (path / MANIFEST).write_text(sealed(plain | changes))


def test_an_export_of_another_version(export):
    change_manifest(export, version=1)
    with pytest.raises(ExportError, match="version 1, this software reads version 3; export again"):
        Recommender.load(export)


def test_something_that_is_no_export(tmp_path):
    with pytest.raises(ExportError, match="no export here"):
        Recommender.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["users/part-00001.parquet", "items/part-00000.parquet", "tables.safetensors", "encoder.safetensors", INDEX]
)
def test_damaged_files_are_found_by_their_checksums(export, name):
    data = bytearray((export / name).read_bytes())
    data[40] ^= 1
    (export / name).write_bytes(data)
    with pytest.raises(ExportError, match=f"{name}(: damaged| has another checksum)"):
        Recommender.load(export)
    with pytest.raises(ExportError, match=f"{name}(: damaged| has another checksum)"):
        Bundle.open(export).check()
    (export / name).write_bytes(data[:-1])
    with pytest.raises(ExportError, match=f"{name} has {len(data) - 1} bytes where the manifest says {len(data)}"):
        Recommender.load(export)


def test_a_damaged_state_is_encoded_again(export):
    with Recommender.load(export) as recommender:
        before = recommender.recommend(range(12), recommender.manifest.as_of, 5)
    for number in range(3):
        path = export / part_name(STATES, number, "bin")
        data = bytearray(path.read_bytes())
        for at in range(4096 + 500, len(data), 700):
            data[at] ^= 1
        path.write_bytes(data)
    with Recommender.load(export) as recommender:
        after = recommender.recommend(range(12), recommender.manifest.as_of, 5)
        assert recommender.info()["damaged_states"] == Bundle.open(export).manifest.states > 3
    assert [answer.items for answer in after] == [answer.items for answer in before]


def test_states_of_another_model_are_refused(export, tmp_path):
    write_demo_export(tmp_path / "other", replace(DEMO, seed=5, histories=None))
    name = part_name(STATES, 0, "bin")
    data = bytearray((export / name).read_bytes())
    other = Bundle.open(tmp_path / "other").manifest.model_id.encode()
    mine = Bundle.open(export).manifest.model_id.encode()
    assert len(other) == len(mine)
    (export / name).write_bytes(bytes(data).replace(mine, other))
    with pytest.raises(ExportError, match="states of model"):
        Recommender.load(export)
