"""Recommendations from an export: users as they are now, with everything they did since."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.modules.state import EncoderState
from fuxi_torchrec.serving.append_log import LOG_FILE, AppendLog, LogContent, Record, read_log
from fuxi_torchrec.serving.bundle import Bundle, ExportError, SideTable
from fuxi_torchrec.serving.catalogue import UNKNOWN, Catalogue, Search, side_values
from fuxi_torchrec.serving.encoding import UserModel
from fuxi_torchrec.serving.histories import Column, Histories, Ints, Ragged, bounds_of
from fuxi_torchrec.serving.stored import StoredUsers
from fuxi_torchrec.serving.times import check_time

logger = get_logger(__name__)

UserId = int | str
ItemId = int | str
Sides = dict[str, Any]

_EAGER = 1024  # so many events that wait to be encoded are encoded when they come, not when the user is asked for
_COMPACT_RECORD = 1000  # events of a record in a log that is written anew


@dataclass(frozen=True)
class Request:
    """One user, asked at a time."""

    user_id: UserId
    time: int
    k: int = 10
    exclude_seen: bool = False


@dataclass(frozen=True)
class Answer:
    """Items for one user, best first.

    Attributes:
        user_id: who was asked; None for an anonymous history.
        as_of: when.
        items, scores: raw ids and scores; fewer than asked for if the catalogue has no more.
        known: whether there is anything about the user; an unknown one is served as new.
        events: that the answer rests on, from the user's anchor.
        unknown_items: events of an anonymous history whose items the model does not know.
        before_last_event: the time asked for lies before the user's last event: no time has passed since.
        model_id, export_as_of: of the export that answers.
    """

    user_id: UserId | None
    as_of: int
    items: list[ItemId]
    scores: list[float]
    known: bool
    events: int
    before_last_event: bool
    model_id: str
    export_as_of: int
    unknown_items: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON: ``user``, ``as_of``, ``items`` with ``item_id`` and ``score``, and the rest."""
        rest = {name: value for name, value in vars(self).items() if name not in ("user_id", "items", "scores")}
        items = [{"item_id": item, "score": score} for item, score in zip(self.items, self.scores, strict=True)]
        return {"user": self.user_id, "as_of": self.as_of, "items": items} | rest


@dataclass(frozen=True)
class Event:
    """One event, with raw ids and, for models that have them, side features: text as in the data, or indices."""

    user_id: UserId
    item_id: ItemId
    timestamp: int
    sides: Sides | None = None


@dataclass(frozen=True)
class Appended:
    """What became of events: accepted ones are on disk, late ones, older than their user's last, were left out."""

    accepted: int
    late: int
    unknown_items: int


class _Recent:
    """What a user did since the export; only ever grows."""

    def __init__(self) -> None:
        self.raw: list[Event] = []
        self.items: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def add(self, event: Event, item: int) -> None:
        self.raw.append(event)
        self.items.append(item)


@dataclass
class _Cached:
    """A user's state after so many of the recent events."""

    state: EncoderState
    applied: int


@dataclass(frozen=True)
class _Snapshot:
    """What is known of a user at a moment: enough to compute outside the lock."""

    user_id: UserId
    generation: int
    stored: int | None
    recent: _Recent | None
    count: int
    cached: EncoderState | None
    applied: int


