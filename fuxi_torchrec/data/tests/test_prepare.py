import gzip
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from fuxi_torchrec.data import prepare as preparing
from fuxi_torchrec.data import writer
from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.prepare import PrepareOptions, prepare, prepare_synthetic
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.synthetic import SyntheticConfig, generate
from fuxi_torchrec.data.tests.logs import events, read, write, write_small_log
from fuxi_torchrec.events import sources
from fuxi_torchrec.events.errors import DataError


@pytest.fixture
def log(tmp_path):
    return write_small_log(tmp_path / "log.csv")


def test_events_become_one_row_per_user_in_the_order_of_time(log, tmp_path):
    info = prepare(events(log), tmp_path / "set")
    _, users, _ = read(tmp_path / "set")
    t = 1_600_000_000
    assert users == {3: [("b", t), ("a", t + 9)], 7: [("b", t + 1), ("a", t + 5), ("b", t + 5)]}
    assert (info.users, info.items, info.events, info.first_time, info.last_time) == (2, 2, 5, t, t + 9)
    items = pq.read_table(tmp_path / "set" / "items.parquet").to_pylist()
    assert items == [{"item_id": "b", "index": 1, "count": 3}, {"item_id": "a", "index": 2, "count": 2}]
    assert not list(tmp_path.glob(".*"))  # hidden, as all that goes away


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
def test_ties_keep_the_order_of_files_and_rows(tmp_path, kind):
    expected = []
    for number in (2, 0, 1):  # written in another order than that of their names
        lines = [(1, number * 1000 + row, 1_600_000_000) for row in range(500)]
        path = tmp_path / "logs" / f"part{number}.{kind}"
        path.parent.mkdir(exist_ok=True)
        if kind == "parquet":
            user, item, time = zip(*lines, strict=True)
            pq.write_table(pa.table({"user": user, "item": item, "time": time}), path, row_group_size=64)
        else:
            text = "user,item,time\n" + "\n".join(",".join(map(str, line)) for line in lines)
            path.write_bytes(gzip.compress(text.encode()) if kind == "csv.gz" else text.encode())
    for number in (0, 1, 2):
        expected += [number * 1000 + row for row in range(500)]
    prepare(events(tmp_path / "logs"), tmp_path / "set")
    _, users, _ = read(tmp_path / "set")
    assert [item for item, _ in users[1]] == expected


def test_globs_string_ids_and_timestamps(tmp_path):
    write(tmp_path / "a1.csv", ["ann,x,2020-01-01 00:00:05", "bob,y,2020-01-01 00:00:01"], "user,item,time")
    write(tmp_path / "a2.csv", ["ann,z,2020-01-01 00:00:04"], "user,item,time")
    write(tmp_path / "b.csv", ["eve,z,2020-01-01 00:00:04"], "user,item,time")
    prepare(events(tmp_path / "a*.csv", time_unit="ms"), tmp_path / "set")
    dataset, users, _ = read(tmp_path / "set")
    assert users == {"ann": [("z", 1577836804000), ("x", 1577836805000)], "bob": [("y", 1577836801000)]}
    assert dataset.info.time_unit == "ms"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_named_like_patterns_are_read_once_each(tmp_path, kind):
    (tmp_path / "logs").mkdir()
    names = ["log1", "log[1]", "log*", "log?"]
    for number, name in enumerate(names):
        table = pa.table({"user": [number], "item": [5], "time": [1_600_000_000]})
        path = tmp_path / "logs" / f"{name}.{kind}"
        pq.write_table(table, path) if kind == "parquet" else pyarrow.csv.write_csv(table, path)
    prepare(events(tmp_path / "logs"), tmp_path / "set")
    assert {user: len(rows) for user, rows in read(tmp_path / "set")[1].items()} == {0: 1, 1: 1, 2: 1, 3: 1}


def test_features_targets_and_conditions(log, tmp_path):
    source = events(log, event_features=["action", "weight"], target_expression="weight * 0.5", where="action <> 'buy'")
    info = prepare(source, tmp_path / "set")
    _, _, table = read(tmp_path / "set")
    rows = table.to_pylist()
    assert rows[1]["target"] == [0.0, 0.5]
    assert rows[1]["weight"] == [0, 1]
    names = {r["index"]: r["value"] for r in pq.read_table(tmp_path / "set" / "feature-action.parquet").to_pylist()}
    assert [names[i] for i in rows[1]["action"]] == ["view", "click"]
    assert info.has_target
    features = {feature.name: feature for feature in info.features}
    assert (features["action"].rows, features["action"].vocabulary) == (3, True)
    assert (features["weight"].rows, features["weight"].vocabulary) == (2, False)


