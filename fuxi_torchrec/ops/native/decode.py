"""Decoding as one operator each: a query, and an append of one event, of each of B users through all blocks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Pending(NamedTuple):
    """The last event of each of B users, and what the blocks keep of those before it.

    Attributes:
        seen: (B,) int64, events, this one included.
        time: (B,) int64.
        rows: (B, D), as they enter the first block.
        memory: of each block in turn: retention, temporal, positional.
    """

    seen: Tensor
    time: Tensor
    rows: Tensor
    memory: list[Tensor]


class Weights(NamedTuple):
    """An encoder's.

    Attributes:
        parameters: of each block in turn: in_proj, out_proj, ffn_in, ffn_out, the raw decays of retention and of the
            temporal channel, its α and β or two empty tensors, the positional kernel, its α and β.
        periods: of the temporal scales.
        official: the preset.
        phases: cos and sin of the times; else 1/sqrt(2).
    """

    parameters: list[Tensor]
    periods: Sequence[int]
    official: bool
    phases: bool


def query(pending: Pending, next_time_B: Tensor, weights: Weights) -> Tensor:
    """The last block's output of the pending events, followed by something at ``next_time_B``."""
    return torch.ops.fuxi_torchrec.query.default(*pending, next_time_B, *weights)


def append(pending: Pending, next_time_B: Tensor, weights: Weights) -> list[Tensor]:
    """The memory after the pending events are committed, decayed to ``next_time_B``."""
    return torch.ops.fuxi_torchrec.append.default(*pending, next_time_B, *weights)


def register() -> None:
    """Shapes without numbers; once, after the library is loaded. There are no gradients."""
    torch.library.register_fake("fuxi_torchrec::query", lambda count, time, rows, *_: rows.new_empty(rows.shape))
    torch.library.register_fake("fuxi_torchrec::append", _fake_append)


def _fake_append(count: Tensor, time: Tensor, rows: Tensor, memory: list[Tensor], *_: Any) -> list[Tensor]:
    return [state.new_empty(state.shape) for state in memory]
