"""What is damaged: a log, datasets, a run, an export and a store, each made as users make them, and small.

log/events.parquet, later.parquet   with page checksums: nothing else can tell an outside file's damage
features/, plain/                   datasets, with features, targets and ids of text, and without
configs/experiment.yaml
run/                                a few steps of training on features/
export/                             of that run: index, states, programs
store/                              of a Recommender that was told of events and users to forget
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import fuxi_torchrec
from fuxi_torchrec.data.synthetic import SyntheticConfig, generate
from fuxi_torchrec.strict_yaml import dump

LAST = "killed-store"  # is made last
USERS, ITEMS, LATER = 40, 120, 3  # the last events of a user come after the export
COLUMNS: dict[str, Any] = {"target_expression": "weight", "event_features": ["action", "surface", "tags"]}
HISTORIES = SyntheticConfig(users=USERS, items=ITEMS, groups=6, window=10, median_length=25, length_sigma=0.8)
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
)


def make(place: Path) -> None:
    """Make them all in an empty directory."""
    _logs(place / "log")
    fuxi_torchrec.prepare(place / "log" / "events.parquet", place / "features", **COLUMNS)
    fuxi_torchrec.prepare(HISTORIES, place / "plain")
    config = fuxi_torchrec.load_config(None, [f"data.path={place}/features", *SETTINGS])
    (place / "configs").mkdir()
    (place / "configs" / "experiment.yaml").write_text(dump(config))
    fuxi_torchrec.train(config, place / "run")
    fuxi_torchrec.export(place / "run", place / "export", fuxi_torchrec.ExportOptions(state_min_events=20))
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
        shutil.copytree(store, killed)  # what a process leaves that ends here
