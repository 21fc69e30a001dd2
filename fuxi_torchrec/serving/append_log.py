"""What a Recommender was told since its export: a file to which every event is added before it is acknowledged.

The file is a line of JSON about itself, then records: length, its complement and crc32 (uint32 each, little-endian) of
the JSON that follows: ``{"events": [[user, item, time], ...]}``, ``{"forget": [user, ...]}``, or, in a log that was
written anew, ``{"forgotten": [user, ...]}`` for those of whom neither it nor the log before has anything from before. A
record that was being written when the machine stopped is at the end, was never acknowledged, and is cut off.
"""

import contextlib
import dataclasses
import json
import os
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuxi_torchrec.artifacts import lock, replace_file
from fuxi_torchrec.export.bundle import ExportError, Manifest
from fuxi_torchrec.logging import get_logger

logger = get_logger(__name__)

VERSION = 1
LOG_FILE, OLD_FILE, LOCK_FILE = "events.log", "events.log.old", "lock"
_HEAD = struct.Struct("<III")
_BITS = 2**32 - 1
_RECORD = 1000  # events of a record in a log that is written anew

Record = dict[str, list[Any]]


@dataclass(frozen=True)
class LogContent:
    """A log as it was found: what it says of itself, its records, and where they end."""

    about: dict[str, Any]
    records: list[Record]
    end: int
    size: int


def about_of(manifest: Manifest) -> dict[str, Any]:
    """What a log says of the export it is for."""
    kinds = {kind: getattr(manifest, kind) for kind in ("user_id_type", "item_id_type", "time_unit")}
    parent = manifest.parent
    if parent is not None:  # the request tells refreshes apart; who was forgotten is no part of that
        parent = {name: value for name, value in parent.items() if name != "forgotten"}
    return {"version": VERSION, "model_id": manifest.model_id, "as_of": manifest.as_of, "parent": parent, **kinds}


def read_about(directory: Path, name: str = LOG_FILE) -> dict[str, Any]:
    """What a log says of itself: its first line."""
    path = directory / name
    with path.open("rb") as file:
        line = file.readline()
    try:
        about: dict[str, Any] = json.loads(line)
        version = about["version"]
    except (ValueError, KeyError, TypeError):
        raise ExportError(f"{path}: not an append log, or its first line is damaged: move it away") from None
    if version != VERSION:
        raise ExportError(f"{path}: log of version {version}, this software reads {VERSION}")
    return about


def read_log(directory: Path, name: str = LOG_FILE) -> LogContent:
    """Everything whole in a log. Damage before the end is an error: events that were acknowledged would be lost."""
    path = directory / name
    about, data = read_about(directory, name), path.read_bytes()
    at, records = data.find(b"\n") + 1, list[Record]()
    while len(data) - at >= _HEAD.size:
        length, complement, crc = _HEAD.unpack_from(data, at)
        sound = length ^ complement == _BITS
        end = at + _HEAD.size + length if sound else at
        payload = data[at + _HEAD.size : end]
        if not sound or len(payload) < length or zlib.crc32(payload) != crc:
            if data[end:].strip(b"\0"):  # a file that grew before its pages were written ends in zeros
                raise ExportError(
                    f"{path}: the record at byte {at} of {len(data)} is damaged, and there is more after it: restore "
                    f"the file, or cut it there (truncate -s {at}) and give up what follows"
                )
            break
        records.append(json.loads(payload))
        at = end
    return LogContent(about, records, at, len(data))


def read_old(directory: Path) -> LogContent | None:
    """The log before the last change of exports; None if there is none that can be read."""
    if not (directory / OLD_FILE).exists():
        return None
    try:
        return read_log(directory, OLD_FILE)
    except ExportError as error:
        logger.warning("%s", error)
        return None


def with_old(directory: Path, content: LogContent, about: dict[str, Any]) -> LogContent:
    """A log for the export that is served now. If that is the one before, the events that the newer one had are brought
    back from the log before: all of that, then what came later.
    """
    old = read_old(directory) if content.about != about else None
    if old is None or old.about != about:
        return content
    there = Counter(json.dumps(event) for record in old.records for event in record.get("events", ()))
    records = list(old.records)
    for record in content.records:
        later = []
        for event in record.get("events", ()):
            key = json.dumps(event)
            if there[key]:
                there[key] -= 1
            else:
                later.append(event)
        # who was forgotten before both logs is in the old one, ahead of what came after
        records.append({**{kind: values for kind, values in record.items() if kind == "forget"}, "events": later})
    logger.info("%s: an export before is served again, with the events of %s", directory, OLD_FILE)
    return dataclasses.replace(content, records=records)


