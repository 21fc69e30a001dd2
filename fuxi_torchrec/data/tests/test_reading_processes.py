"""Reading processes end with the process that started them, whenever and however that ends."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fuxi_torchrec import machine
from fuxi_torchrec.data.batches import BatchMaker, Items
from fuxi_torchrec.data.loader import Loader
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.schedule import Plan
from fuxi_torchrec.data.splits import LeaveOneOut
from fuxi_torchrec.data.tests.small import make_dataset, random_histories
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.tests.test_processes import gone

RANK = """
import sys, time
import numpy as np
from fuxi_torchrec.data.batches import BatchMaker, Items
from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.loader import Loader
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.schedule import Plan, Position
from fuxi_torchrec.data.splits import LeaveOneOut
if __name__ == "__main__":
    dataset = Dataset.open(sys.argv[1])
    maker = BatchMaker(Reader(dataset), LeaveOneOut(), Items(np.arange(dataset.info.items + 1) > 0))
    loader = Loader(maker, Plan(max_length=9, batch_users=1), num_workers=2)
    print("ready", flush=True)
    batches = loader.epoch(Position())
    next(batches)
    print("reading", flush=True)
    time.sleep(120)
"""


def children_of(pid):
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("when", ["starting", "started", "reading"])
def test_no_reading_process_outlives_its_rank(tmp_path, sent, when):
    make_dataset(tmp_path / "set", random_histories(0, users=30, longest=9))
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    rank = subprocess.Popen([sys.executable, script, tmp_path / "set"], stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout.readline() == "ready\n"
        while when != "reading" and len(children_of(rank.pid)) < (2 if when == "starting" else 3):
            assert rank.poll() is None
            time.sleep(0.01)
        if when == "reading":
            assert rank.stdout.readline() == "reading\n"
        children = children_of(rank.pid)
        assert children
        rank.send_signal(sent)
        rank.wait()
        seconds = 5 if when == "reading" else 30  # one that is starting first imports what it needs
        assert [pid for pid in children if not gone(pid, seconds)] == []
    finally:
        rank.kill()


def maker_of(path):
    dataset = make_dataset(path, random_histories(0, users=9, longest=9))
    return BatchMaker(Reader(dataset), LeaveOneOut(), Items(np.arange(dataset.info.items + 1) > 0))


def test_more_reading_processes_than_the_machine_can_run_are_refused(tmp_path):
    maker, most = maker_of(tmp_path / "set"), 4 * machine.cores()
    Loader(maker, Plan(max_length=9, batch_users=1), num_workers=most)
    with pytest.raises(DataError, match=rf"data.num_workers = 100000: at most {most} processes can read"):
        Loader(maker, Plan(max_length=9, batch_users=1), num_workers=100_000)


@pytest.mark.parametrize("name", ["num_streams", "max_length", "batch_users", "shuffle_blocks"])
def test_numbers_that_no_machine_could_hold_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}.* must be at .*most"):
        Plan(**{"max_length": 9, "batch_users": 1, name: 2**62})
    with pytest.raises(ValueError, match=r"num_streams \(batch.streams\) must be at most 65536, not 2147483648"):
        Plan(max_length=9, batch_users=1, num_streams=2**31)


def test_a_cache_larger_than_the_memory_is_refused(tmp_path):
    dataset = make_dataset(tmp_path / "set", random_histories(0, users=9, longest=9))
    with pytest.raises(DataError, match=r"data.cache_mib = 1099511627776: this machine has \d+ MiB of memory in all"):
        Reader(dataset, cache_bytes=2**60)
