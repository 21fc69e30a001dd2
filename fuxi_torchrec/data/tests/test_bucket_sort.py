import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuxi_torchrec.data.bucket_sort import ROW_NUMBER, USER_NUMBER, BucketSort
from fuxi_torchrec.data.prepare import PrepareOptions, prepare
from fuxi_torchrec.data.tests.logs import events, read


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=300),
    st.integers(1, 40),
    st.integers(1, 100),
    st.sampled_from([0, 500, 10**9]),
    st.integers(1, 50),
)
def test_any_events_come_out_by_user_time_and_row(tmp_path_factory, log, group, bucket, budget, size):
    user = np.unique([user for user, _ in log], return_inverse=True)[1]
    time = np.array([time for _, time in log], np.uint32)
    lengths = np.bincount(user)
    spill = tmp_path_factory.mktemp("spill") / "file"
    sort = BucketSort(lengths, group, bucket, budget, str(spill), first_time=100)
    rows = np.arange(len(log))
    tags = [[int(row)] * int(row % 3) for row in rows]
    batch = pa.record_batch(
        {
            USER_NUMBER: user.astype(np.int32),
            ROW_NUMBER: rows.astype(np.uint32),
            "item": rows.astype(np.int32),
            "timestamp": time,
            "tags": tags,
        }
    )
    for begin in reversed(range(0, len(log), size)):  # in any order
        sort.add(batch.slice(begin, size))
    assert spill.exists() or budget
    order = np.lexsort((rows, time, user))
    groups = list(sort.sorted())
    table = pa.Table.from_batches([part.events for part in groups])
    assert table["item"].to_pylist() == rows[order].tolist()
    assert table["timestamp"].to_pylist() == (time[order].astype(np.int64) + 100).tolist()
    assert table["tags"].to_pylist() == [tags[row] for row in order]
    assert np.concatenate([part.lengths for part in groups]).tolist() == lengths.tolist()
    assert [part.first for part in groups] == np.cumsum([0, *(len(part.lengths) for part in groups[:-1])]).tolist()
    for part in groups:
        assert part.lengths.sum() == part.events.num_rows
        assert part.lengths.sum() <= group or len(part.lengths) == 1


def test_a_bucket_of_more_users_than_16_bits_count():
    users = np.arange(70_000)
    sort = BucketSort(np.ones(70_000, np.int64), 50_000, 100_000, 10**9, "")
    sort.add(pa.record_batch({USER_NUMBER: users[::-1], ROW_NUMBER: users, "timestamp": users}))
    parts = list(sort.sorted())
    assert [len(part.lengths) for part in parts] == [50_000, 20_000]
    assert np.concatenate([part.events["timestamp"] for part in parts]).tolist() == users[::-1].tolist()


@pytest.mark.parametrize("unit", ["s", "us"])  # microseconds over years need more than 32 bits
def test_what_does_not_fit_into_memory_is_sorted_from_disk(tmp_path, monkeypatch, unit):
    generator = np.random.default_rng(0)
    size = 20_000
    user, item = generator.integers(0, 400, size), generator.integers(0, 50, size)
    scale = 1 if unit == "s" else 10**6
    time = (1_600_000_000 + generator.integers(0, 3 * 10**7, size) // 10**5 * 10**5) * scale
    (tmp_path / "logs").mkdir()
    for number in range(4):
        part = slice(number * size // 4, (number + 1) * size // 4)
        table = pa.table({"user": user[part], "item": item[part], "time": time[part]})
        pq.write_table(table, tmp_path / "logs" / f"{number}.parquet", row_group_size=512)
    prepare(events(tmp_path / "logs", time_unit=unit), tmp_path / "memory")
    spilled = []
    empty = BucketSort._empty
    monkeypatch.setattr(BucketSort, "_empty", lambda self: (spilled.append(self._held), empty(self)))
    start = BucketSort.__init__
    monkeypatch.setattr(
        BucketSort,
        "__init__",
        lambda self, lengths, group, bucket, budget, *more: start(self, lengths, group, 1_000, 50_000, *more),
    )
    prepare(events(tmp_path / "logs", time_unit=unit), tmp_path / "disk", PrepareOptions(memory_limit="1GB"))
    assert len(spilled) > 2
    (one, users, _), (other, _, _) = read(tmp_path / "memory"), read(tmp_path / "disk")
    assert one.info.fingerprint == other.info.fingerprint
    for number, history in users.items():
        rows = np.flatnonzero(user == number)
        rows = rows[np.argsort(time[rows], kind="stable")]
        assert history == list(zip(item[rows].tolist(), time[rows].tolist(), strict=True))
