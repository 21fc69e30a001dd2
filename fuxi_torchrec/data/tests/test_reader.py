import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.tests.small import describe, make_dataset, random_histories, replace_rows
from fuxi_torchrec.data.writer import DatasetWriter
from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.log import LogSpec
from fuxi_torchrec.events.vocabulary import Vocabulary


@pytest.fixture
def histories():
    return random_histories(0, users=10, longest=20)


@pytest.fixture
def dataset(histories, tmp_path):
    return make_dataset(tmp_path / "set", histories)


def test_blocks_hold_the_histories(dataset, histories):
    reader = Reader(dataset)
    assert reader.users == 10
    assert len(reader.groups) == 4
    assert reader.lengths().tolist() == [len(h[0]) for h in histories]
    found = []
    for number in range(4):
        block = reader.block(number)
        for a, b in zip(block.offsets[:-1], block.offsets[1:], strict=True):
            found.append((block.items[a:b].tolist(), block.times[a:b].tolist()))
    assert found == [(h[0].tolist(), h[1].tolist()) for h in histories]
    assert reader.ids_of(np.array([3, 4, 5])).to_pylist() == [30, 40, 50]


def test_few_blocks_are_kept(dataset):
    reader = Reader(dataset, cache_bytes=1)
    for number in (0, 1, 2, 1):
        reader.block(number)
    assert list(reader._cache) == [1]


@pytest.mark.parametrize(("feature", "names"), [(None, []), ("single", ["action"]), ("multiple", ["tags"])])
def test_the_size_of_a_block_is_known_before_it_is_read(tmp_path, feature, names):
    dataset = make_dataset(tmp_path / "set", random_histories(3, 20, 30, weights=True), feature=feature)
    reader = Reader(dataset, names)
    for number, size in enumerate(reader.block_bytes().tolist()):
        block = reader.block(number)
        # Parquet counts an empty list as a value
        empty = int((np.diff(block.features["tags"].bounds) == 0).sum()) if feature == "multiple" else 0
        assert size == block.nbytes + 8 * empty


def bad_rows(kind):
    rows = {"user_id": [1, 2, 3], "item": [[1, 2], [3, 4], [5]], "timestamp": [[1, 2], [3, 4], [5]]}
    if kind == "lists differ in length":
        rows["timestamp"][1] = [3]
    elif kind == "times are not in order":
        rows["timestamp"][1] = [4, 3]
    elif kind.startswith("a time is not in"):
        rows["timestamp"][1] = [-3, 4] if "negative" in kind else [3, 2**62]
    elif kind == "a value is null":
        rows["item"][1] = [3, None]
    elif kind == "a list is null":
        rows["item"][1] = None
    else:
        rows["item"][1] = [3, 99]
    return pa.table(
        rows,
        schema=pa.schema(
            [("user_id", pa.int64()), ("item", pa.list_(pa.int32())), ("timestamp", pa.list_(pa.int64()))]
        ),
    )


