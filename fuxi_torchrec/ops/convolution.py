"""A causal convolution over each user's events, each channel by itself."""

import torch
from torch import Tensor


def causal_conv(
    x_TE: Tensor, weight_EK: Tensor, bias_E: Tensor, bounds: Tensor, user_T: Tensor, initial_BKE: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``y_i = Σ_k w_k x_{i−K+k}`` and a bias, and the last K inputs of each user; K is the kernel's width less one.

    Args:
        weight_EK: (E, K + 1), the last column meets the current event.
        bounds, user_T: (B + 1,) bounds of the users' rows, and the user of each row.
        initial_BKE: the inputs before each user's first row; zero if None.
    """
    users, before = len(bounds) - 1, weight_EK.shape[1] - 1
    # every user's rows behind so many of its earlier ones
    place_T = torch.arange(len(x_TE), device=x_TE.device) + before * (user_T + 1)
    ends_B = bounds[1:] + before * torch.arange(1, users + 1, device=x_TE.device)
    last_BK = ends_B[:, None] + torch.arange(-before, 0, device=x_TE.device)
    rows = x_TE.new_zeros(len(x_TE) + before * users, x_TE.shape[1]).index_copy(0, place_T, x_TE)
    if initial_BKE is not None:
        first_BK = bounds[:-1, None] + before * torch.arange(users, device=x_TE.device)[:, None]
        first_BK = first_BK + torch.arange(before, device=x_TE.device)
        rows = rows.index_copy(0, first_BK.flatten(), initial_BKE.flatten(0, 1))
    size = max(0, len(rows) - before)
    y = bias_E + sum(weight_EK[:, k] * rows[k : k + size] for k in range(before + 1))
    return y.index_select(0, place_T - before), rows[last_BK]


def conv_step(x_BE: Tensor, weight_EK: Tensor, bias_E: Tensor, state_BKE: Tensor) -> tuple[Tensor, Tensor]:
    """The same for one event of every user."""
    window = torch.cat((state_BKE, x_BE.unsqueeze(1)), 1)
    return (window * weight_EK.T).sum(1) + bias_E, window[:, 1:]
