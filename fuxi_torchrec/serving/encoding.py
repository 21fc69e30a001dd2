"""An export's model: rows of events in, states and vectors out."""

import itertools
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fuxi_torchrec.encoders.state import EncoderState, States
from fuxi_torchrec.events.batching import batch_ends
from fuxi_torchrec.events.feature_table import projection_inputs
from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.events.histories import Column, Histories, Ids, Ints, Ragged
from fuxi_torchrec.export.bundle import ITEM_TABLE, Bundle, ExportError, scaled
from fuxi_torchrec.export.states import TRAILER_BYTES
from fuxi_torchrec.serving.feature_rows import UserRows, pooled_rows, projection_of
from fuxi_torchrec.serving.new_items import ItemComposer
from fuxi_torchrec.serving.requests import UserId
from fuxi_torchrec.serving.windowed import WindowedStates
from fuxi_torchrec.tasks.base import Correction
from fuxi_torchrec.tasks.window_state import WindowState, window_bytes

AT_ONCE, USERS_AT_ONCE = 2**16, 512  # events and users that are encoded in one call


class UserModel:
    """Encodes users as the export did; its tensors are for inference alone."""

    def __init__(self, bundle: Bundle) -> None:
        self.manifest, self.encoder, self.bias = bundle.manifest, bundle.encoder(), bundle.repeats()
        size = self.encoder.state_bytes and self.encoder.state_bytes + window_bytes(self.manifest.window)
        if size != max(0, self.manifest.state_bytes - TRAILER_BYTES):
            said = f"state_bytes {self.manifest.state_bytes}, the encoder's states and windows have {size}"
            raise ExportError(f"{bundle.path}: {said}: export again")
        tables = bundle.tables()
        self.items = tables[ITEM_TABLE]
        self.features = {f.name: tables[f"feature_{f.name}"] for f in self.manifest.features if f.in_table}
        self.numbers = [feature for feature in self.manifest.features if not feature.in_table]
        self.projection = projection_of(bundle, tables, "event")
        self.composer = ItemComposer(bundle, tables)
        self.user_rows = UserRows.read(bundle)
        self.like = self.init_state(0)

    def init_state(self, users: int) -> States:
        """Of users without events."""
        empty = self.encoder.init_state(users)
        return empty if self.bias is None else WindowedStates(empty, WindowState.empty(users, self.manifest.window))

    def set_rows(self, index: Ints, rows: Tensor) -> None:
        """Rows of items; those behind the table's end are new. Others may be reading it: they see the old or the new
        table.
        """
        more = int(index.max(initial=0)) + 1 - len(self.items)
        table = torch.cat([self.items, self.items[:1].expand(max(0, more), -1)])
        table[torch.from_numpy(index)] = rows
        self.items = table

    def rows(self, histories: Histories) -> Tensor:
        """(T, D) rows of events: the item's, and its features'."""
        rows = _lookup(self.items, histories.items, "items")
        if self.numbers and self.projection is not None:
            rows = rows + torch.from_numpy(projection_inputs(self.numbers, histories.features)) @ self.projection.T
        for feature in self.manifest.features:
            if feature.in_table:
                rows = rows + self._feature_rows(feature, histories.features[feature.name])
        return rows

    def _feature_rows(self, feature: Feature, column: Column) -> Tensor:
        table, ids = self.features[feature.name], cast(Ids, column)
        _check(table, ids.values if isinstance(ids, Ragged) else ids, feature.name)
        return pooled_rows(table, ids, feature)

    @torch.inference_mode()
    def append(self, state: States, new: Histories) -> States:
        """States after more events."""
        if not len(new.items):
            return state
        events = self.rows(new), torch.from_numpy(new.offsets.copy()), torch.from_numpy(new.times.copy())
        if not isinstance(state, WindowedStates):
            return self.encoder.append(state, *events)
        windows = state.windows.append(new.items, new.offsets, new.times, state.count.numpy())
        return WindowedStates(self.encoder.append(state.encoded, *events), windows)

    def encode(self, histories: Histories) -> States:
        """States of whole histories, in calls of bounded size."""
        return self.concatenate(
            [
                self.append(self.init_state(end - begin), histories.select(np.arange(begin, end)))
                for begin, end in batches(histories.lengths)
            ]
        )

    def concatenate(self, states: Sequence[States]) -> States:
        """Several as one; a single one is not copied."""
        return states[0] if len(states) == 1 else self.like.concatenate([self.like, *states])

    def assemble(self, pieces: Sequence[tuple[Sequence[int], States]]) -> States:
        """States of users from pieces, each with the places of its users among them all."""
        places = [place for those, _ in pieces for place in those]
        state = self.concatenate([state for those, state in pieces if those])
        return state if places == sorted(places) else state.select(np.argsort(places).tolist())

    @torch.inference_mode()
    def vectors(self, state: States, times: Ints, users: Sequence[UserId | None] | None = None) -> Tensor:
        """(B, D) of users at a time, as scores use them; zero without events.

        Args:
            users: whose features count; None, or None among them, has none.
        """
        encoded = state.encoded if isinstance(state, WindowedStates) else state
        found = self.encoder.query(encoded, torch.from_numpy(times))
        if self.user_rows is not None and users is not None:
            found = found + self.user_rows.of(users) * (state.count > 0).unsqueeze(1)
        return scaled(found, self.manifest.similarity)

    @torch.inference_mode()
    def correction(self, state: States, vectors: Tensor, times: Ints) -> Correction | None:
        """What scores of items of users' windows have beside products of :meth:`vectors`; None for nothing."""
        if self.bias is None:
            return None
        assert isinstance(state, WindowedStates)
        request_times, temperature = torch.from_numpy(times), self.manifest.temperature
        return state.windows.correction(self.bias, state.count, vectors, request_times, temperature)

    @torch.inference_mode()
    def window_scores(self, state: States, vectors: Tensor, times: Ints) -> tuple[Tensor, Tensor]:
        """(B, W) items of users' windows, 0 for empty slots, and what they score in place of products."""
        correction = self.correction(state, vectors, times)
        assert correction is not None
        ids, places = torch.unique(correction.ids, return_inverse=True)
        rows = scaled(_lookup(self.items, ids.numpy(), "items"), self.manifest.similarity)
        scores = correction.scores(vectors, rows, places)
        return correction.ids, torch.where(correction.ids > 0, scores, 0.0)

    def records(self, state: States) -> Tensor:
        """What :meth:`read` takes, of states of constant size."""
        assert isinstance(state, EncoderState | WindowedStates)
        return state.to_bytes()

    def read(self, records: Tensor) -> States:
        """States from stored records."""
        if not isinstance(self.like, WindowedStates):
            assert isinstance(self.like, EncoderState)  # others are not stored
            return EncoderState.from_bytes(records, self.like)
        assert isinstance(self.like.encoded, EncoderState)
        size = records.shape[1] - window_bytes(self.manifest.window)
        encoded = EncoderState.from_bytes(records[:, :size], self.like.encoded)
        return WindowedStates(encoded, WindowState.from_bytes(records[:, size:], self.manifest.window))


def batches(cost: Ints) -> Iterator[tuple[int, int]]:
    """Begin and end of consecutive batches of about AT_ONCE events and at most USERS_AT_ONCE users."""
    return itertools.pairwise([0, *batch_ends(cost, AT_ONCE, USERS_AT_ONCE)])


def _lookup(table: Tensor, index: Ints, what: str) -> Tensor:
    _check(table, index, what)
    return table[torch.from_numpy(index)]


def _check(table: Tensor, index: Ints, what: str) -> None:
    if len(index) and not 0 <= index.min() <= index.max() < len(table):
        raise ExportError(
            f"{what}: indices must be 0 to {len(table) - 1}, not {index.min()} to {index.max()}: the events and the "
            "tables are not of one export"
        )
