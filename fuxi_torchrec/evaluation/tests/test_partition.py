import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fuxi_torchrec.evaluation.partition import UserPartition


@given(
    st.lists(st.integers(1, 400), max_size=60),
    st.integers(1, 5),
    st.integers(1, 500),
    st.integers(1, 9),
    st.integers(1, 40),
)
def test_every_user_is_in_one_batch_in_order_and_batches_are_bounded(lengths, ranks, batch_events, most, wanted):
    users = np.arange(len(lengths)) * 3
    partition = UserPartition.of(users, np.array(lengths, np.int64), ranks, batch_events, most)
    flat = [user for batches in partition.batches for batch in batches for user in batch.tolist()]
    assert flat == users.tolist()
    assert len({len(batches) for batches in partition.batches}) == 1
    length_of = dict(zip(users.tolist(), lengths, strict=True))
    for batches in partition.batches:
        for batch in batches:
            assert len(batch) <= most
            assert len(batch) <= 1 or sum(length_of[user] for user in batch.tolist()) <= batch_events
    flushes = partition.flushes(wanted)
    assert len(flushes) == len(partition.batches[0])
    assert not flushes or flushes[-1]
    waiting = 0
    for number, flush in enumerate(flushes[:-1]):
        waiting += sum(len(batches[number]) for batches in partition.batches)
        assert flush == (waiting >= wanted)
        waiting = 0 if flush else waiting


def test_work_is_about_equal():
    lengths = np.array([1000] * 10 + [10] * 1000)
    partition = UserPartition.of(np.arange(len(lengths)), lengths, 2, 2**15, 10**6)
    work = [sum(int(lengths[batch].sum() + 32 * len(batch)) for batch in batches) for batches in partition.batches]
    assert max(work) < 1.1 * min(work)
