import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fuxi_torchrec.data import loader as loading
from fuxi_torchrec.data.batches import BatchMaker, Items
from fuxi_torchrec.data.loader import Loader
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.schedule import Plan, Position
from fuxi_torchrec.data.splits import ByTime, LeaveOneOut
from fuxi_torchrec.data.survey import survey
from fuxi_torchrec.data.tests.small import make_dataset, random_histories
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.hashing import mix


def everything_known(dataset, **more):
    return Items(np.arange(dataset.info.items + 1) > 0, **more)


@pytest.fixture(scope="module")
def histories():
    return random_histories(0, users=40, longest=60, weights=True)


@pytest.fixture(scope="module")
def dataset(histories, tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "set", histories)


def make_loader(dataset, plan, items=None, **more):
    return Loader(BatchMaker(Reader(dataset), LeaveOneOut(), items or everything_known(dataset)), plan, **more)


def train_part(history):
    """The training events of a history, restated."""
    targets = [i for i, w in enumerate(history[2]) if w > 0]
    test = targets[-1] if targets and targets[-1] >= 1 else None
    valid = targets[-2] if test is not None and len(targets) > 1 and targets[-2] >= 1 else None
    end = valid if valid is not None else test if test is not None else len(history[0])
    return tuple(column[:end] for column in history)


def users_of(batch):
    """A batch as plain lists, user by user."""
    out = []
    for n, (a, b) in enumerate(itertools.pairwise(batch.offsets.tolist())):
        part = [x[a:b].tolist() for x in (batch.items, batch.targets, batch.timestamps, batch.target_weights)]
        out.append((int(batch.users[n]), *part, int(batch.request_timestamps[n])))
    return out


def sequences(batches):
    return sorted(str(user) for batch in batches for user in users_of(batch))


@pytest.mark.parametrize("cut", ["recent", "windows"])
def test_training_batches_hold_what_the_histories_say(dataset, histories, cut):
    plan = Plan(max_length=16, truncation=cut, batch_events=200, seed=3)
    found = [user for batch in make_loader(dataset, plan).epoch(Position()) for user in users_of(batch)]
    wanted = []
    for row, history in enumerate(histories):
        items, times, weights = train_part(history)
        inputs = len(items) - 1
        if inputs < 1:
            continue
        begins = [max(0, inputs - 16)] if cut == "recent" else range(0, inputs, 16)
        for a in begins:
            b = min(a + 16, inputs)
            parts = (items[a:b], items[a + 1 : b + 1], times[a:b], weights[a + 1 : b + 1])
            wanted.append((row, *(np.asarray(p).tolist() for p in parts), int(times[b])))
    assert sorted(map(str, found)) == sorted(map(str, wanted))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_the_same_global_batches(dataset, world_size):
    plan = Plan(max_length=20, batch_events=300)
    alone = make_loader(dataset, plan)
    ranks = [
        make_loader(dataset, plan, rank=r, world_size=world_size, max_events_per_rank=64) for r in range(world_size)
    ]
    for step in range(alone.steps(0)):
        position = Position(0, step)
        together = [batch for loader in ranks for batch in loader.step(position)]
        assert sequences(together) == sequences(alone.step(position))
        assert len({len(loader.step(position)) for loader in ranks}) == 1
    assert ranks[0].balance(0) < 2.5


def test_worker_processes_change_nothing(dataset):
    plan = Plan(max_length=20, batch_events=300)
    none = [b for epoch in (0, 1) for b in make_loader(dataset, plan).epoch(Position(epoch))]
    steps = make_loader(dataset, plan, num_workers=2).converted(Position(), 2, loading._unchanged)
    two = [batch for step in steps for batch in step]
    assert [users_of(b) for b in none] == [users_of(b) for b in two]


