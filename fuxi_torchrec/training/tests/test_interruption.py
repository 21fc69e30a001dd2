"""Requests to stop, and processes that stand still."""

import os
import signal
import subprocess
import sys

from fuxi_torchrec.training.interruption import StopRequest


def test_sigterm_is_a_request_while_somebody_listens_and_as_before_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest().listening() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) is before


STUCK = """
import time
from fuxi_torchrec.training.interruption import Watchdog

def stand_still():
    time.sleep(SECONDS)

watchdog = Watchdog(0.2)
watchdog.moved()
END
"""


def said_by(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stderr


def test_a_process_that_does_not_move_shows_where_it_stands():
    assert "in stand_still" in said_by(STUCK.replace("SECONDS", "1").replace("END", "stand_still()"))


def test_one_that_is_done_says_nothing():
    assert said_by(STUCK.replace("SECONDS", "0.5").replace("END", "watchdog.stop(); stand_still()")) == ""
