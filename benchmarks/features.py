"""What features of items cost: a step of training with five of them and without, and new items in a running service.

    python -m benchmarks.features --data DIR               # a dataset of prepare complete-journey
    python -m benchmarks.features --export DIR             # an export of such a run: in Python, and over HTTP

Each prints its ratio or time, and whether the aim is reached.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.serving import serving
from benchmarks.training import make_trainer
from fuxi_torchrec.distributed import process_group
from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.serving.feature_rows import FeatureRows
from fuxi_torchrec.serving.recommender import Recommender

STEP_AIM, ADD_AIM, NEW_ITEMS, AT_ONCE = 1.5, 5.0, 10_000, 2_500
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
        manifest, users = recommender.manifest, recommender.bundle.parts("users")
        ids = pq.read_table(users[0], columns=["user_id"])["user_id"].to_pylist()[:200]
        records = new_items(recommender._model.composer.features, manifest.item_file.id_column)
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


def adding_over_http(export: str, scratch: Path) -> tuple[float, int, int]:
    """The same of a service in a process of its own, in requests of AT_ONCE items."""
    bundle = Bundle.open(export)
    ids = pq.read_table(bundle.parts("users")[0], columns=["user_id"])["user_id"].to_pylist()[:200]
    features = FeatureRows(bundle, bundle.tables(), "item")
    records = new_items(features, bundle.manifest.item_file.id_column)
    done, failed, stop = [0], [0], threading.Event()
    with serving(Path(export), "--log-dir", str(scratch / "http-log")) as port:

        def post(connection: HTTPConnection, path: str, body: dict[str, Any]) -> dict[str, Any]:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{path}: {answer.status} {said[:200]!r}")
            found: dict[str, Any] = json.loads(said)
            return found

        def ask() -> None:
            connection = HTTPConnection("127.0.0.1", int(port), timeout=60)
            while not stop.is_set():
                try:
                    body = {"user_id": ids[done[0] % len(ids)], "time": bundle.manifest.as_of}
                    failed[0] += len(post(connection, "/recommend", body)["items"]) != 10
                except Exception:
                    failed[0] += 1
                done[0] += 1

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        connection, added = HTTPConnection("127.0.0.1", int(port), timeout=60), 0
        began = time.perf_counter()
        for begin in range(0, NEW_ITEMS, AT_ONCE):
            added += post(connection, "/items", {"items": records[begin : begin + AT_ONCE]})["added"]
        took = time.perf_counter() - began
        stop.set()
        for thread in threads:
            thread.join()
        if added != NEW_ITEMS or not post(connection, "/similar-items", {"item_id": 10**9, "k": 1})["items"]:
            raise RuntimeError(f"{added} items were added, not {NEW_ITEMS}")
    return took, done[0], failed[0]


def new_items(features: FeatureRows, id_column: str) -> list[dict[str, Any]]:
    """Items that nobody has, with values that the model knows."""
    values = {name: column.to_pylist() for name, column in features.values.items()}
    return [
        {id_column: 10**9 + n, **{name: each[n % len(each)] for name, each in values.items()}} for n in range(NEW_ITEMS)
    ]


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
            for how, measure in (("to a Recommender", adding), ("over HTTP", adding_over_http)):
                took, asked, failed = measure(args.export, Path(place))
                missed |= took > ADD_AIM or failed > 0
                said = f"{NEW_ITEMS:,} items added {how} in {took:.2f} s, aim {ADD_AIM} s"
                print(f"{said}; of {asked} requests meanwhile {failed} failed")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
