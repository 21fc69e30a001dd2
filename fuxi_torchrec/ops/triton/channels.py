"""From tensors to launches: each channel's states, outputs and gradients, and the norms.

Rows are read and written where they lie: a tensor with columns next to each other and any distance between rows.
"""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fuxi_torchrec.ops.triton.kernels import constant, norms, temporal
from fuxi_torchrec.ops.triton.kernels import scan as scans
from fuxi_torchrec.ops.triton.launch import compute_dtype, launch, power_of_two, precision
from fuxi_torchrec.ops.triton.layout import NARROW, WIDE, Chunks

EPS = 1e-6
_TILE = {torch.float32: tl.float32, torch.float64: tl.float64}


def _dtype(like: Tensor) -> Any:
    return _TILE[compute_dtype(like.dtype)]


class Constant(NamedTuple):
    """A channel of constant decays: its shape and switches, as :mod:`.kernels.constant` describes them.

    Attributes:
        H, K, V: heads, and the widths of keys and values.
        lag: of queries behind keys.
        table: keys and queries are rows of a table, there is a gain and a skip and no decay; else SiLU and decay.
    """

    H: int
    K: int
    V: int
    lag: int
    table: bool

    def constants(self, like: Tensor, block: int) -> dict[str, Any]:
        switches = {"SILU": not self.table, "TABLE": self.table, "MIX": self.table, "LAG": self.lag}
        sizes = {"H": self.H, "K": self.K, "V": self.V, "BK": power_of_two(self.K, 16), "C": WIDE}
        exact = {"DTYPE": _dtype(like), "PRECISION": precision()}
        return {**sizes, **switches, **exact, "BV": min(power_of_two(self.V, 16), block)}


class Sources(NamedTuple):
    """What a channel of constant decays reads: (T, H·K) or a table, (T, H·V), and its parameters."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_H: Tensor
    gain: Tensor
    skip: Tensor
    position_T: Tensor


def _warps(constants: dict[str, Any]) -> int:
    """Wide heads spill with four."""
    return 8 if max(constants["BK"], constants["BV"]) > 32 else 4


def _blocks(constants: dict[str, Any]) -> int:
    return -(-constants["V"] // constants["BV"])


def scan(
    chunk_NX: Tensor,
    log: Tensor | None,
    initial_BX: Tensor | None,
    final_BX: Tensor | None,
    chunks: Chunks,
    clocks: tuple[Tensor, Tensor] | None = None,
    reverse: bool = False,
) -> None:
    """What chunks add becomes the states before them, in place; see :mod:`.kernels.scan`."""
    (first, fill), size = chunks.places_2N, chunk_NX[0].numel() if len(chunk_NX) else 1
    head, block = chunk_NX.shape[2:].numel(), 128
    clock, next_clock = clocks or (first, first)
    none = chunk_NX
    launch(
        scans.scan,
        (len(chunks.bounds_B) - 1, -(-size // block)) if len(chunk_NX) or final_BX is not None else (0,),
        *(chunk_NX, none if log is None else log, none if initial_BX is None else initial_BX),
        *(none if final_BX is None else final_BX, chunks.bounds_B, first, fill, clock, next_clock),
        SIZE=size,
        HEAD=head,
        LOGS=1 if log is None else len(log),
        BLOCK=block,
        INITIAL=initial_BX is not None,
        FINAL=final_BX is not None,
        DECAY=log is not None,
        CLOCK=clocks is not None,
        REVERSE=reverse,
        DTYPE=tl.float64 if clocks is not None else _dtype(chunk_NX),
        num_warps=4,
    )


def constant_states(spec: Constant, x: Sources, chunks: Chunks, initial: Tensor | None, final: Tensor | None) -> Tensor:
    """The state before each chunk (N, H, K, V); ``final`` is filled with those after each user's last."""
    states = _constant_added(spec, x, x.k, x.v, chunks, to_query=False)
    scan(states, None if spec.table else x.log_H, initial, final, chunks)
    return states


