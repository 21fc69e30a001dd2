import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.pages import rows_and_columns

FORMS = [
    {"use_dictionary": False, "compression": "none"},
    {"compression": "snappy", "data_page_size": 300},
    {"compression": "zstd", "data_page_version": "2.0", "row_group_size": 90},
]


def log(path, **options):
    generator = np.random.default_rng(0)
    columns = {name: generator.integers(0, 900, 400) for name in ("user", "item", "time")}
    text = [f"t{n}" for n in generator.integers(0, 50, 400)]
    tags = [[str(n)] * (n % 3) for n in range(400)]
    pq.write_table(pa.table({**columns, "text": text, "tags": tags}), path, **options)


@pytest.mark.parametrize("form", FORMS)
def test_every_flip_in_a_page_is_found(tmp_path, form):
    path, names = tmp_path / "log.parquet", ["user", "item", "text", "tags"]
    log(path, write_page_checksum=True, **form)
    assert rows_and_columns(str(path), names) == (400, ["user", "item", "time", "text", "tags"])
    whole, metadata = path.read_bytes(), pq.read_metadata(path)
    refused = 0
    for group in range(metadata.num_row_groups):
        for column in (0, 1, 3, 4):
            about = metadata.row_group(group).column(column)
            start = about.dictionary_page_offset or about.data_page_offset
            end = start + about.total_compressed_size
            for place in (end - 1, end - 5):  # between pages there are headers, which have no checksum
                changed = bytearray(whole)
                changed[place] ^= 4
                path.write_bytes(changed)
                with pytest.raises(DataError, match=r"log.parquet: damaged, column (user|item|text|tags)"):
                    rows_and_columns(str(path), names)
                refused += 1
    assert refused >= 8


def test_pages_of_columns_that_nobody_reads_are_not_looked_at(tmp_path):
    path = tmp_path / "log.parquet"
    log(path, write_page_checksum=True, **FORMS[0])
    about = pq.read_metadata(path).row_group(0).column(2)
    changed = bytearray(path.read_bytes())
    changed[about.data_page_offset + about.total_compressed_size - 1] ^= 4
    path.write_bytes(changed)
    rows_and_columns(str(path), ["user", "item"])
    with pytest.raises(DataError, match="column time"):
        rows_and_columns(str(path), ["user", "time"])


@pytest.mark.parametrize("form", FORMS)
def test_a_log_without_checksums_is_read_as_it_is(tmp_path, form):
    log(tmp_path / "log.parquet", **form)
    assert rows_and_columns(str(tmp_path / "log.parquet"), ["user"])[0] == 400


@pytest.mark.parametrize("form", FORMS)
def test_a_log_without_rows_is_whole(tmp_path, form):
    log(tmp_path / "log.parquet")
    empty = pq.read_table(tmp_path / "log.parquet").slice(0, 0)
    pq.write_table(empty, tmp_path / "empty.parquet", write_page_checksum=True, **form)
    assert rows_and_columns(str(tmp_path / "empty.parquet"), empty.column_names)[0] == 0
