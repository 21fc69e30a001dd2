import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMEOUT = 60
# DuckDB is busy with this for days
ENDLESS = "(SELECT sum(hash(a.range + b.range) % 7) FROM range(10000000) a, range(10000000) b) > 0"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_preparing_in_one_line_and_leaves_nothing(tmp_path, number):
    place, scratch = tmp_path / "data", tmp_path / "scratch"
    place.mkdir()
    scratch.mkdir()
    log = tmp_path / "log.csv"
    log.write_text("user,item,time\n1,2,1600000000\n")
    command = [sys.executable, "-m", "pipelines.prepare", "events", "--input", str(log), "--output", str(place / "set")]
    command += ["--user-column", "user", "--item-column", "item", "--time-column", "time", "--time-unit", "s"]
    child = subprocess.Popen(
        [*command, "--where", ENDLESS],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    try:
        until = time.monotonic() + TIMEOUT
        while not list(place.glob(".set.partial/*/events.duckdb")):
            assert child.poll() is None, child.stderr.read()
            assert time.monotonic() < until, os.listdir(place)
            time.sleep(0.05)
        time.sleep(0.5)  # most likely within DuckDB by now; if not, the same holds
        assert child.poll() is None
        child.send_signal(number)
        _, errors = child.communicate(timeout=TIMEOUT)
    finally:
        child.kill()
        child.wait()
    assert errors.splitlines() == [f"prepare: stopped by {number.name}; nothing was written"]
    assert child.returncode == 128 + number
    assert os.listdir(place) == []
    assert os.listdir(scratch) == []
