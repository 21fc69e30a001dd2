"""Write a synthetic event log whose structure is known, cut into parts by time.

    python -m pipelines.synthesize --users 3000 --output data/log --cuts 0.98

writes ``part-0.parquet`` with the first 98 % of all events and ``part-1.parquet`` with the rest: yesterday's log and
today's. Each has ``user_id``, ``item_id`` and ``timestamp`` (seconds), by time.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuxi_torchrec.artifacts import NewDirectory
from fuxi_torchrec.data.synthetic import SyntheticConfig, generate, oracle_hit_rate
from fuxi_torchrec.options import add_options, options_from


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the log; exit code 1 and one line if it cannot."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.synthesize", description=__doc__.splitlines()[0])
    add_options(parser, SyntheticConfig)
    parser.add_argument("--output", type=Path, required=True, help="directory of the log; must not exist")
    parser.add_argument("--cuts", default="", help="shares of the events, rising, at which a new part begins: 0.9,0.95")
    parser.add_argument("--oracle", action="store_true", help="also print the best HR@10 any model can reach")
    options = parser.parse_args(arguments)
    try:
        cuts = [float(cut) for cut in options.cuts.split(",") if cut]
        if sorted(set(cuts)) != cuts or not all(0 < cut < 1 for cut in cuts):
            raise ValueError(f"--cuts must be rising shares between 0 and 1, not {options.cuts}")
        config = options_from(options, SyntheticConfig)
        with NewDirectory(options.output) as place:
            for number, table in enumerate(parts(config, cuts)):
                pq.write_table(table, place / f"part-{number}.parquet", write_page_checksum=True)
                print(f"{options.output / f'part-{number}.parquet'}: {len(table):,} events")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.oracle:
        print(f"best achievable HR@10: {oracle_hit_rate(config):.4f}")
    return 0


def parts(config: SyntheticConfig, cuts: Sequence[float]) -> list[pa.Table]:
    """The log by time, cut at shares of its events; events of one time stay in one part."""
    blocks = list(generate(config))
    user, item, time = (np.concatenate([getattr(b, name) for b in blocks]) for name in ("user", "item", "timestamp"))
    order = np.argsort(time, kind="stable")
    user, item, time = user[order], item[order], time[order]
    edges = [0, *(int(np.searchsorted(time, time[int(cut * len(time))])) for cut in cuts), len(time)]
    columns = {"user_id": user, "item_id": item, "timestamp": time}
    whole = pa.table(columns)
    return [whole.slice(a, b - a) for a, b in itertools.pairwise(edges)]


if __name__ == "__main__":
    sys.exit(main())
