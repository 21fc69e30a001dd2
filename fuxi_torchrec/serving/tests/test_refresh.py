"""A refreshed export is the export that would have been made of everything at once."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from fuxi_torchrec.artifacts import OutputError
from fuxi_torchrec.encoders.tests import causal_mean
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.export.bundle import HISTORIES, ITEMS, STATES, USERS, Bundle, ExportError
from fuxi_torchrec.export.parts import part_name
from fuxi_torchrec.export.states import StateFile
from fuxi_torchrec.serving.refresh.new_events import read_events
from fuxi_torchrec.serving.refresh.refresh import refresh
from fuxi_torchrec.serving.tests.exports import (
    FEATURES,
    Log,
    anchors_of,
    check_equals_full_export,
    export_of,
    random_log,
    users_of,
    without_features,
)
from fuxi_torchrec.serving.tests.random_export import DAY, START, DemoExport, write_demo_export

DEMO = DemoExport(items=40, max_length=24, state_min_events=10, users_per_part=5)
DEMO = replace(DEMO, model={**DEMO.model, "max_positions": 32})
ROOT = Path(__file__).parents[3]


def cut(log, draw, users):
    """The log in two at a random place of each user's, the second part mixed or not; the users at the end have nothing
    in the first part.
    """
    before, after = Log(), Log()
    for user in users:
        rows = log.of(user)
        place = int(draw.integers(0, len(rows) + 1)) if user < len(users) - 2 else 0
        before.rows += rows[:place]
        after.rows += rows[place:]
    if draw.random() < 0.5:  # users and times mixed; only events of one user and time stay in order
        keys = [(row[0], row[2]) for row in after.rows]
        ties = {key: iter([row for row in after.rows if (row[0], row[2]) == key]) for key in keys}
        after.rows = [next(ties[keys[n]]) for n in draw.permutation(len(keys))]
    return before, after


def moved_anchors(logs, demo, users):
    return sum(anchors_of([len(log.of(user)) for log in logs], demo)[1] for user in users)


@pytest.mark.parametrize("seed", range(11))
def test_refreshes_equal_a_full_export(tmp_path, seed):
    """The last three with an encoder whose states grow; every other one with windows, some longer than any history."""
    draw = np.random.default_rng(seed)
    demo = replace(
        DEMO, features=FEATURES if seed % 2 else (), similarity="dot" if seed % 3 == 0 else "cosine", seed=seed
    )
    if seed % 4 == 1:
        demo = replace(demo, item_id_type="string")
    if seed >= 8:
        demo = replace(demo, model={"kind": causal_mean.KIND, "dim": 16, "max_positions": 32})
    if seed % 2 == 0:
        demo = replace(demo, repeats={"window": (3, 9, 100)[seed % 3], "periods": (DAY, 7 * DAY)})
    users = list(range(14))
    log = random_log(draw, demo, users, most=70)
    before, after = cut(log, draw, users)
    first, second = cut(after, draw, users)
    known = users[:-2]  # the last two are new
    export_of(tmp_path / "full", before, known, demo)
    summary = refresh(tmp_path / "full", first.write(tmp_path / "1.parquet", demo.features), tmp_path / "r1")
    there = {*known, *(row[0] for row in first.rows)}
    check_equals_full_export(tmp_path / "r1", [before, first], demo, there)
    assert summary.reanchored_users == moved_anchors([before, first], demo, users)
    summary = refresh(
        tmp_path / "r1",
        second.write(tmp_path / "2.parquet", demo.features),
        tmp_path / "r2",
        requery_all=bool(seed % 2),
    )
    logs = [before, first, second]
    found = check_equals_full_export(tmp_path / "r2", logs, demo, there | {row[0] for row in second.rows})
    moved = moved_anchors(logs, demo, users)
    assert summary.reanchored_users == moved - moved_anchors(logs[:2], demo, users) and moved > 0
    assert all(one.row["events"] <= 32 for one in found.values())
    assert not summary.late_events
    stored = [path.name for path in (tmp_path / "r2" / STATES).iterdir()]
    assert bool(stored) == (seed < 8) == bool(Bundle.open(tmp_path / "r2").manifest.state_bytes)
    if seed % 2:
        assert {one.row["as_of"] for one in found.values()} == {summary.as_of}


def small(tmp_path, users=12, most=20, seed=1):
    draw = np.random.default_rng(seed)
    log = random_log(draw, DEMO, range(users), most)
    export_of(tmp_path / "a", log, range(users), DEMO)
    return log, max(row[2] for row in log.rows)


def same_content(one, other):
    a, b = users_of(one), users_of(other)
    assert a.keys() == b.keys()
    for user in a:
        assert {k: v for k, v in a[user].row.items() if k not in ("embedding", "state_row")} == {
            k: v for k, v in b[user].row.items() if k not in ("embedding", "state_row")
        }
        assert (a[user].row["embedding"] == b[user].row["embedding"]).all()
        assert a[user].history.items.tolist() == b[user].history.items.tolist()
    return True


def test_applying_the_same_events_again_changes_nothing(tmp_path):
    _, last = small(tmp_path)
    events = Log([(3, 1001, last, {}), (3, 1002, last + 5, {}), (50, 1003, last + 6, {})])
    first = refresh(tmp_path / "a", events.write(tmp_path / "e.parquet"), tmp_path / "b")
    assert (first.touched_users, first.new_users, first.events) == (2, 1, 3)
    # the same command once more, as a scheduler may do
    again = refresh(tmp_path / "a", tmp_path / "e.parquet", tmp_path / "b")
    assert again.already_done
    # the same events, in another file, on the refreshed export
    third = refresh(tmp_path / "b", events.write(tmp_path / "other.csv"), tmp_path / "c")
    assert third.applied_before and not third.touched_users
    assert same_content(tmp_path / "b", tmp_path / "c")
    fourth = refresh(tmp_path / "c", tmp_path / "e.parquet", tmp_path / "d")
    assert fourth.applied_before and same_content(tmp_path / "b", tmp_path / "d")


def test_untouched_parts_are_the_same_files(tmp_path):
    _, last = small(tmp_path)
    events = Log([(0, 1001, last + 1, {})]).write(tmp_path / "e.csv")
    summary = refresh(tmp_path / "a", events, tmp_path / "b")
    assert (summary.parts_rewritten, summary.parts_linked) == (1, 2)
    for folder in (USERS, HISTORIES):
        for number, same in ((0, False), (1, True), (2, True)):
            name = part_name(folder, number)
            assert os.path.samefile(tmp_path / "a" / name, tmp_path / "b" / name) == same
    assert os.path.samefile(tmp_path / "a/tables.safetensors", tmp_path / "b/tables.safetensors")
    # asking everybody again leaves histories and states as they are
    refresh(tmp_path / "b", events, tmp_path / "c", as_of=last + 5 * DAY, requery_all=True)
    assert {one.row["as_of"] for one in users_of(tmp_path / "c").values()} == {last + 5 * DAY}
    assert os.path.samefile(tmp_path / "b" / part_name(STATES, 1, "bin"), tmp_path / "c" / part_name(STATES, 1, "bin"))


def test_late_events_are_counted_and_left_out(tmp_path):
    log, last = small(tmp_path)
    user = next(u for u in range(12) if len(log.of(u)) > 3)
    mine = log.of(user)[-1][2]
    late = [(user, 1001, mine - 1, {}), (user, 1002, START - DAY, {})]
    events = Log([*late, (user, 1003, mine, {}), (user, 1004, last + 9, {})]).write(tmp_path / "e.csv")
    summary = refresh(tmp_path / "a", events, tmp_path / "b")
    assert summary.late_events == 2
    new = without_features([(user, 1003, mine, {}), (user, 1004, last + 9, {})])
    check_equals_full_export(tmp_path / "b", [log, new], DEMO, range(12))
    only_late = Log(late).write(tmp_path / "late.csv")
    assert refresh(tmp_path / "a", only_late, tmp_path / "c").parts_linked == 3


def test_forgotten_users_are_gone(tmp_path):
    log, last = small(tmp_path)
    events = Log([(1, 1001, last + 1, {}), (2, 1002, last + 2, {}), (77, 1001, last + 3, {})])
    summary = refresh(tmp_path / "a", events.write(tmp_path / "e.csv"), tmp_path / "b", forget=[2, 11, 77, 500])
    assert (summary.forgotten_users, summary.unknown_forgotten, summary.forgotten_events) == (2, 2, 2)
    found = users_of(tmp_path / "b")
    assert found.keys() == set(range(12)) - {2, 11}
    check_equals_full_export(tmp_path / "b", [log, without_features(events.rows[:1])], DEMO, set(range(12)) - {2, 11})
    # and they are in no file of the new export
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.manifest.users == 10
    for path in (*bundle.parts(USERS), *bundle.parts(HISTORIES)):
        assert not {2, 11, 77, 500} & set(pq.read_table(path)["user_id"].to_pylist())
    records = sum(len(StateFile.open(path)) for path in bundle.parts(STATES))
    assert records == bundle.manifest.states == sum(one.row["state_row"] >= 0 for one in found.values()) > 0
    assert not os.path.samefile(tmp_path / "a" / part_name(USERS, 2), tmp_path / "b" / part_name(USERS, 2))


def test_everybody_can_be_forgotten(tmp_path):
    _, last = small(tmp_path, users=3)
    events = Log([(9, 1001, last, {})]).write(tmp_path / "e.csv")
    refresh(tmp_path / "a", events, tmp_path / "b", forget=[0, 1, 2])
    assert users_of(tmp_path / "b").keys() == {9}
    refresh(tmp_path / "b", Log([(9, 1001, last, {})]).write(tmp_path / "e.csv"), tmp_path / "c", forget=[9])
    assert not users_of(tmp_path / "c")


def test_a_damaged_state_is_encoded_again(tmp_path):
    log, last = small(tmp_path, most=30)
    found = users_of(tmp_path / "a")
    users = [user for user, one in found.items() if user < 5 and one.row["state_row"] >= 0]
    assert len(users) >= 2
    path = tmp_path / "a" / part_name(STATES, 0, "bin")
    data = bytearray(path.read_bytes())
    for at in range(4096 + 100, len(data), 1000):
        data[at] ^= 1
    path.write_bytes(data)
    events = Log([(users[0], 1001, last + 1, {})])
    summary = refresh(tmp_path / "a", events.write(tmp_path / "e.csv"), tmp_path / "b")
    assert summary.damaged_states == len(users)
    check_equals_full_export(tmp_path / "b", [log, without_features(events.rows)], DEMO, range(12))


@pytest.mark.parametrize(
    "name",
    [part_name(USERS, 0), part_name(USERS, 2), part_name(HISTORIES, 0), part_name(ITEMS, 0), "features/action.parquet"],
)
def test_damaged_files_are_refused(tmp_path, name):
    demo = replace(DEMO, features=FEATURES, text_features=("action",))
    log = random_log(np.random.default_rng(1), demo, range(12), 20)
    export_of(tmp_path / "a", log, range(12), demo)
    path = tmp_path / "a" / name
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    last = max(row[2] for row in log.rows)
    events = Log([(0, 1001, last, {"action": "value-1", "tags": [1]})]).write(tmp_path / "e.parquet", FEATURES)
    with pytest.raises(ExportError, match=f"{name}: damaged at bytes"):
        refresh(tmp_path / "a", events, tmp_path / "b")
    assert not (tmp_path / "b").exists() and not list(tmp_path.glob(".b*"))


def test_an_output_is_never_written_over(tmp_path):
    _, last = small(tmp_path)
    events = Log([(0, 1001, last, {})]).write(tmp_path / "e.csv")
    refresh(tmp_path / "a", events, tmp_path / "b")
    with pytest.raises(ExportError, match="exists and is not this refresh"):
        refresh(tmp_path / "a", events, tmp_path / "b", as_of=last + 5)
    (tmp_path / "c").mkdir()
    with pytest.raises(ExportError, match="exists"):
        refresh(tmp_path / "a", events, tmp_path / "c")


@pytest.mark.parametrize("new", [-5, 9])
def test_nobody_is_queried_before_a_known_event(tmp_path, new):
    _, last = small(tmp_path)
    events = Log([(0, 1001, last + new, {})]).write(tmp_path / "e.csv")
    latest = max(last, last + new)
    with pytest.raises(ExportError, match=rf"as_of {latest - 1} \(.*\) is before {latest} "):
        refresh(tmp_path / "a", events, tmp_path / "b", as_of=latest - 1)
    assert not list(tmp_path.glob("*b"))
    assert refresh(tmp_path / "a", events, tmp_path / "b", as_of=latest).as_of == latest


def test_two_refreshes_into_one_output(tmp_path):
    _, last = small(tmp_path)
    events = Log([(0, 1001, last, {})]).write(tmp_path / "e.csv")

    def second(what, done, total):
        with pytest.raises(OutputError, match="another job is writing it"):
            refresh(tmp_path / "a", events, tmp_path / "b")
        tried.append(what)

    tried = []
    refresh(tmp_path / "a", events, tmp_path / "b", progress=second)
    assert tried and len(users_of(tmp_path / "b")) == 12
    assert not list(tmp_path.glob(".b*"))


def test_a_killed_refresh_leaves_nothing_in_the_way(tmp_path):
    _, last = small(tmp_path)
    Log([(0, 1001, last, {})]).write(tmp_path / "e.csv")
    code = (
        "import os, signal; from fuxi_torchrec.serving.refresh.refresh import refresh\n"
        "refresh('a', 'e.csv', 'b', progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, timeout=60, check=False)
    assert done.returncode == -9 and not (tmp_path / "b").exists()
    refresh(tmp_path / "a", tmp_path / "e.csv", tmp_path / "b")
    assert len(users_of(tmp_path / "b")) == 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user_id,item_id\n1,2\n", r"no column timestamp; the columns are user_id, item_id"),
        (
            "user_id,item_id,timestamp\n1,,1703000000\n",
            r"1 rows: item is null\. First: .*e\.csv row 1: item is null\. Mend",
        ),
        (
            "user_id,item_id,timestamp\nx,1001,1700000000\n",
            r"column user_id is VARCHAR, for example 'x': in the dataset's log it is BIGINT",
        ),
        ("user_id,item_id,timestamp\n1,1001,1700000000000\n", r"1700000000000 looks like milliseconds"),
        ("user_id,item_id,timestamp\n1,1001,soon\n", r"column timestamp is VARCHAR, for example 'soon'"),
        ("user_id,item_id,timestamp\n1,1001,-5\n", r"1 rows: time is negative"),
        (
            "user_id,item_id,timestamp\n1,1001,1703000000\n2,1001,1703000000\n1,1002,4102358400\n",
            r"1 rows: time is in the future\. First: .*e\.csv row 3: time",
        ),
        (
            "user_id,item_id,timestamp\n1,1001,1703000000\n2,1001,0\n1,1002,1703000000\n",
            r"1 rows: time is too early\. First: .*e\.csv row 2: time",
        ),
        ("user_id,item_id,timestamp\n1,1001,1700000\n1,1002,1703000000\n1,1002,1700000\n", r"time 1700000 must be"),
        ("", "the file is empty"),
    ],
)
def test_bad_logs_are_refused(tmp_path, text, message):
    small(tmp_path)
    (tmp_path / "e.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        refresh(tmp_path / "a", tmp_path / "e.csv", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_bad_rows_can_be_left_out(tmp_path):
    _, last = small(tmp_path)
    lines = ["1,,5", f"1,1001,{last}", f",1001,{last}", "2,1001,0", f"2,1001,{last}"]
    (tmp_path / "e.csv").write_text("\n".join(["user_id,item_id,timestamp", *lines]))
    summary = refresh(tmp_path / "a", tmp_path / "e.csv", tmp_path / "b", on_bad_rows="skip")
    # the row without an item is too early as well
    assert summary.bad_rows == {"user is null": 1, "item is null": 1, "time is too early": 2}
    assert summary.touched_users == 2


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_bad_row_is_named_with_its_file(tmp_path, kind):
    _, last = small(tmp_path)
    for name, times in (("1", [last, last]), ("2", []), ("3", [last, last, 0]), ("4", [0])):
        (tmp_path / "logs").mkdir(exist_ok=True)
        table = pa.table({"user_id": [1] * len(times), "item_id": [1001] * len(times), "timestamp": times})
        table = table.cast(pa.schema([(each, pa.int64()) for each in table.column_names]))
        path = tmp_path / "logs" / f"{name}.{kind}"
        pq.write_table(table, path) if kind == "parquet" else pyarrow.csv.write_csv(table, path)
    with pytest.raises(
        DataError,
        match=rf"2 rows: time is too early\. First: .*/3\.{kind} row 3: time is too early; .*/4\.{kind} row 1",
    ):
        refresh(tmp_path / "a", tmp_path / "logs", tmp_path / "b")


def test_a_feature_value_that_the_model_does_not_know_counts_as_unknown(tmp_path):
    demo = replace(DEMO, features=FEATURES)
    log = random_log(np.random.default_rng(0), demo, range(8), 20)
    export_of(tmp_path / "a", log, range(8), demo)
    last = max(row[2] for row in log.rows)
    for name, value in (("known", 0), ("unknown", demo.feature_rows)):
        event = (1, 1001, last + 1, {"action": value, "tags": [1, value]})
        refresh(tmp_path / "a", Log([event]).write(tmp_path / f"{name}.parquet", FEATURES), tmp_path / name)
    known, unknown = (users_of(tmp_path / name)[1] for name in ("known", "unknown"))
    assert known.row["embedding"].tolist() == unknown.row["embedding"].tolist()


def test_an_empty_log_and_timestamps_as_dates(tmp_path):
    small(tmp_path)
    (tmp_path / "e.csv").write_text("user_id,item_id,timestamp\n")
    assert refresh(tmp_path / "a", tmp_path / "e.csv", tmp_path / "b").parts_linked == 3
    (tmp_path / "d.csv").write_text("user_id,item_id,timestamp\n1,1001,2026-01-01 00:00:00\n")
    refresh(tmp_path / "a", tmp_path / "d.csv", tmp_path / "c")
    assert users_of(tmp_path / "c")[1].row["last_time"] == 1767225600


@pytest.mark.parametrize("texts", [(), ("user", "time")])
def test_features_named_like_ours(tmp_path, texts):
    features = tuple(Feature(name, multiple=False, pooling="sum") for name in ("user", "time"))
    write_demo_export(tmp_path / "a", replace(DEMO, features=features, text_features=texts))
    time = Bundle.open(tmp_path / "a").manifest.as_of
    value = "value-3" if texts else 3
    events = Log([(7, 1001, time, {"user": value, "time": value}), (99, 1002, time, {"user": value, "time": value})])
    refresh(tmp_path / "a", events.write(tmp_path / "e.parquet", features), tmp_path / "b")
    found = users_of(tmp_path / "b")
    assert len(found) == DEMO.users + 1 and found[99].history.times.tolist() == [time]
    for user in (7, 99):
        assert [found[user].history.features[feature.name][-1] for feature in features] == [3, 3]


def test_events_keep_the_digest_that_earlier_exports_have_written_down(tmp_path):
    export_of(tmp_path / "a", Log(), range(3), replace(DEMO, features=FEATURES[:1]))
    events = Log([(1, 1001, START, {"action": 4})]).write(tmp_path / "e.parquet", FEATURES[:1])
    table, sink = pa.table({"user": [1], "item": [1001], "time": [START], "action": [4]}), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    expected = hashlib.sha256(sink.getvalue()).hexdigest()
    assert read_events(events, Bundle.open(tmp_path / "a")).digest == expected


@pytest.mark.parametrize("text", ["", "1,1001,{last},,\n"])
def test_a_csv_without_feature_values(tmp_path, text):
    demo = replace(DEMO, features=FEATURES)
    log = random_log(np.random.default_rng(0), demo, range(8), 20)
    export_of(tmp_path / "a", log, range(8), demo)
    last = max(row[2] for row in log.rows)
    (tmp_path / "e.csv").write_text("user_id,item_id,timestamp,action,tags\n" + text.format(last=last))
    assert refresh(tmp_path / "a", tmp_path / "e.csv", tmp_path / "b").touched_users == bool(text)
    new = without_features([(1, 1001, last, {})] if text else [])
    check_equals_full_export(tmp_path / "b", [log, new], demo, range(8))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_named_like_patterns_are_read_once_each(tmp_path, kind):
    _, last = small(tmp_path)
    (tmp_path / "logs").mkdir()
    for user, name in ((50, "log1"), (51, "log[1]")):
        Log([(user, 1001, last, {})]).write(tmp_path / "logs" / f"{name}.{kind}")
    assert refresh(tmp_path / "a", tmp_path / "logs", tmp_path / "b").new_users == 2


@pytest.mark.parametrize("kind", [pa.int32(), pa.uint32(), pa.int64(), pa.uint64(), pa.timestamp("us")])
def test_times_of_every_type_that_datasets_are_made_of(tmp_path, kind):
    small(tmp_path)
    time = pa.array([1767225600 * (10**6 if pa.types.is_timestamp(kind) else 1)], pa.int64()).cast(kind)
    pq.write_table(pa.table({"user_id": [1], "item_id": [1001], "timestamp": time}), tmp_path / "e.parquet")
    refresh(tmp_path / "a", tmp_path / "e.parquet", tmp_path / "b")
    assert users_of(tmp_path / "b")[1].row["last_time"] == 1767225600
