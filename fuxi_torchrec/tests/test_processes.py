import os
import signal
import subprocess
import sys
import time

CHILD = "import os, time; from fuxi_torchrec.processes import end_with_parent; end_with_parent({}); time.sleep(60)"
PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}.format(os.getpid())])
print(child.pid, flush=True)
time.sleep(60)
"""


def gone(pid, seconds=30):
    for _ in range(seconds * 20):
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as file:
                if file.read().split()[2] == "Z":  # of a parent that does not wait for it
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_a_child_ends_with_a_parent_that_was_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(child)


def test_a_child_whose_parent_is_gone_already_ends_at_once():
    done = subprocess.run([sys.executable, "-c", CHILD.format(1)], timeout=60)
    assert done.returncode == -signal.SIGKILL
