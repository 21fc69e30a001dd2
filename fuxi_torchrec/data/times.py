"""Units of time, and times for people."""

import datetime

PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000}


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
