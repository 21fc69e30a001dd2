"""Windows of constant size against those of whole histories."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuxi_torchrec.tasks import window_state
from fuxi_torchrec.tasks.tests.test_windows import HISTORIES, oracle
from fuxi_torchrec.tasks.window_state import WindowState, window_bytes


def jagged(histories):
    items = np.array([item for history in histories for item in history], np.int64)
    return items, np.cumsum([0, *map(len, histories)])


def times_of(histories):
    """Falling ones too."""
    return [[(7 * n + 3 * item) % 11 for n, item in enumerate(history)] for history in histories]


def assert_equal(one, other):
    for a, b in zip(one.tensors(), other.tensors(), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@given(HISTORIES, st.integers(1, 9))
def test_the_window_of_a_history_is_its_last_distinct_items(histories, width):
    times = times_of(histories)
    state = WindowState.of(*jagged(histories), jagged(times)[0], width)
    for user, (history, when) in enumerate(zip(histories, times, strict=True)):
        entries = oracle([history], width)[-1] if history else []
        expected = [(history[event], event, count, gap, when[event]) for event, count, gap in entries]
        got = list(zip(*(each[user].tolist() for each in state.tensors()), strict=True))
        assert got == expected + [(0,) * 5] * (width - len(expected))


@given(HISTORIES, st.integers(1, 9), st.data(), st.sampled_from([0, 3, 99]))
def test_appends_give_the_same_however_events_are_cut(histories, width, data, few):
    state, before = WindowState.empty(len(histories), width), np.zeros(len(histories), np.int64)
    rest, times = histories, times_of(histories)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_state, "_FEW", few)
        for last in (False, False, True):
            cuts = [len(each) if last else data.draw(st.integers(0, len(each))) for each in rest]
            now = [each[:cut] for each, cut in zip(rest, cuts, strict=True)]
            when = [each[:cut] for each, cut in zip(times, cuts, strict=True)]
            state = state.append(*jagged(now), jagged(when)[0], before)
            before = before + np.array(cuts, np.int64)
            rest, times = ([each[cut:] for each, cut in zip(those, cuts, strict=True)] for those in (rest, times))
    assert_equal(state, WindowState.of(*jagged(histories), jagged(times_of(histories))[0], width))


def test_windows_are_selected_joined_and_stored():
    histories = [[1, 2, 1, 3], [], [5, 5]]
    state = WindowState.of(*jagged(histories), np.arange(6) * 10**12, 4)
    records = state.to_bytes()
    assert records.shape == (3, window_bytes(4))
    assert_equal(WindowState.from_bytes(records, 4), state)
    wide = torch.cat([torch.zeros(1, 4, dtype=torch.uint8), records[:1]], 1)
    assert_equal(WindowState.from_bytes(wide[:, 4:], 4), state.select(torch.tensor([0])))
    some, others = state.select(torch.tensor([2, 0])), state.select(torch.tensor([1]))
    assert_equal(WindowState.concatenate([some, others]), state.select(torch.tensor([2, 0, 1])))
    assert state.nbytes == 3 * window_bytes(4)


def test_entries_are_counted_from_the_request():
    state = WindowState.of(*jagged([[4, 6, 4], []]), np.array([10, 20, 30]), 3)
    found = state.entries(torch.tensor([3, 0]), torch.tensor([25, 0]))
    assert found.there.tolist() == [[True, True, False], [False] * 3]
    assert found.events_ago[0, :2].tolist() == [0, 1]
    assert found.counts[0, :2].tolist() == [2, 1]
    assert found.gaps[0, :2].tolist() == [2, 0]
    assert found.leads[0, :2].tolist() == [2, 1]  # the other one came right after the first time of the last
    assert found.since[0, :2].tolist() == [0, 5]  # a time before the event counts as its own
