"""Columns of row ids as TorchRec takes them: a bag per event, item or user, and key."""

from collections.abc import Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fuxi_torchrec.events.histories import Column, Ragged


def bags(keys: list[str], columns: Sequence[Column]) -> KeyedJaggedTensor:
    """One bag per event and key."""
    values = [column.values if isinstance(column, Ragged) else column for column in columns]
    lengths = [np.diff(c.bounds) if isinstance(c, Ragged) else np.ones(len(c), np.int64) for c in columns]
    return KeyedJaggedTensor(
        keys, torch.from_numpy(np.concatenate(values)), lengths=torch.from_numpy(np.concatenate(lengths))
    )


def padded(given: KeyedJaggedTensor, count: int) -> KeyedJaggedTensor:
    """With empty bags at the end of every key, ``count`` in all."""
    keys = given.keys()
    lengths = given.lengths().view(len(keys), -1)
    if lengths.shape[1] == count:
        return given
    filled = lengths.new_zeros(len(keys), count)
    filled[:, : lengths.shape[1]] = lengths
    return KeyedJaggedTensor(keys, given.values(), lengths=filled.view(-1))
