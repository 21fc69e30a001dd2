"""Recommendations from an export: users as they are now, with everything they did since."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fuxi_torchrec.encoders.state import States
from fuxi_torchrec.events.feature_files import RawFeatures
from fuxi_torchrec.events.histories import Ints
from fuxi_torchrec.export.bundle import Bundle, scaled
from fuxi_torchrec.export.options import Verify
from fuxi_torchrec.serving.appending import Appender
from fuxi_torchrec.serving.catalogue import LEFT_OUT, UNKNOWN, Catalogue, feature_values
from fuxi_torchrec.serving.encoding import UserModel
from fuxi_torchrec.serving.live_users import LiveUsers
from fuxi_torchrec.serving.log_filter import LogFilter
from fuxi_torchrec.serving.neighbours import Neighbours, nearest_users
from fuxi_torchrec.serving.new_items import AddedItems, latest
from fuxi_torchrec.serving.options import RecommenderOptions, Search
from fuxi_torchrec.serving.replay import replay
from fuxi_torchrec.serving.requests import (
    Answer,
    Appended,
    Checks,
    Event,
    Features,
    ItemId,
    Request,
    Similar,
    UserId,
    make_events,
    plain,
)
from fuxi_torchrec.serving.store import STORE_FILE, Content, Store, about_of, read_store
from fuxi_torchrec.serving.stored import StoredUsers


class Recommender:
    """Answers for users of an export, of the events appended since, or of nobody.

    Made by :meth:`load`. All methods may be called from several threads: an answer rests on a prefix of each user's
    events, and an event is part of every answer that begins after :meth:`append` returned.
    """

    def __init__(
        self, bundle: Bundle, store: Store | None, content: Content | None, options: RecommenderOptions
    ) -> None:
        self.bundle, self.manifest = bundle, bundle.manifest
        self._model = UserModel(bundle)
        self._catalogue = Catalogue(bundle, options.search)
        texts = feature_values(bundle)
        # how many values each feature of integers has
        ids = [feature for feature in self.manifest.features if feature.kind == "id" and feature.name not in texts]
        self.feature_rows = {feature.name: len(self._model.features[feature.name]) for feature in ids}
        self._checks = Checks(self.manifest, self.feature_rows)
        self._filter = LogFilter(self.manifest.log) if self.manifest.log.where else None
        self.users = LiveUsers(self._model, StoredUsers(bundle, self._model), texts, options.cache_mib << 20)
        self._appender = Appender(self.users, store, options.max_recent_events)
        self._adding, self._first_new = Lock(), len(self._model.items)
        if content is not None and content.items:
            kept = latest(content.items, self.manifest.item_file.id_column).values()
            raw = self._model.composer.read([row.event().features for row in kept])  # type: ignore[misc]
            self._add_items(raw, *self._model.composer.rows(raw))
        if content is not None:
            replay(content, bundle.manifest, self._catalogue, self.users, store)

    @staticmethod
    def load(
        path: str | Path,
        *,
        log_dir: str | Path | None = None,
        verify: Verify = RecommenderOptions.verify,
        cache_mib: int = RecommenderOptions.cache_mib,
        search: Search = RecommenderOptions.search,
        max_recent_events: int = RecommenderOptions.max_recent_events,
        read_only: bool = False,
        warm_up: bool = True,
    ) -> "Recommender":
        """Open an export and replay what was appended since.

        Args:
            path: the export; it is never changed.
            log_dir, verify, cache_mib, search, max_recent_events: see :class:`RecommenderOptions`. Events of the log
                are replayed however many there are.
            read_only: replay a log that another process may be writing; nothing can be appended.
            warm_up: answer once, so that the first caller does not wait for libraries.
        """
        path = Path(path).absolute()
        bundle = Bundle.open(path, verify)
        directory = Path(log_dir) if log_dir is not None else path.with_name(path.name + ".log")
        store = None if read_only else Store(directory)
        try:
            content = None
            if store is not None:
                content = store.open(about_of(bundle.manifest))
            elif (directory / STORE_FILE).exists():
                content = read_store(directory)
            options = RecommenderOptions(directory, verify, cache_mib, search, max_recent_events)
            recommender = Recommender(bundle, store, content, options)
            if warm_up:
                recommender.warm_up()
        except BaseException:
            if store is not None:
                store.close()
            raise
        return recommender

    def close(self) -> None:
        """Let go of the store of appended events."""
        self._appender.close()

    def __enter__(self) -> "Recommender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- recommending ------------------------------------------------------------------------------------------------

    def recommend(
        self, user_ids: Sequence[UserId], time: int | Sequence[int], k: int = 10, exclude_seen: bool = False
    ) -> list[Answer]:
        """The best items for each user at a time, in the export's unit.

        Args:
            user_ids: raw ids; an unknown user is served as new.
            time: of the request, one for all or one each.
            exclude_seen: leave out the items of the user's history, as far as it was encoded.
        """
        user_ids = plain(user_ids)
        times = [time] * len(user_ids) if isinstance(time, int | np.integer) else plain(time)
        if len(times) != len(user_ids):
            raise ValueError(f"time has {len(times)} entries for {len(user_ids)} users")
        return self.answer([Request(user, when, k, exclude_seen) for user, when in zip(user_ids, times, strict=True)])

    def check(self, request: Request) -> None:
        """A ValueError if a request cannot be answered."""
        self._checks.request(request)

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """The same for requests that differ; one pass of the encoder and one of the catalogue for all."""
        for request in requests:
            self.check(request)
        if not requests:
            return []
        users = list(dict.fromkeys(request.user_id for request in requests))
        snapshots = self.users.snapshots(users)
        states = self.users.states(snapshots)
        place = {user: n for n, user in enumerate(users)}
        each = [place[request.user_id] for request in requests]
        seen = [
            self.users.seen(snapshots[n]) if request.exclude_seen else None
            for n, request in zip(each, requests, strict=True)
        ]
        known = [snapshot.stored is not None or bool(snapshot.count) for snapshot in snapshots]
        state = states if each == list(range(len(users))) else states.select(each)
        featured = self.users.remembered(users)
        return self._answers(requests, state, [known[n] for n in each], seen, [featured[n] for n in each])

    def recommend_history(
        self,
        items: Sequence[ItemId],
        timestamps: Sequence[int],
        time: int,
        k: int = 10,
        exclude_seen: bool = False,
        features: Sequence[Features] | None = None,
        columns: Sequence[dict[str, Any]] | None = None,
    ) -> Answer:
        """The best items after a history that nobody stores: an anonymous session.

        The last ``max_length`` events count, as for users of an export.

        Args:
            items: raw ids; unknown ones count as "an item I do not know", unless the dataset leaves rare items out.
            timestamps: rising, in the export's unit.
            time: of the request.
            features: a dictionary per event.
            columns: what the condition of the dataset's log reads, a dictionary per event; without it all events count.
        """
        events = make_events(None, items, timestamps, features, columns)
        return self.answer_history(events, Request("", time, k, exclude_seen), select=columns is not None)

    def answer_history(self, events: Sequence[Event], request: Request, select: bool = False) -> Answer:
        """The same for events by time, whose users and the request's do not matter.

        Args:
            select: leave out what the condition of the dataset's log leaves out, see :meth:`select`.
        """
        self._checks.events(events, anonymous=True)
        if select:
            events = self.select(events)
        self._checks.time(request.time, "time")
        self._checks.k(request.k)
        found = self._catalogue.find_few([event.item_id for event in events])
        events = [event for event, index in zip(events, found, strict=True) if index != LEFT_OUT]
        indices = [index for index in found if index != LEFT_OUT]
        history = self.users.history(indices, events, [len(events)]).last(np.array([self.manifest.max_length]))
        seen = np.array(indices, np.int64) if request.exclude_seen else None
        (answer,) = self._answers([request], self._model.encode(history), [True], [seen], [None])
        return replace(answer, user_id=None, unknown_items=sum(index <= UNKNOWN for index in found))

    def _answers(
        self,
        requests: Sequence[Request],
        state: States,
        known: Sequence[bool],
        seen: Sequence[Ints | None],
        users: Sequence[UserId | None],
    ) -> list[Answer]:
        times = np.array([request.time for request in requests], np.int64)
        vectors = self._model.vectors(state, times, users)
        catalogue = self._catalogue  # items may be added meanwhile
        correction = self._model.correction(state, vectors, times)
        places, scores = catalogue.search(vectors, max(request.k for request in requests), seen, correction)
        counts, last = state.count.tolist(), state.last_time.tolist()
        answers = []
        for n, request in enumerate(requests):
            found = places[n, : request.k][places[n, : request.k] >= 0]
            values = scores[n, : len(found)].tolist()
            if not counts[n]:  # every item scores 0: the first ones, which are the most frequent
                found = np.arange(min(request.k, len(catalogue)))
                values = [0.0] * len(found)
            answers.append(
                Answer(
                    user_id=request.user_id,
                    as_of=request.time,
                    items=catalogue.ids.take(found).to_pylist(),
                    display=catalogue.shown(found),
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

    # --- appending ---------------------------------------------------------------------------------------------------

    def append(
        self,
        user_ids: Sequence[UserId],
        items: Sequence[ItemId],
        timestamps: Sequence[int],
        features: Sequence[Features] | None = None,
        columns: Sequence[dict[str, Any]] | None = None,
    ) -> Appended:
        """Add events, in this order; they are on disk when this returns.

        An event older than its user's last one is late: it is counted and left out. The next full export has it. So
        are events that the dataset's log would not have: those of rare items, if it drops them, and those that its
        condition leaves out. An ExportError when there are ``max_recent_events``: an export that has them is needed.

        Args:
            features: a dictionary per event.
            columns: what the condition of the dataset's log reads beside them, a dictionary per event.
        """
        return self.append_events([make_events(user_ids, items, timestamps, features, columns)])[0]

    def select(self, events: Sequence[Event]) -> list[Event]:
        """Events that the condition of the dataset's log keeps; a ValueError if it cannot be told of one."""
        if self._filter is not None:
            self._filter.check(events)
            events = [event for event, keep in zip(events, self._filter.keep(events), strict=True) if keep]
        return [event._replace(columns=None) if event.columns else event for event in events]

    def append_events(self, groups: Sequence[Sequence[Event]], checked: bool = False) -> list[Appended]:
        """The same for the events of several callers, with one write and one wait for the disk.

        Args:
            checked: the callers have made sure that every event can be appended, and :meth:`select`-ed them.
        """
        self._appender.check()
        if not checked:
            self._checks.events([event for group in groups for event in group])
        counts: list[dict[str, int]] = []
        found: list[tuple[dict[str, int], Event, int]] = []
        for group in groups:
            selected = group if checked else self.select(group)
            items = self._catalogue.find_few([event.item_id for event in selected])
            count = dict.fromkeys(("accepted", "late"), 0) | {"filtered": len(group) - len(selected)}
            count |= {"rare_items": items.count(LEFT_OUT), "unknown_items": items.count(UNKNOWN)}
            counts.append(count)
            pairs = zip(selected, items, strict=True)
            found += [(count, event, item) for event, item in pairs if item != LEFT_OUT]
        accepted = self._appender.append([(event, item) for _, event, item in found])
        for (count, *_), ok in zip(found, accepted, strict=True):
            count["accepted" if ok else "late"] += 1
        return [Appended(**count) for count in counts]

    def forget(self, user_ids: Sequence[UserId]) -> int:
        """Remove users: from now on they are unknown, here and on later exports. How many were known.

        The export itself is not changed: ``refresh --forget`` makes one without them.
        """
        user_ids = plain(user_ids)
        for user in user_ids:
            self._checks.user(user, "user id")
        return self._appender.forget(list(dict.fromkeys(user_ids)))

    # --- new items ---------------------------------------------------------------------------------------------------

    def add_items(self, items: Sequence[dict[str, Any]]) -> AddedItems:
        """Make items recommendable by their features, without training; they are on disk when this returns.

        An item that the export has stays as it is, one that was added before gets the row of these features.

        Args:
            items: dictionaries with the id by the name of its column, features and what is shown by theirs.
        """
        self._appender.check()
        raw = self._model.composer.read(items)
        rows, unknown_values = self._model.composer.rows(raw)  # nothing is written of what cannot be taken
        with self._adding:
            self._appender.add_items(items)
            return self._add_items(raw, rows, unknown_values)

    def _add_items(self, raw: RawFeatures, rows: Tensor, unknown_values: int) -> AddedItems:
        catalogue = self._catalogue
        found: Ints = np.array(catalogue.find_few(raw.ids.to_pylist()), np.int64)
        known = (found > UNKNOWN) & (found < self._first_new)
        replaced = found >= self._first_new
        new = ~known & ~replaced
        index = found.copy()
        index[new] = len(self._model.items) + np.arange(int(new.sum()))
        order = np.flatnonzero(~known)
        order = order[np.argsort(index[order])]
        chosen, take = torch.from_numpy(order), pa.array(order)
        self._model.set_rows(index[order], rows[chosen])
        vectors = scaled(rows[chosen], self.manifest.similarity)
        display = {name: raw.columns[name].take(take) for name in catalogue.display}
        self._catalogue = catalogue.with_items(raw.ids.take(take), index[order], vectors, display)
        return AddedItems(int(new.sum()), int(replaced.sum()), int(known.sum()), unknown_values)

    def similar_items(self, item_id: ItemId, k: int = 10) -> Similar:
        """Items whose rows are most similar to an item's, best first, without itself; scores as those of users."""
        self._checks.k(k)
        catalogue = self._catalogue
        (index,) = catalogue.find_few([item_id])
        if index <= UNKNOWN:
            raise ValueError(f"item_id {item_id!r} is not in the catalogue")
        own = np.array([index], np.int64)
        vector = catalogue.vectors[int(np.searchsorted(catalogue.index, index))]
        places, scores = catalogue.search(vector[None], k, [own])
        found = places[0][places[0] >= 0]
        return Similar(
            item_id, catalogue.ids.take(found).to_pylist(), scores[0, : len(found)].tolist(), catalogue.shown(found)
        )

    def similar_users(self, user_id: UserId, time: int, k: int = 10) -> Neighbours:
        """Users of the export most similar to a user as it is now, queried at a time."""
        self.check(Request(user_id, time, k))
        state = self.states([user_id])
        if not int(state.count[0]):
            raise ValueError(f"user_id {user_id!r} has no events")
        (user,) = self.users.remembered([user_id])
        vector = self._model.vectors(state, np.array([time], np.int64), [user])[0].numpy()
        return nearest_users(self.bundle, vector, user_id, k)

    # --- inspecting --------------------------------------------------------------------------------------------------

    def states(self, user_ids: Sequence[UserId]) -> States:
        """States of users, every event so far included."""
        return self.users.states(self.users.snapshots(list(user_ids)))

    def info(self) -> dict[str, Any]:
        """Version and size of what is served; it waits for nobody, so the numbers may be of different moments."""
        m, users, store = self.manifest, self.users, self._appender.store
        return {
            "model_id": m.model_id,
            "as_of": m.as_of,
            "time_unit": m.time_unit,
            "items": len(self._catalogue),
            "users": m.users,
            "recent_users": len(users.recent),
            "recent_events": users.recent_events,
            "max_recent_events": self._appender.max_recent_events,
            "forgotten_users": len(users.forgotten),
            "cached_states": users.cached,
            "damaged_states": users.stored.damaged,
            "log_bytes": store.size if store is not None else 0,
            "log_failed": store is not None and store.failed is not None,
        }
