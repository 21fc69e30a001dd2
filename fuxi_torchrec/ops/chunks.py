"""Jagged rows cut into chunks, and the scan that carries a state from chunk to chunk.

Each user's events are cut into chunks of C; only a user's last chunk is padded. Chunks are ordered by chunk index first
and, within an index, by users sorted by length, longest first. Whoever has a chunk n + 1 therefore stands at the front
of those who have a chunk n, and one step of the scan works on two contiguous slices.
"""

from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from fuxi_torchrec.ops.placement import placed


class Chunks:
    """The layout of one batch for one chunk size.

    Args:
        offsets: B + 1 bounds of the users' rows, on the host.
        size: C.
        device: where the rows are.
    """

    def __init__(self, offsets: list[int], size: int, device: torch.device) -> None:
        self.size = size
        self.device = device
        bounds = torch.tensor(offsets, dtype=torch.int64)
        self.lengths_B = bounds.diff()
        self.starts_B = bounds[:-1]
        self.events = offsets[-1]
        counts_B = (self.lengths_B + size - 1) // size
        # users by chunk count, longest first
        order_B = torch.argsort(counts_B, descending=True, stable=True)
        self.order_B = placed(order_B, device)
        deepest = int(counts_B.max()) if len(counts_B) else 0
        # active[n]: users that have a chunk n; first[n]: where the chunks of index n begin
        having = torch.bincount(counts_B, minlength=deepest + 1)
        self.active: list[int] = having.flip(0).cumsum(0).flip(0)[1:].tolist()
        first = torch.zeros(deepest + 1, dtype=torch.int64)
        first[1:] = torch.tensor(self.active, dtype=torch.int64).cumsum(0)
        self.first: list[int] = first.tolist()
        self.count = self.first[-1]
        # of each chunk: its user and its index within the user
        index_N = torch.repeat_interleave(torch.arange(deepest), torch.tensor(self.active, dtype=torch.int64))
        user_N = order_B[torch.arange(self.count) - first[index_N]]
        begin_N = index_N * size  # position of the chunk's first event within its user
        filled_N = (self.lengths_B[user_N] - begin_N).clamp(max=size)
        # on the host, where all layouts are computed: nothing is read back from the device
        self._user_N, self.host_begin_N, self._filled_N = user_N, begin_N, filled_N
        self.user_N, self.begin_N, self.filled_N = (placed(x, device) for x in (user_N, begin_N, filled_N))
        self.padded = self.count * size != self.events
        self.in_order = int((counts_B > 0).sum()) <= 1  # one user: chunks lie in memory as they come

    def going_on(self, n: int) -> int:
        """Users that have a chunk n + 1."""
        return self.active[n + 1] if n + 1 < len(self.active) else 0

    def fresh(self, has_initial: bool) -> int:
        """Chunks with no state before them: every user's first, unless there is an initial state. They stand first."""
        return 0 if has_initial or not self.active else self.active[0]

    @cached_property
    def _slots(self) -> tuple[Tensor, Tensor]:
        """On the host: the packed row of each chunk slot, and which of them hold an event."""
        slot_C = torch.arange(self.size)
        filled_NC = slot_C < self._filled_N[:, None]
        begin_N1 = (self.starts_B[self._user_N] + self.host_begin_N)[:, None]
        return begin_N1 + torch.where(filled_NC, slot_C, 0), filled_NC

    @cached_property
    def row_NC(self) -> Tensor:
        """The packed row of each chunk slot; padding points at the chunk's own first row."""
        return placed(self._slots[0], self.device)

    @cached_property
    def filled_NC(self) -> Tensor:
        """Which slots hold an event."""
        return placed(self._slots[1], self.device)

    @cached_property
    def slot_T(self) -> Tensor:
        """The chunk slot of each packed row."""
        row_NC, filled_NC = self._slots
        slot_T = torch.empty(self.events, dtype=torch.int64)
        slots = torch.arange(self.count * self.size).view(self.count, self.size)
        slot_T[row_NC[filled_NC]] = slots[filled_NC]
        return placed(slot_T, self.device)

    @cached_property
    def empty_slots(self) -> Tensor:
        return placed(torch.nonzero(~self._slots[1].flatten()).flatten(), self.device)

    def cut(self, x_THK: Tensor) -> Tensor:
        """Packed rows (T, H, K) to chunks (N, H, C, K), zero where there is padding."""
        heads, width = x_THK.shape[1:]
        if self.in_order and not self.padded:
            x_NCHK = x_THK.reshape(self.count, self.size, heads, width)
        else:
            rows = x_THK.reshape(self.events, heads * width).index_select(0, self.row_NC.flatten())
            if self.padded:
                rows.index_fill_(0, self.empty_slots, 0)
            x_NCHK = rows.view(self.count, self.size, heads, width)
        return x_NCHK.transpose(1, 2).contiguous()

    def join(self, x_NHCK: Tensor) -> Tensor:
        """Chunks (N, H, C, K) back to packed rows (T, H, K); padding is dropped."""
        heads, width = x_NHCK.shape[1], x_NHCK.shape[3]
        rows = x_NHCK.transpose(1, 2).reshape(self.count * self.size, heads * width)
        if self.padded or not self.in_order:
            rows = rows.index_select(0, self.slot_T)
        return rows.view(self.events, heads, width)


