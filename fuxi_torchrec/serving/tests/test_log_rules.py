"""Refresh and a Recommender read events as the dataset's log was read: its condition, its columns, its rare items."""

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.log import LogSpec
from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.serving.http.service import create_app
from fuxi_torchrec.serving.log_filter import LogFilter
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.refresh.new_events import LogColumns
from fuxi_torchrec.serving.refresh.refresh import refresh
from fuxi_torchrec.serving.requests import Event
from fuxi_torchrec.serving.tests.exports import FEATURES, users_of
from fuxi_torchrec.serving.tests.random_export import DAY, DemoExport, write_demo_export

WHERE = {
    "where": "device <> 'bot' AND weight > 0 AND item_id <> 1003",
    "columns": {"device": "VARCHAR", "weight": "DOUBLE"},
}
RARE = {"min_item_events": 3, "rare_items": "drop"}


def export(tmp_path, log, **more):
    write_demo_export(tmp_path / "a", DemoExport(users=4, log=log, **more))
    return Bundle.open(tmp_path / "a").manifest.as_of + DAY


def append(live, time, items, columns=None, **more):
    return live.append([77] * len(items), items, [time] * len(items), columns=columns, **more)


def test_a_condition_decides_which_events_count(tmp_path):
    time = export(tmp_path, WHERE)
    columns = [
        {"device": device, "weight": weight} for device, weight in (("bot", 1), ("tv", 0.5), (None, 2), ("tv", -1))
    ]
    with Recommender.load(tmp_path / "a") as live:
        done = append(live, time, [1001, 1002, 1004, 1005], columns)
        assert (done.accepted, done.filtered) == (1, 3)
        done = append(live, time, [1003], [{"device": "tv", "weight": 1, "more": "is ignored"}])
        assert (done.accepted, done.filtered) == (0, 1)  # the item itself
        assert live.recommend([77], time)[0].events == 1
        assert live.recommend_history([1001, 1002], [time, time], time).events == 2  # nothing is said of them
        assert live.recommend_history([1001, 1002], [time, time], time, columns=columns[:2]).events == 1
    with Recommender.load(tmp_path / "a") as again:
        assert again.recommend([77], time)[0].events == 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (None, "event 0: column 'device' is missing: events are those where device <> 'bot'"),
        ([{"device": "tv"}], "event 0: column 'weight' is missing"),
        ([{"device": 5, "weight": 1}], "event 0: column 'device' must be VARCHAR, not 5"),
        ([{"device": "tv", "weight": "heavy"}], "event 0: column 'weight' must be DOUBLE, not 'heavy'"),
    ],
)
def test_a_column_that_is_missing_or_wrong_is_named(tmp_path, columns, message):
    time = export(tmp_path, WHERE)
    with Recommender.load(tmp_path / "a") as live, pytest.raises(ValueError, match=message):
        append(live, time, [1001], columns)
    event = {"user_id": 7, "item_id": 1001, "timestamp": time, **({"columns": columns[0]} if columns else {})}
    with TestClient(create_app(Recommender.load(tmp_path / "a"))) as client:
        answer = client.post("/append", json={"events": [event]})
        assert answer.status_code == 422 and message in answer.json()["detail"]
        good = {**event, "columns": {"device": "tv", "weight": 1}}
        bot = {**event, "columns": {"device": "bot", "weight": 1}}
        done = client.post("/append", json={"events": [good, bot]}).json()
        assert (done["accepted"], done["filtered"]) == (1, 1)


def test_a_condition_reads_no_files():
    secret = LogFilter(LogSpec(where="(SELECT count(*) FROM read_csv('/etc/passwd')) > 0"))
    with pytest.raises(ValueError, match="disabled by configuration"):
        secret.keep([Event(1, 1001, 5)])


def test_a_condition_reads_features_and_times_of_the_event_itself(tmp_path):
    where = "action = 'value-2' AND len(tags) > 1 AND day >= DATE '2020-02-01' AND timestamp > 5"
    log = {"where": where, "columns": {"day": "DATE"}}
    time = export(tmp_path, log, features=FEATURES, text_features=("action",))
    events = [("value-2", [1, 2], "2020-02-02"), ("value-2", [1, 2], "2020-01-02"), ("value-2", [1], "2020-02-02")]
    events.append(("value-1", [1, 2], "2020-02-02"))
    with Recommender.load(tmp_path / "a") as live:
        features = [{"action": action, "tags": tags} for action, tags, _ in events]
        done = append(live, time, [1001] * 4, [{"day": day} for *_, day in events], features=features)
        assert (done.accepted, done.filtered) == (1, 3)
        with pytest.raises(ValueError, match="event 0: feature 'tags' is missing"):
            append(live, time, [1001], [{"day": "2020-01-01"}], features=[{"action": "value-1"}])
        with pytest.raises(ValueError, match="event 0: column 'day' must be DATE, not 'soon'"):
            append(live, time, [1001], [{"day": "soon"}], features=features[:1])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("what", ["where", "target", "item"])
