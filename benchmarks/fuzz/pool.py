"""Cases in forked processes: whatever ends or stops one is told, and does not stop the others."""

import contextlib
import faulthandler
import os
import pickle
import resource
import select
import shutil
import signal
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.fuzz.outcomes import CRASHED, GOOD, HUNG, Outcome
from fuxi_torchrec.processes import end_with_parent

MEMORY = 6 << 30  # bytes that a case may map beside what it was forked with
LIFETIME = 300  # cases of a process: what they leave behind does not pile up
WORKING = object()  # in place of an answer
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Case:
    """Case ``number`` of a format, a function of the seed, the format and the number."""

    format: str
    number: int
    seed: int

    def random(self) -> Random:
        """What its mutation is drawn from."""
        return Random(f"{self.seed}/{self.format}/{self.number}")


Work = Callable[[Any, Path], Any]  # done in a process, with a directory for it


@dataclass
class Worker:
    """A forked process that takes things over a pipe and answers each."""

    work: Work
    place: Path
    number: int = 0  # of things it was given
    since: float = field(default_factory=time.monotonic)
    held: Any = None

    def __post_init__(self) -> None:
        given, self._send = os.pipe()
        self.answers, told = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._send)
            os.close(self.answers)
            try:
                end_with_parent(parent)
                os.setpgid(0, 0)  # what it starts is ended with it
                _serve(self.work, self.place, given, told)
            finally:
                os._exit(0)
        os.close(given)
        os.close(told)

    def give(self, thing: Any) -> None:
        """Begin with a thing."""
        self.held, self.number, self.since = thing, self.number + 1, time.monotonic()
        _write(self._send, thing)

    def end(self) -> int:
        """Kill the process, and all that it started; how it ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.ended()

    def ended(self) -> int:
        """Wait for its end: the exit code, or minus the signal."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self._send)
        os.close(self.answers)
        shutil.rmtree(self.place, ignore_errors=True)
        return os.waitstatus_to_exitcode(status)


def _serve(work: Work, place: Path, given: int, told: int) -> None:
    """The loop of a forked process."""
    faulthandler.disable()  # it would write where the parent's errors go
    place.mkdir(parents=True)
    output = os.open(place / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            thing = _read(given)
        except EOFError:
            return
        os.ftruncate(output, 0)
        here = place / "case"
        try:
            answer = work(thing, here)
        except BaseException:
            answer = Broken(traceback.format_exc())
        shutil.rmtree(here, ignore_errors=True)
        _write(told, answer)


@dataclass(frozen=True)
class Broken:
    """An error of the fuzzer itself."""

    trace: str


def run(work: Work, things: Sequence[Any], place: Path, jobs: int, seconds: float) -> Iterator[tuple[Any, Any]]:
    """Each thing with what the work made of it, or with the Outcome of a process that ended or hung."""
    waiting, workers, made = deque(things), list[Worker](), 0
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.append(Worker(work, place / f"worker-{made}"))
                made += 1
                workers[-1].give(waiting.popleft())
            ready, _, _ = select.select([worker.answers for worker in workers], [], [], 0.5)
            for worker in list(workers):
                answer = _answer(worker, worker.answers in ready, seconds)
                if answer is WORKING:
                    continue
                yield worker.held, answer
                alive = not isinstance(answer, Outcome) or answer.kind not in (CRASHED, HUNG)
                if alive and waiting and worker.number < LIFETIME and _good(answer):
                    worker.give(waiting.popleft())
                    continue
                workers.remove(worker)
                if alive:
                    worker.end()
    finally:
        for worker in workers:
            worker.end()


def _good(answer: Any) -> bool:
    """Whether nothing odd happened: a process that saw something odd is replaced."""
    return not isinstance(answer, Outcome) or answer.kind in GOOD


def _answer(worker: Worker, ready: bool, seconds: float) -> Any:
    """What a process answers, if it is there."""
    if ready:
        try:
            return _read(worker.answers)
        except EOFError:
            said = _tail(worker.place / "output")
            code = worker.ended()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Outcome(CRASHED, "", f"{how}; {said}")
    if time.monotonic() - worker.since > seconds:
        said = _tail(worker.place / "output")
        worker.end()
        return Outcome(HUNG, "", f"after {seconds:g} s; {said}")
    return WORKING


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-1500:] if path.exists() else ""


def _write(pipe: int, thing: Any) -> None:
    data = pickle.dumps(thing)
    view = memoryview(_LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(pipe, view) :]


def _read(pipe: int) -> Any:
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    return pickle.loads(_exactly(pipe, length))


def _exactly(pipe: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        block = os.read(pipe, min(length - len(data), 1 << 20))
        if not block:
            raise EOFError
        data += block
    return bytes(data)
