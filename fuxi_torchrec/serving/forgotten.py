"""Users that refreshes forgot: an export remembers them, so that no log brings back what it had of them.

The manifest keeps a hash of each id and the time until which everything of the user is forgotten. What comes later
begins a new history.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fuxi_torchrec.events.histories import Histories
from fuxi_torchrec.export.bundle import Manifest
from fuxi_torchrec.serving.append_log import LogContent

KEY = "forgotten"  # of the manifest's parent; exports before this was kept have none


def _hashed(user: int | str) -> str:
    return hashlib.sha256(json.dumps(user).encode()).hexdigest()[:32]


class Forgotten:
    """Who was forgotten: of each hashed id, the time until which events do not count."""

    def __init__(self, until: dict[str, int]) -> None:
        self.until = until

    @staticmethod
    def of(manifest: Manifest) -> "Forgotten":
        return Forgotten(dict((manifest.parent or {}).get(KEY, {})))

    def and_these(self, users: Iterable[int | str], until: int) -> "Forgotten":
        new = {name: max(until, self.until.get(name, 0)) for name in map(_hashed, users)}
        return Forgotten({**self.until, **new})

    def counts(self, users: pa.Array, histories: Histories) -> NDArray[np.bool_]:
        """Which events, user after user, are not forgotten."""
        if not self.until:
            return np.ones(len(histories.times), bool)
        until = np.array([self.until.get(_hashed(user), -1) for user in users.to_pylist()], np.int64)
        return histories.times > np.repeat(until, histories.lengths)

    def out_of(self, content: LogContent) -> LogContent:
        """A log of another export without what this one forgot, and with a word of it."""
        if not self.until:
            return content
        users = {event[0] for record in content.records for event in record.get("events", ())}
        until = {user: self.until[name] for user in users if (name := _hashed(user)) in self.until}
        gone, records = dict[Any, None](), []
        for record in content.records:
            events = record.get("events", [])
            kept = [event for event in events if event[2] > until.get(event[0], -1)]
            gone.update((event[0], None) for event in events if event[2] <= until.get(event[0], -1))
            records.append({**record, "events": kept})
        return dataclasses.replace(content, records=[{"forgotten": list(gone)}, *records]) if gone else content
