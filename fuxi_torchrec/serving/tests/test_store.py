"""The store keeps what was acknowledged, and finds out when it has not."""

import contextlib
import json
import os
import random
import resource
import shutil
import sqlite3
import struct
import threading
import time
import zlib

import pytest

from fuxi_torchrec.export.bundle import ExportError
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.requests import Event
from fuxi_torchrec.serving.store import MARK_FILE, STORE_FILE, Row, Store, read_store
from fuxi_torchrec.serving.tests.disks import failing_commits
from fuxi_torchrec.serving.tests.random_export import DemoExport, write_demo_export

ABOUT = {"model_id": "m", "as_of": 5, "parent": None, "user_id_type": "string", "item_id_type": "int64"}
ABOUT |= {"time_unit": "s"}
FLIPS = 1500


def open_store(directory):
    store = Store(directory)
    store.open(ABOUT)
    return store


def filled(directory, commits=8):
    """A store with events of a few users, one of them forgotten, and rows kept for the export before."""
    store = open_store(directory)
    store.append(Event(f"user-{n % 7}", n, 10**9 + n, {"tags": [n, 2]} if n % 3 else None) for n in range(120))
    store.forget(["user-3"])
    store.append([Event("user-3", 5, 10**9)])
    store.add_items([{"item_id": 500, "brand": "a"}, {"item_id": 501, "brand": None}])
    content = read_store(directory)
    rows = [row._replace(live=row.seq % 2) for row in content.events]
    store.rewrite(ABOUT | {"as_of": 6}, [*content.forgotten, *content.items, *rows])
    for n in range(commits):
        store.append([Event("user-1", n, 2 * 10**9 + n)])
    return store


@pytest.fixture
def export(tmp_path):
    write_demo_export(tmp_path / "x", DemoExport(items=30, users=5))
    return tmp_path / "x"


def used(data):
    """Without the zeros after the write-ahead log's end."""
    return len(data.rstrip(b"\0"))


def events_of(recommender, user=1):
    return [event.item_id for event in recommender.users.recent[user].raw]


def test_anybody_reads_the_store_while_the_service_goes_on(tmp_path):
    store = filled(tmp_path / "s")
    before = read_store(tmp_path / "s")
    with contextlib.closing(sqlite3.connect(tmp_path / "s" / STORE_FILE)) as other:
        found = other.execute("SELECT count(*) FROM events WHERE item IS NOT NULL").fetchone()
    assert found == (len(before.events),)
    store.append([Event("new", 1, 1)])
    assert len(read_store(tmp_path / "s").events) == len(before.events) + 1
    store.close()
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [MARK_FILE, STORE_FILE]
    (tmp_path / "s").chmod(0o555)
    try:
        assert read_store(tmp_path / "s").events[-1] == Row(before.events[-1].seq + 1, "new", 1, 1)
    finally:
        (tmp_path / "s").chmod(0o755)
    assert len(list((tmp_path / "s").iterdir())) == 2, "reading leaves nothing behind"


def append_together(recommender, calls):
    """Calls that all wait before the first one is written; how many events of each were accepted, or the error."""
    found = [None] * len(calls)

    def append(number):
        try:
            found[number] = recommender.append(*calls[number]).accepted
        except ExportError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=append, args=(number,)) for number in range(len(calls))]
    with recommender._appender._turn:
        recommender._appender._led = True  # as if somebody wrote
    for number, thread in enumerate(threads, 1):
        thread.start()
        while len(recommender._appender._waiting) < number:
            time.sleep(0.001)
    with recommender._appender._turn:
        recommender._appender._led = False
        recommender._appender._turn.notify_all()
    for thread in threads:
        thread.join()
    return found


def test_callers_that_wait_together_share_a_commit(export):
    with Recommender.load(export) as recommender:
        now, commits = recommender.manifest.as_of, []
        recommender._appender.store._database.set_trace_callback(lambda sql: commits.append(sql == "COMMIT"))
        found = append_together(recommender, [([number % 3] * 2, [1001] * 2, [now] * 2) for number in range(12)])
        assert found == [2] * 12
        assert sum(commits) == 1
        assert recommender.info()["recent_events"] == 24


