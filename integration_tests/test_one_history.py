"""A user's history is the same whichever way it came: a fresh dataset and export, a refresh, or appended events."""

import numpy as np
import pytest

from fuxi_torchrec.data.prepare import PrepareOptions, prepare
from fuxi_torchrec.events.histories import Ragged
from fuxi_torchrec.events.sources import events
from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.refresh.refresh import refresh
from fuxi_torchrec.serving.tests.exports import users_of
from integration_tests import retrieval_runs as small

CUT, END = 1_600_060_000, 1_600_100_000
SETTINGS = ["batch.max_length=200", "model.max_positions=200", "data.min_item_events=12"]
SETTINGS += [
    "features.event.action.pooling=sum",
    "features.event.action.sharding=row_wise",
    "features.event.level.pooling=sum",
    "features.event.tags.pooling=mean",
]
HEADER = "who,what,when,action,level,device,weight,tags"
WHERE = "device <> 'bot' AND weight < 9"


def log(seed=0, users=24):
    """Rows of text ids with ties, bots, heavy weights, and items of one or two events, old and new."""
    draw, rows = np.random.default_rng(seed), []
    for user in range(users):
        first = CUT if user >= users - 3 else 1_600_000_000  # three are new
        for n, time in enumerate(np.sort(draw.integers(first, END, draw.integers(5, 60)) // 50 * 50)):
            item = f"i{draw.integers(12)}" if n % 6 else f"rare-{user}-{n // 12}"
            action = ("view", "click", "buy" if time < CUT else "new-value")[draw.integers(3)]
            device = ("phone", "bot", "")[draw.choice(3, p=[0.7, 0.2, 0.1])]
            level, weight = (int(draw.integers(most)) for most in (4, 11))
            tags = "|".join(f"t{tag}" for tag in draw.integers(0, 5 if time < CUT else 6, draw.integers(3)))
            rows.append((f"u{user}", item, int(time), action, level, device, weight, tags))
    return sorted(rows, key=lambda row: row[2])


def write(path, rows, bad):
    lines = [",".join(map(str, row)) for row in rows]
    for n, line in enumerate(bad):
        lines.insert(3 + 5 * n, line)
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return path


def make_dataset(path, log_path, rule):
    source = events(
        *(str(log_path), "who", "what", "when", "s", ["action", "level", "tags"], "weight * 0.5", WHERE),
        min_item_events=3,
        rare_items=rule,
        split_features={"tags": "|"},
    )
    return prepare(source, path, PrepareOptions(on_bad_rows="skip"))


def export(run_dir, output, data=None):
    from fuxi_torchrec.export import export as exporting
    from fuxi_torchrec.export.options import ExportOptions

    run = small.load(run_dir, data=data, allow_other_data=data is not None)
    options = ExportOptions(state_min_events=10, programs=False, index=False)
    return exporting.export(run, output, options).users


def plain(history):
    features = {}
    for name, column in history.features.items():
        assert isinstance(column, Ragged) == (name == "tags")
        arrays = (column.values, column.bounds) if isinstance(column, Ragged) else (column,)
        features[name] = [array.tolist() for array in arrays]
    return history.items.tolist(), history.times.tolist(), features


def one_or_more(tags):
    """As a service is told: one value may stand alone."""
    return tags if tags and "|" not in tags else [tag for tag in tags.split("|") if tag]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("rule", ["drop", "unknown"])
def test_a_history_is_the_same_three_ways(workers, tmp_path, rule):
    rows = log()
    old, new = [row for row in rows if row[2] < CUT], [row for row in rows if row[2] >= CUT]
    old_bad, new_bad = [",i1,1600000000,view,1,phone,1,"], [f"u1,,{CUT},view,1,phone,1,t1", "u1,i1,,view,1,phone,1,"]
    write(tmp_path / "old.csv", old, old_bad)
    write(tmp_path / "all.csv", rows, [*old_bad, *new_bad])
    write(tmp_path / "new.csv", new, new_bad)
    info = make_dataset(tmp_path / "old", tmp_path / "old.csv", rule)
    assert info.skipped_rows == {"user is null": 1}
    workers(2).run(small.train, tmp_path / "run", [f"data.path={tmp_path / 'old'}", *SETTINGS])
    workers(2).run(export, tmp_path / "run", tmp_path / "yesterday")
    assert 0 < Bundle.open(tmp_path / "yesterday").manifest.items < 12  # the model knows some items
    # 1: everything prepared again, exported with the same weights
    make_dataset(tmp_path / "all", tmp_path / "all.csv", rule)
    workers(2).run(export, tmp_path / "run", tmp_path / "today", str(tmp_path / "all"))
    # 2: refreshed; the export knows columns, condition and what to do with bad rows
    summary = refresh(tmp_path / "yesterday", tmp_path / "new.csv", tmp_path / "refreshed", requery_all=True)
    assert summary.bad_rows == {"item is null": 1, "time is null": 1}
    assert (summary.rare_items > 0) == (rule == "drop") and summary.unknown_items > 0
    today, refreshed = users_of(tmp_path / "today"), users_of(tmp_path / "refreshed")
    assert today.keys() == refreshed.keys() and len(today) == 24
    for user, one in today.items():
        assert plain(one.history) == plain(refreshed[user].history), user
        assert one.row["as_of"] == refreshed[user].row["as_of"]
        np.testing.assert_allclose(one.row["embedding"], refreshed[user].row["embedding"], atol=1e-5)
    # 3: appended, event by event
    kept = [row for row in new if row[5] not in ("", "bot") and row[6] < 9]
    as_of = max(one.row["as_of"] for one in today.values())
    with Recommender.load(tmp_path / "yesterday") as live:
        done = live.append(
            *([row[n] for row in new] for n in range(3)),
            features=[{"action": row[3], "level": row[4], "tags": one_or_more(row[7])} for row in new],
            columns=[{"device": row[5] or None, "weight": row[6]} for row in new],
        )
        assert (done.filtered, done.late) == (len(new) - len(kept), 0)
        assert (done.accepted, done.rare_items) == (len(kept) - summary.rare_items, summary.rare_items)
        assert done.unknown_items == summary.unknown_items
        users = sorted(today)
        vectors = live._model.vectors(live.states(users), np.full(len(users), as_of)).numpy()
        for user, vector, answer in zip(users, vectors, live.recommend(users, as_of), strict=True):
            assert answer.events == len(today[user].history.items)
            np.testing.assert_allclose(vector, today[user].row["embedding"], atol=1e-5)
    # and the service's own log, refreshed, is the same once more
    again = refresh(tmp_path / "yesterday", tmp_path / "yesterday.log", tmp_path / "from-service", requery_all=True)
    assert again.events == done.accepted
    for user, one in users_of(tmp_path / "from-service").items():
        assert plain(one.history) == plain(today[user].history), user
