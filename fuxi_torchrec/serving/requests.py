"""What a Recommender takes and answers, and the checks of both."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.events.times import check_event_time, check_time
from fuxi_torchrec.export.bundle import ExportError, Manifest

UserId = int | str
ItemId = int | str
Features = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """One user and the request time, in the export's unit."""

    user_id: UserId
    time: int
    k: int = 10
    exclude_seen: bool = False


@dataclass(frozen=True)
class Answer:
    """Items for one user, best first.

    Attributes:
        user_id: None for an anonymous history.
        as_of: the request time.
        items, scores: raw ids and scores; fewer than ``k`` if the catalogue has no more.
        known: whether there is anything about the user; an unknown one is served as new.
        events: that the answer rests on, from the user's anchor.
        unknown_items: events of an anonymous history whose items the model does not know.
        before_last_event: the request time lies before the user's last event: no time has passed since.
        model_id, export_as_of: of the export that answers.
        display: of each item, what the export shows of it; empty if it shows nothing.
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
    display: list[dict[str, str | None]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: ``user``, ``as_of``, ``items`` with ``item_id`` and ``score``, and the rest."""
        own = ("user_id", "items", "scores", "display")
        rest = {name: value for name, value in vars(self).items() if name not in own}
        return {"user": self.user_id, "as_of": self.as_of, "items": _items(self)} | rest


@dataclass(frozen=True)
class Similar:
    """Items similar to one, best first."""

    item_id: ItemId
    items: list[ItemId]
    scores: list[float]
    display: list[dict[str, str | None]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: ``item`` and ``items`` with ``item_id`` and ``score``."""
        return {"item": self.item_id, "items": _items(self)}


def _items(answer: Answer | Similar) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"item_id": item, "score": score} for item, score in zip(answer.items, answer.scores, strict=True)
    ]
    for each, shown in zip(found, answer.display, strict=False):
        each["display"] = shown
    return found


class FullError(ExportError):
    """No more events fit into memory: an export that has them is needed."""


class Event(NamedTuple):  # there are many of them
    """One event, with raw ids.

    Attributes:
        features: text as in the data, or indices.
        columns: other columns of the log that its condition reads.
    """

    user_id: UserId
    item_id: ItemId
    timestamp: int
    features: Features | None = None
    columns: dict[str, Any] | None = None


@dataclass(frozen=True)
class Appended:
    """What became of events.

    Attributes:
        accepted: on disk.
        late: older than their user's last one, left out.
        unknown_items: accepted or late, of items that the model does not know.
        rare_items: of items that the dataset would not have, left out.
        filtered: left out by the condition of the dataset's log.
    """

    accepted: int = 0
    late: int = 0
    unknown_items: int = 0
    rare_items: int = 0
    filtered: int = 0


class Checks:
    """Refuses requests and events that do not fit an export, with a ValueError that says why.

    Args:
        rows: how many values each numeric feature has; features of text are not in it.
    """

    def __init__(self, manifest: Manifest, rows: dict[str, int]) -> None:
        self.manifest, self.rows = manifest, rows
        self._features = {feature.name: feature for feature in manifest.features}

    def request(self, request: Request) -> None:
        self.user(request.user_id, "user id")
        self.time(request.time, "time")
        self.k(request.k)

    def events(self, events: Sequence[Event], anonymous: bool = False) -> None:
        """Events; anonymous ones have no user, and their times must not fall."""
        for n, event in enumerate(events):
            if not anonymous:
                self.user(event.user_id, "user id", n)
            _check_id(event.item_id, self.manifest.item_id_type, "item id", n)
            _check_integer(event.timestamp, self.manifest.time_unit, "timestamp", n)
            for name, value in (event.features or {}).items():
                self._feature(n, name, value)
            if anonymous and n and event.timestamp < events[n - 1].timestamp:
                raise ValueError(
                    f"timestamps must not fall: timestamps[{n}] = {event.timestamp} after {events[n - 1].timestamp}"
                )
        times = [event.timestamp for event in events]
        for time in {min(times), max(times)} if times else ():  # all are fine if these are
            self.time(time, f"timestamp {times.index(time)}", check_event_time)

    def user(self, user_id: Any, *what: object) -> None:
        _check_id(user_id, self.manifest.user_id_type, *what)

    def time(self, time: Any, what: str, check: Callable[[int, int, str, str], int] = check_time) -> None:
        """A time in the export's unit, not far from it."""
        _check_integer(time, self.manifest.time_unit, what)
        check(int(time), self.manifest.as_of, self.manifest.time_unit, what)

    def k(self, k: Any) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be a positive integer, not {k!r}")

    def _feature(self, n: int, name: str, value: Any) -> None:
        feature = self._features.get(name)
        if feature is None:
            there = ", ".join(self._features) or "none"
            raise ValueError(f"event {n}: no feature {name!r}; there are {there}")
        if feature.kind != "id":
            _check_numbers(feature, value, f"event {n}: feature {name}")
            return
        rows = self.rows.get(name)
        values = value if feature.multiple and isinstance(value, list | tuple) else [value]
        if rows is None:
            if not all(isinstance(v, str) for v in values):
                raise ValueError(f"event {n}: feature {name} must be text, as in the data, not {value!r}")
            return
        if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < rows for v in values):
            raise ValueError(f"event {n}: feature {name} must be 0 to {rows - 1}, not {value!r}")


