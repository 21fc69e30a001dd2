"""Files of features of items and users in a dataset: kinds, what is learned, what is refused, and --extend."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.prepare import PrepareOptions, prepare
from fuxi_torchrec.events.database import Database
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.feature_files import read_features
from fuxi_torchrec.events.feature_table import FeatureTable
from fuxi_torchrec.events.sources import events

HEADER = "user_id,item_id,timestamp\n"
LOG = [("u1", 10, 100), ("u1", 20, 200), ("u2", 20, 300), ("u2", 30, 400), ("u1", 40, 900)]
ITEMS = {
    "item_id": [10, 20, 30, 40, 99],
    "brand": ["a", "b", "b", "new", "a"],
    "tags": ["x|y", "", "y", "y| z ", "x"],
    "price": [1.0, 3.0, None, 5.0, 7.0],
    "level": [1, 2, 3, 4, 5],
    "text": [[1.0, 0.0], [0.0, 1.0], None, [1.0, 1.0], [2.0, 2.0]],
    "title": ["ten", "twenty", None, "forty", "none"],
}
COLUMNS = "brand tags:id:| price level:bucket:2 text title:display"


def write(path, columns):
    pq.write_table(pa.table(columns), path, write_page_checksum=True)
    return path


def made(tmp_path, name="data", log=LOG, items=ITEMS, columns=COLUMNS, **options):
    (tmp_path / f"{name}.csv").write_text(HEADER + "".join(f"{u},{i},{1_600_000_000 + t}\n" for u, i, t in log))
    file = write(tmp_path / f"{name}-items.parquet", items)
    source = events(str(tmp_path / f"{name}.csv"), "user_id", "item_id", "timestamp", "s")
    wanted = {"item_features": str(file), "item_columns": columns, "train_until": "1600000500", **options}
    prepare(source, tmp_path / name, PrepareOptions(**wanted))
    return Dataset.open(tmp_path / name)


def by_id(dataset):
    """Rows of the table by raw id."""
    table = dataset.features_of("item")
    return {raw: table.take(np.array([n])) for n, raw in enumerate(dataset.vocabulary().ids.to_pylist(), 1)}


def test_every_kind_is_read_learned_from_training_data_and_kept(tmp_path):
    dataset = made(tmp_path)
    about = {feature.name: feature for feature in dataset.info.item_features.features}
    assert dataset.feature_values("brand", "item").to_pylist() == ["b", "a"]  # "new" is of an item after the cut
    assert dataset.feature_values("tags", "item").to_pylist() == ["y", "x"]
    assert (about["price"].mean, about["price"].deviation) == (2.0, 1.0)
    assert about["level"].boundaries == (2.0,) and about["level"].rows == 3
    assert about["text"].width == 2 and about["text"].kind == "vector"
    rows = by_id(dataset)
    assert [int(rows[i].values["brand"][0]) for i in (10, 20, 30, 40)] == [2, 1, 1, 0]
    assert [rows[i].values["tags"].values.tolist() for i in (10, 20, 30, 40)] == [[2, 1], [], [1], [1, 0]]
    assert [int(rows[i].values["level"][0]) for i in (10, 20, 40)] == [1, 2, 2]
    inputs = rows[30].inputs()[0].tolist()
    assert inputs == [0.0, 1.0, 0.0, 0.0, 1.0]  # price and text are missing
    assert rows[40].inputs()[0].tolist() == [3.0, 0.0, 1.0, 1.0, 0.0]
    assert dataset.display()["title"].to_pylist()[dataset.vocabulary().ids.to_pylist().index(40)] == "forty"
    counts = dataset.info.item_features
    assert (counts.without, counts.others, counts.repeated) == (0, 1, 0)
    assert counts.unknown == {"brand": 1, "tags": 1}


def test_an_item_that_the_file_lacks_has_no_features(tmp_path):
    items = {name: values[:3] for name, values in ITEMS.items()}
    dataset = made(tmp_path, items=items)
    assert dataset.info.item_features.without == 1
    row = by_id(dataset)[40]
    assert not row.filled[0] and not row.inputs().any()


def test_kinds_follow_from_types_and_rows_that_repeat_are_counted(tmp_path):
    items = {name: [*values, values[0]] for name, values in ITEMS.items()}
    dataset = made(tmp_path, items=items, columns=None)
    kinds = {feature.name: feature.kind for feature in dataset.info.item_features.features}
    assert kinds == {"brand": "id", "tags": "id", "price": "number", "level": "id", "text": "vector", "title": "id"}
    assert dataset.info.item_features.repeated == 1


def test_csv_and_parquet_say_the_same(tmp_path):
    items = {name: values for name, values in ITEMS.items() if name != "text"}  # CSV has no lists
    columns = COLUMNS.replace(" text", "")
    (tmp_path / "items.csv").write_text(
        ",".join(items) + "\n"
        "10,a,x|y,1.0,1,ten\n20,b,,3.0,2,twenty\n30,b,y,,3,\n40,new,y| z ,5.0,4,forty\n99,a,x,7.0,5,none\n"
    )
    one = made(tmp_path, "one", items=items, columns=columns)
    two = made(tmp_path, "two", columns=columns, item_features=str(tmp_path / "items.csv"))
    assert one.info.item_features.features == two.info.item_features.features
    assert one.info.item_features.unknown == two.info.item_features.unknown
    assert str(one.features_of("item").to_arrow().to_pylist()) == str(two.features_of("item").to_arrow().to_pylist())
    assert one.display().equals(two.display())


@pytest.mark.parametrize("integers", [False, True])
def test_ids_may_be_lists_of_text_or_of_integers(tmp_path, integers):
    lists = [["x", "y"], [], ["y"], ["y", "z"], ["x"]]
    names = {"x": 7, "y": -3, "z": 11}
    tags = [[names[each] for each in some] for some in lists] if integers else lists
    dataset = made(tmp_path, items={**ITEMS, "tags": tags}, columns=COLUMNS.replace("tags:id:|", "tags"))
    assert dataset.feature_values("tags", "item").to_pylist() == (["-3", "7"] if integers else ["y", "x"])
    rows = by_id(dataset)
    assert [rows[i].values["tags"].values.tolist() for i in (10, 20, 30, 40)] == [[2, 1], [], [1], [1, 0]]


def test_an_extended_dataset_keeps_indices_and_statistics(tmp_path):
    first = made(tmp_path)
    items = {name: [values[2], values[3]] for name, values in ITEMS.items()}  # 10 and 20 keep what was said before
    again = made(tmp_path, "more", [*LOG, ("u3", 40, 450)], items, extend=str(tmp_path / "data"))
    assert again.feature_values("brand", "item").to_pylist() == ["b", "a", "new"]
    old, new = ({f.name: f for f in d.info.item_features.features} for d in (first, again))
    assert {n: (f.mean, f.deviation, f.boundaries) for n, f in old.items()} == {
        n: (f.mean, f.deviation, f.boundaries) for n, f in new.items()
    }
    before, after = by_id(first), by_id(again)
    for item in (10, 20):
        assert before[item].inputs().tolist() == after[item].inputs().tolist()
        assert before[item].values["tags"].values.tolist() == after[item].values["tags"].values.tolist()
        assert before[item].values["brand"].tolist() == after[item].values["brand"].tolist()
    assert int(after[40].values["brand"][0]) == 3
    with pytest.raises(DataError, match="has features of items: give --item-features"):
        made(tmp_path, "none", item_features=None, item_columns=None, extend=str(tmp_path / "data"))


@pytest.mark.parametrize(
    ("items", "columns", "said"),
    [
        ({"text": [[1.0, 2.0, 3.0]] * 5}, COLUMNS, "text has 3 elements, before it had 2"),
        (
            {},
            COLUMNS.replace("price", "price:bucket"),
            "price was a number in the dataset that is extended, not",
        ),
        ({}, COLUMNS.replace("tags:id:|", "tags"), "tags has one value in one dataset, and lists in the other"),
        (
            {},
            "brand tags:id:| price",
            "has item features brand, level, price, tags, text: the new file must",
        ),
    ],
)
def test_an_extended_dataset_has_features_of_the_same_kinds(tmp_path, items, columns, said):
    made(tmp_path)
    with pytest.raises(DataError) as error:
        made(tmp_path, "more", items={**ITEMS, **items}, columns=columns, extend=str(tmp_path / "data"))
    assert said in str(error.value)


def test_a_table_with_values_past_its_rows_is_refused(tmp_path):
    dataset = made(tmp_path)
    table, features = dataset.features_of("item").to_arrow(), dataset.info.item_features.features
    fewer = [replace(f, rows=f.rows - 1) if f.name == "brand" else f for f in features]
    with pytest.raises(DataError, match="here: brand has values outside of its 2 rows: make it again"):
        FeatureTable.from_arrow(table, fewer, "here")
    wider = [replace(f, width=3) if f.name == "text" else f for f in features]
    with pytest.raises(DataError, match="here: text has not 3 numbers a row"):
        FeatureTable.from_arrow(table, wider, "here")


def test_tables_survive_the_way_through_a_file(tmp_path):
    table = made(tmp_path).features_of("item")
    again = FeatureTable.from_arrow(table.to_arrow(), table.features, "here")
    assert str(again.to_arrow().to_pylist()) == str(table.to_arrow().to_pylist())  # nan is not itself
    assert np.array_equal(again.inputs(), table.inputs())


def test_features_are_part_of_the_fingerprint(tmp_path):
    one = made(tmp_path, "one").info.fingerprint
    other = made(tmp_path, "two", items={**ITEMS, "price": [1.0, 4.0, None, 5.0, 7.0]}).info.fingerprint
    assert one != other


def changed(**columns):
    return {**ITEMS, **columns}


@pytest.mark.parametrize(
    ("items", "columns", "said"),
    [
        ({k: v for k, v in ITEMS.items() if k != "item_id"}, COLUMNS, "no id column 'item_id'; the columns are brand"),
        (ITEMS, "brand colour", "no column colour; the columns are"),
        (changed(item_id=[10, 10, 30, 40, 99]), COLUMNS, "item_id 10 is there twice, with brand"),
        (
            changed(text=[[1.0], [0.0, 1.0], None, [1.0, 1.0], None]),
            COLUMNS,
            "text of 20 has 2 elements, others have 1",
        ),
        (changed(price=[1.0, float("nan"), None, 1.0, 1.0]), COLUMNS, "price of 20 is nan"),
        (changed(text=[[1.0, float("inf")], None, None, None, None]), COLUMNS, "text of 10 is inf"),
        (changed(item_id=["a", "b", "c", "d", "e"]), COLUMNS, "item ids are string, the log's are"),
        (changed(item_id=[1, 2, 3, 4, 5]), COLUMNS, "no item of the log is in it"),
        (changed(item_id=[10, None, 30, 40, 99]), COLUMNS, "1 rows have no item_id"),
        (ITEMS, "brand:number", "column brand is VARCHAR: that is no feature of kind number"),
        (ITEMS, "brand:colour", "a kind is id, bucket, number, vector or display, not 'colour'"),
        (ITEMS, "level:bucket:1", "buckets are 2 to 65536, not '1'"),
        (changed(price=[None] * 3 + [1.0, 2.0]), COLUMNS, "price: no row of the training data has a number"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, items, columns, said):
    with pytest.raises(DataError) as error:
        made(tmp_path, items=items, columns=columns)
    assert said in str(error.value)
    assert not (tmp_path / "data").exists()


def test_a_damaged_description_is_refused(tmp_path):
    made(tmp_path)
    path = tmp_path / "data" / "dataset.json"
    plain = json.loads(path.read_text())
    plain["item_features"]["features"][0]["rows"] = -1
    path.write_text(json.dumps(plain))
    with pytest.raises(DataError, match="damaged"):
        Dataset.open(tmp_path / "data")


def test_users_have_features_too(tmp_path):
    file = write(tmp_path / "users.parquet", {"user_id": ["u2", "u9"], "age": ["old", "young"]})
    dataset = made(tmp_path, user_features=str(file))
    table = dataset.features_of("user")
    assert table.filled.tolist() == [False, False, True]  # nobody, u1, u2
    assert table.values["age"].tolist() == [0, 0, 1]
    assert dataset.info.user_features.without == 1


@pytest.mark.parametrize("name", ["item_id", "brand", "price", "title"])
def test_damage_in_a_page_of_a_file_of_features_is_found_where_there_are_checksums(tmp_path, name):
    file = write(tmp_path / "items.parquet", ITEMS)
    group = pq.ParquetFile(file).metadata.row_group(0)
    (chunk,) = [c for n in range(group.num_columns) if (c := group.column(n)).path_in_schema == name]
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data = bytearray(file.read_bytes())
    data[start + chunk.total_compressed_size - 1] ^= 1
    file.write_bytes(data)
    with Database(in_memory=True) as database, pytest.raises(DataError, match=f"damaged, column {name}, "):
        read_features(database, str(file), "item_id")
