"""Rows of items and queries of users with features: sharded against the same computed by hand, on 1, 2 and 4 ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fuxi_torchrec.embeddings.bags import padded
from fuxi_torchrec.embeddings.inputs import Lookups, agree, make_input
from fuxi_torchrec.embeddings.owned import FeatureLookup
from fuxi_torchrec.embeddings.sharding import local_parts
from fuxi_torchrec.embeddings.tables import Table, Tables, collection
from fuxi_torchrec.embeddings.tests.small import (
    DIM,
    ITEMS,
    SEQUENCES,
    full_tables,
    gradients,
    local_values,
    random_batch,
    sharded_model,
    slice_of,
    small_config,
    table_weights,
    targets_of,
)
from fuxi_torchrec.events.feature_table import FeatureTable
from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.events.histories import Ragged, bounds_of
from fuxi_torchrec.tasks.samplers import Candidates
from fuxi_torchrec.training.model import SequenceModel

SHARDINGS = ("row_wise", "table_wise", "column_wise", "data_parallel")
BRANDS, TAGS, LEVELS, AGES = 10, 12, 7, 8
FEATURES = (
    Feature("brand", rows=BRANDS, vocabulary=True, owner="item"),
    Feature("price", kind="number", width=1, owner="item", mean=2.0, deviation=3.0),
    Feature("tags", True, TAGS, True, "mean", owner="item"),
    Feature("text", kind="vector", width=3, owner="item"),
    Feature("level", rows=LEVELS, kind="bucket", owner="item", boundaries=(1.0, 2.0, 3.0)),
)
OF_USERS = (
    Feature("age", rows=AGES, vocabulary=True, owner="user"),
    replace(FEATURES[1], name="score", owner="user"),
    replace(FEATURES[2], name="likes", owner="user", pooling="sum"),
    replace(FEATURES[3], name="taste", owner="user", width=2),
    replace(FEATURES[4], name="visits", owner="user"),
)
OF_EVENTS = (
    Feature("watched", kind="number", width=1, mean=1.0, deviation=2.0),
    Feature("scene", kind="vector", width=2),
)


def feature_table(features, rows, seed):
    """Random features of so many rows; some rows have none, some numbers are missing."""
    draw = np.random.default_rng(seed)
    filled = draw.random(rows) < 0.8
    filled[0] = False
    values, numbers = {}, {}
    for feature in features:
        if feature.multiple:
            lengths = np.where(filled, draw.integers(0, 4, rows), 0)
            values[feature.name] = Ragged(draw.integers(0, feature.rows, int(lengths.sum())), bounds_of(lengths))
        elif feature.in_table:
            values[feature.name] = np.where(filled, draw.integers(0, feature.rows, rows), 0)
        else:
            found = draw.normal(size=(rows, feature.width)).astype(np.float32)
            found[~filled | (draw.random(rows) < 0.3)] = np.nan
            numbers[feature.name] = found
    return FeatureTable(tuple(features), values, numbers, filled)


def lookups(dropout=0.0):
    trained = np.arange(ITEMS) % 4 != 0
    items = FeatureLookup(feature_table(FEATURES, ITEMS, 1), trained, dropout, seed=3)
    return Lookups(items, FeatureLookup(feature_table(OF_USERS, max(SEQUENCES) + 1, 2)))


def tables_of(sharding):
    return Tables(
        Table("item_table", "item", ITEMS, DIM, sharding),
        (Table("feature_action", "action", 7, DIM, sharding),),
        (
            Table("item_feature_brand", "brand", BRANDS, DIM, sharding),
            Table("item_feature_tags", "tags", TAGS, DIM, sharding, "mean"),
            Table("item_feature_level", "level", LEVELS, DIM, sharding),
        ),
        (
            Table("user_feature_age", "age", AGES, DIM, sharding),
            Table("user_feature_likes", "likes", TAGS, DIM, sharding),
            Table("user_feature_visits", "visits", LEVELS, DIM, sharding),
        ),
        numbers=OF_EVENTS,
        item_inputs=6,
        user_inputs=5,
    )


def input_of(rank, tables, about, step):
    batch = random_batch(SEQUENCES[rank], [7, rank], items=ITEMS)
    batch.features.update(
        feature_table(OF_EVENTS, len(batch.items) + 1, [5, rank]).take(np.arange(len(batch.items))).numbers
    )
    draw = np.random.default_rng(9)
    pool = np.sort(draw.choice(np.arange(1, ITEMS), 6, replace=False))
    targets = targets_of(batch, Candidates(pool, draw.normal(size=6).astype(np.float32)))
    return make_input(batch, targets, tables, about, step), batch


def rows_by_hand(values, projection, table, features, names, at):
    """The sum over features of some rows, one row after another."""
    found = []
    for row in at.tolist():
        total, inputs = torch.zeros(DIM), []
        for feature in features:
            if feature.in_table:
                column, weight = table.values[feature.name], values[names + feature.name]
                if isinstance(column, Ragged):
                    ids = column.values[column.bounds[row] : column.bounds[row + 1]]
                    several = weight[ids.tolist()].sum(0)
                    total = total + (several / max(1, len(ids)) if feature.pooling == "mean" else several)
                elif table.filled[row]:
                    total = total + weight[int(column[row])]
                continue
            numbers = table.numbers[feature.name][row]
            missing = bool(np.isnan(numbers).any())
            standard = [0.0 if missing else (float(x) - feature.mean) / feature.deviation for x in numbers]
            inputs += [*standard, float(missing and bool(table.filled[row]))]
        found.append(total + torch.tensor(inputs) @ projection.T)
    return torch.stack(found) if found else torch.zeros(0, DIM)


def whole(config, tables, values):
    torch.manual_seed(1)
    model = SequenceModel(config, tables)
    model.items, model.features = collection((tables.items,), "cpu"), collection(tables.features, "cpu")
    model.item_features, model.user_features = collection(tables.of_items, "cpu"), collection(tables.of_users, "cpu")
    for name, weight in table_weights(model).items():
        weight.data.copy_(values[name])
    return model


def not_empty(given):
    """Unsharded collections do not take batches without any bag."""
    items, users = len(given.items.lengths()), len(given.offsets) - 1
    return replace(
        given,
        items=padded(given.items, items + 1),
        features=padded(given.features, len(given.input_rows) + 1),
        item_features=padded(given.item_features, items + 1),
        user_features=padded(given.user_features, users + 1),
    )


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=3e-4, atol=3e-6)


def compare(sharding, dropout):
    tables, about, step = tables_of(sharding), lookups(dropout), (0, 4) if dropout else None
    config, values = small_config(), full_tables(tables)
    model, _ = sharded_model(config, tables, values)
    one = whole(config, tables, values)
    with torch.no_grad():  # the head is drawn by the same seed
        for ours, theirs in zip(model.module.head.parameters(), one.head.parameters(), strict=True):
            theirs.copy_(ours)
    everybody = [input_of(rank, tables, about, step)[0] for rank in range(dist.get_world_size())]
    own, batch = input_of(dist.get_rank(), tables, about, step)
    (ready,) = agree([own], tables.needs_equal_bags)
    unique = np.unique(np.concatenate([batch.items, *(x.reshape(-1) for x in item_ids(batch))]))
    with torch.no_grad():
        head, (ids, features, of_items, of_users) = model.module.head, model.module._lookup(ready)
        expected = values["item_table"][about.items.rows_of(unique, step).tolist()] + rows_by_hand(
            values, head.item_projection.weight, about.items.table, FEATURES, "item_feature_", unique
        )
        close(head.item_rows(ids, of_items, ready)[: len(unique)], expected)
        users = rows_by_hand(
            *(values, head.user_projection.weight, about.users.table, OF_USERS, "user_feature_"),
            np.arange(1, len(batch) + 1),
        )
        close(head.user_rows(of_users, ready), users)
        numbers = FeatureTable(
            OF_EVENTS, {}, {f.name: batch.features[f.name] for f in OF_EVENTS}, np.ones(len(batch.items), bool)
        )
        every = np.arange(len(batch.items))
        events = rows_by_hand({}, head.event_projection.weight, numbers, OF_EVENTS, "", every)
        place = {item: row for row, item in enumerate(unique.tolist())}
        own = head.item_rows(ids, of_items, ready)[[place[item] for item in batch.items.tolist()]]
        events = events + own + values["feature_action"][batch.features["action"].tolist()]
        close(head.event_rows(head.item_rows(ids, of_items, ready), features, ready), events)
    loss, _ = model(ready)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    weight = sum(float(each.targets.weights.sum()) for each in everybody)
    expected = sum(one(replace(not_empty(each), loss_scale=1.0 / weight))[0] for each in everybody)
    expected.backward()
    close(total / dist.get_world_size(), expected.detach())
    found = gradients(model)
    for name, parameter in one.head.named_parameters():
        close(found[f"head.{name}"], parameter.grad)
    of_tables = local_values(model, found)
    for part in local_parts(model):
        grad = of_tables[part.table, part.first_row, part.first_column]
        close(grad, slice_of(part, table_weights(one)[part.table].grad))
    return float(total) / dist.get_world_size()


def item_ids(batch):
    draw = np.random.default_rng(9)
    pool = np.sort(draw.choice(np.arange(1, ITEMS), 6, replace=False))
    return batch.targets[batch.target_weights.nonzero().squeeze(1)].numpy(), pool


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_rows_queries_and_gradients_are_those_of_unsharded_tables(workers, sharding, world):
    workers(world).run(compare, sharding, 0.0)
    workers(world).run(compare, sharding, 0.5)


def test_an_item_is_left_out_of_a_step_or_not_whoever_looks_it_up():
    about, ids = lookups(0.5).items, np.arange(ITEMS)
    here, there = about.rows_of(ids, (0, 3)), about.rows_of(ids[::-1], (0, 3))[::-1]
    assert np.array_equal(here, there)
    assert not np.array_equal(here, about.rows_of(ids, (0, 4)))
    assert np.array_equal(about.rows_of(ids, None), np.where(about.trained, ids, 0))
    bare = about.trained & ~about.table.filled  # without features there is nothing else to know them by
    assert np.array_equal(here[bare], ids[bare])
