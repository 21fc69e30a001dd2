"""Causal linear attention whose decay is the same at every event: retention, and, without decay, positional.

``y_i = gain · Σ_{j≤i} λ^{i−j+LAG} (q_i·k_j) v_j + skip · v_i``. With TABLE queries and keys are rows of a table, by
position, and the same for both; with SILU queries, keys and values go through SiLU; with MIX there are gain and skip.
"""

import triton
import triton.language as tl

from fuxi_torchrec.ops.triton.kernels.common import power, read, read_state, silu, silu_slope, write, write_state


@triton.jit
def _place(first_ptr, fill_ptr, position_ptr, C: tl.constexpr, TABLE: tl.constexpr):
    """A chunk's packed rows, the rows of its keys, which slots are filled, and how many."""
    n = tl.program_id(0)
    slot = tl.arange(0, C)
    fill = tl.load(fill_ptr + n)
    row = tl.load(first_ptr + n).to(tl.int64) + slot
    inside = slot < fill
    key_row = row
    if TABLE:
        key_row = tl.load(position_ptr + row, mask=inside, other=0)
    return row, key_row, inside, fill


@triton.jit
def updates(
    k_ptr, v_ptr, log_ptr, gain_ptr, position_ptr, out_ptr, first_ptr, fill_ptr,
    k_stride, v_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LAG: tl.constexpr, SILU: tl.constexpr, SILU_V: tl.constexpr, TABLE: tl.constexpr, MIX: tl.constexpr,
    TO_QUERY: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a chunk adds to the state after it, ``Σ_j λ^{fill−j} k_jᵀ v_j``; grid (chunks, heads, blocks of V).

    With TO_QUERY what it adds to the gradient of the state before it, from queries and gradients of outputs:
    ``gain · Σ_i λ^{i+LAG} q_iᵀ dy_i``.
    """
    h = tl.program_id(1)
    row, key_row, inside, fill = _place(first_ptr, fill_ptr, position_ptr, C, TABLE)
    key, value = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    k = silu(read(k_ptr + h * K, key_row, k_stride, key, inside, K, DTYPE), SILU)
    v = silu(read(v_ptr + h * V, row, v_stride, value, inside, V, DTYPE), SILU_V)
    if not TABLE:
        slot = tl.arange(0, C)
        ticks = slot + LAG if TO_QUERY else tl.maximum(fill - slot, 0)
        k *= power(tl.load(log_ptr + h).to(DTYPE), ticks, DTYPE)[:, None]
    if MIX:
        k *= tl.load(gain_ptr).to(DTYPE)
    update = tl.dot(tl.trans(k), v, input_precision=PRECISION, out_dtype=DTYPE)
    write_state(out_ptr, update, tl.program_id(0) * H + h, key, value, K, V)


@triton.jit
def outputs(
    q_ptr, k_ptr, v_ptr, log_ptr, gain_ptr, skip_ptr, position_ptr, state_ptr, y_ptr, first_ptr, fill_ptr,
    q_stride, k_stride, v_stride, y_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LAG: tl.constexpr, SILU: tl.constexpr, TABLE: tl.constexpr, MIX: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs of a chunk from the state before it: the map inside, ``(QKᵀ ⊙ D)V``, and what the state has."""
    h = tl.program_id(1)
    row, key_row, inside, _ = _place(first_ptr, fill_ptr, position_ptr, C, TABLE)
    slot, key, value = tl.arange(0, C), tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    q = silu(read(q_ptr + h * K, key_row, q_stride, key, inside, K, DTYPE), SILU)
    k = silu(read(k_ptr + h * K, key_row, k_stride, key, inside, K, DTYPE), SILU)
    v = silu(read(v_ptr + h * V, row, v_stride, value, inside, V, DTYPE), SILU)
    state = read_state(state_ptr, tl.program_id(0) * H + h, key, value, K, V, DTYPE)
    causal = slot[:, None] >= slot[None, :]
    weight = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=DTYPE)
    if TABLE:
        weight = tl.where(causal, weight, 0.0)
    else:
        log = tl.load(log_ptr + h).to(DTYPE)
        distance = tl.where(causal, slot[:, None] - slot[None, :] + LAG, 0)
        weight = tl.where(causal, weight * power(log, distance, DTYPE), 0.0)
        q *= power(log, slot + LAG, DTYPE)[:, None]
    y = tl.dot(weight, v, input_precision=PRECISION, out_dtype=DTYPE)
    y += tl.dot(q, state, input_precision=PRECISION, out_dtype=DTYPE)
    if MIX:
        y = tl.load(gain_ptr).to(DTYPE) * y + tl.load(skip_ptr).to(DTYPE) * v
    write(y_ptr + h * V, y, row, y_stride, value, inside, V)


