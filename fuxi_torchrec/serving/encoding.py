"""An export's model: rows of events in, states and vectors out."""

import numpy as np
import torch
from torch import Tensor

from fuxi_torchrec.encoders.state import EncoderState, States
from fuxi_torchrec.events.batching import batch_ends
from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.events.histories import Column, Histories, Ints, Ragged
from fuxi_torchrec.export.bundle import ITEM_TABLE, Bundle, ExportError, scaled

AT_ONCE = 2**16  # events that are encoded in one call


class UserModel:
    """Encodes users as the export did; its tensors are for inference alone.

    Args:
        bundle: the export.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.manifest, self.encoder = bundle.manifest, bundle.encoder()
        tables = bundle.tables()
        self.items, self.features = (
            tables[ITEM_TABLE],
            {s.name: tables[f"feature_{s.name}"] for s in self.manifest.features},
        )
        self.like = self.encoder.init_state(0)

    def rows(self, histories: Histories) -> Tensor:
        """(T, D) rows of events: the item's, and its features'."""
        rows = _lookup(self.items, histories.items, "items")
        for feature in self.manifest.features:
            rows = rows + self._feature_rows(feature, histories.features[feature.name])
        return rows

    def _feature_rows(self, feature: Feature, column: Column) -> Tensor:
        table = self.features[feature.name]
        if not isinstance(column, Ragged):
            return _lookup(table, column, feature.name)
        values = _lookup(table, column.values, feature.name)
        lengths = torch.from_numpy(np.diff(column.bounds))
        event = torch.repeat_interleave(torch.arange(len(column)), lengths)
        pooled = values.new_zeros(len(column), table.shape[1]).index_add_(0, event, values)
        return pooled / lengths.clamp(min=1).unsqueeze(1) if feature.pooling == "mean" else pooled

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
        if not len(histories):
            return self.like
        states, first = [], 0
        for end in batches(histories.lengths):
            part = histories.select(np.arange(first, end))
            states.append(self.append(self.encoder.init_state(end - first), part))
            first = end
        return self.like.concatenate(states) if len(states) > 1 else states[0]

    @torch.inference_mode()
    def vectors(self, state: States, times: Ints) -> Tensor:
        """(B, D) of users at a time, as scores use them; zero without events."""
        return scaled(self.encoder.query(state, torch.from_numpy(times)), self.manifest.similarity)

    def read(self, records: Tensor) -> States:
        """States of their bytes."""
        assert isinstance(self.like, EncoderState)  # others are not stored
        return EncoderState.from_bytes(records, self.like)


def batches(cost: Ints, users: int = 512) -> list[int]:
    """Ends of consecutive batches of about AT_ONCE events and at most so many users."""
    return batch_ends(cost, AT_ONCE, users)


def _lookup(table: Tensor, index: Ints, what: str) -> Tensor:
    if len(index) and not 0 <= index.min() <= index.max() < len(table):
        raise ExportError(
            f"{what}: indices must be 0 to {len(table) - 1}, not {index.min()} to {index.max()}: the events and the "
            "tables are not of one export"
        )
    return table[torch.from_numpy(index)]
