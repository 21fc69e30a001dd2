"""Sharded tables against the same tables unsharded, on one, two and four ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata

from fuxi_torchrec.config import OptimizerConfig
from fuxi_torchrec.embeddings.inputs import agree
from fuxi_torchrec.embeddings.sharding import (
    ShardingError,
    clipped,
    fill_rows,
    initialise,
    is_sharded,
    like_weight,
    local_parts,
    on_host,
    planned,
    table_states,
)
from fuxi_torchrec.embeddings.tests.small import (
    ITEMS,
    full_tables,
    global_loss,
    gradients,
    input_of,
    local_values,
    not_empty,
    sharded_model,
    slice_of,
    small_config,
    small_tables,
    table_weights,
    whole_model,
)
from fuxi_torchrec.training.optimizers import StepOptimizer

SHARDINGS = ("row_wise", "table_wise", "column_wise", "data_parallel")
# the planner puts both column parts of the small table beside the large table's
CROWDED = ("column_wise", "table_wise", "column_wise")
CROWDED_ROWS = (40, 20_000, 20_000)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-6)


def inputs_of_all(tables, pool, seed):
    return [input_of(rank, pool, seed, tables=tables) for rank in range(dist.get_world_size())]


# --- lookups and gradients -------------------------------------------------------------------------------------------


def compare_lookups_and_gradients(sharding, rows):
    tables = small_tables(sharding, rows=rows) if rows else small_tables(sharding)
    config, values = small_config(), full_tables(tables)
    model, plan = sharded_model(config, tables, values)
    whole, tables = whole_model(config, tables, values), planned(plan, tables)
    for seed, pool in enumerate(("shared", "own", "shared")):
        inputs = inputs_of_all(tables, pool, seed)
        own = inputs[dist.get_rank()]
        (ready,) = agree([own], tables.needs_equal_bags)
        module = model.module
        with torch.no_grad():
            items, features = module.items(ready.items).values(), module.features(ready.features).to_dict()
            mine, filled = len(own.items.lengths()), not_empty(own)
            close(items[:mine], whole.items(filled.items).values()[:mine])
            assert not items[mine:].any()
            for name, expected in whole.features(filled.features).to_dict().items():
                close(features[name][: len(own.input_rows)], expected[: len(own.input_rows)])
                assert not features[name][len(own.input_rows) :].any()
            close(module.head.event_rows(items, features, ready), means_by_hand(values, filled))
        model.zero_grad(set_to_none=True)
        whole.zero_grad(set_to_none=True)
        loss, _ = model(ready)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        expected = global_loss(whole, inputs)
        expected.backward()
        close(total / dist.get_world_size(), expected.detach())
        found = gradients(model)
        for name, parameter in whole.head.named_parameters():
            close(found[f"head.{name}"], parameter.grad)
        of_tables = local_values(model, found)
        for part in local_parts(model):
            grad = of_tables[part.table, part.first_row, part.first_column]
            close(grad, slice_of(part, table_weights(whole)[part.table].grad))
    return sorted((part.table, part.first_row, part.first_column, *part.tensor.shape) for part in local_parts(model))


def means_by_hand(values, own):
    """Item plus action plus the mean of the tags, event by event."""
    items = own.items.values()[own.input_rows]
    action, tags = own.features["action"], own.features["tags"]
    rows = values["item_table"][items] + values["feature_action"][action.values()]
    begin = tags.offsets().tolist()
    for event in range(len(rows)):
        if begin[event + 1] > begin[event]:
            rows[event] += values["feature_tags"][tags.values()[begin[event] : begin[event + 1]]].mean(0)
    return rows


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_lookups_and_gradients_are_those_of_unsharded_tables(workers, sharding, world):
    held = workers(world).run(compare_lookups_and_gradients, sharding, None)
    elements = sum(rows * columns for parts in held for *_, rows, columns in parts)
    whole = sum(table.rows * table.dim for table in small_tables(sharding).all)
    assert elements == whole * (world if sharding == "data_parallel" else 1)


def test_each_table_may_be_sharded_in_its_own_way(workers):
    for features in (("row_wise", "table_wise"), ("data_parallel", "row_wise"), ("table_wise", "data_parallel")):
        workers(2).run(compare_lookups_and_gradients, ("row_wise", *features), None)
        workers(2).run(compare_lookups_and_gradients, ("data_parallel", *reversed(features)), None)


def test_a_process_may_hold_several_column_parts_of_a_table(workers):
    held = workers(2).run(compare_lookups_and_gradients, CROWDED, CROWDED_ROWS)
    assert any([part[0] for part in parts].count("item_table") == 2 for parts in held)


@pytest.mark.parametrize("world", [2, 4])
def test_the_planner_may_choose_and_lookups_are_exact(workers, world):
    held = workers(world).run(compare_lookups_and_gradients, "auto", None)
    assert {part[0] for parts in held for part in parts} == {"item_table", "feature_action", "feature_tags"}


# --- updates in the backward pass ------------------------------------------------------------------------------------


def compare_rowwise_adagrad(sharding):
    tables = small_tables(sharding)
    optimizing = OptimizerConfig(kind="rowwise_adagrad", lr=0.5, table_lr=0.25)
    config, values = small_config(optimizing), full_tables(tables)
    model, _ = sharded_model(config, tables, values)
    optimizer = StepOptimizer(model, optimizing)
    sums = {name: torch.zeros(len(value)) for name, value in values.items()}
    for step, share in enumerate((1.0, 0.5)):
        inputs = inputs_of_all(tables, "shared", step)
        whole = whole_model(config, tables, values)
        whole.head.load_state_dict(model.module.head.state_dict())
        global_loss(whole, inputs).backward()
        (ready,) = agree([inputs[dist.get_rank()]], tables.needs_equal_bags)
        optimizer.share = share
        optimizer.zero_grad()
        model(ready)[0].backward()
        optimizer.step()
        for name, parameter in table_weights(whole).items():
            sums[name] += parameter.grad.square().mean(1)
            rate = 0.25 * share / (sums[name].sqrt() + 1e-8)
            values[name] = values[name] - rate[:, None] * parameter.grad
        for part in local_parts(model):
            close(part.tensor, slice_of(part, values[part.table]))
        for name, value in optimizer.moments().items():
            if name.endswith(".sum"):
                for first, local in rows_of(value):
                    expected = sums[name.split(".")[-3]][first : first + len(local)]
                    torch.testing.assert_close(local, expected, rtol=1e-3, atol=1e-9)
    return sum(name.endswith(".sum") for name in optimizer.moments())


def rows_of(value):
    """The local parts of a table's row sums, with their first rows."""
    if not is_sharded(value):
        return [(0, value)]
    return [(shard.metadata.shard_offsets[0], shard.tensor) for shard in value.local_shards()]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "data_parallel"])