@triton.jit
def gradients(
    q_ptr, k_ptr, v_ptr, dy_ptr, log_ptr, gain_ptr, skip_ptr, position_ptr, state_ptr, dupdate_ptr,
    dq_ptr, dk_ptr, dv_ptr, partial_ptr, first_ptr, fill_ptr,
    q_stride, k_stride, v_stride, dy_stride, dq_stride, dk_stride, dv_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LAG: tl.constexpr, SILU: tl.constexpr, TABLE: tl.constexpr, MIX: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, keys and values; grid (chunks, heads).

    With TABLE dk has both, the queries' and the keys'. ``partial`` (chunks, H, 2) has the gradients of log λ, or of
    gain and skip with MIX.
    """
    h, index = tl.program_id(1), tl.program_id(0) * H + tl.program_id(1)
    row, key_row, inside, fill = _place(first_ptr, fill_ptr, position_ptr, C, TABLE)
    slot, key = tl.arange(0, C), tl.arange(0, BK)
    q_raw = read(q_ptr + h * K, key_row, q_stride, key, inside, K, DTYPE)
    k_raw = read(k_ptr + h * K, key_row, k_stride, key, inside, K, DTYPE)
    q, k = silu(q_raw, SILU), silu(k_raw, SILU)
    causal = slot[:, None] >= slot[None, :]
    log = tl.load(log_ptr + h).to(DTYPE)
    if TABLE:
        log *= 0.0
    between = tl.where(causal, slot[:, None] - slot[None, :] + LAG, 0)
    to_query, to_next = slot + LAG, tl.maximum(fill - slot, 0)
    decay = tl.where(causal, power(log, between, DTYPE), 0.0)
    query_decay, key_decay = power(log, to_query, DTYPE)[:, None], power(log, to_next, DTYPE)[:, None]
    gain, skip = 1.0, 0.0
    if MIX:
        gain, skip = tl.load(gain_ptr).to(DTYPE), tl.load(skip_ptr).to(DTYPE)
    weight = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=DTYPE) * decay
    dweight = tl.zeros((C, C), DTYPE)
    dq = tl.zeros((C, BK), DTYPE)
    dk = tl.zeros((C, BK), DTYPE)
    carried = tl.zeros((BK,), DTYPE)
    dskip = tl.zeros((C,), DTYPE)
    for start in range(0, V, BV):
        value = start + tl.arange(0, BV)
        v_raw = read(v_ptr + h * V, row, v_stride, value, inside, V, DTYPE)
        v = silu(v_raw, SILU)
        dy = read(dy_ptr + h * V, row, dy_stride, value, inside, V, DTYPE)
        state = read_state(state_ptr, index, key, value, K, V, DTYPE)
        dupdate = read_state(dupdate_ptr, index, key, value, K, V, DTYPE)
        dweight += tl.dot(dy, tl.trans(v), input_precision=PRECISION, out_dtype=DTYPE)
        dq += tl.dot(dy, tl.trans(state), input_precision=PRECISION, out_dtype=DTYPE)
        dk += tl.dot(v, tl.trans(dupdate), input_precision=PRECISION, out_dtype=DTYPE)
        dv = gain * tl.dot(tl.trans(weight), dy, input_precision=PRECISION, out_dtype=DTYPE) + skip * dy
        dv += tl.dot(k * key_decay, dupdate, input_precision=PRECISION, out_dtype=DTYPE)
        write(dv_ptr + h * V, dv * silu_slope(v_raw, SILU), row, dv_stride, value, inside, V)
        carried += tl.sum(state * dupdate, 1)
        dskip += tl.sum(dy * v, 1)
    dq *= query_decay
    dk *= key_decay
    if MIX:
        read_sum = tl.sum(tl.sum(dweight * weight, 1), 0) + tl.sum(tl.sum(dq * q, 1), 0)
        tl.store(partial_ptr + 2 * index, read_sum)
        tl.store(partial_ptr + 2 * index + 1, tl.sum(dskip, 0))
    else:
        dlog = tl.sum(tl.sum(dweight * weight * between.to(DTYPE), 1), 0)
        dlog += tl.sum(tl.sum(dq * q, 1) * to_query.to(DTYPE), 0) + tl.sum(tl.sum(dk * k, 1) * to_next.to(DTYPE), 0)
        dlog += tl.sum(carried, 0) * power(log, fill, DTYPE) * fill.to(DTYPE)
        tl.store(partial_ptr + 2 * index, dlog)
        tl.store(partial_ptr + 2 * index + 1, dlog * 0.0)
    dweight = dweight * decay * gain
    dq = dq * gain + tl.dot(dweight, k, input_precision=PRECISION, out_dtype=DTYPE)
    dk += tl.dot(tl.trans(dweight), q, input_precision=PRECISION, out_dtype=DTYPE)
    if TABLE:
        write(dk_ptr + h * K, dq + dk, row, dk_stride, key, inside, K)
    else:
        write(dq_ptr + h * K, dq * silu_slope(q_raw, SILU), row, dq_stride, key, inside, K)
        write(dk_ptr + h * K, dk * silu_slope(k_raw, SILU), row, dk_stride, key, inside, K)


@triton.jit
def step(
    q_ptr, k_ptr, v_ptr, log_ptr, gain_ptr, skip_ptr, position_ptr, seen_ptr, state_ptr, y_ptr, after_ptr,
    q_stride, k_stride, v_stride, y_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LAG: tl.constexpr, SILU: tl.constexpr, TABLE: tl.constexpr, MIX: tl.constexpr, STORE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """One event of each user: its output, and with STORE the state after it; grid (users, heads, blocks of V).

    A user that has seen nothing has no event: its state stays.
    """
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, value = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    key_row = tl.load(position_ptr + b) if TABLE else b
    q = silu(tl.load(q_ptr + key_row * q_stride + h * K + key, mask=key < K, other=0.0).to(DTYPE), SILU)
    k = silu(tl.load(k_ptr + key_row * k_stride + h * K + key, mask=key < K, other=0.0).to(DTYPE), SILU)
    v = silu(tl.load(v_ptr + b * v_stride + h * V + value, mask=value < V, other=0.0).to(DTYPE), SILU)
    state = read_state(state_ptr, b * H + h, key, value, K, V, DTYPE)
    one = tl.full((1,), 1, tl.int32)
    log = tl.load(log_ptr + h).to(DTYPE)
    y = tl.sum(q[:, None] * state, 0) + tl.sum(q * k, 0) * v
    if LAG:
        y *= power(log, one * LAG, DTYPE)
    if MIX:
        y = tl.load(gain_ptr).to(DTYPE) * y + tl.load(skip_ptr).to(DTYPE) * v
    tl.store(y_ptr + b * y_stride + h * V + value, y.to(y_ptr.dtype.element_ty), mask=value < V)
    if STORE:
        there = (tl.load(seen_ptr + b) > 0).to(DTYPE)
        after = state + k[:, None] * (v * there)[None, :]
        if not TABLE:
            after *= power(log, one, DTYPE)[:, None]
        write_state(after_ptr, after, b * H + h, key, value, K, V)
