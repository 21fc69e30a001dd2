"""The operators as FuXi-Linear's block calls them; the contract of :mod:`fuxi_torchrec.ops.native.block`."""

from typing import NamedTuple

import torch
from torch import Tensor

from fuxi_torchrec.ops.native.block import Memory, Parameters
from fuxi_torchrec.ops.triton.layout import Layout


class Events(NamedTuple):
    """What a batch decides before any weight is used.

    Attributes:
        layout: where the chunks lie.
        clock_T, next_clock_T: int64, at each event and at its successor.
        key_THK, query_TGK: the temporal keys and queries.
        position_T: each event's row in the position tables.
    """

    layout: Layout
    clock_T: Tensor
    next_clock_T: Tensor
    key_THK: Tensor
    query_TGK: Tensor
    position_T: Tensor


class Step(NamedTuple):
    """One event of each of B users.

    Attributes:
        seen_B: int64, events so far, this one included; 0 for a user that has none.
        ticks_B: int64, to what follows.
        key_BHK, query_BGK: its temporal keys, and queries at the time of what follows.
        position_B: its row in the position tables.
    """

    seen_B: Tensor
    ticks_B: Tensor
    key_BHK: Tensor
    query_BGK: Tensor
    position_B: Tensor


def _flat(events: Events) -> tuple[Tensor, ...]:
    wide, narrow = events.layout
    return (*wide, *narrow, *events[1:])


def block(
    projection: Tensor, events: Events, parameters: Parameters, before: Memory | None, official: bool, with_state: bool
) -> tuple[Tensor, Memory | None]:
    """The gated channels (T, 3D), and the states after each user's last event if wanted."""
    states = before or (None, None, None)
    gated, *_, retention, temporal, positional = torch.ops.fuxi_torchrec.triton_block(
        projection, *_flat(events), *parameters, *states, official, with_state, torch.is_grad_enabled()
    )
    return gated, Memory(retention, temporal, positional) if with_state else None


def states(projection: Tensor, events: Events, parameters: Parameters, before: Memory, official: bool) -> Memory:
    """The states after each user's last event, where outputs are not needed; without gradients."""
    return Memory(*torch.ops.fuxi_torchrec.triton_states(projection, *_flat(events), *parameters, *before, official))


def step(
    projection: Tensor, event: Step, parameters: Parameters, before: Memory, official: bool, store: bool
) -> tuple[Tensor, Memory | None]:
    """The gated channels (B, 3D) of one event of each user, and the states after it if wanted; without gradients."""
    gated, *after = torch.ops.fuxi_torchrec.triton_step(projection, *event, *parameters, *before, official, store)
    return gated, Memory(*after) if store else None


def norm(x: Tensor, layer: bool) -> Tensor:
    """Rows by their root mean square, or centred and by their deviation."""
    return torch.ops.fuxi_torchrec.triton_norm(x, layer)
