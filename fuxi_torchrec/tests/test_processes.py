import os
import signal
import subprocess
import sys
import time

import pytest

from fuxi_torchrec.artifacts import lock
from fuxi_torchrec.processes import supervised

CHILD = "import os, time; from fuxi_torchrec.processes import end_with_parent; end_with_parent({}); time.sleep(60)"
PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}.format(os.getpid())])
print(child.pid, flush=True)
time.sleep(60)
"""
# starts what would survive: a grandchild in a session of its own that ignores signals; says who they are when it runs
FAMILY = """
import os, signal, subprocess, sys, time
deaf = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(90)"
child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(9)))
print(os.getpid(), child.pid, flush=True)
{}
"""
STARTS = """
import subprocess, sys, time
from pathlib import Path
from fuxi_torchrec.processes import supervised
process = subprocess.Popen(supervised([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2])))
print(process.pid, flush=True)
sys.exit(process.wait())
"""


def gone(pid, seconds=5.0):
    """Whether a process has ended within so many seconds' naps: on a starved machine they take longer."""
    for _ in range(int(seconds * 20)):
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as file:
                if file.read().split()[2] == "Z":  # of a parent that does not wait for it
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def is_held(path):
    with path.open("a+") as file:
        return not lock(file, 0.0)


def test_a_child_ends_with_a_parent_that_was_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(child)


def test_a_child_whose_parent_is_gone_already_ends_at_once():
    done = subprocess.run([sys.executable, "-c", CHILD.format(1)], timeout=60)
    assert done.returncode == -signal.SIGKILL


# --- a command and all that it starts --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_supervised_command_and_all_it_started_end_with_the_parent(tmp_path, number):
    file = tmp_path / "lock"
    command = [sys.executable, "-c", STARTS, FAMILY.format("time.sleep(90)"), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        below = [int(parent.stdout.readline()), *map(int, parent.stdout.readline().split())]
        assert len(below) == 3 and is_held(file)
        parent.send_signal(number)
        assert parent.wait() == -number
        assert "saved" in parent.stdout.readline(), "it was asked before it was killed"
        assert all(map(gone, below)) and not is_held(file)


def test_a_supervisor_whose_parent_is_gone_already_starts_nothing(tmp_path):
    command = supervised(["touch", str(tmp_path / "ran")])
    command[3] = "1"
    assert subprocess.run(command, timeout=60).returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "ran").exists()


def test_signals_are_passed_on_once_and_the_exit_code_comes_back():
    with subprocess.Popen(
        supervised([sys.executable, "-c", FAMILY.format("time.sleep(90)")]), stdout=subprocess.PIPE, text=True
    ) as process:
        below = [int(pid) for pid in process.stdout.readline().split()]
        for _ in range(3):
            process.terminate()
        assert process.stdout.read().splitlines() == ["saved"]
        assert process.wait() == 9 and all(map(gone, below))


def test_what_a_command_leaves_behind_ends_when_it_has_ended():
    done = subprocess.run(
        supervised([sys.executable, "-c", FAMILY.format("sys.exit(3)")]), stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode == 3 and all(gone(int(pid), 0.1) for pid in done.stdout.split())
    done = subprocess.run(supervised(["sh", "-c", "kill -9 $$"]), timeout=60)
    assert done.returncode == 128 + signal.SIGKILL


def test_a_command_gets_its_own_arguments(tmp_path):
    for path in (None, tmp_path / "lock"):
        command = supervised(["echo", "-m", "train", "--", "--lock", "--", "x"], path)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
        assert done.stdout == "-m train -- --lock -- x\n"
    done = subprocess.run(command[:4], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "a command has to follow after --" in done.stderr


def test_a_command_that_is_not_there_is_named():
    done = subprocess.run(supervised(["no-such-command", "--", "x"]), capture_output=True, text=True, timeout=60)
    assert done.returncode and "no-such-command: No such file" in done.stderr