def test_lists_of_values_per_event(tmp_path):
    table = {"user": [1, 1], "item": [5, 6], "time": [2, 1], "tags": [[1, 2], None]}
    pq.write_table(
        pa.table(
            table,
            schema=pa.schema(
                [("user", pa.int64()), ("item", pa.int64()), ("time", pa.int64()), ("tags", pa.list_(pa.int32()))]
            ),
        ),
        tmp_path / "log.parquet",
    )
    info = prepare(events(tmp_path / "log.parquet", event_features=["tags"]), tmp_path / "set")
    _, _, rows = read(tmp_path / "set")
    assert rows["tags"].to_pylist() == [[[], [1, 2]]]
    assert info.features[0].multiple
    assert info.features[0].rows == 3


def test_k_core_is_iterated(tmp_path):
    # item c has one event; without it user 3 has one event; without user 3 item b has one, then user 2 one
    lines = ["1,a,1", "1,a,2", "1,a,3", "2,a,4", "2,b,5", "3,b,6", "3,c,7"]
    write(tmp_path / "log.csv", lines, "user,item,time")
    prepare(events(tmp_path / "log.csv", min_user_events=2, min_item_events=2), tmp_path / "set")
    assert list(read(tmp_path / "set")[1]) == [1]


def test_rare_items_stay_as_index_0_if_asked_for(tmp_path):
    # without c, user 3 has one event: it counts all the same, and b stays frequent
    lines = ["1,a,1", "1,a,2", "2,a,4", "2,b,5", "3,b,6", "3,c,7", "4,b,8"]
    write(tmp_path / "log.csv", lines, "user,item,time")
    rules = {"min_user_events": 2, "min_item_events": 2, "rare_items": "unknown"}
    info = prepare(events(tmp_path / "log.csv", **rules), tmp_path / "set")
    dataset, users, _ = read(tmp_path / "set")
    assert users == {1: [("a", 1), ("a", 2)], 2: [("a", 4), ("b", 5)], 3: [("b", 6), (None, 7)]}
    assert (info.items, info.events) == (2, 6)
    assert Reader(dataset).block(0).items.tolist() == [1, 1, 1, 2, 2, 0]
    with pytest.raises(DataError, match=r"log\.csv: every item is rare: none has 9 events"):
        prepare(events(tmp_path / "log.csv", min_item_events=9, rare_items="unknown"), tmp_path / "none")


def test_a_dataset_says_how_its_log_was_read(log, tmp_path):
    source = events(log, event_features=["action"], target_expression="weight * 2", where="action <> 'buy'")
    prepare(source, tmp_path / "set", PrepareOptions(on_bad_rows="skip"))
    found = Dataset.open(tmp_path / "set").info.log
    assert (found.user, found.where, found.target) == ('"user"', "action <> 'buy'", "weight * 2")
    assert (found.features, found.on_bad_rows, found.time_unit) == (("action",), "skip", "s")
    kinds = {"user": "BIGINT", "item": "VARCHAR", "time": "BIGINT", "action": "VARCHAR", "weight": "BIGINT"}
    assert found.columns == kinds


def test_extending_keeps_every_index_and_appends_the_new(log, tmp_path):
    prepare(events(log), tmp_path / "old")
    t = 1_700_000_000
    new = write(tmp_path / "new.csv", [f"7,c,{t},view,1", f"9,a,{t},view,1", f"9,d,{t},view,1", f"9,d,{t},view,1"])
    info = prepare(events(new), tmp_path / "set", PrepareOptions(extend=str(tmp_path / "old")))
    items = pq.read_table(tmp_path / "set" / "items.parquet").to_pylist()
    assert [(r["item_id"], r["index"], r["count"]) for r in items] == [
        ("b", 1, 0),
        ("a", 2, 1),
        ("d", 3, 2),
        ("c", 4, 1),
    ]
    assert info.items == 4
    with pytest.raises(DataError, match="has times in 's', this source in 'ms'"):
        prepare(events(new, time_unit="ms"), tmp_path / "x", PrepareOptions(extend=str(tmp_path / "old")))
    numbers = write(tmp_path / "numbers.csv", [f"7,5,{t},view,1"])
    with pytest.raises(DataError, match="has item_id as text, this source as integer"):
        prepare(events(numbers), tmp_path / "x", PrepareOptions(extend=str(tmp_path / "old")))


