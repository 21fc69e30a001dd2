"""The fused block: from the columns of a block's projection to its gated channels, as one operator with a backward.

Columns of the projection (T, 8D): u (3D), q, k, v, temporal values, positional values; of the result (T, 3D):
retention, temporal, positional, each normed and gated.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK, PAD, GROUP, STRIP = 32, 16, 16, 64  # as in kernels.h


class Memory(NamedTuple):
    """States of B users, by channel: (B, H, K, V), (B, G, 2, V) in float64, (B, K, D)."""

    retention: Tensor
    temporal: Tensor
    positional: Tensor


class Parameters(NamedTuple):
    """Of a block's channels, as the operator takes them; see :mod:`fuxi_torchrec.ops` for the sums they stand in."""

    retention_log_H: Tensor
    temporal_log_H: Tensor
    temporal_gain_G: Tensor
    temporal_skip_G: Tensor
    table_RK: Tensor
    positional_gain: Tensor
    positional_skip: Tensor


class Events(NamedTuple):
    """What a batch decides before any weight is used.

    Attributes:
        offsets: (B + 1,) int64.
        key_THK, query_TGK: the temporal keys and queries.
        ticks_T: int64, to each event's successor; not negative.
        start_B: position of each user's first row; 0 if None.
    """

    offsets: Tensor
    key_THK: Tensor
    query_TGK: Tensor
    ticks_T: Tensor
    start_B: Tensor | None


def block(
    projection: Tensor,
    events: Events,
    parameters: Parameters,
    before: Memory | None,
    official: bool,
    with_state: bool,
) -> tuple[Tensor, Memory | None]:
    """The gated channels (T, 3D), and the states after each user's last event if wanted."""
    keep = torch.is_grad_enabled()
    p, states = parameters, before or (None, None, None)
    gated, *_, retention, temporal, positional = torch.ops.fuxi_torchrec.block(
        *(projection, events.offsets, p.retention_log_H, events.key_THK, events.query_TGK, events.ticks_T),
        *(p.temporal_log_H, p.temporal_gain_G, p.temporal_skip_G, p.table_RK, p.positional_gain, p.positional_skip),
        *(events.start_B, *states, official, with_state, keep),
    )
    return gated, Memory(retention, temporal, positional) if with_state else None


# --- what torch has to know of it ------------------------------------------------------------------------------------

_KEPT = 4  # outputs that only the backward pass reads


def register() -> None:
    """Shapes without numbers, and the backward pass; once, after the library is loaded."""
    torch.library.register_fake("fuxi_torchrec::block", _fake)
    torch.library.register_fake("fuxi_torchrec::block_backward", _fake_backward)
    torch.library.register_autograd("fuxi_torchrec::block", _backward, setup_context=_keep)


def _padded(n: int) -> int:
    return (n + PAD - 1) // PAD * PAD


def _fake(projection: Tensor, offsets: Tensor, retention_log: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *_, table, _, _, _, _, _, _, _, with_state, keep = others
    temporal_log = others[3]
    events, users, dim = len(projection), len(offsets) - 1, projection.shape[1] // 8
    heads, scales, kernel = len(retention_log), len(temporal_log), table.shape[1]
    width, after = dim // heads, users if with_state else 0
    chunks = events // CHUNK + users if keep else 0
    groups, strips = -(-dim // 2 // GROUP), -(-dim // STRIP)
    new = projection.new_empty
    return (
        new(events, 3 * dim),
        new(events if keep else 0, 3 * dim),
        new(chunks, heads * _padded(width) ** 2),
        new(chunks, 4 * groups * GROUP, dtype=torch.float64),
        new(chunks, strips * _padded(kernel) * STRIP),
        new(after, heads, width, width),
        new(after, 2 * scales, 2, dim // (2 * scales), dtype=torch.float64),
        new(after, kernel, dim),
    )


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    projection, offsets, retention_log, _, _, _, temporal_log, _, _, table = arguments[8:18]
    users, dim = len(offsets) - 1 if arguments[21] is not None else 0, projection.shape[1] // 8
    heads, scales, new = len(retention_log), len(temporal_log), projection.new_empty
    return (
        torch.empty_like(projection, memory_format=torch.contiguous_format),
        new(heads),
        new(scales),
        new(2 * scales),
        new(2 * scales),
        new(table.shape),
        new(()),
        new(()),
        new(users, heads, dim // heads, dim // heads),
        new(users, 2 * scales, 2, dim // (2 * scales), dtype=torch.float64),
        new(users, table.shape[1], dim),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, official, with_state, _keep = inputs
    kept = output[1 : 1 + _KEPT]
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*kept, *tensors)
    ctx.official, ctx.with_state = official, with_state


def _backward(ctx: Any, grad_gated: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError('the chunkwise form has no second derivatives: use form="parallel"')
    saved = ctx.saved_tensors  # once: a checkpoint computes them again at each reading
    kept, tensors = saved[:_KEPT], saved[_KEPT:]
    after = others[_KEPT:] if ctx.with_state else (None, None, None)
    if grad_gated is None:
        grad_gated = torch.zeros_like(kept[0])
    projection, retention, temporal, gain, skip, table, positional_gain, positional_skip, *before = (
        torch.ops.fuxi_torchrec.block_backward(grad_gated, *after, *kept, *tensors, ctx.official)
    )
    if tensors[-1] is None:
        before = [None, None, None]
    return (
        *(projection, None, retention, None, None, None, temporal, gain, skip, table),
        *(positional_gain, positional_skip, None, *before, None, None, None),
    )
