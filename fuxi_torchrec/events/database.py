"""DuckDB for one reading of a log: in a directory that goes away with it, and stopped as soon as its caller is.

DuckDB looks at signals only between its own tasks, which can be long, and turns what their handlers raise into errors
of its own. So a thread beside the caller's runs the statements: the caller only waits, which a signal ends at once.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import duckdb
import pyarrow as pa

from fuxi_torchrec.events.errors import DataError

_STREAMED = 2**25  # bytes that DuckDB reads ahead


class Database:
    """A context manager; leaving it stops what is running, removes the directory, and makes DuckDB's errors DataErrors.

    Args:
        near: the directory is made in this one; in the system's for temporary files if None.
        memory_limit: for example ``"1GB"``. One half is DuckDB's, ``budget`` the other half, in bytes.
        in_memory: tables are in memory, and in the directory only if they do not fit.

    Attributes:
        about: the file that is read, for messages that do not name one.
    """

    def __init__(
        self, near: str | None = None, memory_limit: str = "4GB", threads: int = 2, in_memory: bool = False
    ) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._running: Future[Any]
        self.about = ""
        self.place = tempfile.mkdtemp(prefix="prepare-", dir=near)
        settings = {"memory_limit": memory_limit, "threads": threads, "temp_directory": self.place}
        try:
            file = ":memory:" if in_memory else os.path.join(self.place, "events.duckdb")
            self.connection = duckdb.connect(file, config=settings)
            self.budget = _bytes(self.value("SELECT current_setting('memory_limit')")) // 2
            self.rows(f"SET memory_limit = '{self.budget} B'")
            self.rows(f"SET streaming_buffer_size = '{min(_STREAMED, self.budget // 8)} B'")
            self.rows("SET enable_progress_bar = false")
        except BaseException as error:
            shutil.rmtree(self.place, ignore_errors=True)
            if isinstance(error, duckdb.Error):
                raise DataError(f"DuckDB cannot start with {settings}: {error}") from None
            raise

    def _start(self, function: Callable[[], Any]) -> "Future[Any]":
        self._running = self._pool.submit(function)
        return self._running

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Run a statement; its rows, if it has any."""
        found: list[tuple[Any, ...]] = self._start(lambda: self.connection.execute(query).fetchall()).result()
        return found

    def row(self, query: str) -> tuple[Any, ...]:
        (row,) = self.rows(query)
        return row

    def value(self, query: str) -> Any:
        return self.row(query)[0]

    def table(self, query: str) -> pa.Table:
        return self._start(lambda: self.connection.sql(query).to_arrow_table()).result()

    def batches(self, query: str, size: int) -> Iterator[pa.RecordBatch]:
        """A result in parts; the next one is read while the caller works on one. No other statement until the end."""
        reader = self._start(lambda: self.connection.sql(query).to_arrow_reader(size)).result()
        coming = self._start(lambda: next(reader, None))
        while (batch := coming.result()) is not None:
            coming = self._start(lambda: next(reader, None))
            yield batch

    def load(self, name: str, table: pa.Table) -> None:
        self.connection.register("loaded", table)
        self.rows(f"CREATE TABLE {name} AS SELECT * FROM loaded")
        self.connection.unregister("loaded")

    def __enter__(self) -> "Database":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        while not self._running.done():
            self.connection.interrupt()  # again, should the statement have begun only now
            wait([self._running], timeout=0.1)
        self.connection.close()
        shutil.rmtree(self.place, ignore_errors=True)
        if isinstance(error, duckdb.Error):
            what = _without_hints(str(error))
            raise DataError(what if self.about in what else f"{self.about}: {what}") from None


def _bytes(text: str) -> int:
    """A size as DuckDB prints it.

    >>> _bytes("1.5 KiB")
    1536
    """
    number, _, unit = text.partition(" ")
    powers = {"bytes": 0, "byte": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40, "PiB": 50}
    return int(float(number) * 2 ** powers[unit])


def _without_hints(message: str) -> str:
    """DuckDB's message without its advice on reading options, but with the file it speaks of."""
    first = message.split("\n\n")[0].strip()
    file = re.search(r"file ?= ?(\S+)", message)
    return f"{file[1]}: {first}" if file is not None and file[1] not in first else first