@pytest.mark.parametrize("world_size", [1, 3])
def test_training_resumes_at_any_step_on_any_number_of_ranks(dataset, world_size):
    plan = Plan(max_length=20, batch_events=300)
    whole = list(make_loader(dataset, plan).epoch(Position(2, 0)))
    for step in (0, 1, len(whole) - 1):
        if step:
            assert whole[step - 1].end == Position(2, step)
        rest = []
        for rank in range(world_size):
            rest += list(make_loader(dataset, plan, rank=rank, world_size=world_size).epoch(Position(2, step)))
        assert sequences(rest) == sequences(whole[step:])
    assert whole[-1].end == Position(3, 0)


def test_evaluation_asks_for_the_target_after_its_whole_history(dataset, histories):
    maker = BatchMaker(Reader(dataset), LeaveOneOut(), everything_known(dataset))
    batch = maker.evaluation(np.arange(40), "test", max_length=10)
    rows = users_of(batch)
    assert [r[0] for r in rows] == [n for n, h in enumerate(histories) if any(w > 0 and i for i, w in enumerate(h[2]))]
    for row, items, targets, times, weights, request in rows:
        history = histories[row]
        test = max(i for i, w in enumerate(history[2]) if w > 0)
        begin = max(0, test - 10)
        assert items == history[0][begin:test].tolist()
        assert times == history[1][begin:test].tolist()
        assert (targets[-1], request) == (history[0][test], history[1][test])
        assert weights == [0.0] * (len(items) - 1) + [1.0]


def test_unknown_items_are_index_zero_and_never_a_target(dataset, histories):
    known = np.arange(dataset.info.items + 1) % 2 == 1
    plan = Plan(max_length=100, batch_events=10_000)
    (batch,) = make_loader(dataset, plan, Items(known)).epoch(Position())
    assert set(batch.items.unique().tolist()) <= {0, *range(1, 51, 2)}
    unknown = batch.targets == 0
    assert unknown.any()
    assert not batch.target_weights[unknown].any()


def test_some_inputs_are_hidden_the_same_ones_on_any_number_of_ranks(dataset):
    items = everything_known(dataset, oov_rate=0.2, seed=5)
    plan = Plan(max_length=20, batch_events=300)
    whole = list(make_loader(dataset, plan, items).epoch(Position()))
    hidden = torch.cat([b.items == 0 for b in whole]).float().mean()
    assert 0.1 < float(hidden) < 0.3
    assert not any((b.targets == 0).any() for b in whole)
    parts = [b for r in range(3) for b in make_loader(dataset, plan, items, rank=r, world_size=3).epoch(Position())]
    assert sequences(parts) == sequences(whole)
    other = list(make_loader(dataset, plan, items).epoch(Position(1, 0)))
    assert sequences(other) != sequences(whole)


def test_item_counts_are_those_of_the_training_split(dataset, histories):
    maker = BatchMaker(Reader(dataset), LeaveOneOut(), everything_known(dataset))
    wanted = np.zeros(51, np.int64)
    for history in histories:
        np.add.at(wanted, train_part(history)[0], 1)
    assert survey(maker, items=True).item_counts.tolist() == wanted.tolist()


def test_counts_of_targets_leave_out_first_events_and_context(tmp_path):
    histories = [
        ([1, 2, 3, 2, 1, 1], [1, 2, 3, 4, 5, 6], [1, 0, 2, 1, 1, 1]),
        ([2, 3], [1, 2], [1, 1]),
        ([1], [1], [1]),
    ]
    maker = BatchMaker(Reader(made := make_dataset(tmp_path / "set", histories)), LeaveOneOut(), everything_known(made))
    found = survey(maker, items=True)
    assert found.item_counts.tolist() == [0, 2, 3, 1], "training ends before the last two targets"
    assert found.target_counts.tolist() == [0, 0, 1, 1]


def users_with(maker, part):
    found = [survey(maker, part, items) for items in (False, True)]  # from lengths alone where they decide, or not
    for name in ("lengths", "train_lengths", "users_with"):
        assert getattr(found[0], name).tolist() == getattr(found[1], name).tolist()
    return found[0].users_with.tolist()


