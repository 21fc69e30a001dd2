"""Training launched through TorchX and struck from outside, for tests and the benchmark of faults."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fuxi_torchrec.training.checkpoint.info import LATEST, named

ROOT = Path(__file__).parents[1]


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
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def descendants(pid: int) -> set[int]:
    """Processes below a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found


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
    found = named(run_dir / "checkpoints", LATEST)
    return int(found.name.removeprefix("step-")) if found is not None else -1
