"""Times in an export's unit: read, shown, and checked for being of another unit."""

import datetime
import time

PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000}
NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}
YEAR = 31_556_952  # seconds
FAR, NEAR = 100, 10  # years


def check_time(value: int, as_of: int, unit: str, what: str = "time") -> int:
    """A time that can be meant: not negative, within 100 years of the export, and not one of another unit.

    Example:
        >>> check_time(1_700_000_000_000, 1_700_000_000, "s")
        Traceback (most recent call last):
            ...
        ValueError: time 1700000000000 looks like milliseconds: this export has its times in seconds
    """
    if not 0 <= value < 2**63:
        raise ValueError(f"{what} must be 0 to 2^63 - 1, in {NAMES[unit]} since 1970, not {value}")
    year = YEAR * PER_SECOND[unit]
    if abs(value - as_of) <= NEAR * year:
        return value
    for other, per_second in PER_SECOND.items():
        if other != unit and abs(value * PER_SECOND[unit] // per_second - as_of) <= NEAR * year:
            raise ValueError(f"{what} {value} looks like {NAMES[other]}: this export has its times in {NAMES[unit]}")
    if abs(value - as_of) > FAR * year:
        away = abs(value - as_of) / year
        raise ValueError(
            f"{what} {value} is {away:,.0f} years from the export's as_of, {as_of}: times are in {NAMES[unit]}"
        )
    return value


def parse_time(text: str, unit: str) -> int:
    """A number in the export's unit, or an ISO date or time, which is UTC if it does not say.

    Example:
        >>> parse_time("1970-01-02", "ms"), parse_time("1970-01-01T01:00:00+01:00", "s"), parse_time("77", "us")
        (86400000, 0, 77)
    """
    if text.strip().lstrip("-").isdigit():
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


def show_time(value: int, unit: str) -> str:
    """A time for people, UTC."""
    try:
        moment = datetime.datetime.fromtimestamp(value / PER_SECOND[unit], datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{value} {unit}"
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def now(unit: str) -> int:
    """The clock's time."""
    return time.time_ns() * PER_SECOND[unit] // 1_000_000_000