class Recommender:
    """Answers for users of an export, of its append log, or of nobody.

    Made by :meth:`load`. All methods may be called from several threads: an answer rests on a prefix of each user's
    events, and an event is part of every answer that begins after :meth:`append` returned.
    """

    def __init__(
        self,
        bundle: Bundle,
        log: AppendLog | None,
        content: LogContent | None,
        cache_mib: int = 512,
        search: Search = "index",
    ) -> None:
        self.bundle, self.manifest = bundle, bundle.manifest
        self._model = UserModel(bundle)
        self._catalogue, self._side_values = Catalogue(bundle, search), side_values(bundle)
        self._stored = StoredUsers(bundle, self._model)
        self._lock = threading.Lock()
        self._recent: dict[UserId, _Recent] = {}
        self._forgotten: dict[UserId, int] = {}  # user to how often
        self._cache: OrderedDict[UserId, _Cached] = OrderedDict()
        self.cache_users = max(1, (cache_mib << 20) // max(1, self.manifest.state_bytes))
        self._log = log
        if content is not None:
            self._replay(content)

    @staticmethod
    def load(
        path: str | Path,
        *,
        log_dir: str | Path | None = None,
        verify: Literal["sizes", "checksums"] = "sizes",
        cache_mib: int = 512,
        search: Search = "index",
        read_only: bool = False,
        warm_up: bool = True,
    ) -> "Recommender":
        """Open an export and replay what was appended since.

        Args:
            path: the export; it is never changed.
            log_dir: where appended events are kept; the export's path and ``.log`` by default.
            verify: ``checksums`` reads every file once.
            cache_mib: memory for states of recent users; others are read or encoded again when asked for.
            search: ``index`` uses an approximate FAISS index if there is one, ``exact`` scores every item.
            read_only: replay a log that another process may be writing; nothing can be appended.
            warm_up: answer once, so that the first caller does not wait for libraries.
        """
        path = Path(path)
        bundle = Bundle.open(path, verify)
        directory = Path(log_dir) if log_dir is not None else path.absolute().with_name(path.absolute().name + ".log")
        log, content = None, None
        if not read_only:
            log = AppendLog(directory, _about(bundle))
            content = log.content
        elif (directory / LOG_FILE).exists():
            content = read_log(directory)
        try:
            recommender = Recommender(bundle, log, content, cache_mib, search)
            if warm_up:
                recommender.warm_up()
        except BaseException:
            if log is not None:
                log.close()
            raise
        return recommender

    def close(self) -> None:
        """Let go of the append log."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> "Recommender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- asking ------------------------------------------------------------------------------------------------------

    def recommend(
        self, user_ids: Sequence[UserId], time: int | Sequence[int], k: int = 10, exclude_seen: bool = False
    ) -> list[Answer]:
        """The best items for each user at a time, in the export's unit.

        Args:
            user_ids: raw ids; an unknown user is served as new.
            time: of the request, one for all or one each.
            k: how many items.
            exclude_seen: leave out the items of the user's history, as far as it was encoded.
        """
        user_ids = _plain(user_ids)
        times = [time] * len(user_ids) if isinstance(time, int | np.integer) else _plain(time)
        if len(times) != len(user_ids):
            raise ValueError(f"time has {len(times)} entries for {len(user_ids)} users")
        return self.answer([Request(user, when, k, exclude_seen) for user, when in zip(user_ids, times, strict=True)])

    def check(self, request: Request) -> None:
        """A ValueError if a request cannot be answered."""
        _check_id(request.user_id, self.manifest.user_id_type, "user id")
        self._check_time(request.time, "time")
        _check_k(request.k)

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """The same for requests that differ; one pass of the encoder and one of the catalogue for all."""
        for request in requests:
            self.check(request)
        if not requests:
            return []
        users = list(dict.fromkeys(request.user_id for request in requests))
        snapshots = self._snapshots(users)
        states = self._states(snapshots)
        place = {user: n for n, user in enumerate(users)}
        each = [place[request.user_id] for request in requests]
        seen = [
            self._seen(snapshots[n]) if request.exclude_seen else None
            for n, request in zip(each, requests, strict=True)
        ]
        known = [snapshot.stored is not None or bool(snapshot.count) for snapshot in snapshots]
        state = states if each == list(range(len(users))) else states.select(each)
        return self._answers(requests, state, [known[n] for n in each], seen)

    def recommend_history(
        self,
        items: Sequence[ItemId],
        timestamps: Sequence[int],
        time: int,
        k: int = 10,
        exclude_seen: bool = False,
        sides: Sequence[Sides] | None = None,
    ) -> Answer:
        """The best items after a history that nobody stores: an anonymous session.

        Args:
            items: raw ids; unknown ones count as "an item I do not know".
            timestamps: rising, in the export's unit.
            time: of the request.
            sides: side features, a dictionary per event.
        """
        items, timestamps = _plain(items), _plain(timestamps)
        if len(items) != len(timestamps):
            raise ValueError(f"{len(items)} items and {len(timestamps)} timestamps: there must be one for each")
        if sides is not None and len(sides) != len(items):
            raise ValueError(f"{len(items)} items and {len(sides)} sides: there must be one for each")
        events = [
            Event("", item, when, sides[n] if sides is not None else None)
            for n, (item, when) in enumerate(zip(items, timestamps, strict=True))
        ]
        for n, event in enumerate(events):
            self._check_event(event, n, anonymous=True)
            if n and event.timestamp < events[n - 1].timestamp:
                raise ValueError(
                    f"timestamps must not fall: timestamps[{n}] = {event.timestamp} after {events[n - 1].timestamp}"
                )
        self._check_time(time, "time")
        _check_k(k)
        indices = self._catalogue.find_few(items)
        history = self._history(indices, events, [len(events)])
        request = Request("", time, k, exclude_seen)
        (answer,) = self._answers(
            [request], self._model.encode(history), [True], [history.items if exclude_seen else None]
        )
        return Answer(**{**vars(answer), "user_id": None, "unknown_items": indices.count(UNKNOWN)})

    def _answers(
        self, requests: Sequence[Request], state: EncoderState, known: Sequence[bool], seen: Sequence[Ints | None]
    ) -> list[Answer]:
        times = np.array([request.time for request in requests], np.int64)
        vectors = self._model.vectors(state, times)
        places, scores = self._catalogue.search(vectors, max(request.k for request in requests), seen)
        counts, last = state.count.tolist(), state.pending_time.tolist()
        answers = []
        for n, request in enumerate(requests):
            if counts[n]:
                found = places[n, : request.k][places[n, : request.k] >= 0]
                values = scores[n, : len(found)].tolist()
            else:  # every item scores 0: the first ones, which are the most frequent
                found = np.arange(min(request.k, len(self._catalogue)))
                values = [0.0] * len(found)
            answers.append(
                Answer(
                    user_id=request.user_id,
                    as_of=request.time,
                    items=self._catalogue.ids.take(found).to_pylist(),
                    scores=values,
                    known=known[n],
                    events=counts[n],
                    before_last_event=counts[n] > 0 and request.time < last[n],
                    model_id=self.manifest.model_id,
                    export_as_of=self.manifest.as_of,
                )
            )
        return answers

    def warm_up(self) -> None:
        """Answer once for nobody."""
        self.recommend_history([self._catalogue.ids[0].as_py()] * 2, [self.manifest.as_of] * 2, self.manifest.as_of, 1)
        self._catalogue.find_few([])

    # --- telling -----------------------------------------------------------------------------------------------------

    def append(
        self,
        user_ids: Sequence[UserId],
        items: Sequence[ItemId],
        timestamps: Sequence[int],
        sides: Sequence[Sides] | None = None,
    ) -> Appended:
        """Add events, in this order; they are on disk when this returns.

        An event older than its user's last one is late: it is counted and left out. The next full export has it.
        """
        user_ids, items, timestamps = _plain(user_ids), _plain(items), _plain(timestamps)
        if not len(user_ids) == len(items) == len(timestamps) or (sides is not None and len(sides) != len(items)):
            raise ValueError(
                f"{len(user_ids)} users, {len(items)} items and {len(timestamps)} timestamps: there must be one of "
                "each for every event"
            )
        given: Iterable[Sides | None] = sides if sides is not None else [None] * len(items)
        events = [Event(*columns) for columns in zip(user_ids, items, timestamps, given, strict=True)]
        return self.append_events([events])[0]

    def check_events(self, events: Sequence[Event]) -> None:
        """A ValueError if an event cannot be appended."""
        for n, event in enumerate(events):
            self._check_event(event, n)

    def append_events(self, groups: Sequence[Sequence[Event]]) -> list[Appended]:
        """The same for several callers at once, with one write and one wait for the disk."""
        log = self._writable()
        events = [event for group in groups for event in group]
        self.check_events(events)
        indices = self._catalogue.find_few([event.item_id for event in events])
        crowded = set[UserId]()
        with self._lock:
            accepted = self._accepted(events)
            kept = [event for event, ok in zip(events, accepted, strict=True) if ok]
            position = log.write({"events": [_packed(event) for event in kept]}) if kept else 0
            for event, item, ok in zip(events, indices, accepted, strict=True):
                if ok:
                    self._add(event, item)
                    if self._waiting(event.user_id) % _EAGER == 0:
                        crowded.add(event.user_id)
        log.sync(position)
        if crowded:
            self._states(self._snapshots(list(crowded)))
        results, at = [], 0
        for group in groups:
            here = slice(at, at + len(group))
            taken = sum(accepted[here])
            results.append(Appended(taken, len(group) - taken, indices[here].count(UNKNOWN)))
            at += len(group)
        return results

    def forget(self, user_ids: Sequence[UserId]) -> int:
        """Remove users: from now on they are unknown. How many were known.

        The export itself is not changed: ``refresh --forget`` makes one without them.
        """
        log = self._writable()
        user_ids = _plain(user_ids)
        for user in user_ids:
            _check_id(user, self.manifest.user_id_type, "user id")
        with self._lock:
            known = [user for user in dict.fromkeys(user_ids) if self._is_known(user)]
            position = log.write({"forget": list(known)}) if known else 0
            for user in known:
                self._forget(user)
        log.sync(position)
        return len(known)

    # --- looking -----------------------------------------------------------------------------------------------------

    def states(self, user_ids: Sequence[UserId]) -> EncoderState:
        """States of users, every event so far included."""
        return self._states(self._snapshots(list(user_ids)))

    def side_rows(self, name: str) -> int | None:
        """How many values a side feature of numbers has; None for one of text."""
        return None if name in self._side_values else len(self._model.sides[name])

    def info(self) -> dict[str, Any]:
        """Version and size of what is served."""
        m = self.manifest
        with self._lock:
            return {
                "model_id": m.model_id,
                "as_of": m.as_of,
                "time_unit": m.time_unit,
                "items": m.items,
                "users": m.users,
                "recent_users": len(self._recent),
                "recent_events": sum(len(recent) for recent in self._recent.values()),
                "forgotten_users": len(self._forgotten),
                "cached_states": len(self._cache),
                "damaged_states": self._stored.damaged,
                "log_bytes": self._log.size if self._log is not None else 0,
            }

    # --- inside: under the lock --------------------------------------------------------------------------------------

    def _stored_row(self, user: UserId) -> int | None:
        return None if user in self._forgotten else self._stored.row.get(user)

    def _is_known(self, user: UserId) -> bool:
        return self._stored_row(user) is not None or user in self._recent

    def _last_time(self, user: UserId) -> int:
        recent = self._recent.get(user)
        if recent is not None:
            return recent.raw[-1].timestamp
        row = self._stored_row(user)
        return int(self._stored.last_time[row]) if row is not None and self._stored.events[row] else 0

    def _accepted(self, events: Sequence[Event]) -> list[bool]:
        last: dict[UserId, int] = {}
        accepted = []
        for event in events:
            if event.user_id not in last:
                last[event.user_id] = self._last_time(event.user_id)
            accepted.append(event.timestamp >= last[event.user_id])
            last[event.user_id] = max(last[event.user_id], event.timestamp)
        return accepted

    def _add(self, event: Event, item: int) -> None:
        self._recent.setdefault(event.user_id, _Recent()).add(event, item)

    def _waiting(self, user: UserId) -> int:
        cached = self._cache.get(user)
        return len(self._recent[user]) - (cached.applied if cached is not None else 0)

    def _forget(self, user: UserId) -> None:
        self._forgotten[user] = self._forgotten.get(user, 0) + 1
        self._recent.pop(user, None)
        self._cache.pop(user, None)

    # --- inside: states ----------------------------------------------------------------------------------------------

    def _snapshots(self, users: Sequence[UserId]) -> list[_Snapshot]:
        snapshots = []
        with self._lock:
            for user in users:
                recent, cached = self._recent.get(user), self._cache.get(user)
                if cached is not None:
                    self._cache.move_to_end(user)
                snapshots.append(
                    _Snapshot(
                        user,
                        self._forgotten.get(user, 0),
                        self._stored_row(user),
                        recent,
                        len(recent) if recent is not None else 0,
                        cached.state if cached is not None else None,
                        cached.applied if cached is not None else 0,
                    )
                )
        return snapshots

    def _states(self, snapshots: Sequence[_Snapshot]) -> EncoderState:
        """A state is a function of a user's events alone: whoever computes it may keep it for the others."""
        if not snapshots:
            return self._model.like
        state = self._bases(snapshots)
        waiting = [snapshot.count - snapshot.applied for snapshot in snapshots]
        if any(waiting):
            items, events = list[int](), list[Event]()
            for snapshot in snapshots:
                if snapshot.recent is not None:
                    items += snapshot.recent.items[snapshot.applied : snapshot.count]
                    events += snapshot.recent.raw[snapshot.applied : snapshot.count]
            state = self._model.append(state, self._history(items, events, waiting))
        self._keep(snapshots, state, waiting)
        return state

    def _bases(self, snapshots: Sequence[_Snapshot]) -> EncoderState:
        """From the cache, the export, or nothing."""
        kinds: dict[str, list[int]] = {"cached": [], "stored": [], "new": []}
        for n, snapshot in enumerate(snapshots):
            kind = "cached" if snapshot.cached is not None else "new" if snapshot.stored is None else "stored"
            kinds[kind].append(n)
        parts = [one.cached for one in snapshots if one.cached is not None]
        if kinds["stored"]:
            rows = [row for n in kinds["stored"] if (row := snapshots[n].stored) is not None]
            parts.append(self._stored.states(np.array(rows, np.int64)))
        if kinds["new"]:
            parts.append(self._model.encoder.init_state(len(kinds["new"])))
        state = EncoderState.concatenate(parts) if len(parts) > 1 else parts[0]
        order = [*kinds["cached"], *kinds["stored"], *kinds["new"]]
        if order == list(range(len(order))):
            return state
        return state.select(np.argsort(order).tolist())

    def _keep(self, snapshots: Sequence[_Snapshot], state: EncoderState, waiting: Sequence[int]) -> None:
        changed = [
            n
            for n, snapshot in enumerate(snapshots)
            if waiting[n] or (snapshot.cached is None and snapshot.stored is not None)
        ]
        singles = {n: state.select([n]) if len(snapshots) > 1 else state for n in changed[-self.cache_users :]}
        with self._lock:
            for n, single in singles.items():
                snapshot = snapshots[n]
                user = snapshot.user_id
                if self._forgotten.get(user, 0) != snapshot.generation:
                    continue  # forgotten meanwhile
                cached = self._cache.get(user)
                if cached is None or cached.applied < snapshot.count:
                    self._cache[user] = _Cached(single, snapshot.count)
                    self._cache.move_to_end(user)
            while len(self._cache) > self.cache_users:
                self._cache.popitem(last=False)

    def _history(self, items: Sequence[int], events: Sequence[Event], lengths: Sequence[int]) -> Histories:
        times = np.array([event.timestamp for event in events], np.int64)
        sides = {
            side.name: _side_column(side, events, self._side_values.get(side.name)) for side in self.manifest.sides
        }
        return Histories(bounds_of(np.array(lengths, np.int64)), np.array(items, np.int64), times, sides)

    def _seen(self, snapshot: _Snapshot) -> Ints:
        """Dense indices of everything in a user's history."""
        stored = self._stored.items(snapshot.stored) if snapshot.stored is not None else np.zeros(0, np.int64)
        recent = snapshot.recent.items[: snapshot.count] if snapshot.recent is not None else []
        return np.concatenate((stored, np.array(recent, np.int64)))

    # --- inside: the log ---------------------------------------------------------------------------------------------

    def _writable(self) -> AppendLog:
        if self._log is None:
            raise ValueError("this Recommender is closed or was loaded with read_only=True: nothing can be appended")
        return self._log

    def _replay(self, content: LogContent) -> None:
        """Bring back what was appended. On another export than the log was begun with, what that one has is left out:
        events up to the user's last one there.
        """
        about = _about(self.bundle)
        kinds = ("user_id_type", "item_id_type", "time_unit")
        if any(content.about.get(kind) != about[kind] for kind in kinds):
            raise ExportError(
                "the append log has other ids or times than the export: "
                + ", ".join(f"{kind} {content.about.get(kind)} and {about[kind]}" for kind in kinds)
            )
        same = content.about == {"version": content.about["version"], **about}
        covered, torn = 0, False
        for record in content.records:
            for user in record.get("forget", ()):
                self._forget(user)
                torn = True
            for packed in record.get("events", ()):
                event = Event(*packed)
                last = self._last_time(event.user_id)
                if event.timestamp < last or (not same and self._covered(event)):
                    covered += 1
                else:
                    (item,) = self._catalogue.find_few([event.item_id])
                    self._add(event, item)
        if covered:
            logger.info("append log: %d events are part of this export already", covered)
        if self._log is not None and (torn or not same):
            # what was forgotten, and what the export has, does not stay on disk
            self._forgotten = {user: 1 for user in self._forgotten if user in self._stored.row}
            self._log.rewrite(about, self._compacted())

    def _covered(self, event: Event) -> bool:
        row = self._stored_row(event.user_id)
        return row is not None and self._stored.events[row] > 0 and event.timestamp <= self._stored.last_time[row]

    def _compacted(self) -> Iterable[Record]:
        if self._forgotten:
            yield {"forget": list(self._forgotten)}
        packed = [_packed(event) for recent in self._recent.values() for event in recent.raw]
        for begin in range(0, len(packed), _COMPACT_RECORD):
            yield {"events": packed[begin : begin + _COMPACT_RECORD]}

    # --- inside: checks ----------------------------------------------------------------------------------------------

    def _check_time(self, time: Any, what: str) -> None:
        if isinstance(time, bool) or not isinstance(time, int | np.integer):
            raise ValueError(f"{what} must be an integer in the export's unit, {self.manifest.time_unit}, not {time!r}")
        check_time(int(time), self.manifest.as_of, self.manifest.time_unit, what)

    def _check_event(self, event: Event, n: int, anonymous: bool = False) -> None:
        if not anonymous:
            _check_id(event.user_id, self.manifest.user_id_type, f"user id {n}")
        _check_id(event.item_id, self.manifest.item_id_type, f"item id {n}")
        self._check_time(event.timestamp, f"timestamp {n}")
        if not event.sides:
            return
        for name, value in event.sides.items():
            side = next((side for side in self.manifest.sides if side.name == name), None)
            if side is None:
                there = ", ".join(side.name for side in self.manifest.sides) or "none"
                raise ValueError(f"event {n}: no side feature {name!r}; there are {there}")
            if name in self._side_values:
                if not isinstance(value, str):
                    raise ValueError(f"event {n}: side feature {name} must be text, as in the data, not {value!r}")
                continue
            rows = len(self._model.sides[name])
            values = value if side.multiple and isinstance(value, list | tuple) else [value]
            if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < rows for v in values):
                raise ValueError(f"event {n}: side feature {name} must be 0 to {rows - 1}, not {value!r}")


