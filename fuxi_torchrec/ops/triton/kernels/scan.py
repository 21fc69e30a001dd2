"""From chunk to chunk: the state before each, in the order of events, or its gradient, in reverse."""

import triton
import triton.language as tl

from fuxi_torchrec.ops.triton.kernels.common import power


@triton.jit
def scan(
    chunk_ptr, log_ptr, initial_ptr, final_ptr, at_ptr, first_ptr, fill_ptr, clock_ptr, next_clock_ptr,
    SIZE: tl.constexpr, HEAD: tl.constexpr, LOGS: tl.constexpr, BLOCK: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, DECAY: tl.constexpr, CLOCK: tl.constexpr, REVERSE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Over the chunks of a user: S takes the place of what chunk n adds, then ``S ← r^{ticks_n} S + added_n``.

    Grid (users, blocks of SIZE). A state has SIZE elements, HEAD of them with one decay; the decays of LOGS heads repeat. The ticks of a chunk are its
    events, or with CLOCK the time from its first event to what follows its last. DTYPE is that of S.
    """
    b = tl.program_id(0)
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = x < SIZE
    log = tl.load(log_ptr + (x // HEAD) % LOGS, mask=inside, other=0.0).to(DTYPE)
    if INITIAL:
        state = tl.load(initial_ptr + b.to(tl.int64) * SIZE + x, mask=inside, other=0.0).to(DTYPE)
    else:
        state = tl.zeros((BLOCK,), DTYPE)
    begin, end = tl.load(at_ptr + b), tl.load(at_ptr + b + 1)
    for step in range(begin, end):
        n = step
        if REVERSE:
            n = begin + end - 1 - step
        at = n.to(tl.int64) * SIZE + x
        added = tl.load(chunk_ptr + at, mask=inside, other=0.0).to(DTYPE)
        tl.store(chunk_ptr + at, state.to(chunk_ptr.dtype.element_ty), mask=inside)
        if DECAY:
            ticks = tl.load(fill_ptr + n)
            if CLOCK:
                first = tl.load(first_ptr + n).to(tl.int64)
                ticks = tl.load(next_clock_ptr + first + ticks - 1) - tl.load(clock_ptr + first)
            state *= power(log, ticks, DTYPE)
        state += added
    if FINAL:
        tl.store(final_ptr + b.to(tl.int64) * SIZE + x, state.to(final_ptr.dtype.element_ty), mask=inside)
