"""Events of callers that wait together, written in one commit."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from fuxi_torchrec.serving.live_users import LiveUsers
from fuxi_torchrec.serving.requests import Event, FullError, UserId
from fuxi_torchrec.serving.store import Store

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
        self._writing, self._written = threading.Lock(), threading.Condition()
        self._waiting, self._busy = list[_Waiting](), False  # with the condition

    def check(self) -> Store:
        """A ValueError if nothing can be appended."""
        if self.store is None:
            raise ValueError("this Recommender is closed or was loaded with read_only=True: nothing can be appended")
        return self.store

    def append(self, found: list[tuple[Event, int]]) -> tuple[list[bool], set[UserId]]:
        """Which events were accepted, and are on disk; users of whom many events wait to be encoded."""
        mine, crowded = _Waiting(found), set[UserId]()
        with self._written:
            self._waiting.append(mine)
            while self._busy and not mine.done:
                self._written.wait()
            self._busy = self._busy or not mine.done
        if not mine.done:  # one of those who wait writes for all of them
            crowded = self._append_waiting()
        if mine.error is not None:
            raise mine.error
        return mine.accepted, crowded

    def _append_waiting(self) -> set[UserId]:
        with self._written:
            batch, self._waiting = self._waiting, []
        try:
            with self._writing:
                return self._append_all(batch)
        except BaseException as error:
            for one in batch:
                one.error = one.error or error
            return set()
        finally:
            with self._written:
                self._busy = False
                for one in batch:
                    one.done = True
                self._written.notify_all()

    def _append_all(self, batch: Sequence[_Waiting]) -> set[UserId]:
        kept, last, crowded = list[tuple[Event, int]](), dict[UserId, int](), set[UserId]()
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
            for event, item in kept:
                self.users.add(event, item)
                if self.users.waiting(event.user_id) % _EAGER == 0:
                    crowded.add(event.user_id)
        return crowded

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
