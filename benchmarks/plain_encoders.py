"""Encoders as papers write them: padded, with tensors of all pairs of events or a loop over events.

The encoders' own modules with their operators replaced. All users of a batch must be equally long.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from fuxi_torchrec.ops.chunks import Chunks
from fuxi_torchrec.ops.time_maps import TimeMap


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Inside, every comparison encoder runs in its plain form; TTT4Rec's own is one already."""
    forms = {
        "hstu.biased_attention": _biased,
        "fuxi_alpha.content_attention": _content,
        "fuxi_alpha.relative_maps": _relative,
        "fuxi_beta.relative_maps": _relative,
        "sasrec.softmax_attention": _softmax,
        "retnet.retention": _retention,
        "tim4rec.gated_retention": _gated,
        "mamba4rec.selective_scan": _selective,
        "recblr.diagonal_scan": _diagonal,
    }
    with contextlib.ExitStack() as stack:
        for name, form in forms.items():
            stack.enter_context(mock.patch(f"fuxi_torchrec.encoders.{name}", form))
        yield


def _users(chunks: Chunks, *rows: Tensor) -> list[Tensor]:
    """(B, H, n, K) of rows (T, H, K)."""
    return [x.unflatten(0, (len(chunks.lengths_B), -1)).transpose(1, 2) for x in rows]


def _events(chunks: Chunks, rows: Tensor) -> tuple[Tensor, ...]:
    """(B, W) of each place in the histories."""
    return rows.unflatten(0, (len(chunks.lengths_B), -1)).unbind(1)


def _packed(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(0, 1)


def _causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def _apart(n: int) -> Tensor:
    return torch.arange(n)[:, None] - torch.arange(n)


# --- attention -------------------------------------------------------------------------------------------------------


def _positions(position_P: Tensor, n: int) -> Tensor:
    return position_P[_apart(n).clamp(0, len(position_P) - 1)]


def _times(kind: Any, time_P: Tensor, clocks: tuple[Tensor, Tensor], users: int) -> Tensor:
    time, following = (x.view(users, -1) for x in clocks)
    gaps = following.unsqueeze(2) - time.unsqueeze(1)
    if kind != "buckets":
        a, b = time_P.unbind()
        return a * torch.exp(-torch.exp(b) * gaps.clamp(min=0).float())
    return time_P[TimeMap("buckets", torch.arange(129.0)).weights(gaps).long()]


def _biased(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, time: Tensor, clocks: Any, chunks: Chunks) -> Tensor:
    q, k, v = _users(chunks, q, k, v)
    bias = _positions(pos, q.shape[2]) + _times("buckets", time, clocks, len(q))
    return _packed((F.silu(q @ k.mT + bias.unsqueeze(1)) * _causal(q.shape[2])) @ v)


def _content(q: Tensor, k: Tensor, v: Tensor, chunks: Chunks) -> Tensor:
    q, k, v = _users(chunks, q, k, v)
    return _packed((F.silu(q @ k.mT) * _causal(q.shape[2])) @ v)


def _relative(v: Tensor, pos: Tensor, time: Tensor, kind: Any, clocks: Any, chunks: Chunks) -> tuple[Tensor, Tensor]:
    users = len(chunks.lengths_B)
    rows = v.view(users, -1, v.shape[1])
    causal = _causal(rows.shape[1])
    by_time = (_times(kind, time, clocks, users) * causal) @ rows
    return ((_positions(pos, rows.shape[1]) * causal) @ rows).flatten(0, 1), by_time.flatten(0, 1)


def _softmax(q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, dropout: float) -> tuple[Tensor, None]:
    q, k, v = _users(chunks, q, k, v)
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~_causal(q.shape[2]), -torch.inf)
    return _packed(scores.softmax(3) @ v), None


# --- recurrences: over all pairs where there is such a form, else event after event -----------------------------------


def _retention(
    q: Tensor, k: Tensor, v: Tensor, log_decay_H: Tensor, chunks: Chunks, initial: None, with_state: bool
) -> tuple[Tensor, None]:
    q, k, v = _users(chunks, q, k, v)
    n = q.shape[2]
    powers = torch.exp(log_decay_H[:, None, None] * _apart(n).clamp(min=0)) * _causal(n)
    return _packed((q @ k.mT * powers) @ v), None


def _gated(q_TK: Tensor, k_TK: Tensor, v_THV: Tensor, log_decay_TH: Tensor, chunks: Chunks) -> Tensor:
    q, k, v, log_decay = _users(chunks, q_TK.unsqueeze(1), k_TK.unsqueeze(1), v_THV, log_decay_TH.unsqueeze(2))
    passed = log_decay.cumsum(2)
    decay = (passed - passed.mT).masked_fill(~_causal(q.shape[2]), -torch.inf).exp()
    return _packed((q @ k.mT * decay) @ v)


def _diagonal(
    log_decay_TW: Tensor, update_TW: Tensor, chunks: Chunks, initial: None, with_state: bool
) -> tuple[Tensor, None]:
    decay, update = (_events(chunks, x) for x in (log_decay_TW.exp(), update_TW))
    h, rows = torch.zeros_like(update[0]), []
    for decay_BW, update_BW in zip(decay, update, strict=True):
        h = decay_BW * h + update_BW
        rows.append(h)
    return torch.stack(rows, 1).flatten(0, 1), None


def _selective(
    u: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, chunks: Chunks, initial: None, with_state: bool
) -> tuple[Tensor, None]:
    h, rows = u.new_zeros(len(chunks.lengths_B), *A.shape), []
    for u_BE, step_BE, B_BS, C_BS in zip(*(_events(chunks, x) for x in (u, step, B, C)), strict=True):
        h = torch.exp(step_BE.unsqueeze(2) * A) * h + (step_BE * u_BE).unsqueeze(2) * B_BS.unsqueeze(1)
        rows.append((h @ C_BS.unsqueeze(2)).squeeze(2))
    return torch.stack(rows, 1).flatten(0, 1), None
