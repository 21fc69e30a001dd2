import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.errors import DataError

TABLE = pa.table({"user": ["a", "b", "c"], "item": [[1, 2], [], [3]], "weight": [0.5, 1.0, 2.0]})


def written(path, groups=3):
    with parquet.Writer(path, TABLE.schema, compression="lz4") as writer:
        for _ in range(groups):
            writer.write(TABLE)
    return writer


def test_any_parquet_reader_reads_the_file(tmp_path):
    path = tmp_path / "a.parquet"
    writer = written(path)
    assert pq.read_table(path, page_checksum_verification=True) == pa.concat_tables([TABLE] * 3)
    assert path.stat().st_size == writer.size


def test_columns_and_row_groups_come_back(tmp_path):
    path = tmp_path / "a.parquet"
    writer = written(path)
    file = parquet.open_file(path, writer.crc32)
    assert file.num_row_groups == 3
    assert file.read() == pa.concat_tables([TABLE] * 3)
    assert file.read_row_group(1, columns=["item"])["item"] == TABLE["item"]
    assert [len(batch) for batch in file.iter_batches(batch_size=4, columns=["weight"])] == [4, 4, 1]
    assert parquet.read_table(path, ["weight", "user"]).column_names == ["weight", "user"]


def test_a_table_in_an_object_store(tmp_path):
    path = "memory://place/a.parquet"
    fsspec.filesystem("memory").mkdir("/place")
    parquet.write_table(path, TABLE)
    assert parquet.read_table(path, ["item"])["item"] == TABLE["item"]


def test_a_footer_longer_than_the_first_read(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({f"column {n}": [n] for n in range(700)})
    parquet.write_table(path, table)
    assert pq.read_metadata(path).serialized_size > 2**16
    assert parquet.read_table(path, ["column 5"])["column 5"].to_pylist() == [5]


def test_a_file_without_rows(tmp_path):
    parquet.write_table(tmp_path / "a.parquet", TABLE.slice(0, 0))
    assert parquet.read_table(tmp_path / "a.parquet", ["item"]).num_rows == 0


def test_every_flipped_bit_and_every_cut_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    written(path, groups=1)
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    damaged = [bytearray(whole) for _ in whole]
    for place, content in enumerate(damaged):
        content[place] ^= 1 << int(generator.integers(8))
    for content in (*damaged[4:], *(whole[:size] for size in range(0, len(whole), 7))):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.parquet"):
            parquet.read_table(path, TABLE.column_names)


def test_another_file_in_its_place_is_refused(tmp_path):
    writer = written(tmp_path / "a.parquet", groups=1)
    written(tmp_path / "a.parquet", groups=2)
    with pytest.raises(DataError, match="another file"):
        parquet.open_file(tmp_path / "a.parquet", writer.crc32)


def test_files_of_others_and_missing_ones_are_refused_with_their_names(tmp_path):
    pq.write_table(TABLE, tmp_path / "other.parquet")
    for name, why in (("other.parquet", "not written by this software"), ("none.parquet", "none.parquet")):
        with pytest.raises(DataError, match=why):
            parquet.open_file(tmp_path / name)


def test_a_missing_column_is_named(tmp_path):
    written(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: no column price; the columns are user, item, weight"):
        parquet.read_table(tmp_path / "a.parquet", ["price", "item"])
