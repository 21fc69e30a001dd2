"""Small exports for tests, and what they must hold after a refresh, worked out from scratch."""

from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.events.histories import Histories, bounds_of
from fuxi_torchrec.export.bundle import HISTORIES, STATES, USERS, Bundle, scaled
from fuxi_torchrec.export.parts import part_name, part_number, read_histories, read_users
from fuxi_torchrec.export.states import StateFile
from fuxi_torchrec.serving.encoding import UserModel
from fuxi_torchrec.serving.tests.random_export import DAY, START, write_demo_export
from fuxi_torchrec.serving.windowed import WindowedStates
from fuxi_torchrec.tasks.tests.test_repeats import biases

FEATURES = (Feature("action", multiple=False, pooling="sum"), Feature("tags", multiple=True, pooling="mean"))


@dataclass
class Log:
    """Events in the order in which they came: (user, raw item, time, features)."""

    rows: list = field(default_factory=list)

    def write(self, path, features=()):
        columns = {"user_id": [r[0] for r in self.rows], "item_id": [r[1] for r in self.rows]}
        columns["timestamp"] = [r[2] for r in self.rows]
        for feature in features:
            columns[feature.name] = [r[3][feature.name] for r in self.rows]
        table = pa.table(columns)
        if str(path).endswith(".csv"):
            import pyarrow.csv

            pyarrow.csv.write_csv(table, path)
        else:
            pq.write_table(table, path)
        return path

    def of(self, user):
        return sorted((row for row in self.rows if row[0] == user), key=lambda row: row[2])


def without_features(rows):
    return Log([(*row[:3], {"action": 0, "tags": []}) for row in rows])


def raw_item(index, demo):
    return 1000 + index if demo.item_id_type == "int64" else f"item-{index}"


def index_of(raw, demo):
    number = raw - 1000 if demo.item_id_type == "int64" else int(raw.removeprefix("item-"))
    return number if 1 <= number <= demo.items else 0


def random_log(draw, demo, users, most, first=START):
    """Everybody's whole history, unknown items and ties included."""
    log = Log()
    for user in users:
        time = int(first + draw.integers(0, DAY))
        for _ in range(int(draw.integers(0, most + 1))):
            time += int(draw.integers(0, 4 * DAY)) if draw.random() < 0.8 else 0
            features = {"action": int(draw.integers(8)), "tags": draw.integers(0, 8, draw.integers(0, 4)).tolist()}
            # one in ten items is not in the catalogue
            log.rows.append((user, raw_item(int(draw.integers(1, demo.items * 1.1)), demo), time, features))
    return log


def histories_of(log, users, demo):
    each = [log.of(user) for user in users]
    rows = [row for rows in each for row in rows]
    tags = [row[3]["tags"] for row in rows]
    from fuxi_torchrec.events.histories import Ragged

    features = {
        "action": np.array([row[3]["action"] for row in rows], np.int64),
        "tags": Ragged(
            np.array([v for values in tags for v in values], np.int64), bounds_of(np.array([len(v) for v in tags], int))
        ),
    }
    return Histories(
        bounds_of(np.array([len(rows) for rows in each], np.int64)),
        np.array([index_of(row[1], demo) for row in rows], np.int64),
        np.array([row[2] for row in rows], np.int64),
        {feature.name: features[feature.name] for feature in demo.features},
    )


def export_of(path, log, users, demo):
    """An export of these users' events in a log; ids are 0, 1, 2, ..."""
    demo = replace(demo, histories=histories_of(log, users, demo), users=len(users))
    write_demo_export(path, demo)
    return path


@dataclass
class Found:
    """A user in an export."""

    row: dict
    history: Histories
    state: bytes | None


