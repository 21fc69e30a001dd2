"""How long anything is left of a job whose parent was killed: `torchx run`, the demo, at rest and on a busy machine.

    python -m benchmarks.endings [--rounds 5] [--busy 6]

Strikes in the middle of training (two ranks, a process that reads for each, checkpoints in the background) and waits
until nothing that was started is left. Exit code 1 if anything was there after five seconds.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Aim
from integration_tests import runs
from integration_tests.launches import ENDLESS, SETTINGS, all_end, latest, marked, until
from pipelines.components import WORKER_ENV

MOST = 5.0  # seconds
PATIENCE = 60.0
SIGNALS = (signal.SIGKILL, signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every way to end, write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endings", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often each is struck")
    parser.add_argument("--busy", type=int, default=6, help="processes that keep the machine busy in the second half")
    options = parser.parse_args(arguments)
    rows, aims, raw = [], [], {}
    with tempfile.TemporaryDirectory(prefix="endings-") as scratch:
        data = runs.small_dataset(Path(scratch) / "set")
        for busy in (0, options.busy):
            with _busy(busy):
                for what in ("torchx run", "pipelines.demo"):
                    for number in SIGNALS:
                        times = [_end(what, number, data, Path(scratch)) for _ in range(options.rounds)]
                        raw[f"{what}, {number.name}, {busy} busy"] = times
                        rows.append([what, number.name, busy, f"{statistics.median(times):.1f}", f"{max(times):.1f}"])
                        name = f"{what}, {number.name}, {busy} busy processes: seconds until all have ended, at most"
                        aims.append(Aim(name, max(times), MOST, at_most=True))
                        print(rows[-1], flush=True)
    head = ["parent", "signal", "other busy processes", "median, s", "longest, s"]
    text = (
        f"`python -m benchmarks.endings`. {harness.machine()}. The parent is struck in the middle of training on two "
        "ranks, each with a reading process and checkpoints in the background; seconds from the signal until nothing "
        f"that it started is left, {options.rounds} times each.\n\n{harness.table(head, rows)}\n\n"
        + "\n".join(f"* {aim}" for aim in aims)
    )
    harness.publish("endings", "Processes that end with their parent", text, raw)
    return harness.conclude(aims)


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    workers = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _end(what: str, number: signal.Signals, data: Path, scratch: Path) -> float:
    """Seconds from the signal to the end of the last process."""
    mark, place = uuid.uuid4().hex, Path(tempfile.mkdtemp(dir=scratch))
    log, run = place / "log", place / "run"
    command = ["torchx", "run", "dist.ddp", "-j", "1x2", "-m", "pipelines.train", "--", "--run-dir", str(run)]
    command += [f"data.path={data}", *SETTINGS, *ENDLESS]
    if what == "pipelines.demo":
        run = place / "demo" / "run"
        command = [sys.executable, "-m", "pipelines.demo", "--users", "800", "--directory", str(place / "demo")]
    environment = {**os.environ, **harness.environment(), **WORKER_ENV, "MARK": mark}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        begun = (run / "metrics.jsonl").exists if what == "pipelines.demo" else lambda: latest(run) > 0
        until(begun, process, log, 300)
        process.send_signal(number)
        began = time.monotonic()
        process.wait(PATIENCE)
        all_end(mark, PATIENCE)
        return time.monotonic() - began
    finally:
        process.kill()
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
