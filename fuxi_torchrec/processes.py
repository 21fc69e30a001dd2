"""Processes that end with the one that started them, however that ends."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with_parent(parent: int | None = None) -> None:
    """From now on this process is killed when the thread that started it ends; Linux only, elsewhere nothing happens.

    Args:
        parent: process id of the parent, as it knew it: if it is gone already, this process ends here.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