def test_rowwise_adagrad_moves_rows_as_computed_by_hand(workers, sharding, world):
    found = workers(world).run(compare_rowwise_adagrad, sharding)
    assert sum(found) == (3 if sharding == "table_wise" else 3 * world)


# --- initial values --------------------------------------------------------------------------------------------------


def initial_rows(sharding):
    """All of the tables as their parts say, NaN where this rank holds nothing."""
    tables = small_tables(sharding, rows=(9_000, 5_000, TAGS_ROWS))
    values = {table.name: torch.full((table.rows, table.dim), torch.nan) for table in tables.all}
    model, _ = sharded_model(small_config(), tables, values)
    initialise(model, std=0.5, seed=7)
    for part in local_parts(model):
        slice_of(part, values[part.table]).copy_(part.tensor)
    return values


TAGS_ROWS = 4_097


def together(of_ranks):
    """Every element must come from somewhere, and two ranks that hold the same must agree."""
    whole = {}
    for name in of_ranks[0]:
        stacked = torch.stack([values[name] for values in of_ranks])
        whole[name] = stacked.nan_to_num(-torch.inf).amax(0)
        assert not whole[name].isinf().any()
        assert ((stacked == whole[name]) | stacked.isnan()).all()
    return whole


def test_initial_rows_do_not_depend_on_processes_or_sharding(workers):
    expected = together(workers(1).run(initial_rows, "row_wise"))
    for world, sharding in ((2, "row_wise"), (2, "column_wise"), (2, "data_parallel"), (4, "row_wise"), (4, CROWDED)):
        found = together(workers(world).run(initial_rows, sharding))
        for name, value in expected.items():
            assert torch.equal(found[name], value), (world, sharding, name)
    items, action = expected["item_table"], expected["feature_action"]
    assert (items[:5_000] != action).float().mean() > 0.99
    assert (items[:4_096] != items[4_096:8_192]).float().mean() > 0.99  # another generator from row 4096 on
    # a normal distribution cut at two deviations has 0.88 of its deviation
    assert abs(items.std() - 0.88 * 0.5) < 0.01 and abs(items.mean()) < 0.01 and items.abs().max() <= 1.0
    # no two rows and no two columns are alike
    assert len(items.unique(dim=0)) == 9_000 and items.T.corrcoef().fill_diagonal_(0).abs().max() < 0.06


