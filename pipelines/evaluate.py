"""Evaluate a trained run exactly: every target's rank among all items it knows.

    torchx run dist.ddp -j 1x2 -m pipelines.evaluate -- --run-dir RUN [--split test|valid] [--filter-seen] ...

Writes RUN/eval-SPLIT.json and prints a table.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from fuxi_torchrec.api import evaluate
from fuxi_torchrec.evaluation.options import EvaluateOptions, RunOptions
from fuxi_torchrec.logging import LEVELS, setup_logging
from fuxi_torchrec.options import add_encoder_option, add_options, options_from
from pipelines.job import JobParser, run_job


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """What evaluation and export share."""
    parser.add_argument("--run-dir", required=True, type=Path, help="directory of the run")
    add_options(parser, RunOptions)
    add_encoder_option(parser)
    parser.add_argument("--log-level", default="info", choices=LEVELS)


def _parser() -> argparse.ArgumentParser:
    found = JobParser(prog="python -m pipelines.evaluate", description=__doc__.splitlines()[0])
    add_run_options(found)
    add_options(found, EvaluateOptions)
    found.add_argument("--output", type=Path, metavar="FILE", help="in place of RUN/eval-SPLIT.json")
    what = (
        "write each user's ranks there too, as Parquet: user_id, item_id, cold, events, rank_last, rank_popularity ..."
    )
    found.add_argument("--ranks", type=Path, metavar="FILE", help=what)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, on as many ranks as torchrun has started."""
    given = _parser().parse_args(arguments)
    setup_logging(given.log_level)
    options = options_from(given, EvaluateOptions)
    found = evaluate(given.run_dir, options, options_from(given, RunOptions), given.output, given.ranks)
    if int(os.environ.get("RANK", "0")) == 0:
        from fuxi_torchrec.evaluation.evaluate import as_text

        print(as_text(found), flush=True)
    return 0


if __name__ == "__main__":
    run_job("evaluate", main)
