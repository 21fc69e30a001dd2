"""What the kernels share: powers of decays, activations, tiles of rows."""

import triton
import triton.language as tl


@triton.jit
def power(log, ticks, DTYPE: tl.constexpr):
    """``r^ticks``; ticks are integers that are not negative. Below e^-80 nothing is left, and nothing is denormal."""
    return tl.exp(tl.maximum(log * ticks.to(DTYPE), -80.0))


@triton.jit
def silu(x, ON: tl.constexpr):
    """``x·σ(x)``, or x itself."""
    if ON:
        return x / (1.0 + tl.exp(-x))
    else:
        return x


@triton.jit
def silu_slope(x, ON: tl.constexpr):
    """The derivative of :func:`silu`."""
    if ON:
        gate = 1.0 / (1.0 + tl.exp(-x))
        return gate * (1.0 + x * (1.0 - gate))
    else:
        return x * 0.0 + 1.0


@triton.jit
def read(ptr, row_C, stride, column_X, inside_C, width, DTYPE: tl.constexpr):
    """Rows of a matrix, some columns of them: (C, X); zero outside."""
    mask = inside_C[:, None] & (column_X < width)[None, :]
    at = row_C[:, None] * stride + column_X[None, :]
    return tl.load(ptr + at, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def write(ptr, value_CX, row_C, stride, column_X, inside_C, width):
    """The reverse of :func:`read`."""
    mask = inside_C[:, None] & (column_X < width)[None, :]
    at = row_C[:, None] * stride + column_X[None, :]
    tl.store(ptr + at, value_CX.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def read_state(ptr, index, key_X, value_X, K: tl.constexpr, V: tl.constexpr, DTYPE: tl.constexpr):
    """The state (K, V) number ``index`` of many, some columns of it."""
    at = index.to(tl.int64) * (K * V) + key_X[:, None] * V + value_X[None, :]
    return tl.load(ptr + at, mask=(key_X < K)[:, None] & (value_X < V)[None, :], other=0.0).to(DTYPE)


@triton.jit
def write_state(ptr, state_XX, index, key_X, value_X, K: tl.constexpr, V: tl.constexpr):
    """The reverse of :func:`read_state`."""
    at = index.to(tl.int64) * (K * V) + key_X[:, None] * V + value_X[None, :]
    mask = (key_X < K)[:, None] & (value_X < V)[None, :]
    tl.store(ptr + at, state_XX.to(ptr.dtype.element_ty), mask=mask)