def test_any_slice_of_an_endless_table_is_the_same():
    whole = torch.empty(9_000, 12)
    fill_rows(whole, "t", 0, 0, 1.0, seed=3)
    for row, column, rows, columns in ((0, 0, 10, 12), (4_090, 4, 20, 4), (4_096, 8, 1, 4), (8_191, 0, 809, 8)):
        part = torch.empty(rows, columns)
        fill_rows(part, "t", row, column, 1.0, seed=3)
        assert torch.equal(part, whole[row : row + rows, column : column + columns])
    other = torch.empty(9_000, 12)
    for table, seed in (("t", 4), ("u", 3)):
        fill_rows(other, table, 0, 0, 1.0, seed=seed)
        assert (other != whole).float().mean() > 0.99


def check_alike(sharding, rows):
    """Moments sharded like their weights, whole and cut to the first rows, are where they should be."""
    tables = small_tables(sharding, rows=rows)
    config = small_config()
    whole = full_tables(tables)
    model, _ = sharded_model(config, tables, full_tables(tables))
    parameters = {name: p for name, p in model.named_parameters() if p.numel()}
    held = 0
    for name, weight in table_states(model).items():
        table = name.split(".")[-2]
        local = parameters[name].detach().clone() if name in parameters else None
        moment = like_weight(weight, local)
        for count in (rows[0] + 9, rows[0], 13, 12, 1):
            if count > len(whole[table]):
                continue
            for value in (weight, moment):
                cut = clipped(value, count)
                if not is_sharded(cut):
                    assert torch.equal(cut, whole[table][:count])
                    continue
                assert cut.metadata().size == (count, tables.items.dim)
                covered = sum(s.shard_sizes[0] * s.shard_sizes[1] for s in cut.metadata().shards_metadata)
                assert covered == count * tables.items.dim
                for shard in cut.local_shards():
                    (row, column), (n, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                    assert torch.equal(shard.tensor, whole[table][row : row + n, column : column + columns])
                    held += 1
        if local is not None:  # they alias what they were made from
            for value in (moment, clipped(moment, 5)):
                for shard in value.local_shards() if is_sharded(value) else ():
                    assert shard.tensor.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return held


@pytest.mark.parametrize("sharding", [*SHARDINGS, CROWDED])
def test_moments_are_sharded_as_their_weights_are(workers, sharding):
    rows = CROWDED_ROWS if sharding == CROWDED else (ITEMS + 1, 12, 12)  # equal parts on both ranks
    held = workers(2).run(check_alike, sharding, rows)
    assert sum(held) or sharding == "data_parallel"


def refusal():
    tables = small_tables("row_wise", rows=(3, 7, 11))
    try:
        sharded_model(small_config(), tables, full_tables(tables))
    except ShardingError as error:
        return str(error)


def test_every_process_refuses_a_plan(workers):
    assert len(set(workers(4).run(refusal))) == 1
    assert workers(4).run(refusal)[3].startswith("tables.sharding: item_table has 3 rows")


def test_a_part_copied_from_an_accelerator_is_described_as_the_hosts():
    part = on_host(ShardMetadata([4, 0], [3, 8], "rank:1/cuda:1"))
    assert (part.shard_offsets, part.shard_sizes) == ([4, 0], [3, 8])
    assert (part.placement.rank(), part.placement.device()) == (1, torch.device("cpu"))
