"""The operators: a block's channels and their merge, with a backward; states alone; one event of each user; a norm.

Columns of a projection (T, 8D): u (3D), q, k, v, temporal values, positional values; of the result (T, 3D): retention,
temporal, positional, each normed and gated. Each is one node of a graph for torch.compile and torch.export.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuxi_torchrec.ops.triton import channels
from fuxi_torchrec.ops.triton.channels import Constant, Sources, Times
from fuxi_torchrec.ops.triton.launch import compute_dtype
from fuxi_torchrec.ops.triton.layout import Chunks

_EVENTS = "Tensor wide, Tensor wide_bounds, Tensor narrow, Tensor narrow_bounds, Tensor clock, Tensor next_clock, "
_VECTORS = "Tensor key, Tensor query, Tensor position, "
_PARAMETERS = (
    "Tensor retention_log, Tensor temporal_log, Tensor gain, Tensor skip, Tensor table, Tensor positional_gain, "
    "Tensor positional_skip, "
)
_BEFORE = "Tensor? retention, Tensor? temporal, Tensor? positional, "
_INPUTS = "Tensor projection, " + _EVENTS + _VECTORS + _PARAMETERS + _BEFORE
_SCHEMAS = {
    "triton_block": f"({_INPUTS}bool official, bool with_state, bool keep) -> ({', '.join(['Tensor'] * 8)})",
    "triton_block_backward": "(Tensor grad, Tensor? grad_retention, Tensor? grad_temporal, Tensor? grad_positional, "
    f"Tensor y, Tensor s_retention, Tensor s_temporal, Tensor s_positional, {_INPUTS}bool official) -> "
    f"({', '.join(['Tensor'] * 11)})",
    "triton_states": f"({_INPUTS}bool official) -> (Tensor, Tensor, Tensor)",
    "triton_step": f"(Tensor projection, Tensor seen, Tensor ticks, {_VECTORS}{_PARAMETERS}Tensor retention, "
    "Tensor temporal, Tensor positional, bool official, bool store) -> (Tensor, Tensor, Tensor, Tensor)",
    "triton_norm": "(Tensor x, bool layer) -> Tensor",
    "triton_norm_backward": "(Tensor grad, Tensor x, bool layer) -> Tensor",
}


class _Inputs(NamedTuple):
    """Of a block, in the order of the schema."""

    projection: Tensor
    wide: Tensor
    wide_bounds: Tensor
    narrow: Tensor
    narrow_bounds: Tensor
    clock: Tensor
    next_clock: Tensor
    key: Tensor
    query: Tensor
    position: Tensor
    retention_log: Tensor
    temporal_log: Tensor
    gain: Tensor
    skip: Tensor
    table: Tensor
    positional_gain: Tensor
    positional_skip: Tensor
    retention: Tensor | None
    temporal: Tensor | None
    positional: Tensor | None

    @property
    def dim(self) -> int:
        return self.projection.shape[1] // 8

    @property
    def users(self) -> int:
        return self.wide_bounds.shape[0] - 1

    def columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        """u, q, k, v, temporal values, positional values."""
        return rows.split([3 * self.dim, *[self.dim] * 5], dim=1)

    def chunks(self) -> tuple[Chunks, Chunks]:
        return Chunks(self.wide, self.wide_bounds), Chunks(self.narrow, self.narrow_bounds)

    def sources(self, official: bool) -> tuple[tuple[Constant, Sources], tuple[Constant, Sources], Times]:
        """What the retention, the positional and the temporal channel read."""
        _, q, k, v, _, values = self.columns(self.projection)
        heads, kernel = len(self.retention_log), self.table.shape[1]
        width = self.dim // heads
        retention = Constant(heads, width, width, int(official), False)
        mixed = (self.positional_gain, self.positional_skip, self.position)
        positional = Constant(1, kernel, self.dim, 0, True)
        times = Times(self.key, self.query, (self.clock, self.next_clock), self.temporal_log, self.gain, self.skip)
        return (
            (retention, Sources(q, k, v, self.retention_log, *mixed)),
            (positional, Sources(self.table, self.table, values, self.retention_log, *mixed)),
            times,
        )

    def after(self, wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Room for the states after each user's last event."""
        heads, width, kernel = len(self.retention_log), self.dim // len(self.retention_log), self.table.shape[1]
        users, subs = self.users if wanted else 0, len(self.gain)
        new = self.projection.new_empty
        dtype = compute_dtype(self.projection.dtype)
        return (
            new(users, heads, width, width, dtype=dtype),
            new(users, subs, 2, self.dim // subs, dtype=torch.float64),
            new(users, kernel, self.dim, dtype=dtype),
        )


def _plain(x: _Inputs) -> _Inputs:
    """Columns next to each other, and states and vectors as the kernels index them."""
    projection = x.projection if x.projection.stride(1) == 1 else x.projection.contiguous()
    others: Any = (None if t is None else t.contiguous() for t in x[1:])
    return _Inputs(projection, *others)


def _states(x: _Inputs, official: bool, with_state: bool) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor, Tensor]]:
    """Of each channel before every chunk, and after each user's last event if wanted."""
    (retention, r), (positional, p), times = x.sources(official)
    wide, narrow = x.chunks()
    after = x.after(with_state)
    a, b, c = after if with_state else (None, None, None)
    values = x.columns(x.projection)[4]
    before = (
        channels.constant_states(retention, r, wide, x.retention, a),
        channels.temporal_states(times, values, narrow, x.temporal, b),
        channels.constant_states(positional, p, wide, x.positional, c),
    )
    return before, after


