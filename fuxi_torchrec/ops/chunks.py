"""Jagged rows cut into chunks, and the scan that carries a state from chunk to chunk.

Each user's events are cut into chunks of C; only a user's last chunk is padded. Chunks are ordered by chunk index first
and, within an index, by users sorted by length, longest first. Whoever has a chunk n + 1 therefore stands at the front
of those who have a chunk n, and one step of the scan works on two contiguous slices.
"""

from functools import cached_property

import torch
from torch import Tensor


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
        # users by chunk count, longest first; and each user's place in that order
        self.order_B = torch.argsort(counts_B, descending=True, stable=True)
        place_B = torch.empty_like(self.order_B)
        place_B[self.order_B] = torch.arange(len(place_B))
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
        user_N = self.order_B[torch.arange(self.count) - first[index_N]]
        self.user_N = user_N.to(device)
        self.begin_N = (index_N * size).to(device)  # position of the chunk's first event within its user
        self.filled_N = (self.lengths_B[user_N] - index_N * size).clamp(max=size).to(device)
        # the last chunk of each user that has one
        self.users_with_rows = torch.nonzero(counts_B > 0).flatten().to(device)
        last_B = first[(counts_B - 1).clamp(min=0)] + place_B
        self.last_chunk = last_B[counts_B > 0].to(device)
        self.padded = self.count * size != self.events
        self.in_order = int((counts_B > 0).sum()) <= 1  # one user: chunks lie in memory as they come

    @cached_property
    def row_NC(self) -> Tensor:
        """The packed row of each chunk slot; padding points at the chunk's own first row."""
        slot_C = torch.arange(self.size, device=self.device)
        begin_N1 = (self.starts_B.to(self.device)[self.user_N] + self.begin_N)[:, None]
        return begin_N1 + torch.where(self.filled_NC, slot_C, 0)

    @cached_property
    def filled_NC(self) -> Tensor:
        """Which slots hold an event."""
        return torch.arange(self.size, device=self.device) < self.filled_N[:, None]

    @cached_property
    def slot_T(self) -> Tensor:
        """The chunk slot of each packed row."""
        slot_T = torch.empty(self.events, dtype=torch.int64, device=self.device)
        slots = torch.arange(self.count * self.size, device=self.device).view(self.count, self.size)
        slot_T[self.row_NC[self.filled_NC]] = slots[self.filled_NC]
        return slot_T

    @cached_property
    def empty_slots(self) -> Tensor:
        """The padding slots."""
        return torch.nonzero(~self.filled_NC.flatten()).flatten()

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
    update_NX: Tensor, decay_NX: Tensor | None, chunks: Chunks, initial_BX: Tensor | None, with_final: bool
) -> tuple[Tensor, Tensor | None]:
    """The state before each chunk, and after each user's last if wanted: ``S_{n+1} = decay_n S_n + update_n``.

    ``decay_NX`` broadcasts against the update; None means 1. The state has the initial state's precision, else the
    update's. Not differentiable by itself: see :func:`scan_backward`.
    """
    dtype = update_NX.dtype if initial_BX is None else initial_BX.dtype
    inner = update_NX.shape[1:]
    before_NX = torch.empty(chunks.count, *inner, dtype=dtype, device=update_NX.device)
    update_NX = update_NX.to(dtype)
    order = chunks.order_B.to(update_NX.device)
    if chunks.active:
        head = before_NX[: chunks.active[0]]
        head.zero_() if initial_BX is None else torch.index_select(initial_BX, 0, order[: chunks.active[0]], out=head)
    for n in range(1, len(chunks.active)):
        going_on = chunks.active[n]
        here = slice(chunks.first[n - 1], chunks.first[n - 1] + going_on)
        there = before_NX[chunks.first[n] : chunks.first[n] + going_on]
        _step(update_NX[here], before_NX[here], None if decay_NX is None else decay_NX[here], there)
    if not with_final:
        return before_NX, None
    users = len(chunks.lengths_B)
    final_BX = before_NX.new_zeros(users, *inner) if initial_BX is None else initial_BX.clone()
    last = chunks.last_chunk
    if len(last):
        end = torch.empty(len(last), *inner, dtype=dtype, device=update_NX.device)
        _step(update_NX[last], before_NX[last], None if decay_NX is None else decay_NX[last], end)
        final_BX[chunks.users_with_rows] = end
    return before_NX, final_BX


def scan_backward(
    grad_before_NX: Tensor, grad_final_BX: Tensor | None, decay_NX: Tensor | None, chunks: Chunks
) -> tuple[Tensor, Tensor]:
    """The gradient of each chunk's update, and of the initial state.

    With G_n the gradient of the state before chunk n, ``G_n = grad_before_n + decay_n G_{n+1}``, and the update of
    chunk n has the gradient G_{n+1}.
    """
    inner = grad_before_NX.shape[1:]
    users = len(chunks.lengths_B)
    grad_update_NX = torch.zeros_like(grad_before_NX)
    grad_initial_BX = grad_before_NX.new_zeros(users, *inner)
    if grad_final_BX is not None:
        grad_final_BX = grad_final_BX.to(grad_before_NX.dtype)
        grad_update_NX[chunks.last_chunk] = grad_final_BX[chunks.users_with_rows]
        empty = torch.nonzero(chunks.lengths_B == 0).flatten().to(grad_before_NX.device)
        grad_initial_BX[empty] = grad_final_BX[empty]
    for n in reversed(range(len(chunks.active))):
        here = slice(chunks.first[n], chunks.first[n] + chunks.active[n])
        decay = None if decay_NX is None else decay_NX[here]
        if n:
            previous = grad_update_NX[chunks.first[n - 1] : chunks.first[n - 1] + chunks.active[n]]
        else:
            previous = grad_before_NX.new_empty(chunks.active[0], *inner)
        _step(grad_before_NX[here], grad_update_NX[here], decay, previous)
        if n == 0:
            grad_initial_BX[chunks.order_B[: chunks.active[0]].to(previous.device)] = previous
    return grad_update_NX, grad_initial_BX


def _step(added: Tensor, carried: Tensor, decay: Tensor | None, out: Tensor) -> None:
    """``out = added + decay · carried``."""
    if decay is None:
        torch.add(added, carried, out=out)
    else:
        torch.addcmul(added, carried, decay.to(carried.dtype), out=out)
