"""Attention over every pair of a user's events, tile by tile: no tensor of all pairs exists, in training neither.

A tile is a chunk of queries against a chunk of keys, some chunks before it. Chunks are ordered so that the tiles of one
distance lie side by side (see :class:`Chunks`): a group of them is one product of slices. Only tiles of distance 0 are
masked. The rows that pad a user's last chunk are zero, values and incoming gradients too, so they contribute nothing.
The backward pass keeps the inputs and computes the tiles again.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fuxi_torchrec.ops.chunks import Chunks
from fuxi_torchrec.ops.precision import apply, exactly, once
from fuxi_torchrec.ops.time_maps import Kind, TimeMap

_GROUP_ELEMENTS = 2**19  # of the tiles that are computed together: they stay near the cache


def biased_attention(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    position_P: Tensor,
    time_P: Tensor,
    clocks: tuple[Tensor, Tensor],
    chunks: Chunks,
) -> Tensor:
    """``y_i = Σ_{j≤i} silu(q_i·k_j + position[i−j] + time[t_{i+1} − t_j]) v_j`` of every head.

    Args:
        position_P: weights by distance; larger distances take the last.
        time_P: weights of the buckets of :mod:`time_maps`.
        clocks: (T,) int64 times of events, and of their successors.
    """
    return apply(_Biased, q_THK, k_THK, v_THV, position_P, time_P, *clocks, chunks)


def content_attention(q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, chunks: Chunks) -> Tensor:
    """``y_i = Σ_{j≤i} silu(q_i·k_j) v_j`` of every head."""
    return apply(_Biased, q_THK, k_THK, v_THV, None, None, None, None, chunks)


def relative_maps(
    v_TW: Tensor, position_P: Tensor, time_P: Tensor, kind: Kind, clocks: tuple[Tensor, Tensor], chunks: Chunks
) -> tuple[Tensor, Tensor]:
    """``Σ_{j≤i} position[i−j] v_j`` and ``Σ_{j≤i} φ(t_{i+1} − t_j) v_j``, φ a map of :mod:`time_maps`."""
    return apply(_Relative, v_TW, position_P, time_P, *clocks, kind, chunks)


def distance_map(v_TW: Tensor, position_P: Tensor, chunks: Chunks) -> Tensor:
    """``Σ_{j≤i} position[i−j] v_j`` alone."""
    found: Tensor = apply(_Relative, v_TW, position_P, None, None, None, None, chunks)[0]
    return found


def time_map(v_TW: Tensor, time_P: Tensor, kind: Kind, clocks: tuple[Tensor, Tensor], chunks: Chunks) -> Tensor:
    """``Σ_{j≤i} φ(t_{i+1} − t_j) v_j`` alone."""
    found: Tensor = apply(_Relative, v_TW, None, time_P, *clocks, kind, chunks)[1]
    return found


def groups(chunks: Chunks, distance: int, heads: int) -> Iterator[tuple[slice, slice]]:
    """Query chunks and the key chunks that lie so many chunks before them."""
    most = max(1, _GROUP_ELEMENTS // (heads * chunks.size**2))
    begin, active = distance, chunks.active
    while begin < len(active):
        users, end = active[begin], begin + 1
        # the same users' next chunks follow at once, and so do their keys
        while end < len(active) and active[end] == users == active[end - 1 - distance]:
            end += 1
        query, key, count = chunks.first[begin], chunks.first[begin - distance], users * (end - begin)
        for a in range(0, count, most):
            b = min(a + most, count)
            yield slice(query + a, query + b), slice(key + a, key + b)
        begin = end


def add_product(out_nXX: Tensor, left_nXX: Tensor, right_nXX: Tensor) -> None:
    """``out += left @ right`` in place, any leading dimensions; ``out`` is contiguous."""
    out = out_nXX.view(-1, *out_nXX.shape[-2:])
    out.baddbmm_(left_nXX.reshape(-1, *left_nXX.shape[-2:]), right_nXX.reshape(-1, *right_nXX.shape[-2:]))


def causal(chunks: Chunks, like: Tensor) -> Tensor:
    """(C, C), 1 where the key is not after the query."""
    return torch.ones(chunks.size, chunks.size, dtype=like.dtype, device=like.device).tril_()


class _Positions:
    """The map of positions of one distance of chunks, and where its gradients go."""

    def __init__(self, position_P: Tensor, chunks: Chunks, distance: int) -> None:
        slot = torch.arange(chunks.size, device=position_P.device)
        apart = distance * chunks.size + slot.unsqueeze(1) - slot
        self._place = apart.clamp_(0, len(position_P) - 1).flatten()
        self.map_CC = position_P.index_select(0, self._place).view(chunks.size, chunks.size)

    def add_gradient(self, grad_map_CC: Tensor, grad_position_P: Tensor) -> None:
        grad_position_P.index_add_(0, self._place, grad_map_CC.flatten())


class _Clocks:
    """Times of chunks, and the gaps of a group of tiles."""

    def __init__(self, time_T: Tensor, next_T: Tensor, chunks: Chunks) -> None:
        both_NC2 = chunks.cut(torch.stack((time_T, next_T), 1).unsqueeze(1)).squeeze(1)
        self.time_NC, self.next_NC = both_NC2.unbind(2)

    def gaps(self, query: slice, key: slice) -> Tensor:
        return self.next_NC[query].unsqueeze(2) - self.time_NC[key].unsqueeze(1)


class _Biased(torch.autograd.Function):
    """silu of products, with or without a bias."""

    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        position_P: Tensor | None,
        time_P: Tensor | None,
        time_T: Tensor | None,
        next_T: Tensor | None,
        chunks: Chunks,
    ) -> Tensor:
        q, k, v = (chunks.cut(x) for x in (q_THK, k_THK, v_THV))
        bias = _Bias(position_P, time_P, time_T, next_T, chunks)
        y, mask = torch.zeros_like(v), causal(chunks, v)
        for distance in range(len(chunks.active)):
            bias.go_to(distance)
            for query, key in groups(chunks, distance, v.shape[1]):
                scores = F.silu(bias.scores(q, k, query, key), inplace=True)
                if not distance:
                    scores.mul_(mask)
                add_product(y[query], scores, v[key])
        ctx.save_for_backward(q_THK, k_THK, v_THV, position_P, time_P, time_T, next_T)
        ctx.chunks = chunks
        return chunks.join(y)

    @staticmethod
    @once
    @exactly
    def backward(ctx: Any, grad_y_THV: Tensor) -> tuple[Tensor | None, ...]:
        q_THK, k_THK, v_THV, position_P, time_P, time_T, next_T = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        q, k, v, dy = (chunks.cut(x) for x in (q_THK, k_THK, v_THV, grad_y_THV))
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        bias = _Bias(position_P, time_P, time_T, next_T, chunks)
        mask = causal(chunks, v)
        for distance in range(len(chunks.active)):
            bias.go_to(distance)
            for query, key in groups(chunks, distance, v.shape[1]):
                scores = bias.scores(q, k, query, key)
                grad = torch.ops.aten.silu_backward(dy[query] @ v[key].mT, scores)
                F.silu(scores, inplace=True)
                if not distance:
                    scores.mul_(mask)
                    grad.mul_(mask)
                add_product(dv[key], scores.mT, dy[query])
                add_product(dq[query], grad, k[key])
                add_product(dk[key], grad.mT, q[query])
                bias.add_gradient(grad)
            bias.leave()
        dq, dk, dv = (chunks.join(x) for x in (dq, dk, dv))
        return dq, dk, dv, bias.grad_position_P, bias.grad_time_P, None, None, None


class _Bias:
    """What is added to the scores of a group of tiles: nothing, or a weight of the distance and one of the time."""

    def __init__(
        self,
        position_P: Tensor | None,
        time_P: Tensor | None,
        time_T: Tensor | None,
        next_T: Tensor | None,
        chunks: Chunks,
    ) -> None:
        self._position_P, self._chunks = position_P, chunks
        self.grad_position_P: Tensor | None = None
        self.grad_time_P: Tensor | None = None
        if position_P is not None:
            assert time_P is not None and time_T is not None and next_T is not None
            self._time, self._clocks = TimeMap("buckets", time_P), _Clocks(time_T, next_T, chunks)
            self.grad_position_P, self.grad_time_P = torch.zeros_like(position_P), torch.zeros_like(time_P)

    def go_to(self, distance: int) -> None:
        if self._position_P is not None:
            self._positions = _Positions(self._position_P, self._chunks, distance)
            self._grad_map_CC = torch.zeros_like(self._positions.map_CC)

    def scores(self, q: Tensor, k: Tensor, query: slice, key: slice) -> Tensor:
        scores = q[query] @ k[key].mT
        if self._position_P is None:
            return scores
        self._gap = self._clocks.gaps(query, key)
        return scores.add_(self._time.weights(self._gap).add_(self._positions.map_CC).unsqueeze(1))

    def add_gradient(self, grad_nHCC: Tensor) -> None:
        """Of the group whose scores were the last."""
        if self.grad_time_P is not None:
            grad_nCC = grad_nHCC.sum(1)
            self.grad_time_P += self._time.gradient(self._gap, grad_nCC)
            self._grad_map_CC += grad_nCC.sum(0)

    def leave(self) -> None:
        """All groups of the distance are done."""
        if self.grad_position_P is not None:
            self._positions.add_gradient(self._grad_map_CC, self.grad_position_P)


class _Relative(torch.autograd.Function):
    """Maps that do not know the rows, shared by all columns: of distance, of time, or both."""

    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        v_TW: Tensor,
        position_P: Tensor | None,
        time_P: Tensor | None,
        time_T: Tensor | None,
        next_T: Tensor | None,
        kind: Kind | None,
        chunks: Chunks,
    ) -> tuple[Tensor | None, Tensor | None]:
        v = chunks.cut(v_TW.unsqueeze(1)).squeeze(1)
        mask, time = causal(chunks, v), _Times.of(kind, time_P, time_T, next_T, chunks)
        by_position = None if position_P is None else torch.zeros_like(v)
        by_time = None if time is None else torch.zeros_like(v)
        for distance in range(len(chunks.active)):
            if position_P is not None:
                map_CC = _Positions(position_P, chunks, distance).map_CC
                map_CC = map_CC if distance else map_CC * mask
            for query, key in groups(chunks, distance, 1):
                if by_position is not None:
                    add_product(by_position[query], map_CC.expand(query.stop - query.start, -1, -1), v[key])
                if by_time is not None and time is not None:
                    weights = time.map.weights(time.clocks.gaps(query, key))
                    if not distance:
                        weights.mul_(mask)
                    add_product(by_time[query], weights, v[key])
        ctx.save_for_backward(v_TW, position_P, time_P, time_T, next_T)
        ctx.kind, ctx.chunks = kind, chunks
        y_position, y_time = (
            None if y is None else chunks.join(y.unsqueeze(1)).squeeze(1) for y in (by_position, by_time)
        )
        return y_position, y_time

    @staticmethod
    @once
    @exactly
    def backward(ctx: Any, grad_position_TW: Tensor | None, grad_time_TW: Tensor | None) -> tuple[Tensor | None, ...]:
        v_TW, position_P, time_P, time_T, next_T = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        v, d_position, d_time = (
            None if x is None else chunks.cut(x.unsqueeze(1)).squeeze(1) for x in (v_TW, grad_position_TW, grad_time_TW)
        )
        assert v is not None
        mask, time = causal(chunks, v), _Times.of(ctx.kind, time_P, time_T, next_T, chunks)
        dv = torch.zeros_like(v)
        grad_position_P, grad_time_P = (None if p is None else torch.zeros_like(p) for p in (position_P, time_P))
        for distance in range(len(chunks.active)):
            if d_position is not None and grad_position_P is not None:
                positions = _Positions(position_P, chunks, distance)
                map_CC = positions.map_CC if distance else positions.map_CC * mask
                grad_map_CC = torch.zeros_like(map_CC)
                for query, key in groups(chunks, distance, 1):
                    grad_map_CC.addbmm_(d_position[query], v[key].mT)
                    add_product(dv[key], map_CC.mT.expand(query.stop - query.start, -1, -1), d_position[query])
                positions.add_gradient(grad_map_CC if distance else grad_map_CC * mask, grad_position_P)
            if d_time is not None and time is not None and grad_time_P is not None:
                for query, key in groups(chunks, distance, 1):
                    gap = time.clocks.gaps(query, key)
                    weights, grad = time.map.weights(gap), d_time[query] @ v[key].mT
                    if not distance:
                        weights.mul_(mask)
                        grad.mul_(mask)
                    grad_time_P += time.map.gradient(gap, grad)
                    add_product(dv[key], weights.mT, d_time[query])
        return chunks.join(dv.unsqueeze(1)).squeeze(1), grad_position_P, grad_time_P, None, None, None, None


class _Times(NamedTuple):
    """A map of time and the times of chunks."""

    map: TimeMap
    clocks: _Clocks

    @staticmethod
    def of(
        kind: Kind | None, time_P: Tensor | None, time_T: Tensor | None, next_T: Tensor | None, chunks: Chunks
    ) -> "_Times | None":
        if kind is None or time_P is None or time_T is None or next_T is None:
            return None
        return _Times(TimeMap(kind, time_P), _Clocks(time_T, next_T, chunks))
