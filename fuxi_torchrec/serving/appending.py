"""Events of callers that wait together, written in one commit."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.serving.live_users import LiveUsers
from fuxi_torchrec.serving.requests import Event, FullError, UserId
from fuxi_torchrec.serving.store import Store

logger = get_logger(__name__)

_EAGER = 1024  # so many events that wait to be encoded are encoded when they come, not when the user is queried


@dataclass(eq=False)
class _Waiting:
    """Events of a caller, with dense indices of the items, until they are on disk or it is known why they are not."""

    found: list[tuple[Event, int]]
    accepted: list[bool] = field(default_factory=list)
    error: BaseException | None = None
    done: bool = False


class Appender:
    """All that changes users: on disk first, then in memory, so that answers rest on what was acknowledged alone.

    Args:
        store: None if nothing can be appended.
        max_recent_events: that are held in memory.
    """

    def __init__(self, users: LiveUsers, store: Store | None, max_recent_events: int) -> None:
        self.users, self.store, self.max_recent_events = users, store, max_recent_events
        self._writing, self._turn = threading.Lock(), threading.Condition()
        self._waiting, self._led = list[_Waiting](), False  # with the condition

    def check(self) -> Store:
        """A ValueError if nothing can be appended."""
        if self.store is None:
            raise ValueError("this Recommender is closed or was loaded with read_only=True: nothing can be appended")
        return self.store

    def append(self, found: list[tuple[Event, int]]) -> list[bool]:
        """Which events were accepted, and are on disk."""
        mine = _Waiting(found)
        with self._turn:
            self._waiting.append(mine)
            self._turn.wait_for(lambda: mine.done or not self._led)
            batch: list[_Waiting] = []
            if not mine.done:  # one of those who wait writes for all of them
                batch, self._waiting, self._led = self._waiting, batch, True
        if batch:
            self._lead(batch)
        if mine.error is not None:
            raise mine.error
        return mine.accepted

    def _lead(self, batch: Sequence[_Waiting]) -> None:
        crowded: set[UserId] = set()
        try:
            with self._writing:
                crowded = self._append_all(batch)
        except BaseException as error:
            for one in batch:
                one.error = one.error or error
        with self._turn:
            self._led = False
            for one in batch:
                one.done = True
            self._turn.notify_all()
        try:
            if crowded:
                self.users.states(self.users.snapshots(list(crowded)))
        except Exception:  # the events are on disk, and that is all that append promises
            logger.exception("%d users could not be encoded; they are when they are queried", len(crowded))

    def _append_all(self, batch: Sequence[_Waiting]) -> set[UserId]:
        """Users of whom many events wait to be encoded then."""
        kept: list[tuple[Event, int]] = []
        last: dict[UserId, int] = {}
        for one in batch:
            with self.users.lock:
                one.accepted, after = self.users.accepted((event for event, _ in one.found), last)
            new = [pair for pair, ok in zip(one.found, one.accepted, strict=True) if ok]
            held = self.users.recent_events + len(kept)
            if new and held + len(new) > self.max_recent_events:
                one.error = FullError(
                    f"{held:,} events since the export are in memory, and {len(new):,} more pass the limit of "
                    f"{self.max_recent_events:,}: nothing was appended. Refresh and restart on the new export, or "
                    "give a higher --max-recent-events (max_recent_events) and more memory"
                )
            else:
                kept += new
                last |= after
        self.check().append(event for event, _ in kept)
        with self.users.lock:
            return {event.user_id for event, item in kept if self.users.add(event, item) % _EAGER == 0}

    def add_items(self, records: Sequence[Mapping[str, Any]]) -> None:
        """What was said of items, on disk."""
        with self._writing:
            self.check().add_items(records)

    def forget(self, wanted: Sequence[UserId]) -> int:
        """Users, each once; how many were known."""
        with self._writing:
            store = self.check()
            with self.users.lock:
                known = sum(self.users.is_known(user) for user in wanted)
            if wanted:
                store.forget(wanted)
            with self.users.lock:
                for user in wanted:  # also who is unknown now: the next export may know the user
                    self.users.forget(user)
        return known

    def close(self) -> None:
        """Let go of the store."""
        with self._writing:
            if self.store is not None:
                self.store.close()
                self.store = None
