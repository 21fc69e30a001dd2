"""What a Recommender was told since its export: appended events, forgotten users and new items, in a SQLite file.

``events`` has them in the order in which they came. ``live`` are those that the export that is served lacks; the others
are those that the export before lacked, so that one can go back to it. A row without an item says that the user was
forgotten, one without a user too that an item was added. ``state`` is a row about them.

Nothing that was acknowledged is lost in silence: each row has a checksum over its number too, ``state`` the number and
sum of those until a row, later ones follow without a gap, and SQLite checks its pages on opening. A damaged write-ahead
log is to SQLite one that ends before the damage: so the last row's number is written to a file beside it, after each
commit and before it is acknowledged.
"""

import contextlib
import json
import os
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from fuxi_torchrec.artifacts import lock, replace_file
from fuxi_torchrec.export.bundle import ExportError, Manifest
from fuxi_torchrec.serving.requests import Event, UserId

VERSION = 1
STORE_FILE, MARK_FILE = "events.sqlite", "acknowledged"
_MARK = struct.Struct("<QI")  # number of the last row, crc32
_PAGE = 1024  # bytes: a commit of an event writes a page or two
_LOG = 1000 * (_PAGE + 24)  # bytes that the write-ahead log has between checkpoints
_WAIT = 10.0  # seconds, for a process that reads
_TABLES = {
    "events": "CREATE TABLE events (seq INTEGER PRIMARY KEY, user, item, time, features, live, checksum)",
    "state": "CREATE TABLE state (version, export, until, rows, checksums, erased, checksum)",
}
_INSERT = "INSERT INTO {} VALUES (?, ?, ?, ?, ?, ?, ?)"
_UPDATE = "UPDATE state SET version = ?, export = ?, until = ?, rows = ?, checksums = ?, erased = ?, checksum = ?"


class Row(NamedTuple):
    """A row of the store; features are JSON, of an item that was added all that was said of it."""

    seq: int
    user: Any
    item: Any
    time: Any
    features: str | None = None
    live: int = 1

    def event(self) -> Event:
        return Event(self.user, self.item, self.time, json.loads(self.features) if self.features else None)


class State(NamedTuple):
    """About the rows until one, and the export that is served (JSON); ``erased`` until no trace of deleted rows is on
    disk.
    """

    version: int
    export: str
    until: int = 0
    rows: int = 0
    checksums: int = 0
    erased: int = 0

    def after(self, new: Sequence[tuple[Any, ...]], gone: Sequence[int] = ()) -> "State":
        """With rows more, and without those of some checksums."""
        until, rows = max([self.until, *(row[0] for row in new)]), self.rows + len(new) - len(gone)
        checksums = self.checksums + sum(row[-1] for row in new) - sum(gone)
        return State(self.version, self.export, until, rows, checksums, self.erased)


class Content(NamedTuple):
    """What a store had when it was read, found to be whole."""

    state: State
    events: list[Row]
    forgotten: list[Row]
    items: list[Row]
    about: dict[str, Any]


def about_of(manifest: Manifest) -> dict[str, Any]:
    """What a store says of the export it is for."""
    kinds = {kind: getattr(manifest, kind) for kind in ("user_id_type", "item_id_type", "time_unit")}
    parent = manifest.parent
    if parent is not None:  # the request tells refreshes apart; who was forgotten is no part of that
        parent = {name: value for name, value in parent.items() if name != "forgotten"}
    return {"model_id": manifest.model_id, "as_of": manifest.as_of, "parent": parent, **kinds}


def read_store(directory: Path) -> Content:
    """Everything in a store at this moment; a service may go on with it."""
    path, log = directory / STORE_FILE, directory / f"{STORE_FILE}-wal"
    if not log.exists():  # nobody has it open: then reading makes no files beside it
        content = _read(path, "immutable=1")
        if not log.exists():
            return content
    return _read(path, "mode=ro")


