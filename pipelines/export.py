"""Export a trained run: item and user vectors, a FAISS index, user states, weights, portable programs.

    torchx run dist.ddp -j 1x2 -m pipelines.export -- --run-dir RUN --output DIR [--as-of T] [--state-min-events N] ...

docs/retrieval.md describes the files.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from fuxi_torchrec.distributed import exit_now, raise_on_all_ranks
from fuxi_torchrec.logging import get_logger, setup_logging
from pipelines.evaluate import add_run_options, group_of


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m pipelines.export", description=__doc__.splitlines()[0])
    add_run_options(found)
    found.add_argument("--output", required=True, type=Path, metavar="DIR", help="must not exist")
    found.add_argument(
        "--as-of",
        metavar="T",
        help="when users are asked: a number in the data's time unit, or ISO such as 2024-05-01T12:00:00 (UTC); by "
        "default the latest event's time",
    )
    found.add_argument("--truncate", action="store_true", help="leave events after --as-of out")
    found.add_argument(
        "--state-min-events", type=int, default=2000, metavar="N", help="users with fewer encoded events get no state"
    )
    found.add_argument("--no-index", action="store_true", help="write no FAISS index")
    found.add_argument(
        "--exact-items", type=int, default=200_000, metavar="N", help="catalogues of more items get an HNSW index"
    )
    found.add_argument("--quantize", choices=["int8"], help="write an int8 index too")
    found.add_argument("--no-programs", action="store_true", help="write no portable programs")
    return found


@record
def main(arguments: Sequence[str] | None = None) -> int:
    """Export, on as many processes as torchrun has started."""
    options = parser().parse_args(arguments)
    setup_logging(options.log_level)
    with group_of(options.run_dir) as world:
        from fuxi_torchrec.artifacts import NewDirectory
        from fuxi_torchrec.evaluation.loading import load
        from fuxi_torchrec.export.export import export
        from fuxi_torchrec.export.job import ExportOptions

        with raise_on_all_ranks("looking at the output"):  # before the checkpoint is read
            NewDirectory(options.output).check()
            wanted = ExportOptions(
                options.as_of,
                options.truncate,
                options.state_min_events,
                not options.no_index,
                options.exact_items,
                options.quantize,
                not options.no_programs,
            )
        run = load(options.run_dir, world, options.checkpoint, options.data, options.allow_other_data)
        manifest = export(run, options.output, wanted)
        get_logger(__name__).info(
            "%s: %s items, %s users, %s states, as of %d",
            options.output,
            f"{manifest.items:,}",
            f"{manifest.users:,}",
            f"{manifest.states:,}",
            manifest.as_of,
        )
    return 0


if __name__ == "__main__":
    exit_now(main() or 0)