def test_nothing_that_a_manifest_says_reads_another_file(tmp_path, kind, what):
    """An export may be somebody else's."""
    (tmp_path / "secret.txt").write_text("1001")
    files = f"(SELECT count(*) FROM read_text('{tmp_path}/secret.txt'))"
    log = {"where": {"where": f"{files} = 1"}, "target": {"target": files}, "item": {"item": f"item_id + {files}"}}
    time = export(tmp_path, log[what])
    events = pa.table({"user_id": [77], "item_id": [1001], "timestamp": [time]})
    path = tmp_path / f"e.{kind}"
    pq.write_table(events, path) if kind == "parquet" else pyarrow.csv.write_csv(events, path)
    with pytest.raises(DataError, match="disabled by configuration"):
        refresh(tmp_path / "a", path, tmp_path / "b")


def test_rare_items_are_left_out_if_the_dataset_drops_them(tmp_path):
    time = export(tmp_path, RARE, other_items=(5,))
    (tmp_path / "e.csv").write_text(f"user_id,item_id,timestamp\n77,1001,{time}\n77,5,{time}\n77,6,{time}\n")
    summary = refresh(tmp_path / "a", tmp_path / "e.csv", tmp_path / "b")
    assert (summary.rare_items, summary.unknown_items) == (1, 1)
    assert users_of(tmp_path / "b")[77].history.items.tolist() == [1, 0]
    assert "1 events of rare items left out" in summary.lines()
    with Recommender.load(tmp_path / "a") as live:
        done = append(live, time, [1001, 5, 6])
        assert (done.accepted, done.unknown_items, done.rare_items) == (2, 1, 1)
        answer = live.recommend_history([1001, 5, 6], [time] * 3, time)
        assert (answer.events, answer.unknown_items) == (2, 2)


@pytest.mark.parametrize("log", [{"min_item_events": 3, "rare_items": "unknown"}, {}])
def test_unknown_items_stay_if_the_dataset_keeps_them(tmp_path, log):
    time = export(tmp_path, log)
    (tmp_path / "e.csv").write_text(f"user_id,item_id,timestamp\n77,6,{time}\n")
    refresh(tmp_path / "a", tmp_path / "e.csv", tmp_path / "b")
    assert users_of(tmp_path / "b")[77].history.items.tolist() == [0]


def test_a_log_of_a_service_on_an_export_with_more_items_is_read_by_the_rules_of_this_one(tmp_path):
    time = export(tmp_path, {})
    with Recommender.load(tmp_path / "a") as live:
        append(live, time, [1001, 6])
    write_demo_export(tmp_path / "b", DemoExport(users=4, log=RARE, seed=1, as_of=time))
    with Recommender.load(tmp_path / "b", log_dir=tmp_path / "a.log") as live:
        assert live.recommend([77], time)[0].events == 1


def test_refresh_reads_the_columns_of_the_datasets_log_unless_told_otherwise(tmp_path):
    columns = {"who": "BIGINT", "what": "BIGINT", "seconds": "DOUBLE"}
    log = {"user": '"who"', "item": '"what"', "time": "CAST(seconds AS BIGINT)", "columns": columns}
    time = export(tmp_path, log)
    (tmp_path / "e.csv").write_text(f"who,what,seconds\n77,1001,{time}.0\n")
    refresh(tmp_path / "a", tmp_path / "e.csv", tmp_path / "b")
    (tmp_path / "f.csv").write_text(f"user,what,when\n77,1001,{time}\n")
    with pytest.raises(DataError, match="no column who, seconds; the columns are user, what, when"):
        refresh(tmp_path / "a", tmp_path / "f.csv", tmp_path / "c")
    refresh(tmp_path / "a", tmp_path / "f.csv", tmp_path / "c", columns=LogColumns(user="user", time="when"))
    for name in ("b", "c"):
        assert users_of(tmp_path / name)[77].history.times.tolist() == [time]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_columns_keep_the_types_of_the_datasets_log(tmp_path, ending):
    log = {"where": "code = '007' AND weight IS NULL", "columns": {"code": "VARCHAR", "weight": "BIGINT"}}
    write_demo_export(tmp_path / "a", DemoExport(users=4, log=log, user_id_type="string"))
    time = Bundle.open(tmp_path / "a").manifest.as_of
    table = {"user_id": ["007", "007"], "item_id": [1001, 1002], "timestamp": [time, time], "code": ["007", "7"]}
    table |= {"weight": pa.nulls(2, pa.string())}  # as a CSV column without values
    path = tmp_path / f"e.{ending}"
    pyarrow.csv.write_csv(pa.table(table), path) if ending == "csv" else pq.write_table(pa.table(table), path)
    refresh(tmp_path / "a", path, tmp_path / "b")
    assert users_of(tmp_path / "b")["007"].history.items.tolist() == [1]


def test_bad_rows_are_treated_as_when_the_dataset_was_prepared(tmp_path):
    time = export(tmp_path, {"on_bad_rows": "skip", "target": "weight * 2", "columns": {"weight": "BIGINT"}})
    lines = [f"77,1001,{time},1", f"77,1002,{time},-1", f",1002,{time},1"]
    (tmp_path / "e.csv").write_text("\n".join(["user_id,item_id,timestamp,weight", *lines]))
    summary = refresh(tmp_path / "a", tmp_path / "e.csv", tmp_path / "b")
    assert summary.bad_rows == {"user is null": 1, "target weight is null, negative or not finite": 1}
    with pytest.raises(DataError, match=r"e\.csv row 2: target weight is null"):
        refresh(tmp_path / "a", tmp_path / "e.csv", tmp_path / "c", on_bad_rows="error")
