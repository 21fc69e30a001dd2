"""What a dataset holds: counts, lengths, gaps, ties, repeats, features, a sample user.

python -m pipelines.inspect DIR [--user ROW] [--png FILE]
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.repeats import DISTANCES, SHARES, distances, repeat_shares
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import Feature, Owner
from fuxi_torchrec.events.histories import Ragged, bounds_of
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


def described(dataset: Dataset, owner: Owner, most: int = 5) -> list[str]:
    """Features of items or users: how many have them, what is most frequent, how numbers are spread."""
    about, table = dataset.owned(owner), dataset.features_of(owner)
    lines = [
        f"features of {owner}s: {int(table.filled.sum()):,} of {len(table) - 1:,} have them; {about.others:,} rows of "
        f"the file are of others, {about.repeated:,} repeated"
    ]
    for feature in about.features:
        if not feature.in_table:
            numbers = table.numbers[feature.name][1:]
            there = numbers[~np.isnan(numbers).any(1)]
            spread = (
                ", ".join(f"{value:.4g}" for value in np.quantile(there, (0, 0.25, 0.5, 0.75, 1))) if len(there) else ""
            )
            shown = f"quartiles {spread}" if feature.kind == "number" else f"{feature.width} elements"
            filled = len(there)
        else:
            column = table.bags(feature.name)
            counts = np.bincount(column.values, minlength=feature.rows)
            values = dataset.feature_values(feature.name, owner).to_pylist() if feature.vocabulary else []
            order = [n for n in np.argsort(-counts, kind="stable").tolist() if n and counts[n]][:most]
            shown = ", ".join(f"{values[n - 1] if values else n} {counts[n]:,}" for n in order)
            known = np.concatenate([[0], np.cumsum(column.values > 0)])[column.bounds]
            filled = int((np.diff(known) > 0).sum())
        share = 100 * filled / max(1, len(table) - 1)
        lines.append(f"  {feature.name}: {feature.kind}, {share:.1f} % filled; {shown}")
    return lines


def of_events(dataset: Dataset, most: int = 5) -> list[str]:
    """Features of events: how many events have them, what is most frequent, how numbers are spread."""
    lines, info = [], dataset.info
    reader = Reader(dataset, [feature.name for feature in info.features])
    for feature in info.features:
        filled, counts, numbers = 0, np.zeros(max(1, feature.rows), np.int64), list[np.ndarray]()
        for number in range(len(reader.groups)):
            column = reader.block(number).features[feature.name]
            if isinstance(column, Ragged):
                filled += int((np.diff(column.bounds) > 0).sum())
                counts += np.bincount(column.values, minlength=len(counts))
            elif feature.in_table:
                filled += int((column > 0).sum())
                counts += np.bincount(column.astype(np.int64), minlength=len(counts))
            else:
                there = column[~np.isnan(column).any(1)]
                filled += len(there)
                numbers.append(there[:: max(1, len(there) // 10_000)])
        if feature.in_table:
            values = dataset.feature_values(feature.name).to_pylist() if feature.vocabulary else []
            order = [n for n in np.argsort(-counts, kind="stable").tolist() if n and counts[n]][:most]
            shown = ", ".join(f"{values[n - 1] if values else n} {counts[n]:,}" for n in order)
        elif feature.kind == "number":
            spread = np.quantile(np.concatenate(numbers), (0, 0.25, 0.5, 0.75, 1)) if filled else np.zeros(0)
            shown = "quartiles " + ", ".join(f"{value:.4g}" for value in spread)
        else:
            shown = f"{feature.width} elements"
        several = "a list per event" if feature.multiple else feature.kind
        lines.append(f"feature {feature.name}: {several}, {100 * filled / info.events:.1f} % filled; {shown}")
    return lines


def draw(dataset: Dataset, path: str) -> None:
    """Histograms of all features of items and users, as a PNG."""
    from matplotlib.figure import Figure

    wanted: list[tuple[Owner, Feature]] = [
        (owner, feature) for owner in ("item", "user") for feature in dataset.info.features_of(owner)
    ]
    if not wanted:
        raise DataError(f"{dataset.path}: items and users have no features to draw")
    columns = min(3, len(wanted))
    rows = -(-len(wanted) // columns)
    figure = Figure(figsize=(4.5 * columns, 3 * rows), layout="constrained")
    tables = {owner: dataset.features_of(owner) for owner in {owner for owner, _ in wanted}}
    for place, (owner, feature) in enumerate(wanted, 1):
        axes, table = figure.add_subplot(rows, columns, place), tables[owner]
        axes.set_title(f"{owner}: {feature.name} ({feature.kind})")
        if feature.in_table:
            counts = np.sort(np.bincount(table.bags(feature.name).values, minlength=feature.rows)[1:])[::-1]
            axes.plot(np.arange(1, len(counts) + 1), np.maximum(counts, 0.5))
            axes.set(xscale="log", yscale="log", xlabel="value, by falling count", ylabel=f"{owner}s")
        else:
            numbers = table.numbers[feature.name]
            axes.hist(numbers[~np.isnan(numbers)], bins=50)
            axes.set(xlabel="value", ylabel=f"{owner}s")
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.inspect", description="What a dataset holds.")
    parser.add_argument("dataset", metavar="DIR")
    parser.add_argument("--user", type=int, default=0, metavar="ROW", help="the sample user's row")
    parser.add_argument("--png", metavar="FILE", help="draw histograms of features of items and users into it")
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
        for line in of_events(dataset):
            print(line)
        for owner in ("item", "user"):
            if dataset.owned(owner).there:
                print("\n".join(described(dataset, owner)))
        if args.png:
            draw(dataset, args.png)
        if info.has_target:
            print("events have target weights")
        print(sample_user(reader, args.user))
    except DataError as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
