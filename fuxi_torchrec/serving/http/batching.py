"""Requests of many callers, worked on together."""

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")


class OverloadedError(RuntimeError):
    """Too many requests are waiting."""


class Batcher(Generic[Given, Result]):
    """One thread that collects what callers submit and works on it at once.

    Args:
        work: a result for each of several inputs; an error is every caller's, unless ``repeat``.
        most: inputs of a batch.
        window_seconds: how long to wait for more after the first.
        waiting: inputs that may wait; more are refused.
        observe: is told the size of every batch.
        cost: of an input, 1 or more.
        most_cost: of a batch of more than one input.
        waiting_cost: of all inputs that wait or are worked on; an input alone may have more.
        repeat: work on the inputs of a failed batch one by one, so that an error is only that of the input which has
            it; for work that changes nothing.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Given]], Sequence[Result]],
        name: str,
        most: int = 64,
        window_seconds: float = 0.002,
        waiting: int = 4096,
        observe: Callable[[int], object] = lambda _: None,
        repeat: bool = False,
        cost: Callable[[Given], int] = lambda _: 1,
        most_cost: float = math.inf,
        waiting_cost: float = math.inf,
    ) -> None:
        self._work, self._most, self._window, self._observe = work, most, window_seconds, observe
        self._repeat, self._most_waiting = repeat, waiting
        self._cost, self._most_cost, self._waiting_cost = cost, most_cost, waiting_cost
        self._held = 0  # cost of everything that is not finished
        self._waiting = deque[tuple[Given, Future[Result]]]()
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, given: Given) -> "Future[Result]":
        future, cost = Future[Result](), self._cost(given)
        with self._changed:
            if self._closed:
                raise OverloadedError("the service is shutting down")
            if len(self._waiting) >= self._most_waiting or (self._held and self._held + cost > self._waiting_cost):
                raise OverloadedError("too many requests are waiting")
            self._waiting.append((given, future))
            self._held += cost
            self._changed.notify()
        return future

    def close(self) -> None:
        """Finish what was submitted, then end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while taken := self._collect():
            # a caller that went away has cancelled its future
            batch = [(given, future) for given, future in taken if future.set_running_or_notify_cancel()]
            if batch:
                self._observe(len(batch))
                self._finish(batch)
            with self._changed:
                self._held -= sum(self._cost(given) for given, _ in taken)

    def _finish(self, batch: Sequence[tuple[Given, "Future[Result]"]]) -> None:
        try:
            results = self._work([given for given, _ in batch])
            for (_, future), result in zip(batch, results, strict=True):
                future.set_result(result)
        except BaseException as error:
            open_ones = [(given, future) for given, future in batch if not future.done()]
            if self._repeat and len(batch) > 1:
                for one in open_ones:
                    self._finish([one])
                return
            for _, future in open_ones:
                future.set_exception(error)

    def _collect(self) -> list[tuple[Given, "Future[Result]"]]:
        """The next batch; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._changed.wait_for(lambda: len(self._waiting) >= self._most or self._closed, self._window)
            batch, cost = list[tuple[Given, Future[Result]]](), 0
            while self._waiting and len(batch) < self._most:
                cost += self._cost(self._waiting[0][0])
                if batch and cost > self._most_cost:
                    break
                batch.append(self._waiting.popleft())
            return batch
