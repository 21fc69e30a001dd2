import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuxi_torchrec.data.splits import ByTime, LeaveOneOut

USERS = st.lists(
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from([0.0, 1.0])), max_size=8), min_size=1, max_size=5
)


def flat(users):
    offsets = np.concatenate([[0], np.cumsum([len(u) for u in users])]).astype(np.int64)
    times = np.array([t for u in users for t, _ in sorted(u)], np.int64)
    weights = np.array([w for u in users for _, w in sorted(u)], np.float32)
    return offsets, times, weights


@given(USERS, st.booleans(), st.booleans())
def test_leave_one_out_takes_the_last_targets(users, weighted, fit_on_valid):
    offsets, times, weights = flat(users)
    found = LeaveOneOut(fit_on_valid).bounds(offsets, times, weights if weighted else None)
    for n, user in enumerate(users):
        targets = [i for i, (_, w) in enumerate(sorted(user)) if w > 0 or not weighted]
        test = targets[-1] if targets and targets[-1] >= 1 else -1
        valid = targets[-2] if test >= 0 and len(targets) > 1 and targets[-2] >= 1 and not fit_on_valid else -1
        end = valid if valid >= 0 else test if test >= 0 else len(user)
        assert (found.test[n], found.valid[n], found.train_end[n]) == (test, valid, end)


def first_between(events, ok, a, b):
    return next((i for i, (t, _) in enumerate(events) if a <= t < b and ok[i]), -1)


@given(USERS, st.booleans(), st.integers(1, 19), st.booleans())
def test_by_time_takes_the_first_target_of_each_period(users, weighted, test_from, has_valid):
    offsets, times, weights = flat(users)
    valid_from = test_from // 2 if has_valid and test_from > 1 else None
    found = ByTime(test_from, valid_from).bounds(offsets, times, weights if weighted else None)
    for n, user in enumerate(users):
        events = sorted(user)
        ok = [w > 0 or not weighted for _, w in events]
        test = first_between(events, ok, test_from, 99)
        valid = first_between(events, ok, valid_from, test_from) if valid_from is not None else -1
        until = test_from if valid_from is None else valid_from
        assert found.train_end[n] == sum(t < until for t, _ in events)
        assert found.test[n] == (test if test >= 1 else -1)
        assert found.valid[n] == (valid if valid >= 1 else -1)


def test_periods_must_be_in_order():
    with pytest.raises(ValueError, match="valid_from = 5 must be before test_from = 5"):
        ByTime(5, 5)
