"""The temporal channel: keys and queries of two numbers, decays by int64 clocks, no matrix products.

``y_i = gain · Σ_{j≤i} r^{c_{i+1} − c_j} (q_i·k_j) v_j + skip · v_i`` for each of G sub-heads of width V; scale g mod H
gives keys and decay. Clocks are subtracted as integers; powers inside a chunk are taken of the differences.
"""

import triton
import triton.language as tl

from fuxi_torchrec.ops.triton.kernels.common import power, read, write


@triton.jit
def _vectors(ptr, row, heads: tl.constexpr, head, inside, DTYPE: tl.constexpr):
    """The two numbers of a key or query at each of some rows."""
    at = (row * heads + head) * 2
    return tl.load(ptr + at, mask=inside, other=0.0).to(DTYPE), tl.load(ptr + at + 1, mask=inside, other=0.0).to(DTYPE)


@triton.jit
def _place(first_ptr, fill_ptr, clock_ptr, next_clock_ptr, C: tl.constexpr):
    """A chunk's rows, which slots are filled, the clocks at each event and its successor, and the ticks across."""
    n, slot = tl.program_id(0), tl.arange(0, C)
    first, fill = tl.load(first_ptr + n).to(tl.int64), tl.load(fill_ptr + n)
    start, end = tl.load(clock_ptr + first), tl.load(next_clock_ptr + first + fill - 1)
    row, inside = first + slot, slot < fill
    # padding stands still at the end of its chunk
    clock = tl.load(clock_ptr + row, mask=inside, other=0)
    next_clock = tl.load(next_clock_ptr + row, mask=inside, other=0)
    clock, next_clock = tl.where(inside, clock, end), tl.where(inside, next_clock, end)
    return row, inside, clock, next_clock, start, end


