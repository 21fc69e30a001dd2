"""The whole way once: a log, a dataset, training on two ranks, evaluation, export, new events, a recommendation.

    python -m pipelines.demo [--data PATH/TO/ml-1m] [--directory runs/demo]

Every stage is a command that a person would type; it is shown, run, and timed. What matters of its output is shown, all
of it is in a log.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fuxi_torchrec.processes import supervised

ROOT = Path(__file__).parents[1]
TWO = "torchx run dist.ddp -j 1x2 -m"
MARK = ".demo"  # the directory may be emptied
_TAIL = 20  # lines of a log that say why a command failed
_TORCHX = re.compile(r"torchx \d|\w+://torchx/")  # TorchX's own lines
# before ours: TorchX's, torchrun's, the time
_PREFIX = re.compile(r"(\w+/\d+ )?(\[\d+\]:)?(\d\d-\d\d \d\d:\d\d:\d\d )?")


@dataclass(frozen=True)
class Stage:
    """What is done, the command that does it, and which lines of its output matter."""

    what: str
    command: str
    matters: str = ""

    @property
    def log(self) -> str:
        """Name of the file with the output."""
        words = shlex.split(self.command)
        module = next((word for word in words if word.startswith("pipelines.")), words[0])
        return f"{module.rpartition('.')[2]}.log"


def synthetic_stages(directory: Path, users: int) -> list[Stage]:
    """On synthetic histories with habits, some beyond 10,000 events."""
    root = shlex.quote(str(directory))
    return [
        Stage(
            "synthesize an event log with daily and weekly habits, and a second one with what comes after it",
            f"python -m pipelines.synthesize --users {users} --items 200 --groups 10 --window 10 --repeat 0.1 "
            "--drift-days 40 --median-length 200 --length-sigma 1.2 --oracle "
            f"--cuts 0.98 --output {root}/log",
        ),
        Stage(
            "sort the log into one history per user",
            f"python -m pipelines.prepare events --input {root}/log/part-0.parquet --user-column user_id "
            f"--item-column item_id --time-column timestamp --time-unit s --output {root}/data",
        ),
        *training_stages(root, "configs/demo.yaml"),
        Stage(
            "bring the export up to date with the second log, touching only the users in it",
            f"python -m pipelines.refresh --export {root}/export --events {root}/log/part-1.parquet "
            f"--output {root}/refreshed",
        ),
        Stage("recommend to a user", f"python -m pipelines.recommend --export {root}/refreshed --user 17"),
    ]


def movielens_stages(directory: Path, source: Path) -> list[Stage]:
    """On MovieLens-1M as published."""
    root = shlex.quote(str(directory))
    return [
        Stage(
            "sort the ratings into one history per user",
            f"python -m pipelines.prepare ml-1m --input {shlex.quote(str(source))} --output {root}/data",
        ),
        *training_stages(root, "configs/ml_1m.yaml", "train.epochs=3"),
        Stage("recommend to a user", f"python -m pipelines.recommend --export {root}/export --user 1 --exclude-seen"),
    ]


def training_stages(root: str, config: str, *settings: str) -> list[Stage]:
    """Training, its curve, what it is worth, and its vectors."""
    more = " ".join([f"data.path={root}/data", *settings])
    return [
        Stage(
            "train on two ranks",
            f"{TWO} pipelines.train -- --config {config} --run-dir {root}/run {more}",
            "validation|done:",
        ),
        Stage("plot the learning curve", f"python -m pipelines.curve {root}/run"),
        Stage(
            "rank every user's last event among all items, beside simple baselines",
            f"{TWO} pipelines.evaluate -- --run-dir {root}/run",
            r"targets of|^ +hr@|^model, queried at the [^,]*\d|^(popularity|recent|frequent|transitions)",
        ),
        Stage(
            "export items, users, states and an index for retrieval",
            f"{TWO} pipelines.export -- --run-dir {root}/run --output {root}/export --state-min-events 200",
            "states of|index of|items, ",
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all stages; the first that fails ends it."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="MovieLens-1M as published: its directory, zip or ratings.dat")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("runs/demo"),
        help="everything is written below it; an earlier demo there is removed",
    )
    parser.add_argument("--users", type=int, default=4000, help="of the synthetic log (default 4000)")
    options = parser.parse_args(arguments)
    directory, data = options.directory, options.data
    if data is not None and not data.exists():
        print(f"{data}: no such file or directory", file=sys.stderr)
        return 1
    if directory.exists() and not (directory / MARK).exists():
        print(f"{directory} exists and is not a demo's: name another --directory", file=sys.stderr)
        return 1
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "logs").mkdir(parents=True)
    (directory / MARK).touch()
    shown = in_repository(directory)
    stages = synthetic_stages(shown, options.users) if data is None else movielens_stages(shown, in_repository(data))
    began, times = time.monotonic(), []
    for number, stage in enumerate(stages, 1):
        print(f"\n[{number}/{len(stages)}] {stage.what}\n  $ {stage.command}", flush=True)
        log, since = directory / "logs" / f"{number}-{stage.log}", time.monotonic()
        try:
            code = run(stage, log)
        except KeyboardInterrupt:
            print("\nthe demo was stopped", file=sys.stderr)
            return 130
        times.append(time.monotonic() - since)
        print(f"  {times[-1]:.1f} s, {log}", flush=True)
        if code:
            last = log.read_text().splitlines()[-_TAIL:]
            message = f"the demo stopped: this command ended with exit code {code}; the last lines of {log}:"
            print("\n".join(["", message, *last]), file=sys.stderr)
            return 1
    print(summary(directory, stages, times, time.monotonic() - began))
    return 0


def run(stage: Stage, log: Path) -> int:
    """Run a stage's command, which ends with this process; its output to a log, and what matters of it is printed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    process = subprocess.Popen(
        supervised(shlex.split(stage.command)),
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # of signals of the terminal it hears from this process, once
    )
    assert process.stdout is not None
    try:
        with log.open("w") as file:
            for line in process.stdout:
                file.write(line)
                file.flush()
                show(line, stage.matters)
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        show("", "")


def show(line: str, matters: str) -> None:
    """Print a line of a command if it matters; on a terminal the others pass by in one line."""
    text = "" if _TORCHX.match(line) else _PREFIX.sub("", line.rstrip(), count=1)
    passing = "\r\x1b[K" if sys.stdout.isatty() else ""
    if text and re.search(matters, text):
        print(f"{passing}    {text}", flush=True)
    elif passing:
        print(f"{passing}{f'    {text}'[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)


def in_repository(path: Path) -> Path:
    """A path as commands that run in the repository name it, wherever this was called."""
    whole = path.absolute()
    return whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else whole


def summary(directory: Path, stages: Sequence[Stage], times: Sequence[float], total: float) -> str:
    """What was done, what came out, and what to do next."""
    lines = ["", f"done in {total / 60:.1f} minutes:"]
    lines += [
        f"  {seconds:6.1f} s  {stage.what.partition(',')[0]}" for stage, seconds in zip(stages, times, strict=True)
    ]
    trained = json.loads((directory / "run" / "summary.json").read_text())
    lines += [
        "",
        f"trained {trained['step']} steps at {trained['events_per_second']:,} events/s, best {trained['metric']} "
        f"{trained['best_metric']:.4f}",
        f"  learning curve  {directory / 'run' / 'curve.png'}",
        f"  metrics         {directory / 'run' / 'eval-test.json'}",
        f"  export          {directory / 'export'}",
        "",
        "next: your own log: docs/data-format.md; the encoder in your own stack: docs/plug-in.md; serving: "
        "docs/serving.md",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