def test_extending_keeps_the_indices_of_features_too(tmp_path):
    prepare(
        events(write(tmp_path / "1.csv", ["1,a,5,click,1", "1,b,6,click,1", "1,a,7,buy,1"]), event_features=["action"]),
        tmp_path / "old",
    )
    more = write(tmp_path / "2.csv", ["1,a,8,buy,1", "1,a,9,aaa,1", "1,a,9,aaa,1", "1,a,9,aaa,1"])
    prepare(events(more, event_features=["action"]), tmp_path / "new", PrepareOptions(extend=str(tmp_path / "old")))
    rows = pq.read_table(tmp_path / "new" / "feature-action.parquet").to_pylist()
    assert [(r["value"], r["index"]) for r in rows] == [("click", 1), ("buy", 2), ("aaa", 3)]


def test_extending_lets_features_grow_but_not_beyond_reason_and_keeps_their_kind(tmp_path):
    columns, header = {"event_features": ["category"]}, "user,item,time,category"
    prepare(events(write(tmp_path / "one.csv", ["1,2,3,900000"], header), **columns), tmp_path / "one")
    options = PrepareOptions(extend=str(tmp_path / "one"))
    later = write(tmp_path / "two.csv", ["1,2,3,900000", "1,2,4,1000001"], header)
    assert prepare(events(later, **columns), tmp_path / "two", options).features[0].rows == 1_000_002
    corrupt = write(tmp_path / "corrupt.csv", ["1,2,3,900000", f"1,2,4,{2**40}"], header)
    with pytest.raises(DataError, match=r"values up to 1,099,511,627,776: .* In .*one it has 900,001 rows: mend"):
        prepare(events(corrupt, **columns), tmp_path / "three", options)
    text = write(tmp_path / "three.csv", ["1,2,3,a"], header)
    with pytest.raises(DataError, match=r"feature column category was integers in .*one, here it is text"):
        prepare(events(text, **columns), tmp_path / "three", options)


def test_columns_named_like_our_own_change_nothing(tmp_path):
    header = "user,item,time,n,_row,filename,file_row_number"
    lines = [f"1,{i},5,{9 - i},{9 - i},x,{9 - i}" for i in range(3)]
    prepare(events(write(tmp_path / "log.csv", lines, header)), tmp_path / "csv")
    table = pa.table(
        {"user": [1] * 3, "item": [0, 1, 2], "time": [5] * 3, "file_row_number": [3, 2, 1], "filename": ["x"] * 3}
    )
    pq.write_table(table, tmp_path / "log.parquet")
    prepare(events(tmp_path / "log.parquet"), tmp_path / "parquet")
    for name in ("csv", "parquet"):
        assert [item for item, _ in read(tmp_path / name)[1][1]] == [0, 1, 2]
    for features in (["target"], ["n", "n"], ["item"]):
        with pytest.raises(DataError, match="is named twice, or like one of the dataset's own"):
            events(tmp_path / "log.csv", event_features=features)


def test_nulls_inside_lists_are_dropped(tmp_path):
    table = pa.table({"user": [1], "item": [5], "time": [2], "tags": pa.array([[1, None, 2]], pa.list_(pa.int64()))})
    pq.write_table(table, tmp_path / "log.parquet")
    prepare(events(tmp_path / "log.parquet", event_features=["tags"]), tmp_path / "set")
    assert read(tmp_path / "set")[2]["tags"].to_pylist() == [[[1, 2]]]


