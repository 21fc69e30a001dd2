"""Norms over rows, and the gate of the merge: ``out = norm(y) ⊙ u``, each of a row's channels normed alone.

RMS: ``y / sqrt(SLOPE·mean(y²) + EPS)``; a norm of a norm, as the paper's retention has it, is one with SLOPE 1 + eps and
EPS eps². LAYER: ``(y − mean) / sqrt(var + EPS)``.
"""

import triton
import triton.language as tl

from fuxi_torchrec.ops.triton.kernels.common import read, silu, silu_slope, write


@triton.jit
def _scale(y, column, D: tl.constexpr, LAYER: tl.constexpr, TWICE: tl.constexpr, EPS: tl.constexpr,
           DTYPE: tl.constexpr):  # fmt: skip
    """Centred rows, the factor that norms them, and by how much their mean square counts in it."""
    if LAYER:
        y = tl.where((column < D)[None, :], y - (tl.sum(y, 1) / D)[:, None], 0.0)
    square = tl.sum(y * y, 1) / D
    slope, low = 1.0, EPS
    if TWICE:
        twice = (tl.program_id(1) == 0).to(DTYPE)
        slope, low = 1.0 + twice * EPS, twice * (EPS * EPS) + (1.0 - twice) * EPS
    return y, 1.0 / tl.sqrt(slope * square + low), slope


@triton.jit
def forward(
    y_ptr, u_ptr, out_ptr, T, y_stride, u_stride, out_stride,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, LAYER: tl.constexpr, TWICE: tl.constexpr,
    GATE: tl.constexpr, SILU: tl.constexpr, EPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, channels). With TWICE channel 0 is normed twice; with SILU the gate goes through SiLU."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside, column, first = row < T, tl.arange(0, BD), tl.program_id(1) * D
    y = read(y_ptr + first, row, y_stride, column, inside, D, DTYPE)
    y, factor, _ = _scale(y, column, D, LAYER, TWICE, EPS, DTYPE)
    y *= factor[:, None]
    if GATE:
        y *= silu(read(u_ptr + first, row, u_stride, column, inside, D, DTYPE), SILU)
    write(out_ptr + first, y, row, out_stride, column, inside, D)


@triton.jit
def backward(
    dout_ptr, y_ptr, u_ptr, dy_ptr, du_ptr, T, dout_stride, y_stride, u_stride, dy_stride, du_stride,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, LAYER: tl.constexpr, TWICE: tl.constexpr,
    GATE: tl.constexpr, SILU: tl.constexpr, EPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Gradients of y and, with GATE, of u; the norm is computed again."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside, column, first = row < T, tl.arange(0, BD), tl.program_id(1) * D
    y = read(y_ptr + first, row, y_stride, column, inside, D, DTYPE)
    y, factor, slope = _scale(y, column, D, LAYER, TWICE, EPS, DTYPE)
    y *= factor[:, None]
    dout = read(dout_ptr + first, row, dout_stride, column, inside, D, DTYPE)
    if GATE:
        u = read(u_ptr + first, row, u_stride, column, inside, D, DTYPE)
        write(du_ptr + first, dout * y * silu_slope(u, SILU), row, du_stride, column, inside, D)
        dout *= silu(u, SILU)
    dy = dout - y * (tl.sum(dout * y, 1) / D * slope)[:, None]
    if LAYER:
        dy -= (tl.sum(dout, 1) / D)[:, None]
    write(dy_ptr + first, dy * factor[:, None], row, dy_stride, column, inside, D)
