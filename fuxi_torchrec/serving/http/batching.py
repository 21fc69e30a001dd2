"""Requests of many callers, worked on together."""

import math
import queue
import threading
import time
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
        self._cost, self._most_cost, self._waiting_cost = cost, most_cost, waiting_cost
        self._held = 0  # cost of everything that is not finished
        self._next: tuple[Given, Future[Result]] | None = None  # taken, and too much for the batch before
        self._work, self._most, self._window, self._observe = work, most, window_seconds, observe
        self._repeat = repeat
        self._queue: queue.Queue[tuple[Given, Future[Result]] | None] = queue.Queue(waiting)
        self._closed = False
        self._lock = threading.Lock()  # nothing is put behind the end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, given: Given) -> "Future[Result]":
        future: Future[Result] = Future()
        with self._lock:
            if self._closed:
                raise OverloadedError("the service is shutting down")
            cost = self._cost(given)
            if self._held and self._held + cost > self._waiting_cost:
                raise OverloadedError("too many requests are waiting")
            try:
                self._queue.put_nowait((given, future))
            except queue.Full:
                raise OverloadedError("too many requests are waiting") from None
            self._held += cost
        return future

    def close(self) -> None:
        """Finish what was submitted, then end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        more = True
        while more:
            taken, more = self._collect()
            # a caller that went away has cancelled its future
            batch = [(given, future) for given, future in taken if future.set_running_or_notify_cancel()]
            if batch:
                self._observe(len(batch))
                self._finish(batch)
            with self._lock:
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

    def _collect(self) -> tuple[list[tuple[Given, "Future[Result]"]], bool]:
        first, self._next = self._next or self._queue.get(), None
        if first is None:
            return [], False
        batch, cost, deadline = [first], self._cost(first[0]), time.monotonic() + self._window
        while len(batch) < self._most:
            try:
                left = deadline - time.monotonic()
                entry = self._queue.get(timeout=left) if left > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
            if entry is None:
                return batch, False
            cost += self._cost(entry[0])
            if cost > self._most_cost:
                self._next = entry
                break
            batch.append(entry)
        return batch, True
