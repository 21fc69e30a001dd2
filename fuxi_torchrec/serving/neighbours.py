"""Users of an export whose vectors are most similar to one."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuxi_torchrec.export.bundle import USERS, Bundle
from fuxi_torchrec.export.parts import read_users
from fuxi_torchrec.serving.requests import UserId


@dataclass(frozen=True)
class Neighbours:
    """Users similar to one, best first; as the export has them, at its ``as_of``."""

    user_id: UserId
    users: list[UserId]
    scores: list[float]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: ``user`` and ``users`` with ``user_id`` and ``score``."""
        pairs = zip(self.users, self.scores, strict=True)
        return {"user": self.user_id, "users": [{"user_id": user, "score": score} for user, score in pairs]}


def nearest_users(bundle: Bundle, vector: NDArray[np.float32], user_id: UserId, k: int) -> Neighbours:
    """Every user of the export is scored, part by part; the user itself, and those without events, are left out."""
    best: list[tuple[float, UserId]] = []
    for path in bundle.parts(USERS):
        users = read_users(path, ("events",))
        if not len(users):
            continue
        scores = np.where(users.events > 0, users.embedding @ vector, -np.inf) / bundle.manifest.temperature
        top = np.argsort(-scores, kind="stable")[: k + 1]
        ids = users.ids.take(top).to_pylist()
        best += [(float(score), user) for score, user in zip(scores[top].tolist(), ids, strict=True) if user != user_id]
        best = sorted((each for each in best if np.isfinite(each[0])), key=lambda each: -each[0])[:k]
    return Neighbours(user_id, [user for _, user in best], [score for score, _ in best])
