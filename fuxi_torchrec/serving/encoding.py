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
from fuxi_torchrec.serving.feature_rows import UserRows, pooled_rows, projection_of
from fuxi_torchrec.serving.new_items import ItemComposer
from fuxi_torchrec.serving.requests import UserId

AT_ONCE, USERS_AT_ONCE = 2**16, 512  # events and users that are encoded in one call


class UserModel:
    """Encodes users as the export did; its tensors are for inference alone."""

    def __init__(self, bundle: Bundle) -> None:
        self.manifest, self.encoder = bundle.manifest, bundle.encoder()
        tables = bundle.tables()
        self.items = tables[ITEM_TABLE]
        self.features = {f.name: tables[f"feature_{f.name}"] for f in self.manifest.features if f.in_table}
        self.numbers = [feature for feature in self.manifest.features if not feature.in_table]
        self.projection = projection_of(bundle, tables, "event")
        self.composer = ItemComposer(bundle, tables)
        self.user_rows = UserRows.read(bundle)
        self.like = self.encoder.init_state(0)

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
        return self.encoder.append(
            state, self.rows(new), torch.from_numpy(new.offsets.copy()), torch.from_numpy(new.times.copy())
        )

    def encode(self, histories: Histories) -> States:
        """States of whole histories, in calls of bounded size."""
        return self.concatenate(
            [
                self.append(self.encoder.init_state(end - begin), histories.select(np.arange(begin, end)))
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
        found = self.encoder.query(state, torch.from_numpy(times))
        if self.user_rows is not None and users is not None:
            found = found + self.user_rows.of(users) * (state.count > 0).unsqueeze(1)
        return scaled(found, self.manifest.similarity)

    def read(self, records: Tensor) -> States:
        """States from stored records."""
        assert isinstance(self.like, EncoderState)  # others are not stored
        return EncoderState.from_bytes(records, self.like)


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
