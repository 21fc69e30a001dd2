"""What a dataset holds: counts, lengths, gaps, ties, a sample user.

python -m pipelines.inspect DIR [--user ROW]
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.times import PER_SECOND, show_time

GAP_BOUNDS = {
    "0 (ties)": 0,
    "1 s": 1,
    "10 s": 10,
    "1 min": 60,
    "10 min": 600,
    "1 h": 3_600,
    "1 day": 86_400,
    "1 week": 604_800,
    "30 days": 2_592_000,
}


def bars(rows: dict[str, int]) -> str:
    """A histogram in text."""
    most, total = max(rows.values(), default=1) or 1, sum(rows.values()) or 1
    return "\n".join(
        f"  {name:>12} {count:>12,} {100 * count / total:5.1f} % {'#' * round(40 * count / most)}"
        for name, count in rows.items()
    )


def gap_histogram(reader: Reader) -> dict[str, int]:
    """Times between a user's neighbouring events, by size."""
    bounds = np.array(list(GAP_BOUNDS.values())) * PER_SECOND[reader.dataset.info.time_unit]
    counts = np.zeros(len(bounds) + 1, np.int64)
    for number in range(len(reader.groups)):
        block = reader.block(number)
        edges = block.offsets[(block.offsets > 0) & (block.offsets < len(block.times))]
        gaps = np.delete(np.diff(block.times), edges - 1)  # not those between users
        counts += np.bincount(np.searchsorted(bounds, gaps), minlength=len(counts))
    names = [*(f"<= {name}" if bound else name for name, bound in GAP_BOUNDS.items()), "longer"]
    return {name: int(count) for name, count in zip(names, counts, strict=True)}


def sample_user(reader: Reader, row: int, events: int = 10) -> str:
    """A user's last events, in raw ids and readable times."""
    ((number, inside, _),) = reader.by_block(np.array([row]))
    history = reader.block(number).select(inside)
    last = history.last(np.array([events]))
    raw, unit = reader.dataset.vocabulary().raw(last.items), reader.dataset.info.time_unit
    user = reader.ids_of(np.array([row]))[0].as_py()
    lines = [f"user {user!r} (row {row}): {len(history.items):,} events, the last {len(raw)}:"]
    lines += [f"  {show_time(t, unit)}  {item}" for t, item in zip(last.times.tolist(), raw, strict=True)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.inspect", description="What a dataset holds.")
    parser.add_argument("dataset", metavar="DIR")
    parser.add_argument("--user", type=int, default=0, metavar="ROW", help="the sample user's row")
    args = parser.parse_args(arguments)
    try:
        dataset = Dataset.open(args.dataset)
        info = dataset.info
        reader = Reader(dataset)
        if not 0 <= args.user < info.users:
            raise DataError(f"--user must be 0 to {info.users - 1}, not {args.user}")
        counts = f"{info.users:,} users, {info.items:,} items, {info.events:,} events"
        first, last = (show_time(time, info.time_unit) for time in (info.first_time, info.last_time))
        print(f"{args.dataset}: {counts}, fingerprint {info.fingerprint}")
        print(f"times in {info.time_unit}, {first} to {last}")
        lengths = reader.lengths()
        print(f"events per user: median {np.median(lengths):.0f}, mean {lengths.mean():.0f}, longest {lengths.max():,}")
        print(bars(info.length_histogram))
        print("time between events:")
        print(bars(gap_histogram(reader)))
        for feature in info.features:
            shape = "a list of values" if feature.multiple else "one value"
            print(f"feature {feature.name}: {shape} per event, below {feature.rows}")
        if info.has_target:
            print("events have target weights")
        print(sample_user(reader, args.user))
    except DataError as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