def test_users_with_a_target_are_those_that_can_be_evaluated(tmp_path):
    histories = [([1, 2, 3], [10, 20, 30]), ([1, 2, 3], [10, 11, 12]), ([2], [25]), ([3, 1, 2, 1], [1, 25, 26, 40])]
    dataset = make_dataset(tmp_path / "set", histories)
    whole = BatchMaker(Reader(dataset), LeaveOneOut(), everything_known(dataset))
    assert [users_with(whole, part) for part in ("valid", "test")] == [[0, 1, 3]] * 2
    timed = BatchMaker(Reader(dataset), ByTime(test_from=30, valid_from=20), everything_known(dataset))
    assert [users_with(timed, part) for part in ("valid", "test")] == [[0, 3]] * 2
    assert timed.evaluation(np.arange(4), "valid", 9).users.tolist() == [0, 3]


@pytest.mark.parametrize("kind", ["single", "multiple"])
def test_features_follow_their_events(tmp_path, kind):
    histories = random_histories(1, 12, 20)
    dataset = make_dataset(tmp_path / "set", histories, feature=kind)
    name = "action" if kind == "single" else "tags"
    maker = BatchMaker(Reader(dataset, features=[name]), LeaveOneOut(), everything_known(dataset))
    for batch in Loader(maker, Plan(max_length=8, batch_events=40)).epoch(Position()):
        feature = batch.features[name]
        if kind == "single":
            assert feature.tolist() == (batch.items % 4).tolist()
        else:
            assert np.diff(feature.bounds).tolist() == (batch.items % 3).tolist()
            assert feature.values.tolist() == torch.repeat_interleave(batch.items, batch.items % 3).tolist()


def test_empty_parts_are_legal_batches(dataset):
    loader = make_loader(dataset, Plan(max_length=5, batch_events=10))
    batch = loader.maker.training(loader.schedule, np.zeros(0, np.int64), 0)
    assert (len(batch), batch.events, batch.offsets.tolist()) == (0, 0, [0])


def test_a_dataset_with_nothing_to_train_on_is_refused(tmp_path):
    dataset = make_dataset(tmp_path / "set", [(np.array([1]), np.array([5]))] * 3)
    with pytest.raises(DataError, match="nothing to train on: no user has two events in the training split"):
        make_loader(dataset, Plan(max_length=5, batch_events=10))


def test_the_budget_counts_training_events_only(tmp_path):
    histories = random_histories(3, users=60, longest=80)
    dataset = make_dataset(tmp_path / "set", histories)
    split = ByTime(test_from=1_600_005_000)
    maker = BatchMaker(Reader(dataset), split, everything_known(dataset))
    loader = Loader(maker, Plan(max_length=1000, batch_events=100))
    wanted = [max(0, int((times < 1_600_005_000).sum()) - 1) for _, times in histories]
    assert (
        sum(batch.events for batch in loader.epoch(Position())) == sum(wanted) == loader.schedule.sequences.cost.sum()
    )


def test_only_the_last_micro_batch_of_a_step_ends_it(dataset):
    loader = make_loader(dataset, Plan(max_length=20, batch_events=300), max_events_per_rank=40)
    parts = loader.step(Position(0, 0))
    assert len(parts) > 1
    assert [part.end is not None for part in parts] == [False] * (len(parts) - 1) + [True]


def test_rates_that_make_no_sense(dataset):
    with pytest.raises(ValueError, match=r"oov_rate must be at least 0 and below 1, not 1.0"):
        everything_known(dataset, oov_rate=1.0)


def test_draws_are_spread_evenly():
    draws = mix(1, 2, np.arange(20_000, dtype=np.uint64)).astype(np.float64) / 2**64
    assert np.histogram(draws, 10, (0, 1))[0].min() > 1800


