"""The users of an export, found by id: their states and histories, read when they are needed."""

import itertools
import threading
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fuxi_torchrec.encoders.state import EncoderState, States
from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.histories import Histories, Ints, bounds_of
from fuxi_torchrec.export.bundle import HISTORIES, STATES, USERS, Bundle, ExportError
from fuxi_torchrec.export.parts import NO_STATE, USER, histories_of, part_name, part_number, read_users
from fuxi_torchrec.export.states import TRAILER_BYTES, StateFile
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.serving.encoding import UserModel

logger = get_logger(__name__)

_GROUPS = 64  # row groups of histories that stay decoded


class StoredUsers:
    """All users of an export; safe to use from several threads.

    Attributes:
        row: raw id to row.
        events, last_time: of each row.
        damaged: states that were found damaged and encoded again.
    """

    def __init__(self, bundle: Bundle, model: UserModel) -> None:
        self.manifest, self._model = bundle.manifest, model
        paths = bundle.parts(USERS)
        columns = ("events", "last_time", "state_row")
        parts = [read_users(path, columns, embedding=False) for path in paths]
        ids = list(itertools.chain.from_iterable(part.ids.to_pylist() for part in parts))
        self.row: dict[Any, int] = {user: row for row, user in enumerate(ids)}
        if len(self.row) != len(ids):
            raise ExportError(f"{bundle.path / USERS}: a user is in it twice: export again")
        if len(ids) != self.manifest.users:
            raise ExportError(
                f"{bundle.path / USERS}: {len(ids)} users, the manifest says {self.manifest.users}: export again"
            )
        self.events, self.last_time, self._state_row = (
            np.concatenate([np.zeros(0, np.int64), *(getattr(part, name) for part in parts)]) for name in columns
        )
        self._first = bounds_of(np.array([len(part) for part in parts], np.int64))
        self._states, self._histories = list[StateFile | None](), list[_HistoryFile]()
        for path, part in zip(paths, parts, strict=True):
            number = part_number(path)
            has_states = bool((part.state_row != NO_STATE).any())
            size = self.manifest.state_bytes - TRAILER_BYTES
            states = bundle.file(part_name(STATES, number, "bin")) if has_states else None
            self._states.append(StateFile.open(states, self.manifest.model_id, size) if states else None)
            self._histories.append(_HistoryFile(bundle, number))
        self._decoded = lru_cache(_GROUPS)(lambda part, group: self._histories[part].read(group))
        self._lock = threading.Lock()
        self.damaged = 0

    def __len__(self) -> int:
        return len(self.events)

    def states(self, rows: Ints) -> States:
        """States of users: as stored, or encoded from the history where there is none or it is damaged."""
        stored = {n: record for n, row in enumerate(rows) if (record := self._stored_state(int(row))) is not None}
        missing = [n for n in range(len(rows)) if n not in stored]
        pieces = [(missing, self._model.encode(self.histories(rows[missing])))]
        if stored:
            pieces.append((list(stored), self._model.read(torch.stack(list(stored.values())))))
        return self._model.assemble(pieces)

    def _stored_state(self, row: int) -> Tensor | None:
        state_row = int(self._state_row[row])
        if state_row == NO_STATE:
            return None
        file = self._states[_piece(self._first, row)]
        assert file is not None
        records, valid = file.get([state_row])
        if bool(valid[0]) and EncoderState.peek(records[0]) == (self.events[row], self.last_time[row]):
            return records[0]
        with self._lock:
            self.damaged += 1
        logger.warning("%s: the state in row %d is damaged; the user is encoded again", file.path, state_row)
        self._state_row[row] = NO_STATE  # said once
        return None

    def histories(self, rows: Ints) -> Histories:
        each = [self._history(int(row)) for row in rows]
        return Histories.stack([Histories.empty(0, self.manifest.features), *each])

    def items(self, row: int) -> Ints:
        """Dense indices of a user's events."""
        return self._history(row).items

    def _history(self, row: int) -> Histories:
        if not self.events[row]:
            return Histories.empty(1, self.manifest.features)
        part = _piece(self._first, row)
        inside, file = row - int(self._first[part]), self._histories[part]
        group = _piece(file.first, inside)
        return self._decoded(part, group).select(np.array([inside - int(file.first[group])]))


class _HistoryFile:
    """A part of histories/, a row group at a time."""

    def __init__(self, bundle: Bundle, number: int) -> None:
        self.path, self._features = bundle.file(part_name(HISTORIES, number)), bundle.manifest.features
        self._columns = [USER, "item", "timestamp", *(feature.name for feature in self._features)]
        self._lock = threading.Lock()
        try:
            self._file = parquet.open_file(self.path)
            parquet.check_columns(self.path, self._file, self._columns)
        except DataError as error:
            raise ExportError(str(error)) from None
        meta = self._file.metadata
        self.first = bounds_of(np.array([meta.row_group(n).num_rows for n in range(meta.num_row_groups)], np.int64))

    def read(self, group: int) -> Histories:
        try:
            with self._lock:
                table = self._file.read_row_group(group, columns=self._columns)
        except (OSError, pa.ArrowException, DataError) as error:
            raise ExportError(f"{self.path}: cannot be read, the file is damaged: {error}") from None
        return histories_of(table, self._features, str(self.path))


def _piece(bounds: Ints, row: int) -> int:
    """Which part, or row group, a row is in."""
    return int(np.searchsorted(bounds, row, side="right")) - 1
