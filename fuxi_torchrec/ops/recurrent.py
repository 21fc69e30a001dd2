"""One event at a time, O(1) in the length of the history."""

import itertools

import torch
from torch import Tensor

from fuxi_torchrec.ops.decay import powers
from fuxi_torchrec.ops.precision import at_least_float32, without_autocast


@without_autocast
def read(
    q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, log_decay_H: Tensor, query_ticks_B: Tensor, state_BHKV: Tensor
) -> Tensor:
    """What an event reads, itself included: ``y = r^{query − key} q (S + kᵀv)``. The state is not changed.

    Args:
        q_BHK, k_BHK, v_BHV: one event of each user.
        log_decay_H: log r of each head.
        query_ticks_B: int64, query clock minus key clock of the event.
        state_BHKV: the state before the event; may be of higher precision than the rest.
    """
    q_BHK, k_BHK, v_BHV = (at_least_float32(x) for x in (q_BHK, k_BHK, v_BHV))
    dtype = state_BHKV.dtype
    past_BHV = (q_BHK.to(dtype).unsqueeze(-2) @ state_BHKV).squeeze(-2).to(v_BHV.dtype)
    own_BHV = (q_BHK * k_BHK).sum(-1, keepdim=True) * v_BHV
    return (past_BHV + own_BHV) * powers(log_decay_H, query_ticks_B).T[..., None]


@without_autocast
def write(k_BHK: Tensor, v_BHV: Tensor, log_decay_H: Tensor, next_ticks_B: Tensor, state_BHKV: Tensor) -> Tensor:
    """The state after an event, decayed to the next one: ``S' = r^{next − key} (S + kᵀv)``, in the state's precision.

    Args:
        k_BHK, v_BHV: one event of each user.
        log_decay_H: log r of each head.
        next_ticks_B: int64, key clock of the next event minus that of this one.
        state_BHKV: the state before the event.
    """
    dtype = state_BHKV.dtype
    decay_BH11 = powers(log_decay_H.to(dtype), next_ticks_B).T[..., None, None]
    return torch.addcmul(state_BHKV, k_BHK.to(dtype).unsqueeze(-1), v_BHV.to(dtype).unsqueeze(-2)).mul_(decay_BH11)


@without_autocast
def attention(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    log_decay_H: Tensor,
    key_clock_T: Tensor,
    query_clock_T: Tensor,
    next_clock_T: Tensor,
    offsets: list[int],
    initial_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as :func:`fuxi_torchrec.ops.parallel.attention`, event by event over all users that have one left."""
    users = len(offsets) - 1
    if initial_BHKV is None:
        initial_BHKV = v_THV.new_zeros(users, q_THK.shape[1], q_THK.shape[2], v_THV.shape[2])
    lengths = [b - a for a, b in itertools.pairwise(offsets)]
    states = list(initial_BHKV.unbind(0))
    rows: list[Tensor | None] = [None] * v_THV.shape[0]
    for event in range(max(lengths, default=0)):
        active = [user for user in range(users) if lengths[user] > event]
        at = torch.tensor([offsets[user] + event for user in active], device=v_THV.device)
        state = torch.stack([states[user] for user in active])
        q, k, v, key_clock = q_THK[at], k_THK[at], v_THV[at], key_clock_T[at]
        y = read(q, k, v, log_decay_H, query_clock_T[at] - key_clock, state)
        state = write(k, v, log_decay_H, next_clock_T[at] - key_clock, state)
        for n, user in enumerate(active):
            states[user] = state[n]
            rows[offsets[user] + event] = y[n]
    y_THV = torch.stack([row for row in rows if row is not None]) if rows else v_THV.new_zeros(v_THV.shape)
    return y_THV, torch.stack(states) if states else initial_BHKV
