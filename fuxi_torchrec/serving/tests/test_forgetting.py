"""Who is forgotten stays so, in the store, in refreshed exports and on later ones."""

from dataclasses import replace

import pytest

from fuxi_torchrec.events.times import now
from fuxi_torchrec.export.bundle import MANIFEST, Bundle
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.refresh.refresh import refresh
from fuxi_torchrec.serving.requests import Event
from fuxi_torchrec.serving.store import MARK_FILE, STORE_FILE, read_store
from fuxi_torchrec.serving.tests.exports import (
    users_of,
)
from fuxi_torchrec.serving.tests.random_export import DAY, write_demo_export
from fuxi_torchrec.serving.tests.recommenders import DEMO, log_export, logged, traces


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
