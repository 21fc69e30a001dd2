"""A row of the paper's experiments that is killed goes on where it was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.paper import run
from benchmarks.paper.rows import Timed
from integration_tests.runs import ENCODER, SMALL, small_dataset

ROOT = Path(__file__).parents[1]
# the grid has two points here; a training of 20 steps is saved after every fifth
DRIVER = """
import sys
from pathlib import Path
from benchmarks.paper import plan, run
from benchmarks.paper.rows import Timed
plan.GRID = run.GRID = plan.GRID[:2]
at, settings = Path(sys.argv[1]), tuple(sys.argv[2:])
row = Timed("tiny", "tests", "tiny", "tiny", settings, 1, "test", 0.01, True, "", str(at / "config.yaml"))
sys.exit(not run.run_row(row, 0.01, run.Place(at / "runs", at, timed=2)))
"""


@pytest.mark.timeout(600)  # ten short commands, one after another
def test_a_killed_row_goes_on_where_it_was(tmp_path):
    data = small_dataset(tmp_path / "data", users=60)
    (tmp_path / "config.yaml").write_text(f"data: {{path: {data}, time_unit: s}}\n")
    small = [each for each in SMALL if "checkpoint" not in each]
    command = [sys.executable, "-c", DRIVER, str(tmp_path), *small, *ENCODER]
    row = Timed("tiny", "tests", "tiny", "tiny", tuned=True)
    own = tmp_path / "runs" / "tiny@0.01"

    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        deadline = time.monotonic() + 300
        while not (own / "grid-1" / "config.yaml").exists():  # the second point is being trained
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
    place = run.Place(tmp_path / "runs", tmp_path)
    assert run.state(row, 0.01, place) == "started: 1 of 4 points of the grid"
    _nothing_is_left(own)
    kept = {name: (own / name).stat().st_mtime_ns for name in ("plan.json", "grid-0/ranked.json")}

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {name: (own / name).stat().st_mtime_ns for name in kept} == kept
    assert f"{own}/grid-0" not in done.stdout and f"{own}/grid-1" in done.stdout
    found = json.loads((tmp_path / "paper.json").read_text())["tiny"]
    assert run.state(row, 0.01, place) == "done"
    assert found["plan"] == json.loads((own / "plan.json").read_text())
    assert len(found["grid"]) == 2 and found["chosen"] == found["grid"].index(max(found["grid"]))
    assert len(run.unpacked(found["ranks"])) == found["users"]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert again.stdout == "tiny: done\n"


def _nothing_is_left(own):
    """No process works on the row any more."""
    deadline = time.monotonic() + 60
    while any(str(own).encode() in _command(pid) for pid in os.listdir("/proc") if pid.isdigit()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
