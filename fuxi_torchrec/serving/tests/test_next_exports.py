"""What was appended on one export goes on with the next, and with the one before."""

import sqlite3
from dataclasses import replace
from functools import partial

import pytest

from fuxi_torchrec.export.bundle import ExportError
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.refresh.refresh import refresh
from fuxi_torchrec.serving.store import read_store
from fuxi_torchrec.serving.tests.exports import (
    users_of,
)
from fuxi_torchrec.serving.tests.random_export import DAY, write_demo_export
from fuxi_torchrec.serving.tests.recommenders import DEMO, log_export, traces


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
