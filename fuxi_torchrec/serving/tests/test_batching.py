"""Requests of many callers, worked on together."""

import threading
import time

import pytest

from fuxi_torchrec.serving.http.batching import Batcher, OverloadedError


def held_up(work, first=(0,), **limits):
    """A Batcher whose first input is worked on until the gate opens, and the gate."""
    began, gate = threading.Event(), threading.Event()

    def working(given):
        began.set()
        assert gate.wait(10)
        return work(given)

    batcher = Batcher(working, "test", **limits)
    batcher.submit(first)
    assert began.wait(10)
    return batcher, gate


def test_waiting_requests_are_worked_on_together():
    sizes = []

    def work(given):
        sizes.append(len(given))
        return [n * n for n in given]

    batcher, gate = held_up(work, most=8, first=0)
    futures = [batcher.submit(n) for n in range(20)]
    gate.set()
    assert [future.result(10) for future in futures] == [n * n for n in range(20)]
    assert sizes == [1, 8, 8, 4]
    batcher.close()
    with pytest.raises(OverloadedError, match="shutting down"):
        batcher.submit(1)


def test_an_error_is_every_callers_and_the_next_batch_goes_on():
    def work(given):
        return [1 // n for n in given]

    batcher = Batcher(work, "test", most=1)
    bad, good = batcher.submit(0), batcher.submit(1)
    with pytest.raises(ZeroDivisionError):
        bad.result(10)
    assert good.result(10) == 1
    batcher.close()


def test_too_many_waiting_requests_are_refused():
    gate = threading.Event()
    batcher = Batcher(lambda given: [gate.wait(10) for _ in given], "test", most=1, waiting=3)
    futures = [batcher.submit(0)]
    while not futures[0].running():
        time.sleep(0.001)
    futures += [batcher.submit(n) for n in range(3)]
    with pytest.raises(OverloadedError, match="too many requests are waiting"):
        batcher.submit(4)
    gate.set()
    batcher.close()  # what was taken is finished
    assert all(future.result(10) for future in futures)


def test_a_batch_has_bounded_cost():
    batches = []

    def work(given):
        batches.append([len(one) for one in given])
        return [sum(one) for one in given]

    batcher, gate = held_up(work, most=4, cost=len, most_cost=10)
    given = [[1] * n for n in (4, 6, 1, 50, 3, 3, 1, 1, 1)]
    futures = [batcher.submit(one) for one in given]
    gate.set()
    assert [future.result(10) for future in futures] == [4, 6, 1, 50, 3, 3, 1, 1, 1]
    batcher.close()
    assert batches == [[1], [4, 6], [1], [50], [3, 3, 1, 1], [1]]


def test_waiting_requests_have_bounded_cost():
    batcher, gate = held_up(lambda given: [0 for _ in given], cost=len, waiting_cost=10)
    batcher.submit([1] * 9)
    with pytest.raises(OverloadedError, match="too many requests are waiting"):
        batcher.submit([1])
    gate.set()
    batcher.close()
    alone = Batcher(lambda given: [len(one) for one in given], "test", cost=len, waiting_cost=10)
    assert alone.submit([1] * 50).result(10) == 50, "nothing else is held"
    alone.close()


def test_work_that_changes_something_is_not_repeated():
    calls = []

    def work(given):
        calls.append(list(given))
        raise ValueError("no")

    batcher = Batcher(work, "test", most=4, window_seconds=0.5)
    futures = [batcher.submit(n) for n in range(4)]
    for future in futures:
        with pytest.raises(ValueError, match="no"):
            future.result(5)
    batcher.close()
    assert [n for call in calls for n in call] == [0, 1, 2, 3]
