"""Training that is killed again and again, and moved to other numbers of ranks, against training that is not.

    python -m benchmarks.faults [--kills 20]

Launches `pipelines.train` through TorchX; kills a random worker at random moments, every third time while a checkpoint
is being written; preempts the job (SIGTERM) and continues it on 1, 4 and 2 ranks. Exit code 1 if a kill was not
recovered from, if more than the steps since the last complete checkpoint were repeated, or if the losses differ.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Aim
from fuxi_torchrec.data.prepare import prepare_synthetic
from fuxi_torchrec.data.synthetic import SyntheticConfig
from integration_tests.launches import descendants, latest, launched, strike

SIZES = (2, 1, 4, 2)  # ranks, one after another
EVERY = 5  # steps a checkpoint
STEPS_A_KILL = 15
SETTINGS = [
    *("model.dim=16", "model.num_layers=2", "model.num_heads=2", "model.max_positions=128"),
    *("model.temporal_periods=[3600,86400,604800,31536000]", "batch.events=4096", "batch.max_length=256"),
    # with 1e-3, rounding that differs between numbers of ranks grows to 1e-3 of the loss within 200 steps, also in
    # runs that nobody disturbs, and what a fault changes could not be told from it
    *("loss.num_negatives=128", "optimizer.lr=1e-4", "train.epochs=1000", f"checkpoint.every_steps={EVERY}"),
    *("logging.every_steps=1", "logging.tensorboard=false", "validation.every_epochs=null"),
    "distributed.timeout_seconds=60",
]
WORKER_ENV = "OMP_NUM_THREADS=1,PET_MAX_RESTARTS=1000,TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
PATIENCE = 180.0  # seconds for anything


@dataclass(frozen=True)
class Kill:
    """One kill, and what came of it."""

    processes: int
    rank: int
    step: int  # trained when it struck
    during_save: bool
    resumed_from: int
    repeated: int
    checkpoint_before: int  # the last complete one when it struck
    seconds: float  # until a step was trained again


@dataclass(frozen=True)
class Move:
    """From one number of ranks to another."""

    before: int
    after: int
    step: int  # saved when preempted
    seconds_to_save: float  # from SIGTERM until the checkpoint is complete
    seconds_to_leave: float  # until everything has ended


class Run:
    """A run directory as seen from outside."""

    def __init__(self, path: Path, data: Path, steps: int) -> None:
        self.path, self.log = path, path.with_suffix(".log")
        self.arguments = ["--", "--run-dir", path, f"data.path={data}", f"train.max_steps={steps}", *SETTINGS]

    def command(self, processes: int) -> list[Any]:
        """Of ``torchx run``."""
        return ["dist.ddp", "-j", f"1x{processes}", "--env", WORKER_ENV, "-m", "pipelines.train", *self.arguments]

    def step(self) -> int:
        """The last one in metrics.jsonl."""
        try:
            lines = (self.path / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except (json.JSONDecodeError, KeyError):  # being written
                continue
        return 0

    def resumptions(self) -> list[int]:
        """The steps from which the job says that it went on, in order."""
        return [int(step) for step in re.findall(r"resumed from step-(\d+)", self.log.read_text(errors="replace"))]

    def holder(self) -> str:
        """Who holds the lock: another process after a restart."""
        try:
            return (self.path / ".lock").read_text()
        except FileNotFoundError:
            return ""

    def inode(self) -> int:
        """Of metrics.jsonl, which a resumed run writes anew."""
        try:
            return (self.path / "metrics.jsonl").stat().st_ino
        except FileNotFoundError:
            return 0

    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self.path.glob("checkpoints/.partial-*"))

    def losses(self) -> dict[int, float]:
        """Of every step."""
        entries = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both, compare, publish."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    scratch = Path(tempfile.mkdtemp(prefix="faults-benchmark-"))
    steps = options.kills * STEPS_A_KILL
    load = os.getloadavg()[0]
    try:
        prepare_synthetic(SyntheticConfig(400, 3, 500, 10, median_length=40, length_sigma=1.0), scratch / "data")
        calm, struck = (Run(scratch / name, scratch / "data", steps) for name in ("calm", "struck"))
        began = time.monotonic()
        with launched(*calm.command(2), log=calm.log) as process:
            wait(lambda: process.poll() is not None, process, calm, ended=True)
        undisturbed = time.monotonic() - began
        kills, moves, exit_code = disturb(struck, options.kills, random.Random(options.seed))
        return report(calm, struck, kills, moves, exit_code, options.kills, undisturbed, load)
    finally:
        shutil.rmtree(scratch)


def disturb(run: Run, count: int, draw: random.Random) -> tuple[list[Kill], list[Move], int]:
    """Train to the end with kills and moves in between; the last launch's exit code."""
    kills: list[Kill] = []
    moves: list[Move] = []
    exit_code = -1
    for phase, processes in enumerate(SIZES):
        mine = range(count * phase // len(SIZES), count * (phase + 1) // len(SIZES))
        with launched(*run.command(processes), log=run.log) as process:
            for number in mine:
                target = int((number + draw.uniform(0.2, 0.9)) * STEPS_A_KILL)
                wait(partial(reached, run, target), process, run)
                kills.append(kill(run, process, processes, number % 3 == 2, draw))
                print(kills[-1], flush=True)
            if phase + 1 == len(SIZES):
                wait(lambda: process.poll() is not None, process, run, ended=True)
                exit_code = process.returncode
                break
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            wait((run.path / "preempted").exists, process, run, ended=True)
            saved = time.monotonic() - began
            wait(lambda: process.poll() is not None, process, run, ended=True)
            left = time.monotonic() - began
            step = json.loads((run.path / "preempted").read_text())["step"]
            moves.append(Move(processes, SIZES[phase + 1], step, saved, left))
            print(moves[-1], flush=True)
    return kills, moves, exit_code


def kill(run: Run, process: "subprocess.Popen[bytes]", processes: int, in_save: bool, draw: random.Random) -> Kill:
    """Kill a worker, wait until training goes on."""
    if in_save:
        wait(run.saving, process, run, pause=0.0005)
    else:
        time.sleep(draw.uniform(0.0, 0.3))
    workers = sorted(pid for pid in descendants(process.pid) if is_worker(pid))
    rank = draw.randrange(len(workers))
    holder, inode = run.holder(), run.inode()
    during, complete, before = run.saving(), latest(run.path), len(run.resumptions())
    strike(workers[rank])
    began, step = time.monotonic(), run.step()

    def restarted() -> bool:
        nonlocal step
        if run.holder() == holder:
            step = max(step, run.step())
            return False
        return True

    wait(restarted, process, run)
    wait(lambda: run.inode() != inode, process, run)  # the metrics are cut where training goes on
    if complete >= 0:
        wait(lambda: len(run.resumptions()) > before, process, run)
    resumed_from = run.resumptions()[-1] if len(run.resumptions()) > before else 0
    wait(lambda: run.step() > resumed_from, process, run)
    seconds = time.monotonic() - began
    return Kill(processes, rank, step, during, resumed_from, step - resumed_from, max(0, complete), seconds)


def is_worker(pid: int) -> bool:
    """Whether a process trains, and does not launch."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"pipelines.train" in words and not any(word.endswith((b"torchrun", b"torchx")) for word in words)


def reached(run: Run, step: int) -> bool:
    """Whether the run has trained so far."""
    return run.step() >= step


def wait(
    condition: Callable[[], bool],
    process: "subprocess.Popen[bytes]",
    run: Run,
    pause: float = 0.01,
    ended: bool = False,
) -> None:
    """Until something is so; an error if it takes too long, or the job ends first."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if (not ended and process.poll() is not None) or time.monotonic() > deadline:
            raise RuntimeError(f"exit code {process.returncode} at step {run.step()}:\n{run.log.read_text()[-5000:]}")
        time.sleep(pause)


def report(
    calm: Run,
    struck: Run,
    kills: list[Kill],
    moves: list[Move],
    exit_code: int,
    wanted: int,
    seconds: float,
    load: float,
) -> int:
    """Publish what happened."""
    expected, found = calm.losses(), struck.losses()
    same_steps = expected.keys() == found.keys()
    differ = max(abs(expected[step] - found[step]) for step in expected) if same_steps else float("inf")
    last = max(expected)
    final = abs(expected[last] - found.get(last, float("inf")))
    # a save that was on its way may have completed between the look and the kill, never the other way round
    sound = sum(kill.resumed_from >= kill.checkpoint_before for kill in kills)
    times = [kill.seconds for kill in kills]
    rows = []
    for phase, processes in enumerate(SIZES):
        own = kills[wanted * phase // len(SIZES) : wanted * (phase + 1) // len(SIZES)]
        rows.append(
            [
                processes,
                len(own),
                sum(kill.during_save for kill in own),
                f"{statistics.mean(kill.repeated for kill in own):.1f}" if own else "",
                max((kill.repeated for kill in own), default=""),
                f"{statistics.median(kill.seconds for kill in own):.1f}" if own else "",
                f"{max(kill.seconds for kill in own):.1f}" if own else "",
                f"{moves[phase].seconds_to_save:.1f}" if phase < len(moves) else "",
                f"{moves[phase].seconds_to_leave:.1f}" if phase < len(moves) else "",
            ]
        )
    aims = [
        Aim("kills recovered from, at the last complete checkpoint or a later one", sound, wanted),
        Aim("exit code, without its sign", abs(exit_code), 0, at_most=True),
        Aim("difference of the final losses, in 1e-5", final * 1e5, 1.0, at_most=True),
        Aim("largest difference of the losses of any step, in 1e-5", differ * 1e5, 1.0, at_most=True),
        Aim("seconds from SIGTERM to a complete checkpoint", max(m.seconds_to_save for m in moves), 8.0, at_most=True),
        Aim("seconds from SIGTERM to the end of TorchX", max(m.seconds_to_leave for m in moves), 8.0, at_most=True),
    ]
    head = ["processes", "kills", "during a save", "steps repeated, mean", "most", "s to recover, median", "most"]
    text = (
        f"`python -m benchmarks.faults --kills {wanted}`. {harness.machine()}; load average {load:.1f}.\n\n"
        f"A run of {last} steps, a checkpoint every {EVERY}, launched through TorchX: {wanted} workers killed at any "
        f"moment, moved from {SIZES[0]} processes to {', '.join(map(str, SIZES[1:]))} by SIGTERM and a new launch. "
        f"*To recover*: from the kill until a step is trained again, {statistics.median(times):.1f} s in the median of "
        "all kills, most of it starting Python and importing TorchRec. The undisturbed run took "
        f"{seconds:.0f} s.\n\n"
        f"{harness.table([*head, 's to save when asked to stop', 's to leave'], rows)}\n\n"
        f"Losses of all {last} steps against the undisturbed run on {SIZES[0]} processes: at most {differ:.1e} apart, "
        f"the last {final:.1e}.\n\n" + "\n".join(f"* {aim}" for aim in aims)
    )
    raw = {"kills": [asdict(kill) for kill in kills], "moves": [asdict(move) for move in moves], "differ": differ}
    harness.publish("faults", "Faults", text, raw)
    print(text)
    return harness.conclude(aims)


if __name__ == "__main__":
    sys.exit(main())
