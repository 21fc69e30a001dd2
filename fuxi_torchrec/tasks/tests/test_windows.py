"""Windows against a plain list of each user's items."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fuxi_torchrec.tasks.windows import find_windows


def oracle(histories, width):
    """Of every event: the last distinct items as (event, how often the item has occurred since it came into the
    window, how many events lie between its last two), latest first.
    """
    found, base = [], 0
    for history in histories:
        window = []  # of [item, event, count, gap], latest first
        for place, item in enumerate(history):
            if item > 0:
                own = [entry for entry in window if entry[0] == item]
                others = [entry for entry in window if entry[0] != item]
                count, gap = (own[0][2] + 1, base + place - own[0][1]) if own else (1, 0)
                window = [[item, base + place, count, gap], *others][:width]
            found.append([tuple(entry[1:]) for entry in window])
        base += len(history)
    return found


HISTORIES = st.lists(st.lists(st.integers(0, 6), max_size=14), max_size=6)


@given(HISTORIES, st.integers(1, 9))
def test_windows_are_those_of_the_definition(histories, width):
    items = np.array([item for history in histories for item in history], np.int64)
    offsets = np.cumsum([0, *map(len, histories)])
    found = find_windows(items, offsets, width)
    last, gaps = found.last, found.gaps(np.arange(len(items)))
    assert last.shape == (len(items), width)
    got = [[(event, found.counts[event], gaps[event]) for event in row if event >= 0] for row in last.tolist()]
    assert got == oracle(histories, width)
    assert all((np.diff((row >= 0).astype(int)) <= 0).all() for row in last)  # empty slots come last


@given(HISTORIES, st.randoms(use_true_random=False))
def test_windows_of_some_positions_are_rows_of_all(histories, random):
    items = np.array([item for history in histories for item in history], np.int64)
    offsets = np.cumsum([0, *map(len, histories)])
    chosen = np.array(random.sample(range(len(items)), len(items) // 2), np.int64)
    every = find_windows(items, offsets, 4)
    some = find_windows(items, offsets, 4, chosen)
    np.testing.assert_array_equal(some.last, every.last[chosen])
    events = some.last[some.last >= 0]
    np.testing.assert_array_equal(some.counts[events], every.counts[events])
    np.testing.assert_array_equal(some.previous[events], every.previous[events])


def test_a_long_history_of_one_item_has_a_window_of_one():
    last, counts, _ = find_windows(np.full(5000, 3), np.array([0, 0, 5000, 5000]), 8)
    np.testing.assert_array_equal(last[:, 0], np.arange(5000))
    assert (last[:, 1:] == -1).all() and counts[-1] == 5000
