"""Evaluate a trained run exactly: every target's rank among all items it knows.

    torchx run dist.ddp -j 1x2 -m pipelines.evaluate -- --run-dir RUN [--split test|valid] [--filter-seen] ...

Writes RUN/eval-SPLIT.json and prints a table.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from fuxi_torchrec.distributed import World, exit_now, process_group, raise_on_all_ranks
from fuxi_torchrec.logging import get_logger, setup_logging


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """What evaluation and export share."""
    parser.add_argument("--run-dir", required=True, type=Path, help="directory of the run")
    parser.add_argument(
        "--checkpoint", metavar="best|latest|STEP", help="by default the best one if there is one, else the latest"
    )
    parser.add_argument("--data", metavar="DIR", help="the dataset, where it is not at the run's data.path")
    parser.add_argument(
        "--allow-other-data",
        action="store_true",
        help="take a dataset of another fingerprint; its items are found by their raw ids, unknown ones counted",
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])


@contextmanager
def group_of(run_dir: Path) -> Iterator[World]:
    """The processes that work on a trained run, with the device and the timeouts of its configuration."""
    from fuxi_torchrec.training.run_directory import RunDirectory

    distributed = RunDirectory(run_dir).read_config().distributed
    device = None if distributed.device == "auto" else distributed.device
    with process_group(distributed.timeout_seconds, device) as world:
        yield world


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m pipelines.evaluate", description=__doc__.splitlines()[0])
    add_run_options(found)
    found.add_argument("--split", default="test", choices=["test", "valid"], help="which targets")
    found.add_argument(
        "--request-time",
        choices=["target", "last"],
        help="when the model is asked: at the target's time, or at the last event's, as in serving; both by default",
    )
    found.add_argument("--filter-seen", action="store_true", help="leave items of the user's own history out")
    found.add_argument("--users", type=int, metavar="N", help="a fixed sample of so many users; all by default")
    found.add_argument("--no-baselines", action="store_true", help="the model only")
    found.add_argument("--output", type=Path, metavar="FILE", help="in place of RUN/eval-SPLIT.json")
    return found


@record
def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, on as many processes as torchrun has started."""
    options = parser().parse_args(arguments)
    setup_logging(options.log_level)
    output = options.output or options.run_dir / f"eval-{options.split}.json"
    if options.users is not None and options.users < 1:
        print(f"evaluate: --users must be at least 1, not {options.users}", file=sys.stderr)
        return 1
    with group_of(options.run_dir) as world:
        from fuxi_torchrec.artifacts import write_atomically
        from fuxi_torchrec.evaluation.evaluate import as_text, evaluate
        from fuxi_torchrec.evaluation.held_out import REQUEST_TIMES
        from fuxi_torchrec.evaluation.loading import load

        with raise_on_all_ranks("looking for the output's directory"):
            if world.rank == 0 and not output.absolute().parent.is_dir():
                raise FileNotFoundError(f"--output {output}: there is no directory {output.parent}, make it first")
            if world.rank == 0 and output.is_dir():
                raise IsADirectoryError(f"--output {output} is a directory: name a file")
        run = load(options.run_dir, world, options.checkpoint, options.data, options.allow_other_data)
        times = (options.request_time,) if options.request_time else REQUEST_TIMES
        found = evaluate(run, options.split, times, options.filter_seen, options.users, not options.no_baselines)
        with raise_on_all_ranks("writing the result"):
            if world.rank == 0:
                print(as_text(found), flush=True)
                write_atomically(output, json.dumps(found, indent=1) + "\n")
        if world.rank == 0:
            get_logger(__name__).info("%s, %.1f s", output, found["seconds"])
    return 0


if __name__ == "__main__":
    exit_now(main() or 0)
