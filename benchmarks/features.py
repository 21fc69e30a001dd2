"""What features of items cost: a step of training with five of them and without, and new items in a running service.

    python -m benchmarks.features --data DIR               # a dataset of prepare complete-journey
    python -m benchmarks.features --export DIR             # an export of such a run

Each prints its ratio or time, and whether the aim is reached.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.training import make_trainer
from fuxi_torchrec.distributed import process_group
from fuxi_torchrec.serving.recommender import Recommender

STEP_AIM, ADD_AIM, NEW_ITEMS = 1.5, 5.0, 10_000
FEATURES = "features.item={department: {}, product_category: {}, product_type: {}, brand: {}, manufacturer_id: {}}"
SETTINGS = [
    *("batch.events=8192", "batch.max_length=512", "batch.truncation=windows", "loss.num_negatives=2048"),
    *("model.dim=64", "model.num_layers=2", "model.num_heads=4", "model.max_positions=512"),
    *("data.split=by_time", "data.test_from=1511708329", "validation.every_epochs=null"),
]


def step_ratio(data: str, scratch: Path, steps: int) -> float:
    """Steps with features over the same steps without, taken in turn, after two that are not timed."""

    def stepping(name: str, settings: list[str]) -> Any:
        return make_trainer(scratch / name, [f"data.path={data}", *SETTINGS, *settings]).begin().train

    both = [stepping("without", []), stepping("with", [FEATURES])]
    spent = [0.0, 0.0]
    for number in range(steps + 2):
        for which, step in enumerate(both):
            began = time.perf_counter()
            step()
            spent[which] += time.perf_counter() - began if number >= 2 else 0.0
    plain, featured = (total / steps for total in spent)
    print(f"a step without features {plain * 1e3:.0f} ms, with five features of items {featured * 1e3:.0f} ms")
    return featured / plain


def adding(export: str, scratch: Path) -> tuple[float, int, int]:
    """Seconds of adding items while others ask; requests answered meanwhile, and how many failed."""
    with Recommender.load(export, log_dir=scratch / "log") as recommender:
        manifest, file = recommender.manifest, recommender.manifest.item_file
        users = recommender.bundle.parts("users")
        import pyarrow.parquet as pq

        ids = pq.read_table(users[0], columns=["user_id"])["user_id"].to_pylist()[:200]
        values = {name: column.to_pylist() for name, column in recommender._model.composer.features.values.items()}
        records = [
            {file.id_column: 10**9 + n, **{name: each[n % len(each)] for name, each in values.items()}}
            for n in range(NEW_ITEMS)
        ]
        done, failed, stop = [0], [0], threading.Event()

        def ask() -> None:
            while not stop.is_set():
                try:
                    (answer,) = recommender.recommend([ids[done[0] % len(ids)]], manifest.as_of)
                    failed[0] += len(answer.items) != 10
                except Exception:
                    failed[0] += 1
                done[0] += 1

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        began = time.perf_counter()
        found = recommender.add_items(records)
        took = time.perf_counter() - began
        stop.set()
        for thread in threads:
            thread.join()
        if found.added != NEW_ITEMS or recommender.similar_items(10**9, 1).items == []:
            raise RuntimeError(f"not all items were added: {found}")
        return took, done[0], failed[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for; 1 if an aim is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.features", description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="a prepared Complete Journey")
    parser.add_argument("--export", help="an export of a run on it")
    parser.add_argument("--steps", type=int, default=15)
    args, missed = parser.parse_args(arguments), False
    with tempfile.TemporaryDirectory() as place, process_group(600.0, "cpu"):
        if args.data:
            ratio = step_ratio(args.data, Path(place), args.steps)
            missed |= ratio > STEP_AIM
            print(f"ratio {ratio:.2f}, aim at most {STEP_AIM}")
        if args.export:
            took, asked, failed = adding(args.export, Path(place))
            missed |= took > ADD_AIM or failed > 0
            said = f"{NEW_ITEMS:,} items added in {took:.2f} s, aim {ADD_AIM} s"
            print(f"{said}; of {asked} requests meanwhile {failed} failed")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
