"""Experiments on real data: training runs with their commands, what came out, and the tables made of it.

    python -m benchmarks.experiments list
    python -m benchmarks.experiments run NAME ... [--jobs 2]     # names may be patterns: 'ml-1m-*'
    python -m benchmarks.experiments report

`run` trains and evaluates through the commands that `list` shows, below runs/experiments, and writes what came out to
docs/results/results.json; a run that was interrupted is resumed. `report` writes the tables and figures of
docs/results.md from this file alone.
"""

import argparse
import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from benchmarks import harness, movielens, report
from benchmarks.rows import ROWS, SETS, Row
from fuxi_torchrec.config import differences, load_config
from fuxi_torchrec.processes import supervised
from fuxi_torchrec.training.run_directory import RunDirectory

ROOT = Path(__file__).parents[1]
RUNS = Path("runs/experiments")
RESULTS = ROOT / "docs" / "results"
_WRITING = threading.Lock()  # rows end at the same time


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiments", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="all rows with their commands")
    run = commands.add_parser("run", help="train and evaluate rows")
    run.add_argument("names", nargs="+", metavar="NAME")
    run.add_argument(
        "--jobs", type=int, default=1, choices=range(1, 9), metavar="N", help="rows at a time; each wants its cores"
    )
    commands.add_parser("report", help="write docs/results.md's tables and figures")
    options = parser.parse_args(arguments)
    if options.command == "list":
        for row in ROWS:
            print(f"{row.name}: {row.what}")
            for command in commands_of(row):
                print(f"  {command}")
        return 0
    if options.command == "report":
        return report.write(RESULTS, ROOT / "docs" / "results.md")
    wanted = [row for row in ROWS if any(fnmatchcase(row.name, name) for name in options.names)]
    for name in options.names:
        if not any(fnmatchcase(row.name, name) for row in ROWS):
            parser.error(f"no row {name}: `python -m benchmarks.experiments list` shows them")
    try:
        for name in sorted({row.set for row in wanted}):
            prepare(name)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(options.jobs) as pool:
        return int(not all(pool.map(run_row, wanted)))


def prepare(name: str) -> None:
    """Make a dataset where configurations look for it, if it is not there."""
    output = ROOT / "data" / name
    if output.exists():
        return
    if name == "ml-1m":
        movielens.fetch(ROOT / "data" / "ml-1m-raw")
    subprocess.run(shlex.split(SETS[name]), cwd=ROOT, env=harness.environment(), check=True)


def commands_of(row: Row) -> list[str]:
    """What a person would type: training, then the evaluations."""
    run_dir, launch = RUNS / row.name, f"torchx run dist.ddp -j 1x{row.processes} -m {{}} --"
    evaluate = f"{launch.format('pipelines.evaluate')} --run-dir {run_dir} --split {row.split}"
    files = {way: f"--output {run_dir}/{way}.json --ranks {run_dir}/{way}.parquet" for way in row.ways}
    asked = [" ".join(filter(None, (evaluate, options, files[way]))) for way, options in row.ways.items()]
    return [train_command(row.config, run_dir, row.settings, launch), *asked]


def train_command(config: str, run_dir: Path, settings: Sequence[str], launch: str) -> str:
    """Of a training, launched in a way."""
    given = " ".join(shlex.quote(each) for each in settings)
    return f"{launch.format('pipelines.train')} --config {config} --run-dir {run_dir} {given}".strip()


def run_command(name: str, command: str) -> str | None:
    """Run a command of a row, ended with this process; what it printed, None if it failed."""
    print(f"{name}: {command}", flush=True)
    words = supervised(shlex.split(command))
    done = subprocess.run(words, cwd=ROOT, env=harness.environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name}: exit code {done.returncode}\n{done.stderr[-4000:]}", file=sys.stderr)
        return None
    return done.stdout


def trained(name: str, run_dir: Path) -> dict[str, Any] | None:
    """The summary of a training; None if it was stopped."""
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    if not summary["preempted"]:
        return summary
    print(f"{name}: training was stopped at step {summary['step']}: run it again to go on", file=sys.stderr)
    return None


def settings_of(row: Row) -> Any:
    """What the row's configuration file says; the commands have what differs from it."""
    return yaml.safe_load((ROOT / row.config).read_text())


def stale(config: str, run_dir: Path, settings: Sequence[str]) -> bool:
    """Whether a run directory holds a run of other settings."""
    run = RunDirectory(run_dir)
    if not (run.path / "config.yaml").exists():
        return False
    return bool(differences(run.read_config(), load_config(ROOT / config, settings)))


def run_row(row: Row) -> bool:
    """Run a row's commands and write down what came out; whether all went well."""
    commands, run_dir = commands_of(row), ROOT / RUNS / row.name
    if stale(row.config, run_dir, row.settings):
        print(f"{row.name}: {run_dir} is a run of other settings: remove it first", file=sys.stderr)
        return False
    machine = harness.machine()
    for command in commands:
        if run_command(row.name, command) is None or trained(row.name, run_dir) is None:
            return False
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    validations = [{"step": line["step"], **line["validation"]} for line in lines if "validation" in line]
    measured = {way: json.loads((run_dir / f"{way}.json").read_text()) for way in row.ways}
    about = {"commands": commands, "machine": machine, "config": settings_of(row)}
    with _WRITING:
        report.add(RESULTS, row.name, {**about, **report.essence(summary, validations, measured)})
    kinds = [f"{kind} {found['target']['hr@10']:.4f}" for kind, found in measured.items()]
    print(f"{row.name}: HR@10 {', '.join(kinds)}, {summary['seconds']:.0f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
