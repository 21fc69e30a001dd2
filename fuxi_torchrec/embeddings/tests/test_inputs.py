import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fuxi_torchrec.embeddings import inputs as module
from fuxi_torchrec.embeddings.inputs import agree, bags, deduplicate, make_input, padded
from fuxi_torchrec.embeddings.tables import Tables
from fuxi_torchrec.embeddings.tests.small import (
    FEATURES,
    ITEMS,
    SEQUENCES,
    input_of,
    random_batch,
    small_tables,
    targets_of,
)
from fuxi_torchrec.events.histories import Ragged
from fuxi_torchrec.tasks.samplers import Candidates

TABLES = small_tables("row_wise")
NO_FEATURES = Tables(TABLES.items, ())

# --- deduplication ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=60))))
def test_distinct_ids_in_order_and_where_each_is(case):
    table_rows, ids = case
    ids = np.array(ids, np.int64)
    found = []
    for share in (0.0, 1e9):  # always by marking, always by sorting
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_MARK_SHARE", share)
            found.append(deduplicate(ids, table_rows))
    found.append(deduplicate(ids, table_rows))
    for unique, rows in found:
        assert unique.dtype == rows.dtype == np.int64
        assert unique.tolist() == sorted(set(ids.tolist()))
        np.testing.assert_array_equal(unique[rows], ids)


# --- one rank's input ------------------------------------------------------------------------------------------------


def test_every_item_is_looked_up_once():
    batch = random_batch(9, 1)
    given = make_input(batch, targets_of(batch, Candidates(np.array([3, 4, 9]))), TABLES)
    ids, targets = given.items.values(), given.targets
    assert len(ids) == len(ids.unique()) and (given.items.lengths() == 1).all()
    assert torch.equal(ids[given.input_rows], batch.items)
    kept = batch.target_weights > 0
    assert torch.equal(targets.positions, kept.nonzero().squeeze(1))
    assert torch.equal(ids[targets.items["targets"]], batch.targets[kept])
    assert torch.equal(targets.weights, batch.target_weights[kept])
    assert ids[targets.items["candidates"]].tolist() == [3, 4, 9]
    assert set(ids.tolist()) == {*batch.items.tolist(), *batch.targets[kept].tolist(), 3, 4, 9}
    assert given.features.keys() == FEATURES
    assert given.features["action"].values().tolist() == batch.features["action"].tolist()
    assert given.features["tags"].values().tolist() == batch.features["tags"].values.tolist()
    assert given.features["tags"].lengths().tolist() == np.diff(batch.features["tags"].bounds).tolist()


def test_the_target_column_is_where_the_pool_holds_the_target():
    batch = random_batch(9, 2)
    pool = np.array([2, 3, 5, 7, 11, 13, 17, 19])
    given = make_input(batch, targets_of(batch, Candidates(pool)), NO_FEATURES)
    targets = batch.targets[batch.target_weights > 0].tolist()
    column = given.targets.constants["target_column"]
    assert column.tolist() == [pool.tolist().index(t) if t in pool else -1 for t in targets]
    assert {-1} < set(column.tolist())
    assert given.features is None and "log_weights" not in given.targets.constants


def test_pools_of_each_position_have_no_column():
    batch = random_batch(9, 3)
    positions = int((batch.target_weights > 0).sum())
    pools = np.random.default_rng(0).integers(1, ITEMS, (positions, 4))
    given = make_input(batch, targets_of(batch, Candidates(pools)), NO_FEATURES)
    rows = given.targets.items["candidates"]
    assert "target_column" not in given.targets.constants
    assert rows.shape == (positions, 4)
    np.testing.assert_array_equal(given.items.values()[rows], pools)


@pytest.mark.parametrize("candidates", [Candidates(np.array([1, 2])), Candidates(np.zeros((0, 3), np.int64))])
def test_a_batch_without_events_is_an_input_too(candidates):
    batch = random_batch(0, 0)
    given = make_input(batch, targets_of(batch, candidates), TABLES)
    assert given.items.values().tolist() == candidates.ids.reshape(-1).tolist()
    assert len(given.input_rows) == len(given.targets.items["targets"]) == 0
    assert given.targets.items["candidates"].shape == candidates.ids.shape
    assert given.features.lengths().numel() == 0


def test_inputs_stay_as_they_are_on_the_host():
    given = input_of(0)
    assert given.to(torch.device("cpu")) is given


# --- bags ------------------------------------------------------------------------------------------------------------


def test_padding_adds_empty_bags_to_every_key():
    single = np.array([5, 6])
    several = Ragged(np.array([7, 8, 9]), np.array([0, 0, 3]))
    given = bags(["a", "b"], [single, several])
    filled = padded(given, 4)
    assert filled["a"].lengths().tolist() == [1, 1, 0, 0] and filled["a"].values().tolist() == [5, 6]
    assert filled["b"].lengths().tolist() == [0, 3, 0, 0] and filled["b"].values().tolist() == [7, 8, 9]
    assert padded(given, 2) is given
    nothing = bags(["a"], [np.zeros(0, np.int64)])
    assert padded(nothing, 2).lengths().tolist() == [0, 0]


# --- agreement -------------------------------------------------------------------------------------------------------


def agreed(pad, weightless=False):
    tables = small_tables("row_wise")
    mine = [input_of(dist.get_rank(), "shared", seed) for seed in range(3)]
    if weightless:
        for each in mine:
            each.targets.weights.zero_()
    ready = agree(mine, pad)
    for before, after in zip(mine, ready, strict=True):
        assert torch.equal(before.items.values(), after.items.values())
        assert torch.equal(before.features.values(), after.features.values())
        assert torch.equal(before.input_rows, after.input_rows)
    assert tables.needs_equal_bags
    counts = [(len(x.items.lengths()), len(x.features.lengths()) // 2) for x in ready]
    own = [(len(x.items.lengths()), len(x.input_rows)) for x in mine]
    return counts, own, [x.loss_scale for x in ready]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_processes_agree_on_bags_and_on_the_global_mean(workers, world):
    found = workers(world).run(agreed, True)
    weight = sum(float(input_of(r, "shared", s).targets.weights.sum()) for r in range(world) for s in range(3))
    own = np.array([own for _, own, _ in found])
    for counts, _, scales in found:
        np.testing.assert_array_equal(counts, own.max(0))  # of each micro-batch
        assert scales == pytest.approx([world / weight] * 3, rel=1e-6)
    assert SEQUENCES[1] == 0 and (world == 1 or own[1, 0, 1] == 0)


def test_bags_stay_uneven_where_they_may(workers):
    for counts, own, _ in workers(2).run(agreed, False):
        assert counts == own


def test_a_step_without_any_target_has_no_loss(workers):
    assert [scales for *_, scales in workers(2).run(agreed, True, True)] == [[0.0] * 3] * 2
