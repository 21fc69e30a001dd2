"""What is said of a dataset, against counting."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fuxi_torchrec.data.prepare import PrepareOptions, prepare
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.repeats import DISTANCES, SHARES
from fuxi_torchrec.data.tests.small import make_dataset, random_histories
from fuxi_torchrec.events.sources import events
from pipelines import inspect


def test_repeats_are_those_of_counting(tmp_path, capsys):
    histories = random_histories(3, 30, 60, 40)
    histories[4] = (histories[4][0][:1], histories[4][1][:1])  # nothing before its last event
    dataset = make_dataset(tmp_path / "set", histories, 40, block_users=7)
    shares, far = dict.fromkeys(SHARES, 0), dict.fromkeys(DISTANCES[:-1], 0)
    for items in (history[0].tolist() for history in histories if len(history[0]) > 1):
        *before, last = items
        share = 1 - len(set(before)) / len(before)
        shares[next(name for name in shares if share <= float(name.strip("<=")))] += 1
        back = before[::-1].index(last) + 1 if last in before else 0
        far["never" if not back else "1-10" if back <= 10 else "11-100"] += 1
    assert inspect.repeat_histograms(Reader(dataset)) == (shares, far)
    assert sum(count > 0 for count in far.values()) == 3 <= sum(count > 0 for count in shares.values())
    assert inspect.main([str(tmp_path / "set")]) == 0
    assert "users by share of repeats" in capsys.readouterr().out


def test_features_of_every_kind_are_counted_and_drawn(tmp_path, capsys):
    log = {
        "user_id": ["a", "a", "b", "b", "b"],
        "item_id": [1, 2, 1, 2, 3],
        "timestamp": [1_600_000_000 + n for n in range(5)],
        "action": ["buy", "see", "see", None, "see"],
        "tags": ["x|y", "", "y", None, "y|z"],
        "watched": [1.0, None, 3.0, 5.0, 9.0],
        "scene": [[1.0, 2.0], None, None, [0.0, 1.0], [5.0, 5.0]],
    }
    items = {"item_id": [1, 2, 9], "brand": ["p", "q", "p"], "level": [4, 7, 1], "price": [2.5, None, 1.0]}
    users = {"user_id": ["b", "c"], "age": [30, 40]}
    for name, columns in (("log", log), ("items", items), ("users", users)):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    kinds = ["action", "tags:id:|", "watched:number", "scene:vector"]
    source = events(str(tmp_path / "log.parquet"), "user_id", "item_id", "timestamp", "s", kinds)
    options = PrepareOptions(
        item_features=str(tmp_path / "items.parquet"),
        item_columns="brand level:bucket:4 price",
        user_features=str(tmp_path / "users.parquet"),
        user_columns="age:number",
    )
    prepare(source, tmp_path / "set", options)
    assert inspect.main([str(tmp_path / "set"), "--png", str(tmp_path / "drawn.png")]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("features of events:")
    assert lines[first + 1 : first + 11] == [
        "  action: id, 80.0 % filled; see 3, buy 1",
        "  tags: id (lists), 60.0 % filled; y 3, x 1, z 1",
        "  watched: number, 80.0 % filled; quartiles 1, 2.5, 4, 6, 9",
        "  scene: vector, 60.0 % filled; 2 elements",
        "features of items: 2 of 3 have them; 1 rows of the file are of others, 0 repeated",
        "  brand: id, 66.7 % filled; p 1, q 1",
        "  level: bucket, 66.7 % filled; 1 1, 2 1",
        "  price: number, 33.3 % filled; quartiles 2.5, 2.5, 2.5, 2.5, 2.5",
        "features of users: 1 of 2 have them; 1 rows of the file are of others, 0 repeated",
        "  age: number, 50.0 % filled; quartiles 30, 30, 30, 30, 30",
    ]
    with Image.open(tmp_path / "drawn.png") as drawn:  # three rows of three histograms, the last one with two
        assert drawn.format == "PNG" and drawn.size == (1350, 900)
        below = np.asarray(drawn.convert("L"))[600:]
    inked = [bool(part.min() < 100) for part in np.split(below, 3, axis=1)]
    assert inked == [True, True, False]


def test_without_features_there_is_nothing_to_draw(tmp_path, capsys):
    make_dataset(tmp_path / "set", random_histories(3, 5, 9, 4), 4)
    assert inspect.main([str(tmp_path / "set"), "--png", str(tmp_path / "none.png")]) == 1
    assert "there are no features to draw" in capsys.readouterr().err
