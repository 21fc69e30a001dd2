"""How a job of one or many ranks begins and ends, whether a person started it or torchrun.

An error that is raised on purpose (:class:`FuxiError`: a setting, a file, a run directory that does not fit) ends the
whole job at once, with its message and exit code 1: a restart would not mend it. Any other is a crash: it keeps its
traceback, and torchrun restarts all ranks.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from fuxi_torchrec.errors import FuxiError
from fuxi_torchrec.processes import end_with_launcher, end_with_parent

_COPY_SECONDS = 1.0  # torchrun copies what ranks say to the terminal every tenth of a second
_TURN_SECONDS = 5.0  # the other ranks of a host leave it to the first to speak and to end the job
# ends torchrun without a word: the signals that it handles leave it with a traceback of its own
_END = signal.SIGUSR2


class JobParser(argparse.ArgumentParser):
    """Refuses a wrong flag as any other setting is refused: once, and without a restart."""

    def error(self, message: str) -> NoReturn:
        raise FuxiError(f"{message}; `{self.prog} --help` says what there is")


def run_job(name: str, main: Callable[[], int]) -> NoReturn:
    """Run this rank's part of a job and end the process; under torchrun it also ends when torchrun does, and torchrun
    when a TorchX that had started it on this machine is gone.
    """
    below_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if below_torchrun:
        end_with_parent()
    if os.environ.get("TORCHX_JOB_ID", "").startswith("local_cwd:"):
        end_with_launcher(os.getppid() if below_torchrun else os.getpid())
    try:
        code = main()
    except FuxiError as error:
        _refuse(f"{name}: {error}")
    except Exception as error:
        _crash(error)
    from fuxi_torchrec.distributed import exit_now

    exit_now(code)


def _refuse(message: str) -> NoReturn:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if os.environ["LOCAL_RANK"] != "0":
            time.sleep(_TURN_SECONDS)
            message = f"rank {os.environ['RANK']}: {message}"
        torchrun = os.getppid()
        print(message, file=sys.stderr, flush=True)
        time.sleep(_COPY_SECONDS)
        # the first process of a container gets only signals that it handles
        os.kill(torchrun, signal.SIGTERM if torchrun == 1 else _END)
    else:
        print(message, file=sys.stderr, flush=True)
    os._exit(1)


def _crash(error: Exception) -> NoReturn:
    """Raise it where torchrun notes it as a cause."""
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def fail() -> NoReturn:
        raise error

    fail()
    raise AssertionError
