"""What a dataset holds: counts, lengths, gaps, ties, repeats, features, a sample user.

python -m pipelines.inspect DIR [--user ROW] [--png FILE]
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.repeats import DISTANCES, SHARES, distances, repeat_shares
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import OWNERS, Feature, Owner
from fuxi_torchrec.events.histories import Column, Floats, Ints, Ragged, bounds_of
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
_SAMPLE = 10_000  # numbers of a row group, about
_BARS = 64  # values of a feature; the counts of more are a curve


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


def repeat_histograms(reader: Reader) -> tuple[dict[str, int], dict[str, int]]:
    """Users by the share of repeats before their last event, and by how many events before it its item was last."""
    shares, far = np.zeros(len(SHARES), np.int64), np.zeros(len(DISTANCES), np.int64)
    for number in range(len(reader.groups)):
        block = reader.block(number)
        some = block.lengths > 1
        last = block.offsets[1:][block.lengths > 0] - 1
        items, offsets = np.delete(block.items, last), bounds_of(np.maximum(block.lengths - 1, 0))
        targets = np.zeros(len(some), np.int64)
        targets[block.lengths > 0] = block.items[last]
        shares += np.bincount(repeat_shares(items, offsets)[some], minlength=len(SHARES))
        far += np.bincount(distances(items, offsets, targets)[some], minlength=len(DISTANCES))
    # items are unknown with prepare --rare-items unknown alone
    by_distance = {
        name: count for name, count in zip(DISTANCES, far.tolist(), strict=True) if count or name != "unknown"
    }
    return dict(zip(SHARES, shares.tolist(), strict=True)), by_distance


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


@dataclass
class Spread:
    """The values of a feature.

    Attributes:
        owner: whose it is.
        total: events, items or users; ``filled``: how many of them have a value that is known.
        counts: (rows,) how often each row of its table is named; 0 is unknown.
        numbers: of features without a table; of many events a sample.
    """

    owner: Owner
    feature: Feature
    total: int
    filled: int = 0
    counts: Ints = field(init=False)
    numbers: list[Floats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = np.zeros(max(1, self.feature.rows), np.int64)

    def add(self, column: Column) -> None:
        """Of more events, items or users."""
        if isinstance(column, Ragged):
            known = bounds_of((column.values > 0).astype(np.int64))[column.bounds]
            self.filled += int((np.diff(known) > 0).sum())
            self.counts += np.bincount(column.values, minlength=len(self.counts))
        elif self.feature.in_table:
            self.add(Ragged(column.astype(np.int64), np.arange(len(column) + 1)))
        else:
            there = column[~np.isnan(column).any(1)].astype(np.float32)
            self.filled += len(there)
            self.numbers.append(there[:: max(1, len(there) // _SAMPLE)])

    def text(self, values: Sequence[str], most: int = 5) -> str:
        """Its share filled, and what is most frequent, by name where values have names; or how numbers are spread."""
        feature = self.feature
        if feature.in_table:
            order = [n for n in np.argsort(-self.counts, kind="stable").tolist() if n and self.counts[n]][:most]
            shown = ", ".join(f"{values[n - 1] if values else n} {self.counts[n]:,}" for n in order)
        elif feature.kind == "number" and self.filled:
            spread = np.quantile(np.concatenate(self.numbers), (0, 0.25, 0.5, 0.75, 1))
            shown = "quartiles " + ", ".join(f"{value:.4g}" for value in spread)
        else:
            shown = f"{feature.width} elements"
        several = " (lists)" if feature.multiple else ""
        share = 100 * self.filled / max(1, self.total)
        return f"  {feature.name}: {feature.kind}{several}, {share:.1f} % filled; {shown}"

    def draw(self, axes: Any) -> None:
        """A histogram: of values by how frequent they are, or of numbers by size."""
        axes.set_title(f"{self.owner}: {self.feature.name} ({self.feature.kind})")
        axes.set_ylabel(f"{self.owner}s")
        if not self.feature.in_table:
            axes.hist(np.concatenate([each.ravel() for each in self.numbers]), bins=50)
            axes.set_xlabel("value")
            return
        ids = self.feature.kind == "id"
        counts = np.sort(self.counts[1:])[::-1] if ids else self.counts[1:]
        axes.set_xlabel("value, by falling count" if ids else "bucket")
        if ids and len(counts) > _BARS:
            axes.loglog(np.arange(1, len(counts) + 1), np.maximum(counts, 0.5))
        else:
            axes.bar(np.arange(1, len(counts) + 1), counts)


def spreads(dataset: Dataset) -> list[Spread]:
    """Of all features of events, items and users."""
    info = dataset.info
    found = [Spread("event", feature, info.events) for feature in info.features]
    if found:
        reader = Reader(dataset, [feature.name for feature in info.features])
        for number in range(len(reader.groups)):
            block = reader.block(number)
            for each in found:
                each.add(block.features[each.feature.name])
    for owner in ("item", "user"):
        if not dataset.owned(owner).there:
            continue
        table = dataset.features_of(owner)
        for feature in dataset.owned(owner).features:
            found.append(Spread(owner, feature, len(table) - 1))
            found[-1].add(table.bags(feature.name) if feature.in_table else table.numbers[feature.name])
    return found


def described(dataset: Dataset, found: Sequence[Spread]) -> Iterator[str]:
    """Lines about features: how many have them, what is most frequent, how numbers are spread."""
    for owner in OWNERS:
        if owner == "event":
            if dataset.info.features:
                yield "features of events:"
        elif (about := dataset.owned(owner)).there:
            filled = int(dataset.features_of(owner).filled.sum())
            count = dataset.info.items if owner == "item" else dataset.info.users
            yield (
                f"features of {owner}s: {filled:,} of {count:,} have them; {about.others:,} rows of the file are of "
                f"others, {about.repeated:,} repeated"
            )
        for each in found:
            if each.owner == owner:
                name = each.feature.name
                yield each.text(dataset.feature_values(name, owner).to_pylist() if each.feature.vocabulary else [])


def draw(dataset: Dataset, found: Sequence[Spread], path: str) -> None:
    """Histograms of all features, as a PNG."""
    from matplotlib.figure import Figure

    if not found:
        raise DataError(f"{dataset.path}: there are no features to draw")
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(4.5 * columns, 3 * rows), layout="constrained")
    for place, each in enumerate(found, 1):
        each.draw(figure.add_subplot(rows, columns, place))
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.inspect", description="What a dataset holds.")
    parser.add_argument("dataset", metavar="DIR")
    parser.add_argument("--user", type=int, default=0, metavar="ROW", help="the sample user's row")
    parser.add_argument("--png", metavar="FILE", help="draw histograms of all features into it")
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
        by_share, by_distance = repeat_histograms(reader)
        print("users by share of repeats before their last event:")
        print(bars(by_share))
        print("users by how many events before the last its item was:")
        print(bars(by_distance))
        found = spreads(dataset)
        for line in described(dataset, found):
            print(line)
        if args.png:
            draw(dataset, found, args.png)
        if info.has_target:
            print("events have target weights")
        print(sample_user(reader, args.user))
    except DataError as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