def test_long_users_and_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "ROW_GROUP_EVENTS", 500)
    monkeypatch.setattr(writer, "FILE_EVENTS", 2_000)
    generator = np.random.default_rng(0)
    lengths = [10, 3_000, 5, 700, 450, 40]
    user = np.repeat([1, 2, 3, 4, 5, 6], lengths)
    time = generator.permutation(len(user)) + 1_600_000_000
    item = generator.integers(0, 9, len(user))
    pq.write_table(pa.table({"user": user, "item": item, "time": time}), tmp_path / "log.parquet")
    info = prepare(events(tmp_path / "log.parquet"), tmp_path / "set")
    _, users, _ = read(tmp_path / "set")
    assert [len(history) for history in users.values()] == lengths
    for number, history in users.items():
        order = np.argsort(time[user == number])
        assert history == list(
            zip(item[user == number][order].tolist(), np.sort(time[user == number]).tolist(), strict=True)
        )
    groups = []
    for file in info.files:
        parquet = pq.ParquetFile(tmp_path / "set" / file.name)
        tables = [parquet.read_row_group(n, ["item"])["item"] for n in range(parquet.num_row_groups)]
        groups.append([[len(row) for row in table.to_pylist()] for table in tables])
    # row groups of 500 events, or of one user; a file ends with the row group that reaches 2,000
    assert groups == [[[10], [3_000]], [[5], [700], [450, 40]]]


# --- published layouts -----------------------------------------------------------------------------------------------


def test_movielens_1m_as_published(tmp_path):
    text = "1::1193::5::978300760\n1::661::3::978302109\n1::914::3::978300760\n2::661::4::978298413\n"
    (tmp_path / "ml-1m").mkdir()
    (tmp_path / "ml-1m" / "ratings.dat").write_text(text)
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as archive:
        archive.writestr("ml-1m/ratings.dat", text)
    for number, path in enumerate((tmp_path / "ml-1m", tmp_path / "ml-1m" / "ratings.dat", tmp_path / "ml-1m.zip")):
        prepare(sources.ml_1m(str(path), str(tmp_path)), tmp_path / f"set{number}")
        _, users, _ = read(tmp_path / f"set{number}")
        # a tie: the file's order decides, and with it which event is the last
        assert users == {1: [(1193, 978300760), (914, 978300760), (661, 978302109)], 2: [(661, 978298413)]}


def test_movielens_20m_as_published(tmp_path):
    write(tmp_path / "ratings.csv", ["1,2,3.5,1112486027", "1,29,3.5,1112484676"], "userId,movieId,rating,timestamp")
    prepare(sources.ml_20m(str(tmp_path), str(tmp_path)), tmp_path / "set")
    assert read(tmp_path / "set")[1] == {1: [(29, 1112484676), (2, 1112486027)]}


def test_kuairand_as_published(tmp_path):
    header = "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view"
    header += ",play_time_ms"
    t = 1_650_000_000_000
    one = [f"0,{v},20220408,1400,{t + n},1,0,0,0,0,{int(v == 9)},0,500" for n, v in enumerate([5, 5, 6, 9, 5])]
    two = [f"1,5,20220422,1400,{t + 99},1,0,0,0,0,0,0,500", f"1,9,20220422,1400,{t + 98},1,0,0,0,0,0,0,500"]
    write(tmp_path / "data" / "log_standard_4_08_to_4_21_27k_part1.csv", one, header)
    write(tmp_path / "data" / "log_standard_4_22_to_5_08_27k_part1.csv", two, header)
    write(tmp_path / "data" / "log_random_4_22_to_5_08_27k.csv", two, header)
    info = prepare(sources.kuairand_27k(str(tmp_path / "data"), min_item_events=2), tmp_path / "set")
    assert read(tmp_path / "set")[1] == {0: [(5, t), (5, t + 1), (5, t + 4)], 1: [(5, t + 99)]}
    assert info.time_unit == "ms"
    prepare(sources.kuairand_27k(str(tmp_path / "data"), keep_negative=True, min_item_events=2), tmp_path / "all")
    assert len(read(tmp_path / "all")[1][0]) == 4
    with pytest.raises(DataError, match=r"no events are left after filtering"):
        prepare(sources.kuairand_27k(str(tmp_path / "data")), tmp_path / "none")
    with pytest.raises(DataError, match="no log_standard"):
        sources.kuairand_27k(str(tmp_path / "nowhere"))