def _constant_added(spec: Constant, x: Sources, key: Tensor, value: Tensor, chunks: Chunks, to_query: bool) -> Tensor:
    (first, fill), constants = chunks.places_2N, spec.constants(value, 64)
    out = value.new_empty(len(first), spec.H, spec.K, spec.V, dtype=compute_dtype(value.dtype))
    launch(
        constant.updates,
        (len(first), spec.H, _blocks(constants)),
        *(key, value, x.log_H, x.gain, x.position_T, out, first, fill, key.stride(0), value.stride(0)),
        **{**constants, "MIX": to_query and spec.table},
        SILU_V=not spec.table and not to_query,
        TO_QUERY=to_query,
        num_warps=_warps(constants),
    )
    return out


def constant_outputs(spec: Constant, x: Sources, states: Tensor, chunks: Chunks, y: Tensor) -> None:
    """Into ``y`` (T, H·V)."""
    (first, fill), constants = chunks.places_2N, spec.constants(x.v, 64)
    launch(
        constant.outputs,
        (len(first), spec.H, _blocks(constants)),
        *(x.q, x.k, x.v, x.log_H, x.gain, x.skip, x.position_T, states, y, first, fill),
        *(x.q.stride(0), x.k.stride(0), x.v.stride(0), y.stride(0)),
        **constants,
        num_warps=_warps(constants),
    )


def constant_gradients(
    spec: Constant,
    x: Sources,
    states: Tensor,
    dy: Tensor,
    dfinal: Tensor | None,
    dinitial: Tensor | None,
    into: tuple[Tensor, Tensor, Tensor],
    chunks: Chunks,
) -> Tensor:
    """Gradients of q, k and v ``into`` these, of the initial state into ``dinitial``; those of parameters: (H, 2)."""
    (first, fill), constants = chunks.places_2N, spec.constants(x.v, 32)
    added = _constant_added(spec, x, x.q, dy, chunks, to_query=True)
    scan(added, None if spec.table else x.log_H, dfinal, dinitial, chunks, reverse=True)
    partial = states.new_empty(len(first), spec.H, 2)
    dq, dk, dv = into
    launch(
        constant.gradients,
        (len(first), spec.H),
        *(x.q, x.k, x.v, dy, x.log_H, x.gain, x.skip, x.position_T, states, added, dq, dk, dv, partial, first, fill),
        *(x.q.stride(0), x.k.stride(0), x.v.stride(0), dy.stride(0), dq.stride(0), dk.stride(0), dv.stride(0)),
        **constants,
        num_warps=8,
    )
    return partial.sum(0)


def constant_step(spec: Constant, x: Sources, seen_B: Tensor, state: Tensor, y: Tensor, after: Tensor | None) -> None:
    """One event of each user, into ``y`` and, if wanted, ``after``."""
    constants = spec.constants(x.v, 64)
    for unused in ("C", "PRECISION"):
        del constants[unused]
    launch(
        constant.step,
        (len(x.v), spec.H, _blocks(constants)),
        *(x.q, x.k, x.v, x.log_H, x.gain, x.skip, x.position_T, seen_B, state, y, state if after is None else after),
        *(x.q.stride(0), x.k.stride(0), x.v.stride(0), y.stride(0)),
        **constants,
        STORE=after is not None,
        num_warps=_warps(constants),
    )


class Times(NamedTuple):
    """What the temporal channel reads of the times, and its parameters."""

    key_THK: Tensor
    query_TGK: Tensor
    clocks: tuple[Tensor, Tensor]
    log_H: Tensor
    gain_G: Tensor
    skip_G: Tensor

    def constants(self, like: Tensor) -> dict[str, Any]:
        width = like.shape[1] // len(self.gain_G)
        sizes = {"H": len(self.log_H), "V": width, "BV": min(power_of_two(width), 16), "C": NARROW}
        return {**sizes, "DTYPE": _dtype(like)}


def temporal_states(t: Times, v: Tensor, chunks: Chunks, initial: Tensor | None, final: Tensor | None) -> Tensor:
    """The state before each chunk (N, G, 2, V); ``final`` is filled with those after each user's last, in float64."""
    states = _temporal_added(t, t.key_THK, v, chunks, to_query=False)
    scan(states, t.log_H, initial, final, chunks, t.clocks)
    return states


def _temporal_added(t: Times, vectors: Tensor, value: Tensor, chunks: Chunks, to_query: bool) -> Tensor:
    (first, fill), constants = chunks.places_2N, t.constants(value)
    heads, width = len(t.gain_G), constants["V"]
    out = value.new_empty(len(first), heads, 2, width, dtype=compute_dtype(value.dtype))
    launch(
        temporal.updates,
        (len(first), heads, _blocks(constants)),
        *(vectors, value, t.log_H, t.gain_G, *t.clocks, out, first, fill, value.stride(0)),
        **constants,
        TO_QUERY=to_query,
        num_warps=1,
    )
    return out