def _block(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, official, with_state, keep = arguments
    x = _plain(_Inputs(*inputs))
    (retention, r), (positional, p), times = x.sources(official)
    wide, narrow = x.chunks()
    before, after = _states(x, official, with_state)
    events, dim, dtype = len(x.projection), x.dim, compute_dtype(x.projection.dtype)
    y = x.projection.new_empty(events, 3 * dim, dtype=dtype)
    u, *_, temporal_values, _ = x.columns(x.projection)
    channels.constant_outputs(retention, r, before[0], wide, y[:, :dim])
    channels.temporal_outputs(times, temporal_values, before[1], narrow, y[:, dim : 2 * dim])
    channels.constant_outputs(positional, p, before[2], wide, y[:, 2 * dim :])
    gated = x.projection.new_empty(events, 3 * dim)
    channels.norm(y, u, official, gated)
    kept = (y, *before) if keep else tuple(y.new_empty(0) for _ in range(4))
    return gated, *kept, *after


def _block_backward(*arguments: Any) -> tuple[Tensor, ...]:
    grad, *dafter = arguments[:4]
    y, *before = arguments[4:8]
    *inputs, official = arguments[8:]
    x = _plain(_Inputs(*inputs))
    (retention, r), (positional, p), times = x.sources(official)
    wide, narrow = x.chunks()
    dim, grad = x.dim, grad.contiguous()
    dafter = [None if d is None else d.contiguous() for d in dafter]
    given = x.retention is not None
    dbefore = x.after(given)
    into = dbefore if given else (None, None, None)
    dprojection = torch.empty_like(x.projection, memory_format=torch.contiguous_format)
    du, dq, dk, dv, dtemporal, dpositional = x.columns(dprojection)
    dy = torch.empty_like(y)
    channels.norm_gradients(grad, y, x.columns(x.projection)[0], official, dy, du)
    parts = dy.split(dim, dim=1)
    dlog = channels.constant_gradients(retention, r, before[0], parts[0], dafter[0], into[0], (dq, dk, dv), wide)
    values = x.columns(x.projection)[4]
    dtimes = channels.temporal_gradients(times, values, before[1], parts[1], dafter[1], into[1], dtemporal, narrow)
    dkernel = y.new_empty(len(y), x.table.shape[1])
    dmix = channels.constant_gradients(
        positional, p, before[2], parts[2], dafter[2], into[2], (dkernel, dkernel, dpositional), wide
    )
    # rows of one position lie apart: added up by sorting, not by atomics
    dtable = torch.zeros_like(x.table).index_put_((x.position,), dkernel, accumulate=True)
    scales = len(x.temporal_log)
    dtemporal_log = dtimes[:scales, 0] + dtimes[scales:, 0]
    gains = (dtimes[:, 1].clone(), dtimes[:, 2].clone())
    mixed = (dmix[0, 0].reshape(x.positional_gain.shape).clone(), dmix[0, 1].reshape(x.positional_skip.shape).clone())
    return dprojection, dlog[:, 0].clone(), dtemporal_log, *gains, dtable, *mixed, *dbefore


def _only_states(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, official = arguments
    return _states(_plain(_Inputs(*inputs)), official, True)[1]


def _step(projection: Tensor, seen: Tensor, ticks: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *tensors, official, store = others
    layout = (seen, seen, seen, seen, ticks, ticks)  # a step has no chunks
    x = _plain(_Inputs(projection, *layout, *tensors))
    (retention, r), (positional, p), times = x.sources(official)
    users, dim = len(projection), x.dim
    y = projection.new_empty(users, 3 * dim, dtype=compute_dtype(projection.dtype))
    u, *_, temporal_values, _ = x.columns(x.projection)
    before: list[Any] = [x.retention, x.temporal, x.positional]
    after = tuple(torch.empty_like(s) if store else s.new_empty(0) for s in before)
    a, b, c = after if store else (None, None, None)
    channels.constant_step(retention, r, seen, before[0], y[:, :dim], a)
    channels.temporal_step(times, ticks, temporal_values, seen, before[1], y[:, dim : 2 * dim], b)
    channels.constant_step(positional, p, seen, before[2], y[:, 2 * dim :], c)
    gated = projection.new_empty(users, 3 * dim)
    channels.norm(y, u, official, gated)
    return gated, *after


def _norm(x: Tensor, layer: bool) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    channels.norm(x, None, layer, out)
    return out


def _norm_backward(grad: Tensor, x: Tensor, layer: bool) -> Tensor:
    x, grad = (t if t.stride(1) == 1 else t.contiguous() for t in (x, grad))
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    channels.norm_gradients(grad, x, None, layer, dx, None)
    return dx


# --- what torch has to know of them ----------------------------------------------------------------------------------
# Sizes are asked of shapes: with `len` a compiled program would be one of a single size.

_KEPT = 4  # outputs of the block that only the backward pass reads


def _fake_block(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, _, with_state, keep = arguments
    x = _Inputs(*inputs)
    events, wide, narrow = x.projection.shape[0], x.wide.shape[1], x.narrow.shape[1]
    heads, subs, kernel = len(x.retention_log), len(x.gain), x.table.shape[1]
    dtype, new = compute_dtype(x.projection.dtype), x.projection.new_empty
    shapes = [
        (events, 3 * x.dim),
        (wide, heads, x.dim // heads, x.dim // heads),
        (narrow, subs, 2, x.dim // subs),
        (wide, 1, kernel, x.dim),
    ]
    kept = [new(shape if keep else (0,), dtype=dtype) for shape in shapes]
    return new(events, 3 * x.dim), *kept, *x.after(with_state)


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    *inputs, _ = arguments[8:]
    x = _Inputs(*inputs)
    parameters = (x.retention_log, x.temporal_log, x.gain, x.skip, x.table, x.positional_gain, x.positional_skip)
    new = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in (x.projection, *parameters)]
    return *new, *x.after(x.retention is not None)


def _fake_step(projection: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *tensors, _, store = others
    after = (torch.empty_like(s) if store else s.new_empty(0) for s in tensors[-3:])
    return projection.new_empty(projection.shape[0], 3 * (projection.shape[1] // 8)), *after


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, official, with_state, _ = inputs
    kept = output[1 : 1 + _KEPT]
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*kept, *tensors)
    ctx.official, ctx.with_state = official, with_state


def _backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError('the chunkwise form has no second derivatives: use form="parallel"')
    saved = ctx.saved_tensors  # once: a checkpoint computes them again at each reading
    kept, tensors = saved[:_KEPT], saved[_KEPT:]
    after = others[_KEPT:] if ctx.with_state else (None, None, None)
    if grad is None:
        grad = tensors[0].new_zeros(kept[0].shape)
    projection, retention, temporal, gain, skip, table, positional_gain, positional_skip, *before = (
        torch.ops.fuxi_torchrec.triton_block_backward(grad, *after, *kept, *tensors, ctx.official)
    )
    if tensors[-1] is None:
        before = [None, None, None]
    parameters = (retention, temporal, gain, skip, table, positional_gain, positional_skip)
    return projection, *[None] * 9, *parameters, *before, None, None, None


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.layer = inputs[1]


def _backward_of_norm(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError('the chunkwise form has no second derivatives: use form="parallel"')
    (x,) = ctx.saved_tensors
    return torch.ops.fuxi_torchrec.triton_norm_backward(grad, x, ctx.layer), None


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "triton_block": _block,
    "triton_block_backward": _block_backward,
    "triton_states": _only_states,
    "triton_step": _step,
    "triton_norm": _norm,
    "triton_norm_backward": _norm_backward,
}


def register() -> None:
    """Schemas, implementations, shapes without numbers, and the backward passes; once."""
    fakes: dict[str, Callable[..., Any]] = {
        "triton_block": _fake_block,
        "triton_block_backward": _fake_backward,
        "triton_states": lambda *arguments: _Inputs(*arguments[:-1]).after(True),
        "triton_step": _fake_step,
        "triton_norm": lambda x, layer: torch.empty_like(x, memory_format=torch.contiguous_format),
        "triton_norm_backward": lambda grad, x, layer: torch.empty_like(x, memory_format=torch.contiguous_format),
    }
    for name, schema in _SCHEMAS.items():
        torch.library.define(f"fuxi_torchrec::{name}", schema)
        torch.library.impl(f"fuxi_torchrec::{name}", "CompositeExplicitAutograd", IMPLEMENTATIONS[name])
        torch.library.register_fake(f"fuxi_torchrec::{name}", fakes[name])
    torch.library.register_autograd("fuxi_torchrec::triton_block", _backward, setup_context=_keep)
    torch.library.register_autograd("fuxi_torchrec::triton_norm", _backward_of_norm, setup_context=_keep_norm)