def _read(path: Path, mode: str) -> Content:
    acknowledged = _acknowledged(path.with_name(MARK_FILE))  # first: the service goes on
    try:
        with contextlib.closing(_connect(path, mode)) as database:
            database.execute("BEGIN")
            problem = database.execute("PRAGMA integrity_check(1)").fetchone()[0]
            tables = dict(database.execute("SELECT name, sql FROM sqlite_master"))
            if problem != "ok" or tables != _TABLES:
                raise _damaged(path, problem if problem != "ok" else "not a Recommender's store")
            states, rows = (database.execute(f"SELECT * FROM {table}").fetchall() for table in ("state", "events"))
    except (sqlite3.Error, UnicodeDecodeError) as error:  # also of SQLite's messages about damage
        raise _damaged(path, str(error)) from None
    for row in states + rows:
        if row != _summed(row[:-1]):
            raise _damaged(path, f"the row {row[:3]} has another checksum")
    state = State(*states[0][:-1]) if states else None
    if state is None or state.version != VERSION:
        raise ExportError(f"{path}: a store of version {state and state.version}, this software reads {VERSION}")
    old = [row[-1] for row in rows if row[0] <= state.until]
    new = rows[len(old) :]
    gaps = [row[0] for row in new] != list(range(state.until + 1, state.until + 1 + len(new)))
    if gaps or (state.rows, state.checksums) != (len(old), sum(old)):
        raise _damaged(
            path, f"{len(old)} of {state.rows} rows until {state.until} are there, or rows are missing after"
        )
    state = state.after(new)
    if state.until < acknowledged:
        what = f"rows until {state.until} of {acknowledged} acknowledged ones are there ({path.name}-wal is damaged, or"
        raise _damaged(path, f"{what} an older copy was put in place: then delete {MARK_FILE})")
    found = [Row(*row[:-1]) for row in rows]
    items = [row for row in found if row.user is None]
    events, forgotten = (
        [row for row in found if row.user is not None and (row.item is None) == gone] for gone in (False, True)
    )
    return Content(state, events, forgotten, items, json.loads(state.export))


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.absolute()))}?{mode}"
    return sqlite3.connect(uri, _WAIT, isolation_level=None, check_same_thread=False, uri=True)


def _damaged(path: Path, what: str) -> ExportError:
    return ExportError(
        f"{path}: {what}: restore the directory from a backup, or save what can be read with sqlite3 and begin another "
        'one (docs/serving.md, "A damaged store")'
    )


def _acknowledged(path: Path) -> int:
    data = path.read_bytes() if path.exists() else b""
    if not data.strip(b"\0"):
        return 0
    if len(data) != _MARK.size or _mark(last := _MARK.unpack(data)[0]) != data:
        raise ExportError(f"{path}: the file is damaged: delete it if {STORE_FILE} beside it is as it should be")
    return int(last)


def _mark(last: int) -> bytes:
    return _MARK.pack(last, zlib.crc32(b"%d" % last))


def _summed(row: Sequence[Any]) -> tuple[Any, ...]:
    """A row with its checksum."""
    return (*row, zlib.crc32(repr(tuple(row)).encode()))


