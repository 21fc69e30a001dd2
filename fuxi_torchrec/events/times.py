"""Units of time; times for people, read, and checked for being of another unit."""

import datetime
import time
from typing import Literal

TimeUnit = Literal["s", "ms", "us"]
TIME_UNITS = ("s", "ms", "us")
PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000}
NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}
YEAR = 31_556_952  # seconds
DAY = 86_400
LAST_SECOND = 7_258_118_400  # the year 2200 begins
BEFORE, AFTER = 40, 100  # years from an export's as_of that a time is plausible


def last_time(unit: str) -> int:
    """The last time there can be, anywhere: that of the year 2200. The first is 0, in 1970."""
    return LAST_SECOND * PER_SECOND[unit]


def likely_unit(value: int, unit: str) -> str | None:
    """Another unit, if a time would be of these years in it and is not in its own.

    Example:
        >>> likely_unit(1_700_000_000_000, "s"), likely_unit(1_700_000_000, "s"), likely_unit(7, "s")
        ('ms', None, None)
    """

    def usual(unit: str) -> bool:
        return 1990 <= year_of(value, unit) <= 2100

    return None if usual(unit) else next((other for other in TIME_UNITS if usual(other)), None)


def year_of(value: int, unit: str) -> int:
    """However far away."""
    return int(1970 + value / PER_SECOND[unit] / YEAR)


def show_time(value: int, unit: str) -> str:
    """A time for people, UTC.

    Example:
        >>> show_time(86_400_000, "ms")
        '1970-01-02 00:00:00'
    """
    try:
        moment = datetime.datetime.fromtimestamp(value / PER_SECOND[unit], datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{value} {unit}"
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def bounds(as_of: int, unit: str) -> tuple[int, int]:
    """The first and last plausible time. Seconds since 1970, taken as milliseconds, lie before the first.

    The present is always among them, also of an export with an event in the future.
    """
    year, present = YEAR * PER_SECOND[unit], _today(unit)
    return max(0, min(as_of, present) - BEFORE * year), max(as_of, present) + AFTER * year


def last_event(as_of: int, unit: str) -> int:
    """The last time that an event can have: the end of tomorrow, for clocks that go wrong.

    An export that is ahead of the clock, most likely of synthetic data, takes events of a year more.
    """
    tomorrow = _today(unit) + 2 * DAY * PER_SECOND[unit]
    return tomorrow if as_of <= tomorrow else as_of + YEAR * PER_SECOND[unit]


def check_time(value: int, as_of: int, unit: str, what: str = "time") -> int:
    """A plausible time: from 40 years before the export, or now, to 100 years after.

    Example:
        >>> check_time(1_700_000_000_000, 1_700_000_000, "s")
        Traceback (most recent call last):
            ...
        ValueError: time 1700000000000 looks like milliseconds: this export has its times in seconds
    """
    first, last = bounds(as_of, unit)
    if first <= value <= last:
        return value
    for other, per_second in PER_SECOND.items():
        if first <= value * PER_SECOND[unit] // per_second <= last:
            raise ValueError(f"{what} {value} looks like {NAMES[other]}: this export has its times in {NAMES[unit]}")
    raise ValueError(
        f"{what} {value} must be {first} to {last}, in {NAMES[unit]} since 1970: the export was made as of {as_of}"
    )


def check_event_time(value: int, as_of: int, unit: str, what: str = "timestamp") -> int:
    """The time of an event: a plausible one, not in the future."""
    check_time(value, as_of, unit, what)
    if value > last_event(as_of, unit):
        raise ValueError(f"{what} {value} ({show_time(value, unit)}) is in the future: events have happened")
    return value


def parse_time(text: str | int, unit: str) -> int:
    """A number in the unit, or an ISO date or time, which is UTC if it does not say.

    Example:
        >>> parse_time("1970-01-02", "ms"), parse_time("1970-01-01T01:00:00+01:00", "s"), parse_time("77", "us")
        (86400000, 0, 77)
    """
    if isinstance(text, int) or text.strip().lstrip("-").isdigit():
        return int(text)
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            f"{text!r} is no time: give a number in {NAMES[unit]} since 1970, or ISO such as 2024-05-01T12:00:00"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return since // datetime.timedelta(microseconds=1_000_000 // PER_SECOND[unit])


def now(unit: str) -> int:
    """The clock's time, in the unit."""
    return time.time_ns() * PER_SECOND[unit] // 1_000_000_000


def _today(unit: str) -> int:
    """When the clock's day began, UTC: limits that move once a day can be written down."""
    day = DAY * PER_SECOND[unit]
    return now(unit) // day * day