def reads_of_an_epoch(loader):
    """How often each block is read."""
    reader, reads = loader.maker.reader, []
    read = reader._read
    reader.forget()
    reader._read = lambda number: (reads.append(number), read(number))[1]
    for _ in loader.epoch(Position()):
        pass
    return len(reads)


def test_a_cache_smaller_than_the_blocks_that_are_mixed_is_named_with_what_to_set(tmp_path, caplog):
    dataset = make_dataset(tmp_path / "set", random_histories(0, 1000, 20, weights=True), None, 25, "single")
    plan = Plan(max_length=50, batch_users=32, num_streams=2, shuffle_blocks=8)

    def loader(cache_bytes, plan=plan, **more):
        caplog.clear()
        maker = BatchMaker(
            Reader(dataset, ["action"], cache_bytes=cache_bytes), LeaveOneOut(), everything_known(dataset)
        )
        return Loader(maker, plan, **more)

    enough = loader(10**9).cache_bytes()
    assert not caplog.records
    found = loader(enough)
    assert not caplog.records
    blocks = len(found.maker.reader.groups)
    assert reads_of_an_epoch(found) <= 1.5 * blocks
    assert loader(10**9, rank=1, world_size=2).cache_bytes() < enough
    found = loader(enough // 2)
    (record,) = caplog.records
    said = record.getMessage()
    assert f"Set shuffle_blocks (batch.shuffle_blocks) to {8 * (enough // 2) // enough} (it is 8)" in said
    assert f"cache_bytes={enough} (data.cache_mib={-(-enough // 2**20)})" in said
    assert reads_of_an_epoch(found) > 4 * blocks
    loader(enough // 2, Plan(max_length=50, batch_users=32, num_streams=2, shuffle_blocks=2))
    assert not caplog.records
    loader(enough, num_workers=2)
    assert "each of 2 reading processes" in caplog.text


def test_workers_share_the_cache(dataset, monkeypatch):
    own = make_loader(dataset, Plan(max_length=9, batch_users=4), num_workers=3)
    before = own.maker.reader.cache_bytes
    steps = loading._Steps(own, loading._unchanged)
    monkeypatch.setattr(loading, "get_worker_info", lambda: SimpleNamespace(dataset=steps, num_workers=3))
    monkeypatch.setattr(loading.os, "setpgrp", lambda: None)
    monkeypatch.setattr(loading, "end_with_parent", lambda _: None)
    loading._begin_worker(1, 0)
    assert own.maker.reader.cache_bytes == before // 3


@pytest.mark.parametrize("until", [None, 1_600_005_000])
@pytest.mark.parametrize("max_length", [1, 5, 99])
def test_histories_are_the_last_events_whatever_the_split(tmp_path, until, max_length):
    histories = random_histories(3, 20, 12)
    reader = Reader(make_dataset(tmp_path / "set", histories, 50, feature="single"), ["action"])
    known = np.arange(51) % 5 > 0
    batch, before = BatchMaker(reader, LeaveOneOut(), Items(known)).histories(np.arange(20), max_length, until)
    ids = reader.ids_of(batch.users.numpy()).to_pylist()
    expected = []
    for user, (items, times) in enumerate(histories):
        keep = times <= (2**62 if until is None else until)
        if keep.any():
            expected.append((user * 10, items[keep], times[keep]))
    assert ids == [user for user, *_ in expected]
    for n, (_, items, times) in enumerate(expected):
        own = slice(int(batch.offsets[n]), int(batch.offsets[n + 1]))
        assert batch.items[own].tolist() == [i if known[i] else 0 for i in items[-max_length:]]
        assert batch.timestamps[own].tolist() == times[-max_length:].tolist()
        assert batch.features["action"][own].tolist() == (items[-max_length:] % 4).tolist()
        assert int(batch.request_timestamps[n]) == times[-1]
        assert before[n] == max(len(items) - max_length, 0)
    assert not batch.target_weights.any() and not batch.targets.any()