def test_one_that_does_not_fit_fails_alone(export):
    with Recommender.load(export, max_recent_events=3) as recommender:
        now = recommender.manifest.as_of
        later = ([1] * 2, [1001] * 2, [now + 9] * 2)  # nothing of it counts: what comes next is not late
        found = append_together(recommender, [([1] * 2, [1001] * 2, [now] * 2), later, ([1], [1002], [now])])
        assert found[::2] == [2, 1] and "2 events since the export are in memory" in found[1]
        assert [event.item_id for event in recommender.users.recent[1].raw] == [1001, 1001, 1002]


def test_when_nothing_can_be_written_all_who_wait_are_told(export):
    with Recommender.load(export) as recommender:
        now = recommender.manifest.as_of
        with failing_commits(recommender, "SQLITE_FULL"):
            found = append_together(recommender, [([number], [1001], [now]) for number in range(5)])
        assert all("nothing was changed" in each for each in found) and not recommender.users.recent
        assert recommender.append([1], [1001], [now]).accepted == 1


def test_text_that_cannot_be_written_down_is_refused(tmp_path):
    write_demo_export(tmp_path / "x", DemoExport(items=30, users=5, user_id_type="string"))
    with Recommender.load(tmp_path / "x") as live, pytest.raises(ValueError, match="user id 0 is no text that can be"):
        live.append(["a\ud800"], [1001], [live.manifest.as_of])


def test_a_commit_does_not_make_the_write_ahead_log_longer(tmp_path):
    """The length would have to be written too, each time."""
    store = filled(tmp_path / "s", commits=0)
    log = tmp_path / "s" / f"{STORE_FILE}-wal"
    before, written = log.stat().st_size, used(log.read_bytes())
    for n in range(20):
        store.append([Event("user-1", n, 2 * 10**9 + n)])
    assert log.stat().st_size == before and used(log.read_bytes()) > written
    store.close()


# --- damage ----------------------------------------------------------------------------------------------------------


def flipped(directory, content):
    """What becomes of a store with a flipped bit: the error, or None if it has all that it should, and goes on."""
    store = None
    try:
        assert read_store(directory) == content
        store = Store(directory)
        assert store.open(ABOUT) == content
        store.append([Event("later", 1, 1)])
    except ExportError as error:
        return str(error)
    finally:
        if store is not None:
            store.close()
    after = read_store(directory)
    assert (after.events[:-1], after.forgotten, after.items) == (content.events, content.forgotten, content.items)
    return None


@pytest.mark.parametrize("killed", [False, True])
def test_every_flipped_bit_is_found_or_changes_nothing(tmp_path, killed):
    store = filled(tmp_path / "s")
    if killed:  # as it is on disk with commits that are in the write-ahead log alone
        shutil.copytree(tmp_path / "s", tmp_path / "whole")
    store.close()
    if not killed:
        os.rename(tmp_path / "s", tmp_path / "whole")
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert len(files) == (4 if killed else 2)
    content = read_store(tmp_path / "whole")
    draw, harmless = random.Random(0), 0
    places = [(name, at) for name, data in files.items() for at in range(used(data))]
    # the ends of the write-ahead log are what a careless reader loses
    chosen = [
        (name, used(data) - back) for name, data in files.items() for back in (1, 30, 4000, 4100) if back <= used(data)
    ]
    for name, at in chosen + draw.sample(places, FLIPS):
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
        (tmp_path / "d").mkdir()
        for each, data in files.items():
            (tmp_path / "d" / each).write_bytes(data)
        data = bytearray(files[name])
        data[at] ^= 1 << draw.randrange(8)
        (tmp_path / "d" / name).write_bytes(data)
        error = flipped(tmp_path / "d", content)
        assert error is None or str(tmp_path / "d") in error, (name, at)
        harmless += error is None
    assert 0 < harmless < FLIPS


