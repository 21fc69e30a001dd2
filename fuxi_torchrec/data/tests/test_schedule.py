import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuxi_torchrec.data.schedule import Plan, Schedule, sequences_of, streams_of_rank, turns

LENGTHS = st.lists(st.sampled_from([0, 1, 2, 3, 7, 20, 21, 22, 400]), min_size=1, max_size=60)
PLANS = st.builds(
    Plan,
    max_length=st.sampled_from([5, 20, 1000]),
    truncation=st.sampled_from(["recent", "windows"]),
    batch_events=st.sampled_from([10, 64, 1000]),
    num_streams=st.sampled_from([4, 7, 16]),
    shuffle_blocks=st.sampled_from([1, 3]),
    seed=st.integers(0, 5),
)


def make(lengths, plan):
    lengths = np.asarray(lengths, np.int64)
    return Schedule(lengths, np.arange(len(lengths)) // 5, plan)


def key(schedule, batch):
    """A batch as a sorted list of (user, window)."""
    return sorted(zip(schedule.sequences.user[batch].tolist(), schedule.sequences.window[batch].tolist(), strict=True))


@given(LENGTHS, PLANS, st.integers(0, 3))
def test_an_epoch_holds_every_sequence_once(lengths, plan, epoch):
    schedule = make(lengths, plan)
    batches = [schedule.batch(epoch, step) for step in range(schedule.steps(epoch))]
    everything = sorted(k for batch in batches for k in key(schedule, batch))
    sequences = schedule.sequences
    assert everything == sorted(zip(sequences.user.tolist(), sequences.window.tolist(), strict=True))
    if plan.truncation == "recent":
        assert [user for user, _ in everything] == [n for n, length in enumerate(lengths) if length > 1]


@given(LENGTHS, PLANS, st.sampled_from([1, 2, 3, 4]))
def test_global_batches_do_not_depend_on_the_number_of_ranks(lengths, plan, world_size):
    schedule = make(lengths, plan)
    for step in range(schedule.steps(1)):
        together = [key(schedule, schedule.batch(1, step, rank, world_size)) for rank in range(world_size)]
        assert sorted(itertools.chain.from_iterable(together)) == key(schedule, schedule.batch(1, step))


@given(LENGTHS, PLANS)
def test_the_same_seed_gives_the_same_order_and_another_epoch_another(lengths, plan):
    one, two = make(lengths, plan), make(lengths, plan)
    orders = []
    for epoch in (0, 1):
        first = [one.batch(epoch, s).tolist() for s in range(one.steps(epoch))]
        assert first == [two.batch(epoch, s).tolist() for s in range(two.steps(epoch))]
        orders.append(list(itertools.chain.from_iterable(first)))
    if len(one.sequences) > 30:
        assert orders[0] != orders[1]


@given(LENGTHS, st.integers(1, 30))
def test_windows_cover_each_target_once(lengths, max_length):
    sequences = sequences_of(np.asarray(lengths, np.int64), Plan(max_length, "windows", batch_events=10))
    targets = []
    for user, window, cost in zip(sequences.user, sequences.window, sequences.cost, strict=True):
        assert 1 <= cost <= max_length
        begin = window * max_length
        targets += [(int(user), int(t)) for t in range(begin + 1, begin + cost + 1)]
    assert sorted(targets) == [(u, t) for u, n in enumerate(lengths) for t in range(1, n)]


@given(LENGTHS, PLANS, st.sampled_from([1, 2, 3]), st.sampled_from([None, 5, 30]))
def test_every_rank_has_the_same_number_of_micro_batches(lengths, plan, world_size, max_events):
    schedule = make(lengths, plan)
    for step in range(schedule.steps(0)):
        parts = [schedule.micro_batches(0, step, rank, world_size, max_events) for rank in range(world_size)]
        assert len({len(p) for p in parts}) == 1
        for rank, mine in enumerate(parts):
            assert np.concatenate(mine).tolist() == schedule.batch(0, step, rank, world_size).tolist()
            for part in mine:
                assert max_events is None or len(part) <= 1 or schedule.sequences.cost[part].sum() <= max_events


def test_batches_keep_to_their_budget_and_debts_are_paid():
    lengths = np.full(4000, 50)
    lengths[::500] = 5000
    plan = Plan(max_length=10_000, batch_events=4096)
    schedule = make(lengths, plan)
    sizes = [int(schedule.sequences.cost[schedule.batch(0, s)].sum()) for s in range(schedule.steps(0))]
    assert sum(sizes) == (lengths - 1).sum()
    # a stream that emitted 5,000 events at once then waits until its credit is positive again
    assert len(sizes) == pytest.approx(sum(sizes) / 4096, rel=0.25)
    assert max(np.cumsum(sizes) - 4096 * np.arange(1, len(sizes) + 1)) < 16 * 5000


@pytest.mark.parametrize("batch_users", [1, 4, 8, 24, 64])
def test_batches_of_users_have_that_many(batch_users):
    schedule = make([30] * 960, Plan(max_length=20, batch_users=batch_users))
    assert {len(schedule.batch(0, s)) for s in range(schedule.steps(0) - 1)} == {batch_users}


def test_streams_do_not_all_emit_in_the_same_steps():
    schedule = make([1025] * 1600, Plan(max_length=1024, batch_events=4096))
    sizes = [int(schedule.sequences.cost[schedule.batch(0, s)].sum()) for s in range(schedule.steps(0))]
    assert set(sizes[:-1]) == {4096}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("budget", [{"batch_users": 8}, {"batch_users": 24}, {"batch_events": 8 * 1024}])
def test_every_rank_has_its_share_of_every_step(world_size, budget):
    schedule = make([1025] * 1600, Plan(max_length=1024, **budget))
    loads = schedule.loads(0, world_size)
    assert loads.sum() == 1600 * 1024
    assert (loads[:, :-1].max(0) == loads[:, :-1].min(0)).all()
    for step in (0, 7):
        batches = [schedule.batch(0, step, rank, world_size) for rank in range(world_size)]
        assert loads[:, step].tolist() == [int(schedule.sequences.cost[batch].sum()) for batch in batches]


@pytest.mark.parametrize("num_streams", [1, 2, 3, 7, 16, 100])
def test_every_stream_has_a_turn_of_its_own(num_streams):
    assert sorted(turns(num_streams)) == list(range(num_streams))


def test_an_epoch_is_ordered_once_whatever_is_asked_of_others(monkeypatch):
    schedule = Schedule(np.arange(2, 50), np.zeros(48, np.int64), Plan(max_length=20, batch_events=100))
    made, make = [], schedule._make_epoch
    monkeypatch.setattr(schedule, "_make_epoch", lambda epoch: made.append(epoch) or make(epoch))
    for epoch in range(3):
        for step in range(schedule.steps(epoch)):
            schedule.batch(epoch, step)
            schedule.steps(0)
    assert made == [0, 1, 2]


def test_shuffling_keeps_few_blocks_open():
    plan = Plan(max_length=10, batch_users=4, num_streams=1, shuffle_blocks=2)
    schedule = make([5] * 100, plan)  # 20 blocks of 5 users
    order = np.concatenate([schedule.batch(0, s) for s in range(schedule.steps(0))])
    blocks = schedule.block[order].reshape(10, 10)
    assert all(len(set(group.tolist())) == 2 for group in blocks)
    assert order.tolist() != sorted(order.tolist())


def test_streams_are_shared_out_and_too_many_ranks_refused():
    owned = [list(streams_of_rank(rank, 3, 16)) for rank in range(3)]
    assert list(itertools.chain.from_iterable(owned)) == list(range(16))
    with pytest.raises(ValueError, match="17 ranks need at least as many streams, there are 16: raise num_streams"):
        streams_of_rank(0, 17, 16)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"batch_events": 5, "batch_users": 5}, "give one of batch_events and batch_users"),
        ({}, "give one of batch_events and batch_users"),
        ({"batch_events": 0}, "batch_events must be at least 1, not 0"),
        ({"batch_events": 5, "truncation": "all"}, "truncation must be 'recent' or 'windows', not 'all'"),
    ],
)
def test_plans_that_make_no_sense(settings_, message):
    with pytest.raises(ValueError, match=message):
        Plan(max_length=5, **settings_)
