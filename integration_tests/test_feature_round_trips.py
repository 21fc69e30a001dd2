"""Features of items and users through --extend, a warm start, other shardings and other numbers of ranks."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.prepare import PrepareOptions, prepare
from fuxi_torchrec.events.sources import events
from fuxi_torchrec.training.checkpoint.info import find_checkpoint
from fuxi_torchrec.training.checkpoint.unshard import read_plain
from fuxi_torchrec.worker_group import WorkerError
from integration_tests import runs

START = 1_600_000_000
FEATURES = [
    "features.item={brand: {}, tags: {pooling: mean}, price: {}, text: {}, level: {}}",
    "features.user={age: {}, likes: {}, income: {}}",
]
BOTH = ("item", "user")
TABLES = {"item_feature_brand", "item_feature_tags", "item_feature_level", "user_feature_age", "user_feature_likes"}


def day(path, number, before=None):
    """A dataset; on the second day there are more items and users, and values that the first day does not have."""
    draw, users, items = np.random.default_rng(number), 20 + 5 * number, 40 + 10 * number
    log = {
        "user_id": np.repeat(np.arange(users), 20),
        "item_id": draw.integers(1, items + 1, users * 20),
        "timestamp": START + 10_000 * number + np.tile(np.arange(20), users),
    }
    about = {
        "item_id": np.arange(1, items + 1),
        "brand": [f"b{n % (5 + 3 * number)}" for n in range(items)],
        "tags": [[f"t{n % (4 + number)}", "all"][: n % 3] for n in range(items)],
        "price": [float(n * (1 + number)) if n % 4 else None for n in range(items)],
        "text": draw.normal(size=(items, 3)).tolist(),
        "level": np.arange(items) * (1 + number),
    }
    people = {
        "user_id": np.arange(users),
        "age": [f"a{n % (3 + number)}" for n in range(users)],
        "likes": [f"l{n % (2 + number)}|l0" for n in range(users)],
        "income": draw.normal(size=users),
    }
    for name, columns in (("log", log), ("items", about), ("users", people)):
        pq.write_table(pa.table(columns), path / f"{name}-{number}.parquet")
    options = PrepareOptions(
        item_features=str(path / f"items-{number}.parquet"),
        item_columns="brand tags price text level:bucket:4",
        user_features=str(path / f"users-{number}.parquet"),
        user_columns="age likes:id:| income",
        extend=None if before is None else str(path / before),
    )
    return events(str(path / f"log-{number}.parquet"), "user_id", "item_id", "timestamp", "s"), options


@pytest.fixture(scope="module")
def place(tmp_path_factory, workers):
    path = tmp_path_factory.mktemp("days")
    prepare(*_placed(path, "one", day(path, 0)))
    prepare(*_placed(path, "two", day(path, 1, "one")))
    prepare(*_placed(path, "apart", day(path, 1)))
    workers(2).run(runs.run, path / "run", settings(path, "one", "train.max_steps=3"))
    return path


def _placed(path, name, made):
    return made[0], path / name, made[1]


def settings(path, name, *more):
    return [f"data.path={path / name}", "batch.users=8", "batch.events=null", *FEATURES, *more]


def weights(run_dir):
    """Of the latest checkpoint, whatever it was divided into."""
    return read_plain(find_checkpoint(run_dir / "checkpoints", "latest"))


def started(run_dir, given, other):
    """Start warm, save before any step."""
    made, _ = runs.trainer(run_dir, given, init_from=other)
    made._saved_at = -1  # nothing has moved, and yet it is to be written
    made.save()
    made.saver.wait()


def test_vocabularies_grow_behind_what_was_there_and_statistics_stay(place):
    one, two, apart = (Dataset.open(place / name) for name in ("one", "two", "apart"))
    for owner in BOTH:
        old, new, alone = ({f.name: f for f in each.info.features_of(owner)} for each in (one, two, apart))
        for name, feature in old.items():
            kept = (feature.kind, feature.boundaries, feature.mean, feature.deviation, feature.width)
            again = new[name]
            assert kept == (again.kind, again.boundaries, again.mean, again.deviation, again.width)
            if not feature.vocabulary:
                continue
            values, more = (each.feature_values(name, owner).to_pylist() for each in (one, two))
            assert more[: len(values)] == values and len(more) > len(values), name
            assert sorted(more) == sorted(apart.feature_values(name, owner).to_pylist())
        differ = {n for n in old if (old[n].mean, old[n].boundaries) != (alone[n].mean, alone[n].boundaries)}
        assert differ == ({"price", "level"} if owner == "item" else {"income"})


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "sharding"), [(1, "row_wise"), (2, "table_wise"), (4, "data_parallel")])
def test_a_warm_start_takes_over_every_row_and_projection(place, workers, world, sharding):
    given = settings(place, "two", *(f"features.{o}.{n}.sharding={sharding}" for o, n in _in_tables()))
    run_dir = place / f"warm-{world}"
    workers(world).run(started, run_dir, given, place / "run")
    old, new = weights(place / "run"), weights(run_dir)
    for name, value in old.items():
        own = new[name]
        if name == "item_table" or name in TABLES:
            assert len(own) >= len(value) and torch.equal(own[: len(value)], value), name
            grown = name != "item_feature_level"  # boundaries stay, and so do buckets
            assert (len(own) > len(value)) == grown, name
        else:
            assert torch.equal(own, value), name
    assert {name for name in new if name.startswith(("item_feature", "user_feature"))} == TABLES
    assert sum("_projection" in name for name in new) == 2


@pytest.mark.timeout(300)
def test_a_run_goes_on_with_other_shardings_on_other_numbers_of_ranks(place, workers):
    whole = workers(1).run(runs.run, place / "whole", settings(place, "one", "train.max_steps=4"))[0]
    for world, sharding in ((1, "row_wise"), (2, "column_wise"), (4, "table_wise")):
        run_dir = place / f"on-{world}"
        workers(2).run(runs.run, run_dir, settings(place, "one", "train.max_steps=2"))
        more = (f"features.{owner}.{name}.sharding={sharding}" for owner, name in _in_tables())
        found = workers(world).run(runs.run, run_dir, settings(place, "one", "train.max_steps=4", *more))[0]
        assert found == pytest.approx(whole, rel=2e-4)


def test_a_dataset_that_was_not_extended_is_refused(place, workers):
    with pytest.raises(WorkerError, match=r"prepare the dataset with --extend over that run's"):
        workers(1).run(started, place / "refused", settings(place, "apart"), place / "run")


def _in_tables():
    return [("item", "brand"), ("item", "tags"), ("item", "level"), ("user", "age"), ("user", "likes")]
