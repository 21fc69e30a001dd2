"""Plan a run on machines that are not here: sharding, memory of a rank, communication of a step.

    python -m pipelines.plan --config configs/long_16k.yaml --nodes 8 --procs-per-node 8 --items 100000000 --device cuda

Exit code 1 if it does not fit, with what would.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Literal

from fuxi_torchrec.logging import setup_logging
from fuxi_torchrec.options import add_options, check_bounds, option, options_from

if TYPE_CHECKING:  # torch and TorchRec take seconds to import: not for --help
    from fuxi_torchrec.config import Config
    from fuxi_torchrec.training import planning


@dataclass(frozen=True)
class Options:
    """The machines, and what of the data decides sizes."""

    items: int = option(MISSING, "of the catalogue", least=1, most=10**12)
    nodes: int = option(1, "hosts", least=1, most=10**5)
    procs_per_node: int = option(1, "ranks on a host, one a device", least=1, most=10**3)
    device: Literal["cpu", "cuda"] = option("cuda", "of the ranks")
    memory_gb: float | None = option(None, "of a device, or a rank's share of a host (80; cpu: 16)", above=0)

    def __post_init__(self) -> None:
        check_bounds(self)


def _parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m pipelines.plan", description=__doc__.splitlines()[0])
    found.add_argument("--config", help="YAML file of the experiment")
    add_options(found, Options)
    found.add_argument(
        "--feature-rows", type=_feature, action="append", default=[], metavar="NAME=ROWS", help="of a feature table"
    )
    found.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the config's")
    return found


def _feature(text: str) -> tuple[str, int]:
    name, _, rows = text.partition("=")
    if not rows.isdecimal() or not 0 < int(rows[:14]) <= 10**12:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not NAME=ROWS, of 1 to 10^12 rows")
    return name, int(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; 1 if it does not fit."""
    given = _parser().parse_intermixed_args(arguments)
    from fuxi_torchrec.config import load_config

    try:
        options, config = options_from(given, Options), load_config(given.config, given.overrides)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    setup_logging("error")
    from fuxi_torchrec.embeddings.sharding import ShardingError, describe
    from fuxi_torchrec.training import planning

    gigabytes = options.memory_gb or {"cpu": 16.0, "cuda": 80.0}[options.device]
    cluster = planning.Cluster(options.nodes, options.procs_per_node, options.device, int(gigabytes * planning.GB))
    features = dict(given.feature_rows)
    unknown = [name for name in features if name not in config.features.event]
    if unknown:
        there = ", ".join(config.features.event) or "none"
        print(f"--feature-rows: features.event has no {', '.join(unknown)}; there are {there}", file=sys.stderr)
        return 1
    tables = planning.described_tables(config, options.items, features)
    print(
        f"{cluster.nodes} nodes x {cluster.per_node} ranks on {cluster.device}, {gigabytes:g} GB each; "
        f"{options.items:,} items, d = {config.model.dim}, {config.optimizer.kind}\n"
    )
    if config.batch.streams < cluster.ranks:
        print(f"batch.streams is {config.batch.streams}: {cluster.ranks} ranks need batch.streams={cluster.ranks}\n")
    try:
        found = planning.estimate(config, tables, cluster)
    except ShardingError as error:
        print(f"no plan: {error}")
        return 1
    print(describe(found.parts))
    print(f"\nMemory of the busiest rank, {found.events:,} events and {found.lookups:,} rows looked up at once:\n")
    print(_sizes(found.memory, "total", found.total))
    if config.batch.max_events_per_rank is None:
        bound = "batch.max_events_per_rank bounds it" if config.optimizer.kind == "adamw" else "leave room for it"
        print(f"\nThese are a rank's events in a mean step; where histories differ, the largest has more: {bound}.")
    if found.host:
        print(f"{'host memory, while a checkpoint is written':<48} {_size(found.host):>10}")
        print(f"{'the same for all ranks of a node, at most':<48} {_size(found.host * cluster.per_node):>10}")
    print("\nSent by the busiest rank in a step (a micro-batch, if there are several):\n")
    print(_sizes(found.sent, "total", sum(found.sent.values())))
    if found.fits(cluster):
        try:
            planning.estimate(config, tables, cluster, cap=True)
        except ShardingError as error:
            print(f"\nDOES NOT FIT: {error}")
        else:
            share = found.total / cluster.memory
            print(f"\nFITS: {_size(found.total)} of {gigabytes:g} GB a rank ({share:.0%}).")
            return 0
    else:
        usable = f"{planning.USABLE:.0%} can be used"
        print(f"\nDOES NOT FIT: {_size(found.total)} of {gigabytes:g} GB a rank, of which {usable}.")
    _print_changes(config, options.items, features, cluster)
    return 1


def _print_changes(config: "Config", items: int, features: dict[str, int], cluster: "planning.Cluster") -> None:
    from fuxi_torchrec.training import planning

    changes = planning.changes_that_fit(config, items, features, cluster)
    if not changes:
        print("No single change and no pair of changes that were tried makes it fit: take fewer items or more memory.")
        return
    print("What would fit:")
    for settings, total in sorted(changes.items(), key=lambda each: each[1]):
        print(f"  {' and '.join(settings):<60} {_size(total):>10}")


def _sizes(values: dict[str, int], last: str, total: int) -> str:
    return "\n".join(f"{name:<48} {_size(value):>10}" for name, value in [*values.items(), (last, total)])


def _size(value: float) -> str:
    return f"{value / 1e9:,.2f} GB" if value >= 1e8 else f"{value / 1e6:,.2f} MB"


if __name__ == "__main__":
    sys.exit(main())
