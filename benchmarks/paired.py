"""Two rankings of the same users' targets compared user by user, with an interval by bootstrap.

    python -m pipelines.evaluate --run-dir RUN --ranks a.parquet
    python -m benchmarks.paired a.parquet b.parquet [--column rank_last] [--metric hr@10] [--targets warm|cold]
    python -m benchmarks.paired a.parquet a.parquet --column rank_target --other rank_popularity

Prints both means, their difference and their ratio, each with a 95 % interval over users.
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """Means of the first and the second, with intervals of (first − second) and of first / second."""

    users: int
    first: float
    second: float
    difference: tuple[float, float]
    ratio: tuple[float, float]

    def __str__(self) -> str:
        ratio = self.first / self.second if self.second else math.inf
        return (
            f"{self.users:,} users: {self.first:.4f} and {self.second:.4f}; difference {self.first - self.second:+.4f} "
            f"[{self.difference[0]:+.4f}, {self.difference[1]:+.4f}], ratio {ratio:.2f} "
            f"[{self.ratio[0]:.2f}, {self.ratio[1]:.2f}]"
        )


def gains(ranks: pa.Array, metric: str) -> Floats:
    """What each rank counts in ``hr@K``, ``ndcg@K`` or ``mrr``; a missing rank is a miss.

    Example:
        >>> gains(pa.array([1, 3, None]), "hr@2").tolist(), gains(pa.array([1, 3, None]), "ndcg@3").tolist()
        ([1.0, 0.0, 0.0], [1.0, 0.5, 0.0])
    """
    found = re.fullmatch(r"(hr|ndcg)@(\d+)|mrr", metric)
    if found is None:
        raise ValueError(f"--metric {metric}: hr@K, ndcg@K or mrr")
    values = pc.fill_null(ranks.cast(pa.float64()), math.inf).to_numpy(zero_copy_only=False)
    if metric == "mrr":
        return 1.0 / values
    gain = np.ones(len(values)) if found[1] == "hr" else 1.0 / np.log2(values + 1.0)
    return np.where(values <= int(found[2]), gain, 0.0)


def compare(first: Floats, second: Floats, draws: int = 10_000, seed: int = 0) -> Comparison:
    """Resample users with replacement, both their values together.

    Example:
        >>> found = compare(np.ones(50), np.ones(50))
        >>> found.difference, found.ratio
        ((0.0, 0.0), (1.0, 1.0))
    """
    n, generator = len(first), np.random.default_rng(seed)
    means = np.empty((draws, 2))
    for number in range(draws):
        chosen = generator.integers(0, n, n)
        means[number] = first[chosen].mean(), second[chosen].mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.nan_to_num(means[:, 0] / means[:, 1], nan=1.0, posinf=math.inf)
    difference, ratio = (np.quantile(each, [0.025, 0.975], method="nearest") for each in (means @ [1, -1], ratios))
    ends = [(float(low), float(high)) for low, high in (difference, ratio)]
    return Comparison(n, float(first.mean()), float(second.mean()), *ends)


def paired(first: str, second: str, columns: tuple[str, str], metric: str, targets: str) -> Comparison:
    """Of the users that both files have; whether a target is cold is what either file knows of it."""
    tables = [
        pq.read_table(path, columns=["user_id", "cold", column]).rename_columns(["user_id", f"cold{n}", f"rank{n}"])
        for n, (path, column) in enumerate(zip((first, second), columns, strict=True))
    ]
    table = tables[0].join(tables[1], "user_id", join_type="inner").sort_by("user_id")
    if len(table) < max(map(len, tables)):
        raise ValueError(f"{first} and {second} have {len(table)} users in common of {[*map(len, tables)]}")
    if targets != "all":
        cold = pc.fill_null(pc.coalesce(table["cold0"], table["cold1"]), targets == "cold")
        table = table.filter(cold if targets == "cold" else pc.invert(cold))
    if not len(table):
        raise ValueError(f"no user has a {targets} target")
    one, other = (gains(table[f"rank{n}"].combine_chunks(), metric) for n in range(2))
    return compare(one, other)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paired", description=__doc__.splitlines()[0])
    parser.add_argument("first", help="of evaluate --ranks")
    parser.add_argument("second", help="another, or the same with --other")
    parser.add_argument("--column", default="rank_last")
    parser.add_argument("--other", help="the second file's column, where it is another")
    parser.add_argument("--metric", default="hr@10", help="hr@K, ndcg@K or mrr")
    parser.add_argument("--targets", default="all", choices=["all", "warm", "cold"])
    args = parser.parse_args(arguments)
    columns = args.column, args.other or args.column
    print(paired(args.first, args.second, columns, args.metric, args.targets))
    return 0


if __name__ == "__main__":
    sys.exit(main())