def _check_numbers(feature: Feature, value: Any, what: str) -> None:
    """A finite number, or so many of them as a vector has; None is missing."""
    width = feature.width if feature.kind == "vector" else 0
    given = value if width else [value]
    if value is None:
        return
    if not isinstance(given, list | tuple) or (width and len(given) != width):
        raise ValueError(f"{what} must be {width} numbers, not {value!r}")
    if any(isinstance(v, bool) or not isinstance(v, int | float) or not math.isfinite(v) for v in given):
        raise ValueError(f"{what} must be {'finite numbers' if width else 'a finite number'}, not {value!r}")


def plain(values: Any) -> list[Any]:
    """Python's own numbers, of a list, an array or a tensor."""
    if isinstance(values, str | int):
        raise ValueError(f"a list is needed, not {values!r} alone")
    return values.tolist() if hasattr(values, "tolist") else [v.item() if hasattr(v, "item") else v for v in values]


def make_events(
    user_ids: Sequence[UserId] | None,
    items: Sequence[ItemId],
    timestamps: Sequence[int],
    features: Sequence[Features] | None,
    columns: Sequence[dict[str, Any]] | None,
) -> list[Event]:
    """Events of their columns, a ValueError if these differ in length; without users they are anonymous."""
    given = {"users": user_ids, "items": items, "timestamps": timestamps, "features": features, "columns": columns}
    there = {what: plain(each) for what, each in given.items() if each is not None}
    if len({len(each) for each in there.values()}) > 1:
        said = ", ".join(f"{len(each)} {what}" for what, each in there.items())
        raise ValueError(f"{said}: there must be one of each for every event")
    count = len(there["items"])
    missing: list[Any] = [None] * count
    there = {"users": [""] * count, "features": missing, "columns": missing} | there
    return [Event(*each) for each in zip(*(there[what] for what in given), strict=True)]


def _check_integer(value: Any, unit: str, *what: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{_joined(what)} must be an integer in the export's unit, {unit}, not {value!r}")


def _check_id(value: Any, kind: str, *what: object) -> None:
    if kind == "string":
        if not isinstance(value, str) or not value:
            raise ValueError(f"{_joined(what)} must be text, as in the export, not {value!r}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{_joined(what)} is no text that can be written to a file: {value!r}") from None
    elif isinstance(value, bool) or not isinstance(value, int | np.integer) or not -(2**63) <= value < 2**63:
        raise ValueError(f"{_joined(what)} must be an integer of 64 bits, as in the export, not {value!r}")


def _joined(what: Iterable[object]) -> str:
    return " ".join(map(str, what))
