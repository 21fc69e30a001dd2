"""What prepare refuses, and how it says so; nothing half-written stays behind."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from fuxi_torchrec.artifacts import OutputError
from fuxi_torchrec.data import writer
from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.prepare import PrepareOptions, prepare, prepare_synthetic
from fuxi_torchrec.data.synthetic import SyntheticConfig
from fuxi_torchrec.data.tests.logs import events, read, write, write_small_log
from fuxi_torchrec.events import sources
from fuxi_torchrec.events.errors import DataError


@pytest.fixture
def log(tmp_path):
    return write_small_log(tmp_path / "log.csv")


def refused(tmp_path, message, path, **more):
    options = more.pop("options", None)
    with pytest.raises(DataError, match=message) as caught:
        prepare(events(path, **more), tmp_path / "refused", options)
    assert not (tmp_path / "refused").exists()
    assert not list(tmp_path.glob(".*"))  # hidden, as all that goes away
    return str(caught.value)


def test_missing_columns(tmp_path):
    path = write(tmp_path / "log.csv", ["1,2,3"], "who,item,time")
    assert "log.csv: no column user; the columns are who, item, time" in refused(tmp_path, "no column", path)
    good = write(tmp_path / "good.csv", ["1,2,3"], "user,item,time")
    assert "no column colour" in refused(tmp_path, "no column", good, event_features=["colour"])


def test_event_features_that_cannot_be_tables(tmp_path):
    path = write(tmp_path / "log.csv", ["1,2,3,900000000,7", "1,2,4,900000049,8"], "user,item,time,category,a.b")
    message = refused(tmp_path, "feature column category", path, event_features=["category"])
    assert "about 2 values up to 900,000,049" in message and "Write them as text" in message
    with pytest.raises(DataError, match=r"feature column 'a\.b': a name with a dot or a slash"):
        events(path, event_features=["a.b"])


def test_null_ids_and_times_are_named_or_skipped(tmp_path, caplog):
    lines = ["1,a,1600000000", ",b,1600000001", "1,,1600000002", "1,d,", "1,e,-5", "1,f,1600000003"]
    path = write(tmp_path / "log.csv", lines, "user,item,time")
    message = refused(tmp_path, "bad rows", path)
    for part in (
        "1 rows: user is null; 1 rows: item is null; 1 rows: time is null; 1 rows: time is negative",
        "log.csv row 2: user is null",
        "row 3: item is null",
        "--on-bad-rows skip",
    ):
        assert part in message
    info = prepare(events(path), tmp_path / "set", PrepareOptions(on_bad_rows="skip"))
    assert [item for item, _ in read(tmp_path / "set")[1][1]] == ["a", "f"]
    assert info.skipped_rows == {"user is null": 1, "item is null": 1, "time is null": 1, "time is negative": 1}


def test_rows_are_counted_within_their_own_file(tmp_path):
    write(tmp_path / "logs" / "a.csv", ["1,a,5", "1,b,6"], "user,item,time")
    write(tmp_path / "logs" / "b.csv", ["1,a,5", ",b,6"], "user,item,time")
    assert "b.csv row 2: user is null" in refused(tmp_path, "bad rows", tmp_path / "logs")


@pytest.mark.parametrize(("time", "kind"), [("1600000000.5", "DOUBLE"), ("yesterday", "VARCHAR")])
def test_times_that_are_no_integers(tmp_path, time, kind):
    path = write(tmp_path / "log.csv", [f"1,a,{time}"], "user,item,time")
    message = refused(tmp_path, "column time is", path)
    assert f"column time is {kind}, for example" in message
    assert "times must be integers" in message


@pytest.mark.parametrize(
    ("time", "unit", "why"),
    [
        (1_600_000_000, "ms", "seconds: 1600000000 in milliseconds would be in the year 1970. Say --time-unit s"),
        (1_600_000_000_000, "s", "milliseconds: .* in seconds would be in the year 52671. Say --time-unit ms"),
        (1_600_000_000_000_000, "ms", "microseconds: .* in milliseconds would be in the year 52671"),
    ],
)
def test_times_of_another_unit_are_refused_unless_one_insists(tmp_path, time, unit, why):
    path = write(tmp_path / "log.csv", [f"1,a,{time}", f"1,b,{time}"], "user,item,time")
    message = refused(tmp_path, f"log.csv: times look like {why}", path, time_unit=unit)
    assert "insist with --accept-times" in message
    insist = PrepareOptions(accept_times=True)
    if time < 10**10:
        assert prepare(events(path, time_unit=unit), tmp_path / "set", insist).last_time == time
    else:  # nothing in this software takes times after 2200
        with pytest.raises(DataError, match=r"2 rows: time is after the year 2200\. First: .*log\.csv row 1"):
            prepare(events(path, time_unit=unit), tmp_path / "set", insist)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_times_near_the_end_of_64_bits_are_bad_rows(tmp_path, kind):
    path = tmp_path / f"log.{kind}"
    table = pa.table({"user": [1, 1, 2], "item": [7, 8, 7], "time": [1_600_000_000, 2**62, 1_600_000_001]})
    pq.write_table(table, path) if kind == "parquet" else pyarrow.csv.write_csv(table, path)
    message = refused(tmp_path, "1 rows: time is after the year 2200", path)
    assert f"log.{kind} row 2" in message
    info = prepare(events(path), tmp_path / "set", PrepareOptions(on_bad_rows="skip"))
    assert (info.events, info.last_time) == (2, 1_600_000_001)
    assert info.skipped_rows == {"time is after the year 2200": 1}


def test_a_last_event_in_the_future_is_a_warning(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(logging.Logger, "warning", lambda self, text, *args: said.append(text % args))
    path = write(tmp_path / "log.csv", ["1,a,1600000000", "1,b,4102358400"], "user,item,time")
    prepare(events(path), tmp_path / "set")
    assert [text.partition(":")[0] for text in said] == ["the last event, at 2099-12-31 00"]


def test_files_that_are_empty_cut_short_or_missing(tmp_path):
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    refused(tmp_path, "empty.csv: the file is empty, not even a header", empty)
    refused(tmp_path, "no events", write(tmp_path / "header.csv", [], "user,item,time"))
    pq.write_table(pa.table({"user": [1], "item": [1], "time": [1]}), tmp_path / "cut.parquet")
    content = (tmp_path / "cut.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[:-20])
    refused(tmp_path, r"cut.parquet: not a readable Parquet file, perhaps cut short", tmp_path / "cut.parquet")
    refused(tmp_path, "nowhere.csv: no such file", tmp_path / "nowhere.csv")
    (tmp_path / "nothing").mkdir()
    refused(tmp_path, r"no file ending in .parquet, .csv", tmp_path / "nothing")
    with pytest.raises(DataError, match=r"no ratings.dat below it, and no zip"):
        sources.ml_1m(str(tmp_path / "nothing"), str(tmp_path))


@pytest.mark.parametrize("names", [("a.csv", "b.tsv"), ("a.csv.gz", "b.tsv"), ("a.tsv", "b.parquet")])
def test_files_of_several_kinds(tmp_path, names):
    for name in names:
        write(tmp_path / "logs" / name, ["1,2,3"], "user,item,time")
    with pytest.raises(DataError, match=r"logs: both .* files; name one kind with a glob"):
        events(tmp_path / "logs")


def test_mistakes_in_sql_and_targets(log, tmp_path):
    refused(tmp_path, "nonsense", log, where="nonsense = 1")
    message = refused(tmp_path, "target weight", log, target_expression="weight - 1")
    assert "2 rows: target weight is null, negative or not finite" in message
    refused(
        tmp_path,
        "feature column weight is DOUBLE",
        write(tmp_path / "f.csv", ["1,a,5,x,1.5"]),
        event_features=["weight"],
    )
    refused(
        tmp_path,
        "rows: feature weight is negative. First: ",
        write(tmp_path / "n.csv", ["1,a,5,x,-1"]),
        event_features=["weight"],
    )
    refused(tmp_path, "DuckDB cannot start", log, options=PrepareOptions(memory_limit="lots"))


def test_an_output_that_exists_is_left_alone(log, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "precious").write_text("keep")
    with pytest.raises(OutputError, match="set exists: nothing is written over it, choose another output"):
        prepare(events(log), tmp_path / "set")
    assert os.listdir(tmp_path / "set") == ["precious"]
    assert sorted(os.listdir(tmp_path)) == ["log.csv", "set"]


def test_nothing_half_written_passes_for_a_dataset(log, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(writer.DatasetWriter, "finish", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare(events(log), tmp_path / "set")
    assert not (tmp_path / "set").exists()
    with pytest.raises(OSError, match="disk full"):
        prepare_synthetic(SyntheticConfig(users=3), "memory://half/written")
    with pytest.raises(DataError, match="no dataset here"):
        Dataset.open("memory://half/written")


def test_the_description_is_plain_json(log, tmp_path):
    prepare(events(log), tmp_path / "set")
    plain = json.loads((tmp_path / "set" / "dataset.json").read_text())
    assert plain["source"]["files"] == ["log.csv"]
    assert plain["length_histogram"] == {"<=2": 1, "<=5": 1}


def test_ids_that_are_neither_integers_nor_text(tmp_path):
    message = refused(
        tmp_path, "column user is DOUBLE", write(tmp_path / "f.csv", ["1.2,a,5", "1.4,a,5"], "user,item,time")
    )
    assert "ids must be integers of at most 64 bits, signed, or text" in message


def test_a_column_is_judged_by_all_of_its_rows(tmp_path):
    lines = [f"1,{i},{1_600_000_000 + i}" for i in range(30_000)]
    path = write(tmp_path / "log.csv", [*lines, "1,1,1600000000.5"], "user,item,time")
    refused(tmp_path, "column time is DOUBLE", path)


def test_rows_are_numbered_before_they_are_filtered(tmp_path):
    path = write(tmp_path / "log.csv", ["1,a,5", "2,a,5", ",a,5"], "user,item,time")
    message = refused(tmp_path, "bad rows", path, where="user IS DISTINCT FROM 1")
    assert "log.csv row 3: user is null" in message


@pytest.mark.parametrize("step", ["reading", "sorting and writing"])
def test_stopping_at_any_step_leaves_nothing(tmp_path, step):
    log = write_small_log(tmp_path / "log.csv")

    def stop(what, done, total):
        if what == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(events(log), tmp_path / "set", progress=stop)
    assert os.listdir(tmp_path) == ["log.csv"]


def test_two_preparations_into_one_output(log, tmp_path):
    tried = []

    def second(what, done, total):
        with pytest.raises(OutputError, match="set: another job is writing it: wait for it, or choose another"):
            prepare(events(log), tmp_path / "set")
        with pytest.raises(OutputError, match="another job is writing it"):
            prepare_synthetic(SyntheticConfig(users=3), f"{tmp_path}/set/")
        tried.append(what)

    prepare(events(log), tmp_path / "set", progress=second)
    assert tried and Dataset.open(tmp_path / "set").info.users == 2
    assert sorted(os.listdir(tmp_path)) == ["log.csv", "set"]


def test_what_a_killed_preparation_left_goes_away_with_the_next(log, tmp_path):
    code = (
        "import os, signal; from fuxi_torchrec.data.prepare import prepare\n"
        "from fuxi_torchrec.data.tests.logs import events\n"
        "kill = lambda what, *_: what.startswith('sorting') and os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare(events('log.csv'), 'set', progress=kill)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, timeout=60, check=False)
    assert done.returncode == -9
    # everything it had is under one name
    assert sorted(os.listdir(tmp_path)) == [".set.lock", ".set.partial", "log.csv"]
    assert list(tmp_path.glob(".set.partial/*/events.duckdb"))
    prepare(events(log), tmp_path / "set")
    assert sorted(os.listdir(tmp_path)) == ["log.csv", "set"]
