"""Users that refreshes forgot: an export remembers them, so that no log brings back what it had of them.

The manifest keeps a hash of each id and the time until which everything of the user is forgotten. What comes later
begins a new history.
"""

import hashlib
import json
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fuxi_torchrec.events.histories import Histories
from fuxi_torchrec.export.bundle import Manifest

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

    def until_of(self, users: Iterable[int | str]) -> dict[int | str, int]:
        """Of those of users that were forgotten."""
        return {user: self.until[name] for user in users if self.until and (name := _hashed(user)) in self.until}

    def counts(self, users: pa.Array, histories: Histories) -> NDArray[np.bool_]:
        """Which events, user after user, are not forgotten."""
        ids = users.to_pylist()
        until = self.until_of(ids)
        return histories.times > np.repeat(np.array([until.get(user, -1) for user in ids], np.int64), histories.lengths)
