"""Export a trained run: item and user vectors, a FAISS index, user states, weights, portable programs.

    torchx run dist.ddp -j 1x2 -m pipelines.export -- --run-dir RUN --output DIR [--as-of T] [--state-min-events N] ...

docs/retrieval.md describes the files.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from fuxi_torchrec.api import export
from fuxi_torchrec.evaluation.options import RunOptions
from fuxi_torchrec.export.options import ExportOptions
from fuxi_torchrec.logging import get_logger, setup_logging
from fuxi_torchrec.options import add_options, options_from
from pipelines.evaluate import add_run_options
from pipelines.job import JobParser, run_job


def _parser() -> argparse.ArgumentParser:
    found = JobParser(prog="python -m pipelines.export", description=__doc__.splitlines()[0])
    add_run_options(found)
    found.add_argument("--output", required=True, type=Path, metavar="DIR", help="must not exist")
    add_options(found, ExportOptions)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Export, on as many ranks as torchrun has started."""
    given = _parser().parse_args(arguments)
    setup_logging(given.log_level)
    manifest = export(given.run_dir, given.output, options_from(given, ExportOptions), options_from(given, RunOptions))
    counts = f"{manifest.items:,} items, {manifest.users:,} users, {manifest.states:,} states"
    get_logger(__name__).info("%s: %s, as of %d", given.output, counts, manifest.as_of)
    return 0


if __name__ == "__main__":
    run_job("export", main)
