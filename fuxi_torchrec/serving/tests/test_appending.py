"""The Recommender keeps what it was told, and stays right under threads and crashes."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from fuxi_torchrec.export.bundle import ExportError
from fuxi_torchrec.serving import appending
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.refresh.refresh import refresh
from fuxi_torchrec.serving.store import STORE_FILE
from fuxi_torchrec.serving.tests.exports import (
    assert_states_close,
)
from fuxi_torchrec.serving.tests.random_export import DAY
from fuxi_torchrec.serving.tests.recommenders import DEMO, GROWING, ROOT, log_export
from fuxi_torchrec.serving.tests.threads import mixed_operations


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