class Store:
    """The store of one Recommender, to write to; only one may hold a directory at a time.

    Methods are called by one thread at a time. What they do is on disk when they return; an ExportError says that
    nothing was changed.

    Attributes:
        failed: why nothing can be written any more; None if it can.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / STORE_FILE
        self.failed: str | None = None
        self._held = contextlib.ExitStack()
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / "events.log").exists():
            raise ExportError(f"{directory}: an append log of an earlier version: refresh with that, or move it away")
        (directory / MARK_FILE).touch()
        self._mark = self._held.enter_context((directory / MARK_FILE).open("r+b", buffering=0))
        if not lock(self._mark):
            self.close()
            raise ExportError(
                f"{directory}: another process is appending to this store: one Recommender at a time, or read_only=True"
            )

    def open(self, about: dict[str, Any]) -> Content:
        """What is in it; a new one is for an export."""
        if not self.path.exists():
            with replace_file(self.path) as aside, contextlib.closing(_connect(aside, "mode=rwc")) as database:
                database.execute(f"PRAGMA page_size = {_PAGE}")
                database.execute("PRAGMA journal_mode = WAL")
                for sql in _TABLES.values():
                    database.execute(sql)
                database.execute(_INSERT.format("state"), _summed(State(VERSION, json.dumps(about))))
        content = read_store(self.path.parent)  # before it is written to, so that damage stays as it is
        self._database = self._held.enter_context(contextlib.closing(_connect(self.path, "mode=rw")))
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute("PRAGMA secure_delete = ON")
        self._acknowledge(content.state)
        self._lengthen_log()
        return content

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.path.parent.glob(f"{STORE_FILE}*"))

    def append(self, events: Iterable[Event]) -> None:
        """Add events, in one commit."""
        self._add((user, item, int(time), features) for user, item, time, features, _ in events)

    def add_items(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add what was said of items, in one commit."""
        self._add((None, None, None, record) for record in records)

    def _add(self, said: Iterable[tuple[Any, Any, int | None, Any]]) -> None:
        rows = [
            Row(seq, user, item, time, json.dumps(features) if features else None)
            for seq, (user, item, time, features) in enumerate(said, self._state.until + 1)
        ]
        if rows:
            self._change((), rows)

    def forget(self, users: Sequence[UserId]) -> None:
        """Delete everything of users, and remember them as forgotten."""
        rows = [Row(seq, user, None, None) for seq, user in enumerate(users, self._state.until + 1)]
        self._change(users, rows, self._state._replace(erased=1))

    def rewrite(self, about: dict[str, Any], rows: Sequence[Row]) -> None:
        """Go on with an export and these rows; no trace of others is left on disk."""
        self._change(None, rows, State(VERSION, json.dumps(about), self._state.until, erased=1))
        with self._reported():
            self._database.execute("VACUUM")
            busy = self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if not busy:  # nobody reads what was before; otherwise the next start does it again
            self._change((), (), self._state._replace(erased=0))
        self._lengthen_log()

    def _change(self, users: Sequence[UserId] | None, new: Iterable[Row], state: State | None = None) -> None:
        """Delete everything of users, or everything, and add rows, in one commit; it notes a state if one is given."""
        rows, database = [_summed(row) for row in new], self._database
        gone: list[int] = []
        with self._reported():
            database.execute("BEGIN IMMEDIATE")
            if users is None:
                database.execute("DELETE FROM events")
            elif users:
                those, given = "FROM events WHERE user IN (SELECT value FROM json_each(?))", (json.dumps(users),)
                gone = [checksum for (checksum,) in database.execute(f"SELECT checksum {those}", given)]
                database.execute(f"DELETE {those}", given)
            database.executemany(_INSERT.format("events"), rows)
            after = (state or self._state).after(rows, gone)
            if state is not None:
                database.execute(_UPDATE, _summed(after))
            database.execute("COMMIT")
        self._acknowledge(after)

    def _lengthen_log(self) -> None:
        """Zeros after the write-ahead log's end: commits then overwrite, and a sync has no new length to write too."""
        self._database.execute("SELECT * FROM state").fetchall()  # so that there is one
        with contextlib.suppress(OSError), self.path.with_name(f"{STORE_FILE}-wal").open("ab") as file:
            file.write(bytes(max(0, _LOG - file.tell())))
            file.flush()
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        if self.failed is not None:
            raise ExportError(self.failed)
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorname", "")
            if "FSYNC" in code or "CORRUPT" in code:
                self.failed = f"{self.path}: the disk failed ({error}); appending is over until a restart"
                raise ExportError(self.failed) from None
            raise ExportError(f"{self.path}: cannot be written, nothing was changed: {error}") from None
        finally:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")

    def _acknowledge(self, state: State) -> None:
        os.pwrite(self._mark.fileno(), _mark(state.until), 0)
        self._state = state

    def close(self) -> None:
        """Let go of the directory; everything acknowledged is on disk already."""
        self._held.close()