def test_an_acknowledged_commit_that_the_write_ahead_log_lost_is_missed(tmp_path):
    store = filled(tmp_path / "s", commits=3)
    shutil.copytree(tmp_path / "s", tmp_path / "d")
    store.close()
    log = tmp_path / "d" / f"{STORE_FILE}-wal"
    data = bytearray(log.read_bytes())
    data[used(data) - 200] ^= 4  # in the last commit: SQLite takes it for one that was not finished
    log.write_bytes(data)
    with pytest.raises(
        ExportError, match=r"until \d+ of \d+ acknowledged ones are there .*events.sqlite-wal is damaged"
    ) as e:
        Store(tmp_path / "d").open(ABOUT)
    assert "A damaged store" in str(e.value) and log.read_bytes() == data, "nothing is done to what is left"
    (tmp_path / "d" / MARK_FILE).unlink()  # as the message says
    assert len(read_store(tmp_path / "d").events) == len(read_store(tmp_path / "s").events) - 1


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("DELETE FROM events WHERE seq = 130", "rows are missing|acknowledged ones are there"),
        (
            "INSERT INTO events SELECT 500, user, item, time, features, live, checksum FROM events WHERE seq = 130",
            "500",
        ),
        ("UPDATE events SET seq = -seq WHERE seq = 130", "has another checksum"),
        ("UPDATE events SET live = 1 WHERE seq = 2", "has another checksum"),
        ("UPDATE state SET export = 'another'", "has another checksum"),
        ("DELETE FROM state", "version None"),
        ("CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM events; END", "not a Recommender's store"),
        ("ALTER TABLE events RENAME COLUMN item TO itum", "not a Recommender's store"),
    ],
)
def test_rows_that_are_missing_doubled_or_changed_are_found(tmp_path, sql, message):
    filled(tmp_path / "s").close()
    with sqlite3.connect(tmp_path / "s" / STORE_FILE) as other:
        other.execute(sql)
    other.close()
    with pytest.raises(ExportError, match=message):
        Store(tmp_path / "s").open(ABOUT)


def test_files_that_are_no_store(tmp_path):
    (tmp_path / STORE_FILE).write_bytes(b"what is this" * 100)
    with pytest.raises(ExportError, match="file is not a database: restore the directory from a backup"):
        open_store(tmp_path)
    (tmp_path / STORE_FILE).unlink()
    (tmp_path / MARK_FILE).write_bytes(struct.pack("<QI", 7, 7))
    with pytest.raises(ExportError, match=f"{MARK_FILE}: the file is damaged: delete it if"):
        open_store(tmp_path)
    (tmp_path / "events.log").touch()
    with pytest.raises(ExportError, match="an append log of an earlier version"):
        open_store(tmp_path)


def test_a_store_of_another_version_is_refused(tmp_path):
    open_store(tmp_path).close()
    with sqlite3.connect(tmp_path / STORE_FILE) as other:
        row = (99, json.dumps(ABOUT), 0, 0, 0, 0)
        other.execute("DELETE FROM state")
        other.execute("INSERT INTO state VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, zlib.crc32(repr(row).encode())))
    other.close()
    with pytest.raises(ExportError, match="a store of version 99, this software reads 1"):
        open_store(tmp_path)


# --- full disks ------------------------------------------------------------------------------------------------------


def test_a_full_disk_takes_nothing(export):
    with Recommender.load(export) as recommender:
        now = recommender.manifest.as_of
        recommender.append([1], [1001], [now])
        log = recommender._appender.store.path.with_name(f"{STORE_FILE}-wal")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (used(log.read_bytes()) + 10, before[1]))  # the kernel refuses more
        try:
            for _ in range(2):
                with pytest.raises(ExportError, match=f"{STORE_FILE}: cannot be written, nothing was changed"):
                    recommender.append([1], [1002], [now])
                with pytest.raises(ExportError, match="nothing was changed"):
                    recommender.forget([1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert events_of(recommender) == [1001] and not recommender.info()["log_failed"]
        recommender.append([1], [1003], [now])
        assert events_of(recommender) == [1001, 1003]
    with Recommender.load(export) as recommender:
        assert events_of(recommender) == [1001, 1003]


def test_no_room_for_more_pages_is_a_full_disk(export):
    with Recommender.load(export) as recommender:
        now, database = recommender.manifest.as_of, recommender._appender.store._database
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(ExportError, match="nothing was changed: database or disk is full"):
            recommender.append([1] * 500, [1001] * 500, [now] * 500)
        assert 1 not in recommender.users.recent
        database.execute("PRAGMA max_page_count = 100000")
        assert recommender.append([1] * 500, [1001] * 500, [now] * 500).accepted == 500


def test_after_a_failed_fsync_nothing_is_appended_until_a_restart(export):
    with Recommender.load(export) as recommender:
        now = recommender.manifest.as_of
        recommender.append([1], [1001], [now])
        with failing_commits(recommender, "SQLITE_IOERR_FSYNC"), pytest.raises(ExportError, match="the disk failed"):
            recommender.append([1], [1002], [now])
        with pytest.raises(ExportError, match="appending is over until a restart"):
            recommender.append([1], [1003], [now])
        assert recommender.info()["log_failed"] and events_of(recommender) == [1001]
    with Recommender.load(export) as recommender:
        assert events_of(recommender) == [1001]