@triton.jit
def updates(
    vector_ptr, v_ptr, log_ptr, gain_ptr, clock_ptr, next_clock_ptr, out_ptr, first_ptr, fill_ptr,
    v_stride,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, TO_QUERY: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """What a chunk adds to the state after it, (chunks, G, 2, V); grid (chunks, G, blocks of V).

    With TO_QUERY what it adds to the gradient of the state before it, from queries and gradients of outputs.
    """
    g = tl.program_id(1)
    row, inside, clock, next_clock, start, end = _place(first_ptr, fill_ptr, clock_ptr, next_clock_ptr, C)
    value = tl.program_id(2) * BV + tl.arange(0, BV)
    log = tl.load(log_ptr + g % H).to(DTYPE)
    if TO_QUERY:
        one, two = _vectors(vector_ptr, row, 2 * H, g, inside, DTYPE)
        decay = power(log, next_clock - start, DTYPE) * tl.load(gain_ptr + g).to(DTYPE)
    else:
        one, two = _vectors(vector_ptr, row, H, g % H, inside, DTYPE)
        decay = power(log, end - clock, DTYPE)
    v = read(v_ptr + g * V, row, v_stride, value, inside, V, DTYPE)
    at = (tl.program_id(0).to(tl.int64) * 2 * H + g) * 2 * V + value
    tl.store(out_ptr + at, tl.sum((one * decay)[:, None] * v, 0), mask=value < V)
    tl.store(out_ptr + at + V, tl.sum((two * decay)[:, None] * v, 0), mask=value < V)


@triton.jit
def _weights(key_ptr, query_ptr, log, row, inside, clock, next_clock, g, H: tl.constexpr, C: tl.constexpr,
             DTYPE: tl.constexpr):  # fmt: skip
    """The map inside a chunk, ``r^{c_{i+1} − c_j} (q_i·k_j)``, with its ticks, keys and queries."""
    slot = tl.arange(0, C)
    key_one, key_two = _vectors(key_ptr, row, H, g % H, inside, DTYPE)
    query_one, query_two = _vectors(query_ptr, row, 2 * H, g, inside, DTYPE)
    causal = slot[:, None] >= slot[None, :]
    between = tl.where(causal, next_clock[:, None] - clock[None, :], 0)
    phase = query_one[:, None] * key_one[None, :] + query_two[:, None] * key_two[None, :]
    weight = tl.where(causal, phase * power(log, between, DTYPE), 0.0)
    return weight, between, key_one, key_two, query_one, query_two


@triton.jit
def outputs(
    key_ptr, query_ptr, v_ptr, log_ptr, gain_ptr, skip_ptr, clock_ptr, next_clock_ptr, state_ptr, y_ptr,
    first_ptr, fill_ptr,
    v_stride, y_stride,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The outputs of a chunk from the state before it; grid (chunks, G, blocks of V)."""
    g = tl.program_id(1)
    row, inside, clock, next_clock, start, _ = _place(first_ptr, fill_ptr, clock_ptr, next_clock_ptr, C)
    value = tl.program_id(2) * BV + tl.arange(0, BV)
    log = tl.load(log_ptr + g % H).to(DTYPE)
    weight, _, _, _, query_one, query_two = _weights(
        key_ptr, query_ptr, log, row, inside, clock, next_clock, g, H, C, DTYPE
    )
    v = read(v_ptr + g * V, row, v_stride, value, inside, V, DTYPE)
    at = (tl.program_id(0).to(tl.int64) * 2 * H + g) * 2 * V + value
    state_one = tl.load(state_ptr + at, mask=value < V, other=0.0).to(DTYPE)
    state_two = tl.load(state_ptr + at + V, mask=value < V, other=0.0).to(DTYPE)
    decay = power(log, next_clock - start, DTYPE)
    y = tl.sum(weight[:, :, None] * v[None, :, :], 1)
    y += (query_one * decay)[:, None] * state_one[None, :] + (query_two * decay)[:, None] * state_two[None, :]
    y = tl.load(gain_ptr + g).to(DTYPE) * y + tl.load(skip_ptr + g).to(DTYPE) * v
    write(y_ptr + g * V, y, row, y_stride, value, inside, V)


@triton.jit
def gradients(
    key_ptr, query_ptr, v_ptr, dy_ptr, log_ptr, gain_ptr, skip_ptr, clock_ptr, next_clock_ptr, state_ptr, dupdate_ptr,
    dv_ptr, partial_ptr, first_ptr, fill_ptr,
    v_stride, dy_stride, dv_stride,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Gradients of the values, and of log r, gain and skip as ``partial`` (chunks, G, 3); grid (chunks, G)."""
    g, index = tl.program_id(1), tl.program_id(0).to(tl.int64) * 2 * H + tl.program_id(1)
    row, inside, clock, next_clock, start, end = _place(first_ptr, fill_ptr, clock_ptr, next_clock_ptr, C)
    log = tl.load(log_ptr + g % H).to(DTYPE)
    gain, skip = tl.load(gain_ptr + g).to(DTYPE), tl.load(skip_ptr + g).to(DTYPE)
    weight, between, key_one, key_two, query_one, query_two = _weights(
        key_ptr, query_ptr, log, row, inside, clock, next_clock, g, H, C, DTYPE
    )
    to_query, to_next = next_clock - start, end - clock
    query_decay, key_decay = power(log, to_query, DTYPE), power(log, to_next, DTYPE)
    query_one, query_two = query_one * query_decay, query_two * query_decay
    key_one, key_two = key_one * key_decay, key_two * key_decay
    dweight = tl.zeros((C, C), DTYPE)
    dskip = tl.zeros((C,), DTYPE)
    from_state = tl.zeros((C,), DTYPE)
    to_state = tl.zeros((C,), DTYPE)
    carried = tl.zeros((BV,), DTYPE)
    for begin in range(0, V, BV):
        value = begin + tl.arange(0, BV)
        v = read(v_ptr + g * V, row, v_stride, value, inside, V, DTYPE)
        dy = read(dy_ptr + g * V, row, dy_stride, value, inside, V, DTYPE)
        at = index * 2 * V + value
        state_one = tl.load(state_ptr + at, mask=value < V, other=0.0).to(DTYPE)
        state_two = tl.load(state_ptr + at + V, mask=value < V, other=0.0).to(DTYPE)
        dupdate_one = tl.load(dupdate_ptr + at, mask=value < V, other=0.0).to(DTYPE)
        dupdate_two = tl.load(dupdate_ptr + at + V, mask=value < V, other=0.0).to(DTYPE)
        dweight += tl.sum(dy[:, None, :] * v[None, :, :], 2)
        dv = gain * tl.sum(weight[:, :, None] * dy[:, None, :], 0) + skip * dy
        dv += key_one[:, None] * dupdate_one[None, :] + key_two[:, None] * dupdate_two[None, :]
        write(dv_ptr + g * V, dv, row, dv_stride, value, inside, V)
        dskip += tl.sum(dy * v, 1)
        from_state += query_one * tl.sum(dy * state_one[None, :], 1) + query_two * tl.sum(dy * state_two[None, :], 1)
        to_state += key_one * tl.sum(v * dupdate_one[None, :], 1) + key_two * tl.sum(v * dupdate_two[None, :], 1)
        carried += state_one * dupdate_one + state_two * dupdate_two
    inner = dweight * weight
    dgain = tl.sum(tl.sum(inner, 1), 0) + tl.sum(from_state, 0)
    dlog = gain * tl.sum(tl.sum(inner * between.to(DTYPE), 1), 0)
    dlog += gain * tl.sum(from_state * to_query.to(DTYPE), 0) + tl.sum(to_state * to_next.to(DTYPE), 0)
    dlog += tl.sum(carried, 0) * power(log, end - start, DTYPE) * (end - start).to(DTYPE)
    tl.store(partial_ptr + index * 3, dlog)
    tl.store(partial_ptr + index * 3 + 1, dgain)
    tl.store(partial_ptr + index * 3 + 2, tl.sum(dskip, 0))


@triton.jit
def step(
    key_ptr, query_ptr, ticks_ptr, v_ptr, log_ptr, gain_ptr, skip_ptr, seen_ptr, state_ptr, y_ptr, after_ptr,
    v_stride, y_stride,
    H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, STORE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One event of each user: its output, and with STORE the state after it; grid (users, blocks of columns)."""
    b = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, g = column < 2 * H * V, column // V
    ticks = tl.load(ticks_ptr + b)
    v = tl.load(v_ptr + b * v_stride + column, mask=inside, other=0.0).to(DTYPE)
    key_one, key_two = _vectors(key_ptr, b, H, g % H, inside, DTYPE)
    query_one, query_two = _vectors(query_ptr, b, 2 * H, g, inside, DTYPE)
    at = (b * 2 * H + g) * 2 * V + column % V
    state_one = tl.load(state_ptr + at, mask=inside, other=0.0)
    state_two = tl.load(state_ptr + at + V, mask=inside, other=0.0)
    log = tl.load(log_ptr + g % H, mask=inside, other=0.0)
    decay = power(log.to(DTYPE), ticks, DTYPE)
    past = query_one.to(tl.float64) * state_one + query_two.to(tl.float64) * state_two
    y = (past.to(DTYPE) + (query_one * key_one + query_two * key_two) * v) * decay
    gain = tl.load(gain_ptr + g, mask=inside, other=0.0).to(DTYPE)
    y = gain * y + tl.load(skip_ptr + g, mask=inside, other=0.0).to(DTYPE) * v
    tl.store(y_ptr + b * y_stride + column, y.to(y_ptr.dtype.element_ty), mask=inside)
    if STORE:
        there = (tl.load(seen_ptr + b) > 0).to(tl.float64)
        slow, written = power(log.to(tl.float64), ticks, tl.float64), v.to(tl.float64) * there
        tl.store(after_ptr + at, (state_one + key_one.to(tl.float64) * written) * slow, mask=inside)
        tl.store(after_ptr + at + V, (state_two + key_two.to(tl.float64) * written) * slow, mask=inside)
