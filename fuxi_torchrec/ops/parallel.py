"""The definition: the whole n×n map of one user at a time. For tests and short sequences."""

import itertools

import torch
from torch import Tensor

from fuxi_torchrec.ops.decay import powers
from fuxi_torchrec.ops.precision import without_autocast


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
    """``(QKᵀ ⊙ D)V`` with ``D_ij = r^{query_clock_i − key_clock_j}`` for j ≤ i and 0 above.

    Args:
        q_THK, k_THK, v_THV: queries, keys and values of all users, one user after another.
        log_decay_H: log r of each head, at most 0.
        key_clock_T: int64, when each event writes; never decreases within a user.
        query_clock_T: int64, when each event reads.
        next_clock_T: int64, the key clock of the user's next event.
        offsets: B + 1 bounds of the users' rows.
        initial_BHKV: the state before each user's first row; zero if None.

    Returns:
        y_THV, and the state after each user's last row.
    """
    outputs, states = [v_THV.new_zeros(0, *v_THV.shape[1:])], []
    for user, (a, b) in enumerate(itertools.pairwise(offsets)):
        shape = (q_THK.shape[1], q_THK.shape[2], v_THV.shape[2])
        state_HKV = v_THV.new_zeros(shape) if initial_BHKV is None else initial_BHKV[user]
        if a == b:
            states.append(state_HKV)
            continue
        q_HnK, k_HnK, v_HnV = (x[a:b].transpose(0, 1) for x in (q_THK, k_THK, v_THV))
        key_n, query_n, next_clock = key_clock_T[a:b], query_clock_T[a:b], next_clock_T[b - 1]
        causal_nn = torch.ones(b - a, b - a, dtype=torch.bool, device=v_THV.device).tril()

        D_Hnn = powers(log_decay_H, (query_n[:, None] - key_n[None, :]).where(causal_nn, 0)) * causal_nn
        y_HnV = ((q_HnK @ k_HnK.mT) * D_Hnn) @ v_HnV
        y_HnV = y_HnV + (q_HnK * powers(log_decay_H, query_n - key_n[0])[..., None]) @ state_HKV.to(v_THV.dtype)

        to_next_Hn1 = powers(log_decay_H, next_clock - key_n)[..., None]
        carried_HKV = state_HKV * powers(log_decay_H.to(state_HKV.dtype), next_clock - key_n[0])[..., None, None]
        states.append(carried_HKV + (k_HnK * to_next_Hn1).mT @ v_HnV)
        outputs.append(y_HnV.transpose(0, 1))
    return torch.cat(outputs), torch.stack(states)
