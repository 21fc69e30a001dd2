"""Users as they are now: what the export has of them, what they did since, and states of the latest in memory."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fuxi_torchrec.encoders.state import States
from fuxi_torchrec.events.feature_learning import buckets
from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.events.histories import Column, Histories, Ints, Ragged, bounds_of
from fuxi_torchrec.serving.encoding import UserModel, batches
from fuxi_torchrec.serving.requests import Event, UserId
from fuxi_torchrec.serving.stored import StoredUsers


@dataclass(slots=True)
class _Recent:
    """What a user did since the export, with dense indices of the items; only ever grows."""

    raw: list[Event] = field(default_factory=list)
    items: list[int] = field(default_factory=list)


@dataclass
class _Cached:
    """A user's state after so many of the recent events."""

    state: States
    applied: int


@dataclass(frozen=True)
class Snapshot:
    """What is known of a user at a moment: enough to compute outside the lock."""

    user_id: UserId
    generation: int
    stored: int | None
    recent: _Recent
    count: int
    cached: States | None
    applied: int


class LiveUsers:
    """Users, their events since the export and their states.

    Methods marked as needing the lock are called while :attr:`lock` is held; the others take it themselves.

    Args:
        feature_values: index of every text, for features of text.
        cache_bytes: of states kept in memory, at least one.
    """

    def __init__(
        self,
        model: UserModel,
        stored: StoredUsers,
        feature_values: dict[str, dict[str, int]],
        cache_bytes: int,
    ) -> None:
        self.lock = threading.Lock()
        self.stored, self.cache_bytes = stored, cache_bytes
        self.recent: dict[UserId, _Recent] = {}
        self.recent_events = 0
        self.forgotten: dict[UserId, int] = {}  # user to how often
        self._model, self._features, self._feature_values = model, stored.manifest.features, feature_values
        self._cache: OrderedDict[UserId, _Cached] = OrderedDict()
        self._held = 0  # bytes of the states in it

    @property
    def cached(self) -> int:
        """States in memory."""
        return len(self._cache)

    def stored_row(self, user: UserId) -> int | None:
        """A user's row in the export, unless there is none or it was forgotten; needs the lock."""
        return None if user in self.forgotten else self.stored.row.get(user)

    def is_known(self, user: UserId) -> bool:
        """Whether there is anything about a user; needs the lock."""
        return self.stored_row(user) is not None or user in self.recent

    def remembered(self, users: Sequence[UserId]) -> list[UserId | None]:
        """Users whose features count: None for those that were forgotten."""
        with self.lock:
            return [None if user in self.forgotten else user for user in users]

    def last_time(self, user: UserId) -> int:
        """Of a user's last event, 0 if there is none; needs the lock."""
        recent = self.recent.get(user)
        if recent is not None:
            return recent.raw[-1].timestamp
        row = self.stored_row(user)
        return int(self.stored.last_time[row]) if row is not None and self.stored.events[row] else 0

    def accepted(self, events: Iterable[Event], before: dict[UserId, int]) -> tuple[list[bool], dict[UserId, int]]:
        """Which events are not older than their user's last one, and the last times then; needs the lock.

        Args:
            before: last times of users with events that are yet to be added.
        """
        accepted: list[bool] = []
        last: dict[UserId, int] = {}
        for event in events:
            user = event.user_id
            if user not in last:
                last[user] = before[user] if user in before else self.last_time(user)
            accepted.append(event.timestamp >= last[user])
            last[user] = max(last[user], event.timestamp)
        return accepted, last

    def add(self, event: Event, item: int) -> int:
        """An accepted event; how many of the user's no state in memory has. Needs the lock."""
        recent, cached = self.recent.setdefault(event.user_id, _Recent()), self._cache.get(event.user_id)
        recent.raw.append(event)
        recent.items.append(item)
        self.recent_events += 1
        return len(recent.items) - (cached.applied if cached is not None else 0)

    def forget(self, user: UserId) -> None:
        """From now on the user is unknown; needs the lock."""
        self.forgotten[user] = self.forgotten.get(user, 0) + 1
        self.recent_events -= len(self.recent.pop(user, _Recent()).items)
        if (cached := self._cache.pop(user, None)) is not None:
            self._held -= cached.state.nbytes

    def stored_ties(self, users_at: Iterable[tuple[UserId, int]]) -> dict[tuple[UserId, int], Counter[int]]:
        """Of users and times: where that is the user's last time in the export, the items it has of that time."""
        rows = {
            (user, time): row
            for user, time in users_at
            if (row := self.stored.row.get(user)) is not None
            and self.stored.events[row]
            and self.stored.last_time[row] == time
        }
        ties = {}
        for (user, time), row in sorted(rows.items(), key=lambda pair: pair[1]):  # in the order of the files
            history = self.stored.histories(np.array([row]))
            ties[user, time] = Counter(history.items[history.times == time].tolist())
        return ties

    def snapshots(self, users: Sequence[UserId]) -> list[Snapshot]:
        """What is known of users at this moment."""
        snapshots = []
        with self.lock:
            for user in users:
                recent, state, applied = self.recent.get(user, _Recent()), None, 0
                if (cached := self._cache.get(user)) is not None:
                    self._cache.move_to_end(user)
                    state, applied = cached.state, cached.applied
                generation, stored = self.forgotten.get(user, 0), self.stored_row(user)
                snapshots.append(Snapshot(user, generation, stored, recent, len(recent.items), state, applied))
        return snapshots

    def states(self, snapshots: Sequence[Snapshot]) -> States:
        """States with every event of the snapshots, encoded in calls of bounded size.

        A state is a function of a user's events alone: whoever computes it may keep it for the others.
        """
        waiting = [snapshot.count - snapshot.applied for snapshot in snapshots]
        parts = [
            self._states_of(snapshots[begin:end], waiting[begin:end])
            for begin, end in batches(np.array(waiting, np.int64))
        ]
        state = self._model.concatenate(parts)
        self._keep(snapshots, state, waiting)
        return state

    def _states_of(self, snapshots: Sequence[Snapshot], waiting: Sequence[int]) -> States:
        state = self._bases(snapshots)
        if not any(waiting):
            return state
        items, events = list[int](), list[Event]()
        for snapshot in snapshots:
            items += snapshot.recent.items[snapshot.applied : snapshot.count]
            events += snapshot.recent.raw[snapshot.applied : snapshot.count]
        return self._model.append(state, self.history(items, events, waiting))

    def _bases(self, snapshots: Sequence[Snapshot]) -> States:
        """From the cache, the export, or nothing."""
        pieces = [([n], one.cached) for n, one in enumerate(snapshots) if one.cached is not None]
        rest = [n for n, one in enumerate(snapshots) if one.cached is None]
        rows = {n: row for n in rest if (row := snapshots[n].stored) is not None}
        if rows:
            pieces.append((list(rows), self.stored.states(np.array(list(rows.values()), np.int64))))
        new = [n for n in rest if n not in rows]
        return self._model.assemble([*pieces, (new, self._model.init_state(len(new)))])

    def _keep(self, snapshots: Sequence[Snapshot], state: States, waiting: Sequence[int]) -> None:
        changed = [
            n for n, one in enumerate(snapshots) if waiting[n] or (one.cached is None and one.stored is not None)
        ]
        singles, size = dict[int, States](), 0
        for n in reversed(changed):  # no more than there is room for
            if size >= self.cache_bytes:
                break
            singles[n] = state.select([n]) if len(snapshots) > 1 else state
            size += singles[n].nbytes
        with self.lock:
            for n, single in reversed(singles.items()):
                user, count = snapshots[n].user_id, snapshots[n].count
                if self.forgotten.get(user, 0) != snapshots[n].generation:
                    continue  # forgotten meanwhile
                cached = self._cache.get(user)
                if cached is None or cached.applied < count:
                    self._held += single.nbytes - (cached.state.nbytes if cached is not None else 0)
                    self._cache[user] = _Cached(single, count)
                    self._cache.move_to_end(user)
            while self._held > self.cache_bytes and len(self._cache) > 1:
                _, oldest = self._cache.popitem(last=False)
                self._held -= oldest.state.nbytes

    def history(self, items: Sequence[int], events: Sequence[Event], lengths: Sequence[int]) -> Histories:
        """Events, user after user, as the model takes them."""
        times = np.array([event.timestamp for event in events], np.int64)
        features = {}
        for feature in self._features:
            texts, table = self._feature_values.get(feature.name), self._model.features.get(feature.name)
            rows = 0 if table is None else len(table)
            features[feature.name] = _feature_column(feature, events, texts, rows)
        return Histories(bounds_of(np.array(lengths, np.int64)), np.array(items, np.int64), times, features)

    def seen(self, snapshot: Snapshot) -> Ints:
        """Dense indices of everything in a user's history."""
        stored = self.stored.items(snapshot.stored) if snapshot.stored is not None else np.zeros(0, np.int64)
        return np.concatenate((stored, np.array(snapshot.recent.items[: snapshot.count], np.int64)))