def scan(
    update_NX: Tensor,
    decay_NX: Tensor | None,
    chunks: Chunks,
    initial_BX: Tensor | None,
    with_final: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The state before each chunk, and after each user's last if wanted: ``S_{n+1} = decay_n S_n + update_n``.

    Without an initial state nothing stands before a user's first chunk: the states are then those of the chunks from
    :meth:`Chunks.fresh` on, and nothing is kept, or multiplied, for histories of a single chunk.

    ``decay_NX`` broadcasts against the update; None means 1. The state is of the given precision, else the initial
    state's, else the update's. Not differentiable by itself: see :func:`scan_backward`.
    """
    dtype = dtype or (update_NX if initial_BX is None else initial_BX).dtype
    inner = update_NX.shape[1:]
    update_NX, initial_BX = update_NX.to(dtype), None if initial_BX is None else initial_BX.to(dtype)
    fresh = chunks.fresh(initial_BX is not None)
    before_AX = torch.empty(chunks.count - fresh, *inner, dtype=dtype, device=update_NX.device)
    final_BX = None
    if with_final:
        users = len(chunks.lengths_B)
        final_BX = update_NX.new_zeros(users, *inner) if initial_BX is None else initial_BX.clone()
    if initial_BX is not None and chunks.active:
        torch.index_select(initial_BX, 0, chunks.order_B[: chunks.active[0]], out=before_AX[: chunks.active[0]])

    def step(a: int, b: int, out: Tensor) -> Tensor:
        """The states after chunks a to b."""
        if a < fresh:
            return out.copy_(update_NX[a:b])
        return _step(update_NX[a:b], before_AX[a - fresh : b - fresh], None if decay_NX is None else decay_NX[a:b], out)

    for n, here in enumerate(chunks.active):
        first, going_on = chunks.first[n], chunks.going_on(n)
        if going_on:
            there = chunks.first[n + 1] - fresh
            step(first, first + going_on, before_AX[there : there + going_on])
        if final_BX is not None and going_on < here:
            end = torch.empty(here - going_on, *inner, dtype=dtype, device=update_NX.device)
            final_BX[chunks.order_B[going_on:here]] = step(first + going_on, first + here, end)
    return before_AX, final_BX


def last_state(
    update_NX: Tensor, decay_NX: Tensor | None, chunks: Chunks, initial_BX: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """The state after each user's last chunk alone; see :func:`scan`."""
    return cast(Tensor, scan(update_NX, decay_NX, chunks, initial_BX, True, dtype)[1])


def scan_backward(
    grad_before_AX: Tensor, grad_final_BX: Tensor | None, decay_NX: Tensor | None, chunks: Chunks, has_initial: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of each chunk's update, and of the initial state if there is one.

    With G_n the gradient of the state before chunk n, ``G_n = grad_before_n + decay_n G_{n+1}``, and the update of
    chunk n has the gradient G_{n+1}.
    """
    inner, fresh = grad_before_AX.shape[1:], chunks.fresh(has_initial)
    grad_update_NX = grad_before_AX.new_zeros(chunks.count, *inner)
    grad_initial_BX = None
    if grad_final_BX is not None:
        grad_final_BX = grad_final_BX.to(grad_before_AX.dtype)
    if has_initial:  # a user without rows hands its state on
        users = len(chunks.lengths_B)
        grad_initial_BX = grad_before_AX.new_zeros(users, *inner) if grad_final_BX is None else grad_final_BX.clone()
    for n in reversed(range(len(chunks.active))):
        here, going_on, a = chunks.active[n], chunks.going_on(n), chunks.first[n]
        b = a + here
        if grad_final_BX is not None:
            grad_update_NX[a + going_on : b] = grad_final_BX[chunks.order_B[going_on:here]]
        if a < fresh:
            break
        if n:
            previous = grad_update_NX[chunks.first[n - 1] : chunks.first[n - 1] + here]
        else:
            previous = grad_before_AX.new_empty(here, *inner)
        decay = None if decay_NX is None else decay_NX[a:b]
        _step(grad_before_AX[a - fresh : b - fresh], grad_update_NX[a:b], decay, previous)
        if grad_initial_BX is not None and not n:
            grad_initial_BX[chunks.order_B[:here]] = previous
    return grad_update_NX, grad_initial_BX


def _step(added: Tensor, carried: Tensor, decay: Tensor | None, out: Tensor) -> Tensor:
    """``out = added + decay · carried``."""
    if decay is None:
        return torch.add(added, carried, out=out)
    return torch.addcmul(added, carried, decay.to(carried.dtype), out=out)
