"""What is damaged: a log, datasets, a run, an export and a store, each made as users make them, and small.

log/events.parquet, later.parquet   with page checksums: nothing else can tell an outside file's damage
log/items.parquet, users.parquet    features; more-items.parquet: of items that nobody has had
csv/events.csv                      a small log
features/, plain/                   datasets, with features, targets and ids of text, and without
configs/experiment.yaml
run/                                a few steps of training on features/
export/                             of that run: index, states, programs
repeats/, repeats-run/              the same with a bias for items of users' windows: an export, and its run
store/                              of a Recommender that was told of events, users to forget and new items
daily/                              of a pipeline: its state, and two releases
"""

import csv
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import fuxi_torchrec
from fuxi_torchrec.data.prepare import PrepareOptions
from fuxi_torchrec.data.synthetic import SyntheticConfig, generate
from fuxi_torchrec.strict_yaml import dump
from pipelines.daily.state import Day, Evaluation, Layout, Release, Releases, State

WINDOW = 8  # of the run with repeats
LAST = "killed-store"  # is made last
USERS, ITEMS, LATER = 40, 120, 3  # the last events of a user come after the export
COLUMNS: dict[str, Any] = {"target_expression": "weight", "event_features": ["action", "surface", "tags"]}
HISTORIES = SyntheticConfig(users=USERS, items=ITEMS, groups=6, window=10, median_length=25, length_sigma=0.8)
OWN = PrepareOptions(
    item_columns="brand kinds:id:| price size:bucket:4 text title:display", user_columns="age income:number"
)
SETTINGS = (
    "model.dim=16",
    "model.num_layers=1",
    "model.max_positions=128",
    "model.temporal_periods=[3600, 86400]",
    "batch.max_length=48",
    "batch.events=512",
    "batch.streams=2",
    "loss.num_negatives=16",
    "train.max_steps=6",
    "train.epochs=9",
    "checkpoint.every_steps=3",
    "validation.every_epochs=1",
    "logging.tensorboard=false",
    "distributed.device=cpu",
    "features.event={action: {}, surface: {}, tags: {}}",
    "features.user={age: {}, income: {}}",
    "features.item={brand: {}, kinds: {pooling: mean}, price: {}, size: {}, text: {}}",
)


def make(place: Path) -> None:
    """Make them all in an empty directory."""
    _logs(place / "log")
    prepare_with_features(place / "log", place / "features")
    fuxi_torchrec.prepare(HISTORIES, place / "plain")
    config = fuxi_torchrec.load_config(None, [f"data.path={place}/features", *SETTINGS])
    (place / "configs").mkdir()
    (place / "configs" / "experiment.yaml").write_text(dump(config))
    repeats = [f"task.repeats={{window: {WINDOW}, periods: [86400]}}", "optimizer.lr=0.1"]  # a bias that matters
    with_repeats = fuxi_torchrec.load_config(None, [f"data.path={place}/features", *SETTINGS, *repeats])
    for run, export, settings in (("run", "export", config), ("repeats-run", "repeats", with_repeats)):
        fuxi_torchrec.train(settings, place / run)
        fuxi_torchrec.export(place / run, place / export, fuxi_torchrec.ExportOptions(state_min_events=20))
    _csv(place / "csv" / "events.csv")
    _daily(place / "daily")
    _stores(place / "export", place / "store", place / "killed-store")


def _logs(place: Path) -> None:
    place.mkdir(parents=True)
    block = next(iter(generate(HISTORIES)))
    random, events = np.random.default_rng(1), len(block.user)
    table = pa.table(
        {
            "user_id": [f"user-{user}" for user in block.user],
            "item_id": [f"item-{item}" for item in block.item],
            "timestamp": block.timestamp,
            "weight": random.choice([0.0, 1.0, 2.5], events),
            "action": random.choice(["view", "buy", "like"], events),
            "surface": random.integers(0, 5, events),
            "tags": [random.integers(0, 9, n).tolist() for n in random.integers(0, 4, events)],
        }
    )
    order = np.argsort(block.timestamp, kind="stable")
    cut = events - LATER * USERS
    for name, rows in (("events", order[:cut]), ("later", order[cut:])):
        part = table.take(pa.array(rows))
        pq.write_table(part, place / f"{name}.parquet", row_group_size=400, write_page_checksum=True)

    for name, numbers in (("items", range(1, ITEMS)), ("more-items", range(1000, 1012))):
        pq.write_table(pa.table(item_features(numbers)), place / f"{name}.parquet", write_page_checksum=True)
    users = [f"user-{n}" for n in range(USERS)]
    ages, incomes = ["old", "young", None, "young"] * (USERS // 4), random.normal(size=USERS)
    about = {"user_id": users, "age": ages, "income": incomes}
    pq.write_table(pa.table(about), place / "users.parquet", write_page_checksum=True)


def item_features(numbers: Sequence[int]) -> dict[str, list[Any]]:
    """Columns of a file of items."""
    random = np.random.default_rng(2)
    return {
        "item_id": [f"item-{n}" for n in numbers],
        "brand": [f"brand-{random.integers(6)}" if n % 7 else None for n in numbers],
        "kinds": ["|".join(f"kind-{kind}" for kind in random.integers(0, 5, random.integers(3))) for _ in numbers],
        "price": [float(random.normal()) if n % 5 else None for n in numbers],
        "size": [int(random.integers(50)) for _ in numbers],
        "text": [random.normal(size=3).tolist() for _ in numbers],
        "title": [f"number {n}" for n in numbers],
    }


def prepare_with_features(log: Path, output: Path) -> None:
    """A dataset of the log and of what is known of its items and users."""
    options = replace(OWN, item_features=str(log / "items.parquet"), user_features=str(log / "users.parquet"))
    fuxi_torchrec.prepare(log / "events.parquet", output, options, **COLUMNS)


def _csv(path: Path) -> None:
    path.parent.mkdir()
    random = np.random.default_rng(3)
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["user_id", "item_id", "timestamp"])
        for time in range(300):
            rows.writerow([f"u{random.integers(9)}", f"i{random.integers(30)}", 1_700_000_000 + 60 * time])


def _daily(root: Path) -> None:
    layout = Layout(root)
    root.mkdir()
    state, releases = State(root), Releases(layout)
    found = Evaluation("test", False, "step-000000006", 6, "dataset", 40, {"mrr": 0.25}, {"mrr": 0.5})
    for day, before in (("2024-05-01", None), ("2024-05-02", "2024-05-01")):
        state.days[day] = Day(base=before, evaluation=found)
        state.start(day, "train").job = "local_cwd://torchx/train-1"
        state.end(day, "train", "finished")
        state.close(day, "published", "better than before")
        releases.publish(Release(day, day, found, before, "2024-05-03T00:00:00+00:00"))


def _stores(export: Path, store: Path, killed: Path) -> None:
    later = pq.read_table(export.parent / "log" / "later.parquet").to_pylist()
    with fuxi_torchrec.Recommender.load(export, log_dir=store) as recommender:
        for begin in range(0, len(later), 7):
            some = later[begin : begin + 7]
            features = [{name: event[name] for name in ("action", "surface", "tags")} for event in some]
            users, items, times = ([event[name] for event in some] for name in ("user_id", "item_id", "timestamp"))
            recommender.append(users, items, times, features)
            if begin == 28:
                recommender.forget(["user-3", "user-4"])
                columns = item_features(range(1000, 1006))
                items = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
                recommender.add_items(items[:4])
                recommender.add_items(items[4:])
        shutil.copytree(store, killed)  # what a process leaves that ends here