def users_of(path):
    """Everything an export holds about users."""
    bundle = Bundle.open(path, "checksums")
    found = {}
    for users_path in bundle.parts(USERS):
        number = part_number(users_path)
        users = read_users(users_path, window=bundle.manifest.window)
        histories = read_histories(bundle.path / part_name(HISTORIES, number), users.ids, bundle.manifest.features)
        states_path = bundle.path / part_name(STATES, number, "bin")
        states = StateFile.open(states_path, bundle.manifest.model_id) if states_path.exists() else None
        assert (len(states) if states is not None else 0) == (users.state_row >= 0).sum()  # and nobody else's
        for n, user in enumerate(users.ids.to_pylist()):
            row = {name: int(getattr(users, name)[n]) for name in ("as_of", "anchor_time", "anchor_count")}
            row |= {name: int(getattr(users, name)[n]) for name in ("events", "last_time", "state_row")}
            row["embedding"] = users.embedding[n]
            row |= {name: getattr(users, name)[n].tolist() for name in ("window_item", "window_score")}
            state = None
            if row["state_row"] >= 0:
                records, valid = states.get([row["state_row"]])
                assert valid.all()
                state = records
            assert user not in found
            found[user] = Found(row, histories.select(np.array([n])), state)
    assert bundle.manifest.users == len(found)
    assert bundle.manifest.states == sum(one.state is not None for one in found.values())
    return found


def anchors_of(counts, demo):
    """Events before a user's anchor and how often it was moved, of a user with so many events in an export and in each
    refresh after it: the last max_length to begin with, and again whenever new events go past max_positions.
    """
    encoded, moved = min(counts[0], demo.max_length), 0
    for count in counts[1:]:
        encoded += count
        if count and encoded > demo.model["max_positions"]:
            encoded, moved = demo.max_length, moved + 1
    return sum(counts) - encoded, moved


def check_equals_full_export(path, logs, demo, expected_users):
    """Every user is as if encoded at once from the right anchor, queried at the same time.

    Args:
        logs: of the export and of each refresh after it, without late events.
    """
    bundle = Bundle.open(path)
    model, found = UserModel(bundle), users_of(path)
    assert set(found) == set(expected_users)
    everything = Log([row for log in logs for row in log.rows])
    for user, one in found.items():
        whole = histories_of(everything, [user], demo)
        anchor, _ = anchors_of([len(log.of(user)) for log in logs], demo)
        assert one.row["anchor_count"] == anchor
        kept = whole.last(whole.lengths - anchor)
        assert one.row["events"] == len(kept.items)
        assert one.history.items.tolist() == kept.items.tolist()
        assert one.history.times.tolist() == kept.times.tolist()
        if not len(kept.items):
            assert not one.row["embedding"].any()
            continue
        assert one.row["anchor_time"] == kept.times[0]
        assert one.row["last_time"] == kept.times[-1]
        offsets, times = torch.from_numpy(kept.offsets), torch.from_numpy(kept.times)
        y = model.encoder(model.rows(kept), offsets, times, torch.tensor([one.row["as_of"]]))
        vector = scaled(y[-1:], bundle.manifest.similarity)[0]
        torch.testing.assert_close(torch.from_numpy(one.row["embedding"]), vector.detach(), atol=1e-5, rtol=1e-5)
        if bundle.manifest.window:
            check_window(model, one.row, kept, vector)
        enough = bundle.manifest.state_bytes and one.row["events"] >= bundle.manifest.state_min_events
        assert (one.state is not None) == bool(enough)
        if one.state is not None:
            assert_states_close(model.read(one.state), model.encode(kept))
    return found


def check_window(model, row, history, vector):
    """The user's window and its scores are those of the definition."""
    wanted = window_of(model, history, vector, row["as_of"])
    empty = model.manifest.window - len(wanted)
    assert row["window_item"] == [*wanted, *[0] * empty]
    scores = torch.tensor([*wanted.values(), *[0.0] * empty]) * model.manifest.temperature
    torch.testing.assert_close(torch.tensor(row["window_score"]), scores, atol=1e-5, rtol=1e-5)


def window_of(model, history, vector, time):
    """Scores of the items of a history's window, latest first, by the definition of the bias."""
    items = scaled(model.items, model.manifest.similarity)
    found = biases(model.bias, vector, history.items.tolist(), history.times.tolist(), time, items)
    return {item: float(items[item] @ vector / model.manifest.temperature + bias) for item, bias in found.items()}


def assert_states_close(one, other, tolerance=1e-5):
    if isinstance(one, WindowedStates):
        assert [x.tolist() for x in one.windows.tensors()] == [x.tolist() for x in other.windows.tensors()]
        one, other = one.encoded, other.encoded
    assert one.count.tolist() == other.count.tolist()
    assert one.pending_time.tolist() == other.pending_time.tolist()
    for a, b in zip(one._tensors(), other._tensors(), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
