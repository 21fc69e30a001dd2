"""Ranks against counting, on one, two and four ranks."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fuxi_torchrec.embeddings.rows import ItemLookup
from fuxi_torchrec.embeddings.tests.small import DIM, here, sharded_model, small_config, small_tables
from fuxi_torchrec.evaluation import ranking
from fuxi_torchrec.evaluation.ranking import Queries, ShardedCatalogue
from fuxi_torchrec.tasks.base import Correction
from fuxi_torchrec.tasks.rank_metrics import CUTS, UNRANKED, RankMetrics

ROWS = 90
# users of each rank
USERS = {"uneven": (7, 0, 3, 12), "one": (0, 5, 0, 0), "none": (0, 0, 0, 0), "first": (9, 0, 0, 0)}


def table(integers=True):
    generator = torch.Generator().manual_seed(3)
    if integers:  # few different scores, all of them exact
        return torch.randint(-1, 2, (ROWS, DIM), generator=generator).float()
    return torch.randn(ROWS, DIM, generator=generator)


def corrected(queries, draw, integers):
    """Queries with windows: empty slots, unknown items, the target in some, biases of both signs."""
    count, width = len(queries.targets), 6
    ids = np.stack([draw.permutation(ROWS)[:width] for _ in range(count)]) if count else np.zeros((0, width), int)
    ids[draw.random(ids.shape) < 0.2] = 0
    own = (draw.random(count) < 0.5) & (ids != queries.targets.numpy()[:, None]).all(1)
    ids[own, 0] = queries.targets.numpy()[own]
    sizes = (count, width), (count, DIM)
    values = [draw.integers(-2, 3, size) if integers else draw.normal(size=size) for size in sizes]
    queries.correction = Correction(torch.from_numpy(ids), *(torch.from_numpy(each).float() for each in values))
    return queries


def queries_of(rank, users, candidates, filtered, integers=True, windows=False):
    draw = np.random.default_rng([5, rank])
    count = users[rank]
    vectors = draw.integers(-1, 2, (count, DIM)) if integers else draw.normal(size=(count, DIM))
    targets = draw.choice([0, *candidates.tolist()], count)
    targets[::4] = 0  # unknown
    lengths = draw.integers(0, 30, count)
    seen = draw.integers(0, ROWS, int(lengths.sum()))  # with repetitions, unknown ones, others than candidates
    owner = np.repeat(np.arange(count), lengths)
    seen[::5] = targets[owner][::5]  # the target may have been seen
    found = Queries(torch.from_numpy(vectors).float(), torch.from_numpy(targets))
    if filtered:
        found.seen, found.seen_lengths = torch.from_numpy(seen), torch.from_numpy(lengths)
    return corrected(found, draw, integers) if windows else found


def ranks_here(sharding, users, candidates, filtered, similarity="dot", integers=True, block=None, windows=False):
    tables = small_tables(sharding, rows=(ROWS, 7, 11))
    values = {t.name: table(integers) if t.rows == ROWS else torch.zeros(t.rows, DIM) for t in tables.all}
    model, _ = sharded_model(small_config(), tables, values)
    before = dict(ranking._BLOCK)
    ranking._BLOCK["cpu"] = block or before["cpu"]
    try:
        catalogue = ShardedCatalogue(ItemLookup(model.module.items), candidates, DIM, similarity, here())
        mine = queries_of(dist.get_rank(), users, candidates, filtered, integers, windows)
        first, counts = catalogue.ranks(mine)
        again, _ = catalogue.ranks(mine)  # a catalogue is used many times
        assert torch.equal(first, again)
    finally:
        ranking._BLOCK.update(before)
    return first.tolist(), counts.tolist(), catalogue.ids.tolist()


def counted(world, users, candidates, filtered, similarity="dot", integers=True, windows=False):
    """One user and one candidate after another."""
    rows = table(integers).double()
    found = []
    for rank in range(world):
        queries = queries_of(rank, users, candidates, filtered, integers, windows)
        seen = torch.split(queries.seen, queries.seen_lengths.tolist() if filtered else [0] * users[rank])
        each = zip(queries.vectors.double(), queries.targets.tolist(), seen, strict=True)
        for user, (vector, target, mine) in enumerate(each):
            if target == 0:
                found.append(UNRANKED)
                continue
            vectors = rows / rows.norm(dim=1, keepdim=True) if similarity == "cosine" else rows
            score = vectors @ (vector / vector.norm() if similarity == "cosine" else vector)
            if windows:
                ids = queries.correction.ids[user]
                score[ids] += vectors[ids] @ queries.correction.shift[user].double() + queries.correction.bias[user]
            others = [c for c in candidates.tolist() if c != target and c not in mine.tolist()]
            found.append(1 + sum(bool(score[c] > score[target]) for c in others))
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("filtered", [False, True], ids=["all", "unseen"])
def test_ranks_are_those_of_counting(workers, world, filtered):
    every = torch.arange(1, ROWS)
    some = every[every % 3 > 0]
    for candidates, users, block in (
        (every, USERS["uneven"], None),
        (some, USERS["uneven"], (16, 7)),  # a few users and items at a time
        (some, USERS["one"], None),
        (some, USERS["none"], None),
        (torch.tensor([4, 8, 9]), USERS["first"], None),  # fewer than ranks
        (torch.tensor([8]), USERS["uneven"], None),
    ):
        expected = counted(world, users, candidates, filtered)
        results = workers(world).run(ranks_here, "row_wise", users, candidates, filtered, block=block)
        for ranks, counts, _ in results:
            assert ranks == expected
            assert counts == list(users[:world])
        assert [i for *_, ids in results for i in ids] == candidates.tolist()


@pytest.mark.parametrize("sharding", ["table_wise", "column_wise", "data_parallel"])
def test_ranks_do_not_depend_on_the_sharding(workers, sharding):
    candidates = torch.arange(1, ROWS)
    for similarity in ("dot", "cosine"):
        expected = counted(2, USERS["uneven"], candidates, True, similarity, integers=False)
        for ranks, *_ in workers(2).run(
            ranks_here, sharding, USERS["uneven"], candidates, True, similarity, integers=False
        ):
            assert ranks == expected


@pytest.mark.parametrize("world", [1, 2, 4])
def test_corrected_scores_rank_as_counted(workers, world):
    every = torch.arange(1, ROWS)
    for candidates, filtered, block in ((every, False, None), (every[::2], True, (16, 7)), (every[:3], False, None)):
        setup = (USERS["uneven"], candidates, filtered)
        expected = counted(world, *setup, windows=True)
        assert expected != counted(world, *setup) or len(candidates) == 3
        for ranks, *_ in workers(world).run(ranks_here, "row_wise", *setup, block=block, windows=True):
            assert ranks == expected
        expected = counted(world, *setup, "cosine", integers=False, windows=True)
        for ranks, *_ in workers(world).run(ranks_here, "row_wise", *setup, "cosine", False, block, True):
            assert ranks == expected


def test_ties_and_unknown_targets_occur_in_these_tests():
    candidates = torch.arange(1, ROWS)
    ranks = counted(4, USERS["uneven"], candidates, False)
    assert UNRANKED in ranks and len(set(ranks)) > 5
    scores = table() @ queries_of(3, USERS["uneven"], candidates, False).vectors.T
    assert max(len(column.unique()) for column in scores.T) < ROWS / 3


def rows_by_id(sharding):
    tables = small_tables(sharding, rows=(ROWS, 7, 11))
    values = {t.name: table() if t.rows == ROWS else torch.zeros(t.rows, DIM) for t in tables.all}
    model, _ = sharded_model(small_config(), tables, values)
    wanted = [torch.tensor([5, 5, 89, 0]), torch.zeros(0, dtype=torch.int64)][dist.get_rank() % 2]
    found = ItemLookup(model.module.items).rows(wanted, DIM, torch.device("cpu"))
    return torch.equal(found, table()[wanted]) and not found.requires_grad


def test_every_process_asks_for_its_own_rows(workers):
    for sharding in ("row_wise", "table_wise", "column_wise", "data_parallel"):
        assert workers(2).run(rows_by_id, sharding) == [True, True]


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_their_definitions():
    draw = np.random.default_rng(1)
    ranks = [1, 5, 6, 10, 11, 50, 51, 200, 201, UNRANKED, *draw.integers(1, 300, 60).tolist(), UNRANKED]
    metrics = RankMetrics()
    for begin in range(0, len(ranks), 7):
        metrics.add(torch.tensor(ranks[begin : begin + 7]))
    metrics.add(torch.zeros(0, dtype=torch.int64))
    found = metrics.result()
    for k in CUTS:
        assert found[f"hr@{k}"] == pytest.approx(sum(r <= k for r in ranks) / len(ranks))
        gains = sum(1 / math.log2(r + 1) for r in ranks if r <= k)
        assert found[f"ndcg@{k}"] == pytest.approx(gains / len(ranks))
    assert found["mrr"] == pytest.approx(sum(1 / r for r in ranks if r != UNRANKED) / len(ranks))
    assert (found["users"], found["unknown_targets"]) == (len(ranks), 2)


def test_metrics_of_nobody_are_zero():
    assert set(RankMetrics().result().values()) == {0}
