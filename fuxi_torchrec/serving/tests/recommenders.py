"""Exports with their logs, and what the model itself answers."""

import json
from pathlib import Path

import numpy as np
import torch

from fuxi_torchrec.encoders.tests import causal_mean
from fuxi_torchrec.export.bundle import MANIFEST, Bundle, scaled
from fuxi_torchrec.schema import CHECKSUM, sealed
from fuxi_torchrec.serving.encoding import UserModel
from fuxi_torchrec.serving.store import read_store
from fuxi_torchrec.serving.tests.exports import (
    Log,
    export_of,
    histories_of,
    random_log,
    window_of,
)
from fuxi_torchrec.serving.tests.random_export import DemoExport

DEMO = DemoExport(items=50, users=12, events=60, state_min_events=20, users_per_part=5)
GROWING = {"kind": causal_mean.KIND, "dim": 16, "max_positions": 64}
ROOT = Path(__file__).parents[3]


def log_export(tmp_path, demo=DEMO, users=8, most=40, seed=0):
    """An export, its log, and the time of its last event."""
    log = random_log(np.random.default_rng(seed), demo, range(users), most)
    export_of(tmp_path / "x", log, range(users), demo)
    return log, Bundle.open(tmp_path / "x").manifest.as_of


def expected(path, demo, rows, time):
    """Items by falling score and the scores, of a history encoded at once and every item scored."""
    bundle = Bundle.open(path)
    model = UserModel(bundle)
    history = histories_of(Log(rows), [rows[0][0]], demo).last(np.array([bundle.manifest.max_length]))
    y = model.encoder(
        model.rows(history), torch.from_numpy(history.offsets), torch.from_numpy(history.times), torch.tensor([time])
    )
    items = scaled(model.items[1:], bundle.manifest.similarity)
    vector = scaled(y[-1], bundle.manifest.similarity)
    scores = items @ vector / bundle.manifest.temperature
    if bundle.manifest.window:
        for item, score in window_of(model, history, vector, time).items():
            scores[item - 1] = score
    best = torch.argsort(scores, descending=True)
    return (best + 1001).tolist(), scores[best].detach()


def traces(directory, times):
    """Files of a store in which a time of an event is to be found, as SQLite writes it."""
    return [path.name for path in directory.iterdir() for time in times if time.to_bytes(4, "big") in path.read_bytes()]


def logged(tmp_path, user=7, live=False):
    """Items and times of a user's events in a store."""
    events = read_store(tmp_path / "log").events
    return [[row.item, row.time] for row in events if row.user == user and (row.live or not live)]


def change_manifest(path, files=None, **changes):
    plain = json.loads((path / MANIFEST).read_text())
    plain["files"].update(files or {})
    del plain[CHECKSUM]
    (path / MANIFEST).write_text(sealed(plain | changes))