KINDS = [
    *("lists differ in length", "times are not in order", "a value is null", "a list is null"),
    *("an item is not in 1 .. 50", "a time is not in 0 .. 7258118400", "a time is not in 0: negative"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_bad_rows_are_named_with_file_row_and_reason(tmp_path, kind, caplog):
    dataset = make_dataset(tmp_path / "set", random_histories(0, 3, 5), items=50)
    dataset = replace_rows(dataset, bad_rows(kind))
    with pytest.raises(DataError, match=r"part-00000.parquet: 1 bad rows, the first is row 1: " + kind.split(":")[0]):
        Reader(dataset).block(0)
    reader = Reader(dataset, on_bad_rows="skip")
    block = reader.block(0)
    assert np.diff(block.offsets).tolist() == [2, 0, 1]
    assert block.items.tolist() == [1, 2, 5]
    assert sum(reader.bad_rows.values()) == 1


@pytest.mark.parametrize(
    "values", [[[0], [3, 4]], [[0], [-1, 1]], [[[0]], [[3], [1, 4]]]], ids=["above", "below", "list"]
)
def test_a_feature_value_without_a_row_is_a_bad_row(tmp_path, values):
    nested = isinstance(values[0][0], list)
    kind = pa.list_(pa.list_(pa.int64())) if nested else pa.list_(pa.int64())
    good = [[[0]], [[3], [1, 2]]] if nested else [[0], [3, 1]]
    with DatasetWriter(tmp_path / "set", LogSpec(), {}) as out:
        columns = {"user_id": [7, 8, 8], "item": [1, 2, 3], "timestamp": [5, 6, 7], "size": [*good[0], *good[1]]}
        out.write(pa.table(columns))
        out.write_table("items.parquet", pa.table({"item_id": [1, 2, 3], "index": [1, 2, 3], "count": [1, 1, 1]}))
        out.finish(3, {}, frozenset())
    dataset = Dataset.open(tmp_path / "set")
    Reader(dataset, ["size"]).block(0)
    table = pq.read_table(dataset.file("part-00000.parquet"))
    table = table.set_column(table.schema.get_field_index("size"), "size", pa.array(values, kind))
    dataset = replace_rows(dataset, table)
    with pytest.raises(DataError, match=r"1 bad rows, the first is row 1: size is not in 0 \.\. 3"):
        Reader(dataset, ["size"]).block(0)


def test_a_directory_without_a_description_is_no_dataset(tmp_path):
    with pytest.raises(DataError, match=r"no dataset here: dataset.json is missing"):
        Dataset.open(tmp_path)
    with pytest.raises(DataError, match="no dataset here"):
        Dataset.open(tmp_path / "none")


def test_descriptions_that_cannot_be_used(dataset):
    path = dataset.file("dataset.json")
    plain = json.loads(dataset.info.to_json())
    for text, message in (
        (json.dumps({**plain, "version": 9}), "version 9, this software reads version 3; prepare the dataset again"),
        ("{}", "no 'version' in it; prepare the dataset again"),
        ("half a f", "not readable as JSON"),
    ):
        with open(path, "w") as file:
            file.write(text)
        with pytest.raises(DataError, match=message):
            Dataset.open(dataset.path)


def test_files_that_cannot_be_read(dataset):
    path = dataset.file("part-00000.parquet")
    rows = rows_of(dataset)
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"part-00000.parquet: damaged, cut short"):
        Reader(dataset)
    pq.write_table(pa.table({"user_id": [1]}), path)
    with pytest.raises(DataError, match=r"part-00000.parquet: damaged, cut short, or not written by this software"):
        Reader(dataset)
    parquet.write_table(path, pa.table({"user_id": [1]}))
    with pytest.raises(DataError, match=r"part-00000.parquet: another file than the one that was written"):
        Reader(dataset)
    one = replace_rows(dataset, pa.table({"user_id": [1]}))
    with pytest.raises(DataError, match="no column item, timestamp; the columns are user_id"):
        Reader(one)
    one = replace_rows(dataset, rows[:1])
    files = (dataclasses.replace(one.info.files[0], users=10),)
    ten = describe(one, files=files, users=10, length_histogram={"<=10": 10})
    with pytest.raises(DataError, match=r"1 users where dataset.json says 10: the dataset was changed"):
        Reader(ten)


def rows_of(dataset):
    return pq.read_table(dataset.file("part-00000.parquet"))


def with_column(table, name, values):
    return table.set_column(table.schema.get_field_index(name), name, values)


@pytest.mark.parametrize("name", ["item", "timestamp"])
def test_numbers_are_not_rounded_to_fit(dataset, name):
    table = rows_of(dataset)
    broken = with_column(table, name, table[name].cast(pa.list_(pa.float64())))
    with pytest.raises(DataError, match=rf"part-00000.parquet: column {name} is list<.*double>"):
        Reader(replace_rows(dataset, broken)).block(0)


@pytest.mark.parametrize("weight", [np.nan, np.inf, -1.0])
def test_weights_that_are_no_weights(tmp_path, weight):
    dataset = make_dataset(tmp_path / "set", random_histories(0, 3, 5, weights=True), items=50)
    weights = [list(each) for each in rows_of(dataset)["target"].to_pylist()]
    weights[1][0] = weight
    dataset = replace_rows(dataset, with_column(rows_of(dataset), "target", pa.array(weights, pa.list_(pa.float32()))))
    with pytest.raises(DataError, match="the first is row 1: a target weight is negative or not finite"):
        Reader(dataset).block(0)
    assert Reader(dataset, on_bad_rows="skip").block(0).lengths[1] == 0


@pytest.mark.parametrize("ids", [[1, 2, 2], [1, None, 2]])
def test_users_have_an_id_of_their_own(tmp_path, ids):
    dataset = make_dataset(tmp_path / "set", random_histories(0, 3, 5), items=50)
    dataset = replace_rows(dataset, with_column(rows_of(dataset), "user_id", pa.array(ids, pa.int64())))
    with pytest.raises(DataError, match="users without an id, or with one id"):
        Reader(dataset).ids_of(np.arange(3))
    with DatasetWriter(tmp_path / "other", LogSpec(), {}) as out:
        columns = {"item": pa.array([1, 1, 1], pa.int32()), "timestamp": [1, 2, 3]}
        out.write_users(pa.array(ids, pa.int64()), np.ones(3, np.int64), pa.table(columns))
        with pytest.raises(DataError, match="users must be given by rising ids, each once"):
            out.finish(1, {}, frozenset())


def test_features_that_do_not_exist(dataset):
    with pytest.raises(DataError, match="no feature colour; there are none"):
        Reader(dataset, features=["colour"])


def test_remote_paths_are_read_through_their_file_system(histories):
    dataset = make_dataset("memory://sets/one", histories)
    assert Reader(Dataset.open("memory://sets/one")).lengths().tolist() == [len(h[0]) for h in histories]
    assert len(dataset.vocabulary()) == dataset.info.items


def test_vocabularies_go_both_ways(dataset):
    vocabulary = dataset.vocabulary()
    assert vocabulary.index([100, 300, 7]).tolist() == [1, 3, 0]
    assert vocabulary.raw([1, 0, 3]) == [100, None, 300]
    with pytest.raises(DataError, match="item indices must be 0 to"):
        vocabulary.raw([10_000])
    with pytest.raises(DataError, match="item ids must be int32, as in the dataset"):
        vocabulary.index(["a"])
    names = Vocabulary(pa.array(["b", "a"]), np.array([2, 1]))
    assert names.index(["a", "b", "c"]).tolist() == [2, 1, 0]