def _feature_column(feature: Feature, events: Sequence[Event], known: dict[str, int] | None, rows: int) -> Column:
    """Values of a feature; 0 for what the export does not know, as events of an earlier export's log may have."""
    values = [(event.features or {}).get(feature.name) for event in events]
    if feature.kind != "id":
        return _numbers(feature, values)

    def index(value: Any) -> int:
        if known is not None:
            return known.get(value, 0) if isinstance(value, str) else 0
        return value if isinstance(value, int) and 0 <= value < rows else 0

    if not feature.multiple:
        return np.array([index(value) for value in values], np.int64)
    lists = [value if isinstance(value, list | tuple) else [] if value is None else [value] for value in values]
    return Ragged(
        np.array([index(v) for value in lists for v in value], np.int64),
        bounds_of(np.array([len(value) for value in lists], np.int64)),
    )


def _numbers(feature: Feature, values: Sequence[Any]) -> Column:
    """Buckets, or (T, width) numbers; of another export's log what does not fit is missing."""
    found = np.full((len(values), feature.width or 1), np.nan)
    for row, value in zip(found, values, strict=True):
        given = value if isinstance(value, list | tuple) else [value]
        if len(given) == len(row) and all(isinstance(each, int | float) for each in given):
            row[:] = given
    return buckets(feature, found[:, 0]) if feature.kind == "bucket" else found.astype(np.float32)