def test_kuairec_as_published(tmp_path):
    header = "user_id,video_id,play_duration,video_duration,time,date,timestamp,watch_ratio"
    lines = [
        f"{u},{v},13838,10867,2020-07-05 00:08:23.438,20200705,{1593878903.438 + 10 * v + u},1.27"
        for u in range(5)
        for v in range(5)
    ]
    write(tmp_path / "KuaiRec" / "data" / "big_matrix.csv", [*lines, "9,9,1,1,x,1,1593878903.5,1.0"], header)
    info = prepare(sources.kuairec(str(tmp_path / "KuaiRec"), str(tmp_path)), tmp_path / "set")
    _, users, _ = read(tmp_path / "set")
    assert users[2][1] == (1, 1593878915438)
    assert (info.users, info.items, info.events, info.time_unit) == (5, 5, 25, "ms")


def test_synthetic_histories_as_a_dataset(tmp_path):
    config = SyntheticConfig(users=30, seed=2, items=400)
    info = prepare_synthetic(config, tmp_path / "set")
    _, users, _ = read(tmp_path / "set")
    wanted = {}
    for block in generate(config):
        for user, item, time in zip(block.user.tolist(), block.item.tolist(), block.timestamp.tolist(), strict=True):
            wanted.setdefault(user, []).append((item, time))
    assert users == wanted
    assert info.events == sum(map(len, wanted.values()))
    assert Dataset.open(tmp_path / "set").info.source["synthetic"]["seed"] == 2


TAGGED = [("1", "a", 5, ["x", "y"]), ("1", "b", 6, []), ("2", "a", 7, ["y", "y", "z"]), ("2", "b", 8, None)]


def tagged_log(path, texts=TAGGED):
    """The same events with tags as a list, or in one text."""
    if path.suffix == ".csv":
        lines = [f"{user},{item},{time},{' | '.join(tags or [])}" for user, item, time, tags in texts]
        return write(path, lines, "user,item,time,tags")
    columns = dict(zip(("user", "item", "time", "tags"), map(list, zip(*texts, strict=True)), strict=True))
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize(("name", "split"), [("log.csv", {"tags": "|"}), ("log.parquet", None)])
def test_several_texts_of_an_event_are_values_of_one_vocabulary(tmp_path, name, split):
    source = events(tagged_log(tmp_path / name), event_features=["tags"], split_features=split)
    info = prepare(source, tmp_path / "set")
    (tags,) = info.features
    assert (tags.multiple, tags.vocabulary, tags.rows) == (True, True, 4)
    assert info.log.split == (split or {})
    dataset, _, table = read(tmp_path / "set")
    assert dataset.feature_values("tags").to_pylist() == ["y", "x", "z"]
    assert table["tags"].to_pylist() == [[[2, 1], []], [[1, 1, 3], []]]
    more = [("3", "a", 9, ["w", "z"])]
    source = events(tagged_log(tmp_path / f"more.{name}", more), event_features=["tags"], split_features=split)
    prepare(source, tmp_path / "next", PrepareOptions(extend=str(tmp_path / "set")))
    dataset, _, table = read(tmp_path / "next")
    assert dataset.feature_values("tags").to_pylist() == ["y", "x", "z", "w"]
    assert table["tags"].to_pylist() == [[[4, 3]]]


def test_what_cannot_be_split_is_named(tmp_path):
    path = tagged_log(tmp_path / "log.csv")
    with pytest.raises(DataError, match="to be split, but no feature: tags"):
        events(path, split_features={"tags": "|"})
    source = events(path, event_features=["user"], split_features={"user": "|"})
    with pytest.raises(DataError, match=r"log\.csv: feature column user is BIGINT: only text can be split"):
        prepare(source, tmp_path / "set")


def test_the_command_line_splits_features(tmp_path, capsys):
    from pipelines.prepare import main

    path = tagged_log(tmp_path / "log.csv")
    columns = ["--user-column", "user", "--item-column", "item", "--time-column", "time", "--time-unit", "s"]
    arguments = [
        "events",
        "--input",
        str(path),
        "--output",
        str(tmp_path / "set"),
        *columns,
        "--event-features",
        "tags",
    ]
    with pytest.raises(SystemExit):
        main([*arguments, "--split-features", "tags"])
    assert "'tags' is not a column and a delimiter, A=|" in capsys.readouterr().err
    assert main([*arguments, "--split-features", "tags=|"]) == 0
    assert Dataset.open(tmp_path / "set").feature_values("tags").to_pylist() == ["y", "x", "z"]