def _about(bundle: Bundle) -> dict[str, Any]:
    m = bundle.manifest
    kinds = {"user_id_type": m.user_id_type, "item_id_type": m.item_id_type, "time_unit": m.time_unit}
    return {"model_id": m.model_id, "as_of": m.as_of, "parent": m.parent, **kinds}


def _plain(values: Any) -> list[Any]:
    """Python's own numbers, of a list, an array or a tensor."""
    if isinstance(values, str | int):
        raise ValueError(f"a list is needed, not {values!r} alone")
    return values.tolist() if hasattr(values, "tolist") else [getattr(v, "item", lambda v=v: v)() for v in values]


def _packed(event: Event) -> list[Any]:
    plain = [event.user_id, event.item_id, int(event.timestamp)]
    return [*plain, event.sides] if event.sides else plain


def _side_column(side: SideTable, events: Sequence[Event], known: dict[str, int] | None) -> Column:
    if known is not None:
        return np.array([known.get((event.sides or {}).get(side.name, ""), 0) for event in events], np.int64)
    values = [(event.sides or {}).get(side.name, [] if side.multiple else 0) for event in events]
    if not side.multiple:
        return np.array(values, np.int64)
    lists = [value if isinstance(value, list | tuple) else [value] for value in values]
    return Ragged(
        np.array([v for value in lists for v in value], np.int64),
        bounds_of(np.array([len(value) for value in lists], np.int64)),
    )


def _check_id(value: Any, kind: str, what: str) -> None:
    if kind == "string":
        if not isinstance(value, str) or not value:
            raise ValueError(f"{what} must be text, as in the export, not {value!r}")
    elif isinstance(value, bool) or not isinstance(value, int | np.integer) or not -(2**63) <= value < 2**63:
        raise ValueError(f"{what} must be an integer of 64 bits, as in the export, not {value!r}")


def _check_k(k: Any) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a positive integer, not {k!r}")