def settled(records: Iterable[Record], kind: str = "forgotten") -> Iterator[Record]:
    """The same in short: who was forgotten, a record of this kind, then the events that are left."""
    forgotten: dict[Any, None] = {}
    events: list[list[Any] | None] = []
    places: dict[Any, list[int]] = {}
    for record in records:
        for user in (*record.get("forget", ()), *record.get("forgotten", ())):
            forgotten[user] = None
            for place in places.pop(user, ()):
                events[place] = None
        for event in record.get("events", ()):
            places.setdefault(event[0], []).append(len(events))
            events.append(event)
    if forgotten:
        yield {kind: list(forgotten)}
    left = [event for event in events if event is not None]
    for begin in range(0, len(left), _RECORD):
        yield {"events": left[begin : begin + _RECORD]}


def _packed(record: Record) -> bytes:
    payload = json.dumps(record, separators=(",", ":")).encode()
    return _HEAD.pack(len(payload), len(payload) ^ _BITS, zlib.crc32(payload)) + payload


class AppendLog:
    """The log of one Recommender; only one may hold a directory at a time.

    Args:
        directory: is made if need be.
        about: of the export, for a new log.

    Attributes:
        failed: why nothing can be appended any more; None if it can.
        size: bytes written.
    """

    def __init__(self, directory: Path, about: dict[str, Any]) -> None:
        self.directory, self.path = directory, directory / LOG_FILE
        directory.mkdir(parents=True, exist_ok=True)
        self._lock_file = (directory / LOCK_FILE).open("a")
        if not lock(self._lock_file):
            self._lock_file.close()
            raise ExportError(
                f"{directory}: another process is appending to this log: one Recommender at a time, or read_only=True"
            )
        self.failed: str | None = None
        self._file = -1
        try:
            for name in (LOG_FILE, OLD_FILE):  # of a start that was stopped
                (directory / f".{name}.new").unlink(missing_ok=True)
            if not self.path.exists():
                self._write(LOG_FILE, about, [])
            self.content = read_log(directory)
            self._file = os.open(self.path, os.O_RDWR)
            if self.content.end < self.content.size:
                lost = self.content.size - self.content.end
                logger.warning("%s: %d bytes of an unfinished record cut off at the end", self.path, lost)
                os.ftruncate(self._file, self.content.end)
                os.fsync(self._file)
        except BaseException:
            self.close()
            raise
        self.size = self._synced = self.content.end
        self._sync_lock = threading.Lock()

    def write(self, record: Record) -> int:
        """Add a record; one caller at a time. What is returned is for :meth:`sync`."""
        if self.failed is not None:
            raise ExportError(self.failed)
        data, done = _packed(record), 0
        try:
            while done < len(data):
                done += os.pwrite(self._file, data[done:], self.size + done)
        except OSError as error:
            with contextlib.suppress(OSError):  # a full disk: the part that was written is taken back
                os.ftruncate(self._file, self.size)
            raise ExportError(f"{self.path}: cannot be written, nothing was appended: {error.strerror}") from None
        self.size += len(data)
        return self.size

    def sync(self, position: int) -> None:
        """Wait until a record is on disk; callers that wait together share one fsync."""
        if self._synced >= position:
            return
        with self._sync_lock:
            if self.failed is not None:
                raise ExportError(self.failed)
            if self._synced >= position:
                return
            reached = self.size
            try:
                os.fdatasync(self._file)
            except OSError as error:
                self.failed = f"{self.path}: the disk failed ({error.strerror}); appending is over until a restart"
                raise ExportError(self.failed) from None
            self._synced = reached

    def rewrite(self, about: dict[str, Any], records: Sequence[Record]) -> None:
        """Begin anew for an export; nothing of anybody who was forgotten stays on disk.

        The log until now becomes the one before; on the same export, the one before stays, without who was forgotten. A
        stop at any moment loses nothing, and leaves nobody behind for good: the next start does it again. The records
        are what the export lacks, and who was forgotten.
        """
        found, old = self.content, read_old(self.directory)
        newly = [user for record in found.records for user in record.get("forget", ())]
        before = found if found.about != about else old
        if before is old and old is not None:
            before = dataclasses.replace(old, records=[*old.records, {"forget": newly}])
        if found.about != about and old is not None and old.about == about:
            # back to the export before: until the new log is there, the old one alone has some of its events
            self._write(LOG_FILE, about, settled(records, "forget" if newly else "forgotten"))
            self._write_old(before)
            if newly:
                self._write(LOG_FILE, about, settled(records))
        else:
            self._write_old(before)
            self._write(LOG_FILE, about, settled(records))
        os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR)
        self.size = self._synced = os.fstat(self._file).st_size

    def _write_old(self, before: LogContent | None) -> None:
        if before is None:
            (self.directory / OLD_FILE).unlink(missing_ok=True)
        else:
            self._write(OLD_FILE, before.about, settled(before.records))

    def _write(self, name: str, about: dict[str, Any], records: Iterable[Record]) -> None:
        with replace_file(self.directory / name) as aside, aside.open("wb") as file:
            file.write(json.dumps(about).encode() + b"\n")
            for record in records:
                file.write(_packed(record))

    def close(self) -> None:
        """Let go of the directory; everything acknowledged is on disk already."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._lock_file.close()