def temporal_outputs(t: Times, v: Tensor, states: Tensor, chunks: Chunks, y: Tensor) -> None:
    """Into ``y`` (T, G·V)."""
    (first, fill), constants = chunks.places_2N, t.constants(v)
    launch(
        temporal.outputs,
        (len(first), len(t.gain_G), _blocks(constants)),
        *(t.key_THK, t.query_TGK, v, t.log_H, t.gain_G, t.skip_G, *t.clocks, states, y, first, fill),
        *(v.stride(0), y.stride(0)),
        **constants,
        num_warps=4,
    )


def temporal_gradients(
    t: Times,
    v: Tensor,
    states: Tensor,
    dy: Tensor,
    dfinal: Tensor | None,
    dinitial: Tensor | None,
    dv: Tensor,
    chunks: Chunks,
) -> Tensor:
    """Of the values into ``dv``, of the initial state into ``dinitial``; of log r, gain and skip: (G, 3)."""
    (first, fill), constants = chunks.places_2N, t.constants(v)
    added = _temporal_added(t, t.query_TGK, dy, chunks, to_query=True)
    scan(added, t.log_H, dfinal, dinitial, chunks, t.clocks, reverse=True)
    partial = states.new_empty(len(first), len(t.gain_G), 3)
    launch(
        temporal.gradients,
        (len(first), len(t.gain_G)),
        *(t.key_THK, t.query_TGK, v, dy, t.log_H, t.gain_G, t.skip_G, *t.clocks, states, added, dv, partial),
        *(first, fill, v.stride(0), dy.stride(0), dv.stride(0)),
        **constants,
        num_warps=2,
    )
    return partial.sum(0)


def temporal_step(
    t: Times, ticks_B: Tensor, v: Tensor, seen_B: Tensor, state: Tensor, y: Tensor, after: Tensor | None
) -> None:
    """One event of each user, into ``y`` and, if wanted, ``after``."""
    block = 128
    launch(
        temporal.step,
        (len(v), -(-v.shape[1] // block)),
        *(t.key_THK, t.query_TGK, ticks_B, v, t.log_H, t.gain_G, t.skip_G, seen_B, state, y),
        *(state if after is None else after, v.stride(0), y.stride(0)),
        H=len(t.log_H),
        V=v.shape[1] // len(t.gain_G),
        BLOCK=block,
        STORE=after is not None,
        DTYPE=_dtype(v),
    )


def _norm_constants(y: Tensor, channels: int, layer: bool, gate: bool) -> dict[str, Any]:
    dim = y.shape[1] // channels
    switches = {"LAYER": layer, "TWICE": gate and not layer, "GATE": gate, "SILU": layer, "EPS": EPS}
    return {**switches, "D": dim, "BD": power_of_two(dim), "ROWS": 4, "DTYPE": _dtype(y)}


def norm(y: Tensor, u: Tensor | None, layer: bool, out: Tensor) -> None:
    """Rows normed; with ``u`` three channels, each normed and gated, as the merge of a preset: layer is official."""
    channels = 1 if u is None else 3
    constants = _norm_constants(y, channels, layer, u is not None)
    gate = y if u is None else u
    launch(
        norms.forward,
        (-(-len(y) // constants["ROWS"]), channels),
        *(y, gate, out, len(y), y.stride(0), gate.stride(0), out.stride(0)),
        **constants,
    )


def norm_gradients(dout: Tensor, y: Tensor, u: Tensor | None, layer: bool, dy: Tensor, du: Tensor | None) -> None:
    """Into ``dy`` and ``du``."""
    channels = 1 if u is None else 3
    constants = _norm_constants(y, channels, layer, u is not None)
    gate, dgate = y if u is None else u, dy if du is None else du
    launch(
        norms.backward,
        (-(-len(y) // constants["ROWS"]), channels),
        *(dout, y, gate, dy, dgate, len(y), dout.stride(0), y.stride(0), gate.stride(0), dy.stride(0), dgate.stride(0)),
        **constants,
    )
