"""What of a history is for training, validation and test: decided when it is read, without copies.

Every event has a weight as a target; 0 means context only. A target is evaluated on what came before it, so that an
event without any history is never one.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Part = Literal["valid", "test"]


@dataclass(frozen=True)
class Bounds:
    """Of each user, as positions within the history.

    Attributes:
        train_end: events before it are for training.
        valid: the validation target, −1 if there is none; everything before it is its history.
        test: the test target likewise.
    """

    train_end: Ints
    valid: Ints
    test: Ints

    def target(self, part: Part) -> Ints:
        return {"valid": self.valid, "test": self.test}[part]


@dataclass(frozen=True)
class LeaveOneOut:
    """The last target event is the test, the one before it the validation, the rest is training.

    Args:
        fit_on_valid: train on everything before the test target; there is no validation then.
    """

    fit_on_valid: bool = False

    def bounds(self, offsets: Ints, times: Ints, weights: NDArray[np.float32] | None) -> Bounds:
        lengths = np.diff(offsets)
        if weights is None:
            last, before = lengths - 1, lengths - 2
        else:
            last = _last_target(offsets, weights, lengths)
            before = _last_target(offsets, weights, np.maximum(last, 0))
        test = np.where(last >= 1, last, -1)
        valid = np.where((before >= 1) & (test >= 0), before, -1)
        if self.fit_on_valid:
            valid = np.full_like(valid, -1)
        train_end = np.where(valid >= 0, valid, np.where(test >= 0, test, lengths))
        return Bounds(train_end, valid, test)


@dataclass(frozen=True)
class ByTime:
    """Each user's first target event at or after a time; training is everything before the first of the two times.

    Args:
        valid_from: start of the validation period; None for none.
        test_from: start of the test period.
    """

    test_from: int
    valid_from: int | None = None

    def __post_init__(self) -> None:
        if self.valid_from is not None and self.valid_from >= self.test_from:
            raise ValueError(f"valid_from = {self.valid_from} must be before test_from = {self.test_from}")

    def bounds(self, offsets: Ints, times: Ints, weights: NDArray[np.float32] | None) -> Bounds:
        lengths = np.diff(offsets)
        is_target = np.ones(len(times), dtype=bool) if weights is None else weights > 0
        test = _first(offsets, is_target & (times >= self.test_from))
        valid = np.full(len(lengths), -1, dtype=np.int64)
        train_until = self.test_from
        if self.valid_from is not None:
            train_until = self.valid_from
            valid = _first(offsets, is_target & (times >= self.valid_from) & (times < self.test_from))
        cut = _first(offsets, times >= train_until)
        train_end = np.where(cut >= 0, cut, lengths)
        return Bounds(train_end, np.where(valid >= 1, valid, -1), np.where(test >= 1, test, -1))


Split = LeaveOneOut | ByTime


def _first(offsets: Ints, marked: NDArray[np.bool_]) -> Ints:
    """The position of each user's first marked event, −1 if none is."""
    places = np.flatnonzero(marked)
    at = np.searchsorted(places, offsets[:-1])
    found = np.append(places, np.iinfo(np.int64).max)[at]
    return np.where(found < offsets[1:], found - offsets[:-1], -1).astype(np.int64)


def _last_target(offsets: Ints, weights: NDArray[np.float32], ends: Ints) -> Ints:
    """The position of each user's last event with a positive weight among its first ``ends``, −1 if none has."""
    places = np.flatnonzero(weights > 0)
    at = np.searchsorted(places, offsets[:-1] + ends) - 1
    found = np.append(places, -1)[at]  # at = −1 picks the sentinel
    return np.where((at >= 0) & (found >= offsets[:-1]), found - offsets[:-1], -1).astype(np.int64)
