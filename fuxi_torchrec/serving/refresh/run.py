"""One refresh at work: part after part, users that did something encoded on, the others' files linked."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuxi_torchrec.artifacts import sync
from fuxi_torchrec.events.histories import Histories, Ints, covered
from fuxi_torchrec.events.times import now
from fuxi_torchrec.export.bundle import (
    HISTORIES,
    STATES,
    USER_ROWS,
    USERS,
    Bundle,
    ExportError,
    FileEntry,
    describe_file,
    write_manifest,
)
from fuxi_torchrec.export.parts import (
    ID_TYPES,
    NO_STATE,
    Users,
    part_name,
    part_number,
    read_histories,
    read_users,
    write_histories,
    write_rows,
    write_users,
)
from fuxi_torchrec.export.states import TRAILER_BYTES, StateFile
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.serving.encoding import UserModel, batches
from fuxi_torchrec.serving.feature_rows import UserRows
from fuxi_torchrec.serving.forgotten import KEY as FORGOTTEN
from fuxi_torchrec.serving.forgotten import Forgotten
from fuxi_torchrec.serving.refresh.new_events import NewEvents
from fuxi_torchrec.serving.refresh.new_items import link_file
from fuxi_torchrec.serving.refresh.summary import Summary

logger = get_logger(__name__)

PART_USERS = 2**14  # new users fill up the last part to this
RULES = {
    "late": "an event older than its user's last one is counted and left out; the next full export has it",
    "anchors": "past max_positions encoded events a user starts anew from the last max_length",
    "as_of": "touched users are queried at the refresh's as_of; users/ has the request time of each",
}

Progress = Callable[[str, int, int], None]  # what is done, users so far, users in all


class RefreshRun:
    """One run, which writes to a place that becomes the export.

    Args:
        user_rows: of users' features, in place of the export's.
    """

    def __init__(
        self,
        bundle: Bundle,
        new: NewEvents,
        place: Path,
        as_of: int,
        requery_all: bool,
        forget: Sequence[int | str],
        summary: Summary,
        progress: Progress,
        user_rows: UserRows | None = None,
    ) -> None:
        self.bundle, self.manifest, self.place = bundle, bundle.manifest, place
        self.as_of, self.requery_all, self.summary, self.progress = as_of, requery_all, summary, progress
        self.model = UserModel(bundle)
        self.new, self.clock = new, summary.timed
        self.applied: list[str] = list((self.manifest.parent or {}).get("applied", ()))
        self.files: dict[str, FileEntry] = {}
        self.users = self.states = self.done = 0
        self.new_users = partial(Users.new, dimension=self.manifest.dimension, window=self.manifest.window)
        id_type = ID_TYPES[self.manifest.user_id_type]
        try:
            self.forget = pa.array(list(dict.fromkeys(forget)), id_type)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ExportError(f"users to forget must be {id_type}, as in the export: {error}") from None
        self.forgotten = Forgotten.of(self.manifest)
        gone = pa.concat_arrays([self.forget, new.forgotten])
        self.rows_changed = user_rows is not None or len(gone) > 0
        if (rows := user_rows or self.model.user_rows) is not None:
            self.model.user_rows = rows.without(gone)

    def run(self, request: str) -> None:
        """All parts, then what is the same, then the manifest."""
        for folder in (USERS, HISTORIES, STATES):
            (self.place / folder).mkdir()
        events, ids, renewed = self._wanted_events()
        numbers = [part_number(path) for path in self.bundle.parts(USERS)]
        with self.clock("reading"):
            members = [read_users(self._path(USERS, number), (), embedding=False).ids for number in numbers]
        again = pa.array(_mask(ids, renewed))  # they start anew, as users that are not there
        # where each touched user is
        rows = [pc.if_else(again, None, pc.index_in(ids, value_set=part)) for part in members]
        found: NDArray[np.bool_] = np.logical_or.reduce(
            [np.zeros(len(ids), bool), *(pc.is_valid(each).to_numpy(zero_copy_only=False) for each in rows)]
        )
        named = [_mask(part, self.forget) for part in members]
        forgotten = [mask | _mask(part, renewed) for mask, part in zip(named, members, strict=True)]
        self.summary.forgotten_users = int(sum(mask.sum() for mask in forgotten))
        self.summary.unknown_forgotten = len(self.forget) - int(sum(mask.sum() for mask in named))
        fresh = np.flatnonzero(~found)
        self.summary.new_users = len(fresh)
        self.total = sum(len(part) for part in members) + len(fresh)
        for n, number in enumerate(numbers):
            here = pc.is_valid(rows[n]).to_numpy(zero_copy_only=False)
            joining = fresh[: max(0, PART_USERS - len(members[n]))] if n + 1 == len(numbers) else fresh[:0]
            fresh = fresh[len(joining) :]
            self._part(
                number,
                np.asarray(rows[n].drop_null(), np.int64),
                events.select(np.flatnonzero(here)),
                forgotten[n],
                ids.take(pa.array(joining)),
                events.select(joining),
            )
        next_number = max(numbers, default=-1) + 1
        for begin in range(0, len(fresh), PART_USERS):
            some = fresh[begin : begin + PART_USERS]
            users = self.new_users(ids.take(pa.array(some)))
            nothing, number = Histories.empty(len(some), self.manifest.features), next_number + begin // PART_USERS
            self._write_part(number, users, nothing, events.select(some), None, True)
        with self.clock("files"):
            self._write_user_rows()
            for name in self.manifest.files:
                if name.split("/")[0] not in (USERS, HISTORIES, STATES, USER_ROWS):
                    self._link(name)
            self._finish(request)

    def _wanted_events(self) -> tuple[Histories, pa.Array, pa.Array]:
        """The events to apply, by user, and of whom nothing older stays: none if they were applied before, none of
        users to forget.
        """
        new = self.new
        if new.digest in self.applied:
            self.summary.applied_before = True
            logger.info("these events were applied before: %s", new.digest[:16])
            return Histories.empty(0, self.manifest.features), new.users[:0], new.forgotten[:0]
        counts = np.repeat(~_mask(new.users, self.forget), new.histories.lengths)
        if self.new.since != "export":  # what a Recommender on this export took came after it had forgotten
            counts &= self.forgotten.counts(new.users, new.histories)
        self.summary.forgotten_events = int((~counts).sum())
        if len(new) or len(new.forgotten):
            self.applied.append(new.digest)
        histories = new.histories.filter(counts)
        kept = np.flatnonzero(histories.lengths)
        return histories.select(kept), new.users.take(pa.array(kept)), new.forgotten

    # --- a part ------------------------------------------------------------------------------------------------------

    def _path(self, folder: str, number: int, ending: str = "parquet") -> Path:
        return self.bundle.file(part_name(folder, number, ending))

    def _part(
        self,
        number: int,
        touched: Ints,
        events: Histories,
        forgotten: NDArray[np.bool_],
        new_ids: pa.Array,
        new_events: Histories,
    ) -> None:
        """Rewrite a part, or link it.

        Args:
            touched: rows of users with events.
            events: of these.
            forgotten: rows that go.
            new_ids, new_events: users that come.
        """
        if not (len(touched) or forgotten.any() or len(new_ids) or self.requery_all):
            self._link_part(number)
            return
        with self.clock("reading"):
            users = read_users(self._path(USERS, number), window=self.manifest.window)
            if not len(users):
                users = self.new_users(users.ids)
        last = np.repeat(np.where(users.events[touched] > 0, users.last_time[touched], 0), events.lengths)
        on_time = events.times >= last
        self.summary.late_events += int((~on_time).sum())
        histories = None
        if self.new.since == "before" and (events.times == last).any():
            histories = self._histories(number, users)
            there = covered(histories.select(touched), events)
            self.summary.covered_events += int(there.sum())
            on_time &= ~there
        events = events.filter(on_time)
        some = events.lengths > 0
        touched, events = touched[some], events.select(np.flatnonzero(some))
        changes = bool(len(touched) or forgotten.any() or len(new_ids))
        if not changes and not self.requery_all:
            self._link_part(number)
            return
        if histories is None:
            histories = self._histories(number, users)
        # new events, a row per user of the part
        place = np.full(len(users), len(events))
        place[touched] = np.arange(len(touched))
        added = Histories.stack((events, Histories.empty(1, self.manifest.features))).select(place)
        users = Users.stack((users, self.new_users(new_ids)))
        histories = Histories.stack((histories, Histories.empty(len(new_ids), self.manifest.features)))
        added = Histories.stack((added, new_events))
        kept = np.flatnonzero(~np.concatenate((forgotten, np.zeros(len(new_ids), bool))))
        old_states = None
        if (users.state_row != NO_STATE).any():
            path, size = self._path(STATES, number, "bin"), self.manifest.state_bytes - TRAILER_BYTES
            old_states = StateFile.open(path, self.manifest.model_id, size)
        self._write_part(number, users.select(kept), histories.select(kept), added.select(kept), old_states, changes)

    def _histories(self, number: int, users: Users) -> Histories:
        path = self._path(HISTORIES, number)
        with self.clock("reading"):
            histories = read_histories(path, users.ids, self.manifest.features)
        if not np.array_equal(histories.lengths, users.events):
            raise ExportError(f"{path}: lengths are not those in users/: export again")
        return histories

    def _write_part(
        self,
        number: int,
        users: Users,
        histories: Histories,
        added: Histories,
        old_states: StateFile | None,
        changes: bool,
    ) -> None:
        """Encode and write a part; if nobody changed, only users/ is written."""
        joined, fresh_anchor = self._anchored(users, histories.join(added))
        touched = added.lengths > 0
        self.summary.touched_users += int(touched.sum())
        self.summary.reanchored_users += int(fresh_anchor.sum())
        new_states = None
        if changes and self.manifest.state_bytes:  # none are stored where they grow
            path, size = self.place / part_name(STATES, number, "bin"), self.manifest.state_bytes - TRAILER_BYTES
            new_states = StateFile.create(path, self.manifest.model_id, size)
        # states are appended to or encoded in batches of bounded size
        has_state = (users.state_row != NO_STATE) & ~fresh_anchor
        cost = np.where(has_state, added.lengths, np.where(touched | self.requery_all, joined.lengths, 0))
        for begin, end in batches(cost):
            rows = np.arange(begin, end)
            self._encode(users, rows, joined, added, has_state, old_states, new_states)
            self.done += len(rows)
            self.progress("encoding", self.done, self.total)
        users.events, some = joined.lengths, joined.lengths > 0
        users.last_time[some] = joined.times[joined.offsets[1:][some] - 1]
        users.anchor_time[some] = joined.times[joined.offsets[:-1][some]]
        with self.clock("files"):
            names = _names(number)
            write_users(self.place / names[0], users)
            if changes:
                write_histories(self.place / names[1], users.ids, joined)
            if new_states is not None:
                new_states.close()
                sync(new_states.path)
            for name in names:
                if (self.place / name).exists():
                    self.files[name] = describe_file(self.place / name)
                elif not changes:
                    self._link(name)
        self._count(users)
        self.summary.parts_rewritten += 1

    def _anchored(self, users: Users, joined: Histories) -> tuple[Histories, NDArray[np.bool_]]:
        """The events to encode, and which users have a new anchor."""
        over = joined.lengths > self.model.encoder.config.max_positions
        over &= joined.lengths > users.events  # touched; what an export encoded stays as it is
        limit = np.where(over, self.manifest.max_length, joined.lengths)
        cut = joined.last(limit)
        users.anchor_count = users.anchor_count + joined.lengths - cut.lengths
        return cut, over

    def _encode(
        self,
        users: Users,
        rows: Ints,
        joined: Histories,
        added: Histories,
        has_state: NDArray[np.bool_],
        old_states: StateFile | None,
        new_states: StateFile | None,
    ) -> None:
        """States and vectors of some rows of a part."""
        with self.clock("encoding"):
            stored, records = rows[has_state[rows]], dict[int, Tensor]()
            if old_states is not None:
                found = zip(stored.tolist(), *old_states.get(users.state_row[stored]), strict=True)
                records = {row: record for row, record, whole in found if whole}
            queried = [row for row in rows.tolist() if self.requery_all or added.offsets[row] < added.offsets[row + 1]]
            continued = [row for row in queried if row in records]
            encoded = [row for row in queried if row not in records]
            damaged = set(stored.tolist()) - records.keys()
            self.summary.damaged_states += len(damaged)
            if new_states is not None:
                encoded += sorted(damaged.difference(encoded))
            pieces = [self.model.encode(joined.select(np.array(encoded, np.int64)))]
            if continued:
                before = self.model.read(torch.stack([records[row] for row in continued]))
                pieces.insert(0, self.model.append(before, added.select(np.array(continued))))
            state = self.model.concatenate(pieces)
            self.summary.encoded_users += int((joined.lengths[encoded] > 0).sum())
            place = {row: n for n, row in enumerate(continued + encoded)}
            if queried:
                chosen = state.select([place[row] for row in queried])
                times, whose = np.full(len(queried), self.as_of), users.ids.take(pa.array(queried)).to_pylist()
                vectors = self.model.vectors(chosen, times, whose)
                users.embedding[queried], users.as_of[queried] = vectors.numpy(), self.as_of
                if self.manifest.window:
                    windows = self.model.window_scores(chosen, vectors, times)
                    users.window_item[queried], users.window_score[queried] = (each.numpy() for each in windows)
                self.summary.requeried_users += len(queried)
        if new_states is None:
            return
        with self.clock("files"):
            records |= dict(zip(place, self.model.records(state), strict=True))
            enough = joined.lengths >= self.manifest.state_min_events
            kept = [row for row in rows.tolist() if row in records and enough[row]]
            users.state_row[rows] = NO_STATE
            if kept:
                users.state_row[kept] = new_states.append(torch.stack([records[row] for row in kept]))

    # --- files -------------------------------------------------------------------------------------------------------

    def _link(self, name: str) -> None:
        """The same file in the new export, or a copy where links cannot be made."""
        if name not in self.manifest.files:
            return
        link_file(self.bundle.path / name, self.place / name)
        self.files[name] = self.manifest.files[name]

    def _write_user_rows(self) -> None:
        """What users' features add, or links where nothing changed."""
        rows = self.model.user_rows
        if rows is None or not self.rows_changed:
            for path in self.bundle.parts(USER_ROWS):
                self._link(f"{USER_ROWS}/{path.name}")
        elif len(rows.ids):
            name = part_name(USER_ROWS, 0)
            (self.place / USER_ROWS).mkdir()
            write_rows(self.place / name, rows.ids, rows.table)
            self.files[name] = describe_file(self.place / name)

    def _link_part(self, number: int) -> None:
        for name in _names(number):
            self._link(name)
        users = read_users(self._path(USERS, number), ("state_row",), embedding=False)
        self._count(users)
        self.done += len(users)
        self.summary.parts_linked += 1
        self.progress("encoding", self.done, self.total)

    def _count(self, users: Users) -> None:
        self.users += len(users)
        self.states += int((users.state_row != NO_STATE).sum())

    def _finish(self, request: str) -> None:
        before = self.manifest
        parent: dict[str, Any] = {"model_id": before.model_id, "as_of": before.as_of}
        parent |= {"applied": self.applied, "request": request}
        # a log that this run did not see may be older than the clock, and one that it saw ahead of it
        until = max(now(before.time_unit), int(self.new.histories.times.max(initial=0)))
        if forgotten := self.forgotten.and_these(self.forget.to_pylist(), until).until:
            parent[FORGOTTEN] = forgotten
        manifest = replace(
            before,
            as_of=self.as_of,
            users=self.users,
            states=self.states,
            rules={**before.rules, **RULES},
            files=dict(sorted(self.files.items())),
            parent=parent,
        )
        write_manifest(self.place, manifest)


def _names(number: int) -> tuple[str, str, str]:
    """The files of a part."""
    return part_name(USERS, number), part_name(HISTORIES, number), part_name(STATES, number, "bin")


def _mask(ids: pa.Array, among: pa.Array) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = pc.is_in(ids, value_set=among).to_numpy(zero_copy_only=False)
    return found
