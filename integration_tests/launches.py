"""Training launched through TorchX and struck from outside, for tests and benchmarks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fuxi_torchrec import processes
from fuxi_torchrec.processes import descendants as descendants
from fuxi_torchrec.training.checkpoint.info import named
from integration_tests import runs

ROOT = Path(__file__).parents[1]
# of a small training that is struck
STEPS, EVERY = 16, 4
SETTINGS = [
    *(s.replace(" ", "") for s in (*runs.SMALL, *runs.ENCODER) if not s.startswith(("checkpoint.", "model.dim"))),
    *("model.dim=16", "train.epochs=100", f"train.max_steps={STEPS}", f"checkpoint.every_steps={EVERY}"),
    "distributed.timeout_seconds=60",
]
ENDLESS = ("data.num_workers=1", "train.epochs=1000000", "train.max_steps=1000000000")


@contextmanager
def launched(*arguments: Any, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A running ``torchx run``; at the end of the body whatever is left of it is killed.

    Args:
        arguments: after ``torchx run``.
        log: file for what it says.
        environment: variables more than this process has.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with log.open("ab") as file:
        process = subprocess.Popen(
            ["torchx", "run", *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "PATH": path, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    seen = {process.pid}
    try:
        yield process
    finally:
        seen |= descendants(process.pid)
        process.poll() if process.returncode is not None else process.kill()
        process.wait()
        for pid in seen - {process.pid}:
            strike(pid)


def strike(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process that may be gone."""
    processes.strike([pid], number)


def marked(mark: str) -> set[int]:
    """Processes that have a text in the environment they were started with, wherever they are now."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or another user's
            if mark.encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
    return found


def all_end(mark: str, seconds: float = 5.0) -> float:
    """Wait until no marked process is left, see :func:`none_left`."""
    return none_left(lambda: marked(mark), seconds)


def none_left(find: Callable[[], set[int]], seconds: float = 5.0) -> float:
    """Wait until no process is found; an error with their command lines if some stay, else how long it took."""
    began = time.monotonic()
    for _ in range(int(seconds / 0.05)):  # naps: on a starved machine they take longer, as everything does
        if not find():
            return time.monotonic() - began
        time.sleep(0.05)
    raise AssertionError(f"still there after {seconds:g} s: {list(map(command_of, find()))}")


def command_of(pid: int) -> list[str]:
    """Of a process, empty when it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    return []


def listener(port: int, among: set[int]) -> int | None:
    """Which of some processes listens on a port."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for pid in among:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if descriptor.is_symlink() and os.readlink(descriptor) in inodes:
                return pid
    return None


def until(condition: Callable[[], Any], process: subprocess.Popen[bytes], log: Path, seconds: float = 60.0) -> Any:
    """What a condition gives once it is true; an error with the log if the launch ends or it takes too long."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"exit code {process.returncode}, waiting for {condition}:\n{log.read_text()[-8000:]}")
        time.sleep(0.02)
    return found


def held(run_dir: Path, world: int) -> dict[int, dict[str, int]] | None:
    """The ranks that wait at ``RUN/hold``, by rank, once all of them do; see held_training."""
    files = [run_dir / "held" / str(rank) for rank in range(world)]
    if not all(file.exists() for file in files):
        return None
    found = {rank: json.loads(file.read_text()) for rank, file in enumerate(files)}
    return found if all(each["world"] == world for each in found.values()) else None


def latest(run_dir: Path) -> int:
    """The step of the last complete checkpoint; -1 if there is none."""
    found = named(run_dir / "checkpoints", "latest")
    return int(found.name.removeprefix("step-")) if found else -1
