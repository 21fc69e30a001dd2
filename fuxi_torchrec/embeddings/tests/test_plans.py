"""What can be sharded, and the plan that it gets."""

import json

import pytest
import torch

from fuxi_torchrec.config import BatchConfig, Config, FeatureConfig, FeaturesConfig, OptimizerConfig, TablesConfig
from fuxi_torchrec.embeddings.sharding import (
    ShardingError,
    check_shardable,
    choices,
    describe,
    make_plan,
    placements,
    plan_to_json,
)
from fuxi_torchrec.embeddings.tables import Table, Tables
from fuxi_torchrec.embeddings.tests.small import (
    small_config,
    small_tables,
)
from fuxi_torchrec.training.model import SequenceModel

SHARDINGS = ("row_wise", "table_wise", "column_wise", "data_parallel")


def one_table(sharding, rows=100, dim=8, genres=None):
    features = (Table("feature_genre", "genre", genres, dim, sharding),) if genres else ()
    return Tables(Table("item_table", "item", rows, dim, sharding), features)


@pytest.mark.parametrize(
    ("tables", "optimizer", "world", "words"),
    [
        (one_table("row_wise", 5), OptimizerConfig(), 4, ["tables.sharding", "item_table has 5 rows", "4 ranks"]),
        (one_table("row_wise", 1), OptimizerConfig(), 2, ["1 rows", "tables.sharding=data_parallel"]),
        (
            one_table("row_wise", genres=3),
            OptimizerConfig(),
            4,
            [
                "features.event.genre.sharding",
                "feature_genre has 3 rows",
                "features.event.genre.sharding=data_parallel",
            ],
        ),
        (one_table("column_wise", dim=6), OptimizerConfig(), 1, ["column_wise", "model.dim", "multiple of 4, not 6"]),
        (
            one_table("row_wise", dim=6),
            OptimizerConfig(kind="rowwise_adagrad"),
            2,
            ["rowwise_adagrad", "model.dim", "not 6"],
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_torchrec_sees_it(tables, optimizer, world, words):
    with pytest.raises(ShardingError) as refused:
        check_shardable(tables, optimizer, world)
    with pytest.raises(ShardingError) as planned:
        make_plan(torch.nn.Module(), tables, optimizer, world, world, "cpu")
    assert str(planned.value) == str(refused.value)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("rows", range(1, 30))
@pytest.mark.parametrize("world", range(1, 9))
def test_row_wise_is_refused_exactly_if_a_process_would_have_no_row(rows, world):
    block = -(-rows // world)
    shares = [min(block, max(0, rows - rank * block)) for rank in range(world)]
    if min(shares):
        check_shardable(one_table("row_wise", rows), OptimizerConfig(), world)
    else:
        with pytest.raises(ShardingError):
            check_shardable(one_table("row_wise", rows), OptimizerConfig(), world)


def test_configurations_whose_result_would_depend_on_the_division_are_refused():
    adagrad = OptimizerConfig(kind="rowwise_adagrad")
    with pytest.raises(ValueError, match=r"tables\.sharding is column_wise"):
        Config(optimizer=adagrad, tables=TablesConfig(sharding="column_wise"))
    with pytest.raises(ValueError, match=r"features\.event\.tags\.sharding is column_wise"):
        Config(optimizer=adagrad, features=FeaturesConfig({"tags": FeatureConfig(sharding="column_wise")}))
    with pytest.raises(ValueError, match=r"batch\.max_events_per_rank accumulates gradients"):
        Config(optimizer=adagrad, batch=BatchConfig(max_events_per_rank=100))
    with pytest.raises(ValueError, match="clip_norm needs all gradients"):
        OptimizerConfig(kind="rowwise_adagrad", clip_norm=1.0)
    Config(tables=TablesConfig(sharding="column_wise"), batch=BatchConfig(max_events_per_rank=100))


def test_auto_offers_the_planner_exact_shardings_only():
    adamw, adagrad = OptimizerConfig(), OptimizerConfig(kind="rowwise_adagrad")
    table = one_table("auto", 40).items
    assert set(choices(table, adamw, 4)) == set(SHARDINGS)
    assert set(choices(table, adagrad, 4)) == set(SHARDINGS) - {"column_wise"}
    assert set(choices(one_table("auto", 5).items, adamw, 4)) == set(SHARDINGS) - {"row_wise"}
    assert set(choices(one_table("auto", dim=6).items, adamw, 2)) == set(SHARDINGS) - {"column_wise"}
    assert choices(one_table("table_wise").items, adamw, 2) == ("table_wise",)


def plan_for(tables, world, **optimizer):
    config = small_config(OptimizerConfig(**optimizer))
    return make_plan(SequenceModel(config, tables), tables, config.optimizer, world, world, "cpu")


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", ["adamw", "rowwise_adagrad"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_parts_of_a_plan_cover_every_table_once(sharding, kind, world):
    if kind == "rowwise_adagrad" and sharding == "column_wise":
        return
    tables = small_tables(sharding, rows=(100, 50, 49))
    parts = placements(plan_for(tables, world, kind=kind), tables)
    for table in tables.all:
        covered = torch.zeros(table.rows, table.dim)
        for part in (p for p in parts if p.table == table.name):
            rows = slice(part.first_row, part.first_row + part.rows)
            covered[rows, part.first_column : part.first_column + part.columns] += 1
            assert part.sharding == sharding
            assert part.kernel == ("dense" if kind == "adamw" or sharding == "data_parallel" else "fused")
            assert (part.rank is None) == (sharding == "data_parallel")
        assert (covered == 1).all()


def test_a_plan_reads_well_and_is_the_same_every_time():
    tables = small_tables(("row_wise", "data_parallel", "column_wise"))
    plan = plan_for(tables, 2)
    assert str(plan) == str(plan_for(tables, 2))
    head, *lines = describe(placements(plan, tables)).splitlines()
    assert head.split() == ["table", "sharding", "kernel", "ranks", "rows", "of", "a", "part", "columns", "MB"]
    assert sorted(line.split() for line in lines) == [
        ["feature_action", "data_parallel", "dense", "all", "7", "8", "0.0"],
        ["feature_tags", "column_wise", "dense", "2", "11", "4", "0.0"],
        ["item_table", "row_wise", "dense", "2", "12", "8", "0.0"],
    ]
    plain = json.loads(plan_to_json(plan, tables, 2))
    assert plain["world_size"] == 2
    (last,) = [p for p in plain["placements"] if p["table"] == "item_table" and p["rank"] == 1]
    assert list(last) == ["table", "sharding", "kernel", "rank", "first_row", "first_column", "rows", "columns"]
    assert list(last.values()) == ["item_table", "row_wise", "dense", 1, 12, 0, 11, 8]
