"""Processes that end with the one that started them, however that ends.

    python -m fuxi_torchrec.processes PARENT [--lock FILE] -- COMMAND ...

runs a command and gives back its exit code. When the process PARENT, which has to be the one that starts this, is gone,
however it ended, the command and everything it has started end too, sessions of their own or not; also when the command
alone has ended. ``--lock`` holds a shared lock on a file as long as one of them runs.
"""

import argparse
import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from fuxi_torchrec.artifacts import lock

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
GRACE_SECONDS = 3.0  # from a signal to the kill: five seconds after its parent nothing is left
_LOOK_SECONDS = 0.25


def end_with_parent(parent: int | None = None) -> None:
    """From now on this process is killed when the thread that started it ends; Linux only, elsewhere nothing happens.

    Args:
        parent: process id of the parent, as it knew it: if it is gone already, this process ends here.
    """
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) and parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_launcher(pid: int) -> None:
    """From now on a process, this one or its parent, ends when its own parent is gone: it is asked, then killed.

    For torchrun, which does not do that itself, by the ranks below it; they end with it. Linux only.
    """
    if not Path("/proc/self/stat").exists():
        return
    launcher = _parent(pid)
    # at the first look it may be gone already, if it is not the first process of a container
    orphan = launcher == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes()

    def watch() -> None:
        with contextlib.suppress(OSError):  # the process has ended
            while not orphan and _parent(pid) == launcher:
                time.sleep(_LOOK_SECONDS)
        strike([pid], signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        strike([pid])

    threading.Thread(target=watch, name="end with launcher", daemon=True).start()


def supervised(command: Sequence[str], lock_path: Path | None = None) -> list[str]:
    """A command that ends with this process, with everything it starts."""
    more = ["--lock", str(lock_path)] if lock_path is not None else []
    return [sys.executable, "-m", "fuxi_torchrec.processes", str(os.getpid()), *more, "--", *command]


def supervise(command: Sequence[str], parent: int) -> int:
    """Run a command, pass signals on to it, end what is left of it; its exit code."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # they are waited for below
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # whoever loses its parent below becomes a child of this process
    if os.getppid() != parent:
        return 128 + signal.SIGTERM
    supervisor = os.getpid()

    def begin() -> None:
        end_with_parent(supervisor)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        # a session of its own: signals for the group of this process reach it once, by this process
        child = subprocess.Popen(command, start_new_session=True, preexec_fn=begin)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")
    told, kill_at = False, math.inf
    while (ended := _reap()) is not None:
        if child.pid in ended:
            child.returncode, kill_at = ended[child.pid], min(kill_at, time.monotonic() + GRACE_SECONDS)
            strike(descendants(supervisor), signal.SIGTERM)
        if time.monotonic() >= kill_at:
            strike(descendants(supervisor))
        came = signal.sigtimedwait(_SIGNALS, 1.0 if kill_at == math.inf else 0.1)
        if came is None or came.si_signo == signal.SIGCHLD:
            continue
        kill_at = min(kill_at, time.monotonic() + GRACE_SECONDS)
        if not told and child.returncode is None:  # once: a second signal would break into the saving
            told = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, came.si_signo)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _reap() -> dict[int, int] | None:
    """Exit codes of children that have ended since; None if there are no children any more."""
    found: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = os.waitstatus_to_exitcode(ended[1])
        return found
    return found or None


def strike(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes that may be gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(pid: int) -> set[int]:
    """Processes below a process; Linux only."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            children.setdefault(_parent(int(entry.name)), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _prctl(option: int, value: int) -> bool:
    """Whether there is such a call."""
    libc = ctypes.CDLL(None, use_errno=True)
    return hasattr(libc, "prctl") and libc.prctl(option, value) == 0


def main(arguments: Sequence[str]) -> int:
    """Run a command for a parent; its exit code."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)  # the command may have one of its own
    own, command = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m fuxi_torchrec.processes",
        usage="%(prog)s PARENT [--lock FILE] -- COMMAND ...",
        description="Run a command that ends, with everything it has started, when its parent is gone.",
    )
    parser.add_argument("parent", type=int, help="process id of the one that starts this")
    parser.add_argument("--lock", type=Path, help="file that is locked, shared, as long as something of it runs")
    options = parser.parse_args(own)
    if not command:
        parser.error("a command has to follow after --")
    with contextlib.ExitStack() as stack:
        if options.lock is not None and not lock(stack.enter_context(options.lock.open("a+")), shared=True):
            sys.exit(f"{options.lock} is locked: another job runs")
        if not hasattr(signal, "sigtimedwait"):  # no Linux
            return subprocess.run(command, check=False).returncode
        return supervise(command, options.parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
