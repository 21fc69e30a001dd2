"""A new export from an old one and the events since, without encoding everybody again.

    python -m pipelines.refresh --export DIR --events NEW --output DIR2
        [--as-of T] [--requery-all] [--forget FILE] [--user-column C --item-column C --time-column C]

    python -m pipelines.refresh --export DIR --users NEW --output DIR2
    python -m pipelines.refresh --export DIR --items NEW --output DIR2

NEW is a CSV or Parquet file, a directory, a glob, or the directory of a Recommender's store. It is read as the log was
that the export's dataset was made from: the manifest says how.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.times import parse_time
from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.logging import setup_logging
from fuxi_torchrec.options import add_encoder_option
from fuxi_torchrec.serving.refresh.new_events import LogColumns
from fuxi_torchrec.serving.refresh.new_items import add_items
from fuxi_torchrec.serving.refresh.refresh import refresh
from fuxi_torchrec.serving.refresh.summary import Summary


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.refresh", description=__doc__.splitlines()[0])
    parser.add_argument("--export", required=True, type=Path, metavar="DIR", help="the export to begin with")
    parser.add_argument("--events", metavar="NEW", help="file, directory, glob, or a service's store")
    parser.add_argument(
        "--items", metavar="NEW", help="Parquet or CSV of new items with their features, without events"
    )
    parser.add_argument(
        "--users", metavar="NEW", help="Parquet or CSV of users with new features, beside events or alone"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR2", help="the new export")
    parser.add_argument("--as-of", metavar="T", help="when users are queried: ISO or a number; the latest event's time")
    parser.add_argument("--requery-all", action="store_true", help="query all users, not only those with new events")
    parser.add_argument("--forget", type=Path, metavar="FILE", help="users to leave out, an id a line")
    for name in ("user", "item", "time"):
        parser.add_argument(f"--{name}-column", metavar="C", help="if it is not the one of the dataset's log")
    parser.add_argument("--on-bad-rows", choices=("error", "skip"), help="as when the dataset was prepared by default")
    add_encoder_option(parser)
    return parser.parse_args(arguments)


def users_to_forget(path: Path | None, kind: str) -> list[int | str]:
    """Ids of a file, of the export's type."""
    if path is None:
        return []
    found: list[int | str] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip()
        if text and kind == "string":
            found.append(text)
        elif text:
            if not re.fullmatch("-?[0-9]{1,19}", text) or not -(2**63) <= int(text) < 2**63:
                raise ValueError(
                    f"{path}: line {number} is no integer of 64 bits, as the export's user ids are: {text[:40]}"
                )
            found.append(int(text))
    return found


def run(args: argparse.Namespace) -> Summary:
    """Refresh, with a progress bar on a terminal."""
    manifest = Bundle.open(args.export).manifest
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} users"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading", total=None)
        return refresh(
            args.export,
            args.events,
            args.output,
            as_of=parse_time(args.as_of, manifest.time_unit) if args.as_of else None,
            users=args.users,
            requery_all=args.requery_all,
            forget=users_to_forget(args.forget, manifest.user_id_type),
            columns=LogColumns(args.user_column, args.item_column, args.time_column),
            on_bad_rows=args.on_bad_rows,
            progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Refresh and say what came of it."""
    args = parse(arguments)
    setup_logging()
    try:
        if (args.events is None and args.users is None) == (args.items is None):
            raise ValueError(
                "give --events, --users or both; or --items: first items, then the events of the export that has them"
            )
        if args.items is not None:
            done = add_items(args.export, args.items, args.output)
            print(f"{args.output}: {done.added:,} new items; {done.known:,} that the export has stay as they are")
            print(f"{done.unknown_values:,} values of features that the model has no row for")
            return 0
        summary = run(args)
    except (DataError, ValueError, OSError) as error:
        print(f"refresh: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("refresh: interrupted; nothing was written", file=sys.stderr)
        return 130
    print("\n".join(summary.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
