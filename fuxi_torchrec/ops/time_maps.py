"""Weights of pairs of events by the time between them, and their derivatives; times are int64 in the data's own unit.

A map takes gaps Δ_ij = t_{i+1} − t_j of any shape and one vector of parameters:

* ``buckets``: w[b(Δ)] with 129 weights, b(Δ) the number of thresholds T_k = ceil(e^{0.301 k}), k = 1..128, that |Δ|
  reaches; that is trunc(log(max(|Δ|, 1)) / 0.301), at most 128, exact for every integer.
* ``exp``: a·exp(−e^b·max(Δ, 0)).
* ``pow``: a·(1 + max(Δ, 0))^(−b).
"""

from decimal import ROUND_CEILING, Context, Decimal
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from fuxi_torchrec.ops.decay import LOWEST_EXPONENT

BUCKETS = 129
Kind = Literal["buckets", "exp", "pow"]

_CELL_BITS = 19  # of a float32 below what tells cells apart: 16 cells in every doubling, thresholds lie further apart
_CELLS = 191 << 4  # up to 2^63


class TimeMap:
    """A map with its parameters: ``weights`` of gaps, and the parameters' gradient from that of the weights."""

    def __init__(self, kind: Kind, parameters: Tensor) -> None:
        self.kind, self.parameters = kind, parameters
        if kind == "buckets":
            below, self._thresholds = _cells(parameters.device)
            # each cell's two buckets side by side
            self._either = torch.stack((below, (below + 1).clamp(max=BUCKETS - 1)), 1).flatten()
            self._weights = parameters[self._either]

    def weights(self, gap: Tensor) -> Tensor:
        if self.kind == "buckets":
            return torch.take(self._weights, self._place(gap))
        a, _ = self.parameters.unbind()
        return self._decay(gap)[0].mul_(a)

    def gradient(self, gap: Tensor, grad: Tensor) -> Tensor:
        """Of the parameters, where the weights have the gradient ``grad``."""
        if self.kind == "buckets":
            by_place = torch.bincount(self._place(gap).flatten(), grad.flatten(), minlength=2 * _CELLS)
            return torch.zeros_like(self.parameters).index_add_(0, self._either, by_place.to(grad.dtype))
        a, _ = self.parameters.unbind()
        decay, by_b = self._decay(gap)
        grad = decay.mul_(grad)
        return torch.stack((grad.sum(), grad.mul_(by_b).sum() * a))

    def _place(self, gap: Tensor) -> Tensor:
        """The cell of each gap, twice, and one more where it reaches the cell's threshold."""
        size = gap.abs()
        cell = size.float().view(torch.int32).bitwise_right_shift_(_CELL_BITS).long()
        reached = size >= torch.take(self._thresholds, cell)
        return cell.mul_(2).add_(reached)

    def _decay(self, gap: Tensor) -> tuple[Tensor, Tensor]:
        """What the first parameter multiplies, and its logarithm's derivative by the second."""
        b = self.parameters[1]
        passed = gap.clamp(min=0).to(b.dtype)
        if self.kind == "exp":
            exponent = passed.mul_(-b.exp())
            return exponent.clamp(min=LOWEST_EXPONENT).exp_(), exponent
        passed = passed.log1p_().neg_()
        return (passed * b).clamp_(min=LOWEST_EXPONENT).exp_(), passed


def bucket_thresholds() -> list[int]:
    """T_1 to T_128, with decimals: a float64 of e^x is off by whole numbers where T is large."""
    exact = Context(prec=60)
    powers = (exact.exp(exact.multiply(Decimal("0.301"), Decimal(k))) for k in range(1, BUCKETS))
    return [int(power.to_integral_value(ROUND_CEILING)) for power in powers]


@cache
def _cells(device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each cell of float32 numbers: the bucket of its least integer, and the threshold that follows."""
    cell = torch.arange(_CELLS)
    low, high = torch.zeros_like(cell), torch.full_like(cell, 2**63 - 1)
    for _ in range(63):  # the least integer that is rounded into each cell or a later one
        middle = low + (high - low) // 2
        reached = (middle.float().view(torch.int32) >> _CELL_BITS) >= cell
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    thresholds = torch.tensor(bucket_thresholds())
    below = torch.searchsorted(thresholds, low, right=True)
    following = torch.cat((thresholds, torch.tensor([2**63 - 1])))[below]
    return below.to(device), following.to(device)
