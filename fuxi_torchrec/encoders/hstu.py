"""HSTU (arXiv 2402.17152) as the FuXi-Linear release has it: pointwise attention with weights of distance and time.

``y_i = Σ_{j≤i} silu(q_i·k_j + pos[i−j] + ts[b(t_{i+1} − t_j)]) v_j / N``, ``out = (u ⊙ LN(y)) W_o + x``. The divisor is
``max_positions``, whatever the history's length: y is so small that the norm's eps matters, and N is part of the model.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuxi_torchrec.encoders.base import check_positive, setting
from fuxi_torchrec.encoders.cached import Earlier, Kept, PendingBlock, PendingEncoder, tile_chunks
from fuxi_torchrec.encoders.explain import Curve, by_distance
from fuxi_torchrec.encoders.norms import layer_norm
from fuxi_torchrec.encoders.released import ReleasedLayer, linear_names
from fuxi_torchrec.encoders.stack import Batch, StackConfig
from fuxi_torchrec.ops import cached
from fuxi_torchrec.ops.precision import at_least_float32
from fuxi_torchrec.ops.tiles import biased_attention
from fuxi_torchrec.ops.time_maps import BUCKETS, TimeMap, bucket_thresholds

_LONGEST = 10 * 365 * 86400  # seconds that are shown of the buckets


@dataclass(frozen=True)
class HSTUConfig(StackConfig):
    """Shape of an HSTU encoder; the defaults are the published size for KuaiRand-27K."""

    kind: Literal["hstu"] = setting("hstu", "which encoder")
    num_heads: int = setting(4, "attention heads")
    qk_dim: int = setting(32, "width of a head's queries and keys")
    value_dim: int = setting(128, "width of a head's values")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_heads", "qk_dim", "value_dim"):
            check_positive(name, getattr(self, name))


class DistanceWeights(nn.Module):
    """A weight of every distance in events."""

    def __init__(self, max_positions: int) -> None:
        super().__init__()
        self.positions = max_positions
        # the released table also has the distances to later events, which nothing uses
        self.position_table = nn.Parameter(torch.empty(2 * max_positions - 1).normal_(std=0.02))

    @property
    def by_distance(self) -> Tensor:
        """(N,), from distance 0 on."""
        return at_least_float32(self.position_table[: self.positions].flip(0))

    def curves(self, per_second: int) -> list[Curve]:
        return [by_distance(self.by_distance)]


class RelativeWeights(DistanceWeights):
    """The same, and a weight of every bucket of time."""

    def __init__(self, max_positions: int) -> None:
        super().__init__(max_positions)
        self.time_table = nn.Parameter(torch.empty(BUCKETS).normal_(std=0.02))

    def curves(self, per_second: int) -> list[Curve]:
        ends = [0, *bucket_thresholds()]
        shown = [n for n, end in enumerate(ends) if end <= _LONGEST * per_second and n != 1]  # bucket 1 is empty
        weights = self.time_table[shown].tolist()
        over_time = Curve("weight of an event after a time", [ends[n] / per_second for n in shown], weights, "time")
        return [over_time, *super().curves(per_second)]


class HSTUBlock(PendingBlock):
    """Attention and its gate; no feed-forward network."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.heads, self.keys, self.values = config.num_heads, config.qk_dim, config.value_dim
        value, query = self.heads * self.values, self.heads * self.keys
        self.widths = [value, value, query, query]
        self.uvqk = nn.Parameter(torch.empty(config.dim, sum(self.widths)).normal_(std=0.02))
        self.relative = RelativeWeights(config.max_positions)
        self.out = nn.Linear(value, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        nn.init.xavier_uniform_(self.out.weight)

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        return (self.heads, self.keys), cached.narrow_shape(self.heads, self.values)

    def forward(self, x_TD: Tensor, batch: Batch, earlier: Earlier | None = None) -> tuple[Tensor, Kept]:
        u, v, q, k = self._project(x_TD)
        distance_P, time_P = self.relative.by_distance, self.relative.time_table
        clocks = batch.time_T, batch.next_time_T
        y = biased_attention(q, k, v, distance_P, time_P, clocks, tile_chunks(batch))
        if earlier is not None:
            time = TimeMap("buckets", time_P)
            for rows, queries, time_E, (k_HEK, v_GEV) in earlier.blocks(self.heads):
                bias = cached.time_map(time, clocks[1][rows], time_E)
                bias += cached.position_map(distance_P, queries, len(time_E))
                (more,) = cached.weighted(v_GEV, cached.content(q[rows], k_HEK, bias))
                y[rows] += more.view_as(y[rows])
        # y² is near the norm's eps: not in half precision
        gated = u * layer_norm((y / self.relative.positions).flatten(1)).to(u.dtype)
        return self.out(self.dropout(gated)) + x_TD, (k, cached.narrow(v))

    def kept(self, x_TD: Tensor) -> Kept:
        _, v, _, k = self._project(x_TD)
        return k, cached.narrow(v)

    def _project(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        u, *parts = F.silu(layer_norm(x_TD) @ self.uvqk).split(self.widths, -1)
        return u, *(part.unflatten(-1, (self.heads, -1)) for part in parts)


class HSTUEncoder(PendingEncoder):
    """HSTU: attends to every event, time-aware; see the module."""

    config_class = HSTUConfig
    block_class = HSTUBlock
    config: HSTUConfig
    tables = ("position_table", "time_table")
    released_prefix = "_hstu._attention_layers."
    released_tells_heads = False
    released_names: ClassVar = {
        "uvqk": "_uvqk",
        "relative.position_table": "_rel_attn_bias._pos_w",
        "relative.time_table": "_rel_attn_bias._ts_w",
        **linear_names(out="_o"),
    }

    @classmethod
    def released_settings(cls, layer: ReleasedLayer, dim: int, num_heads: int) -> dict[str, Any]:
        value = layer["_o.weight"].shape[1]
        query = layer["_uvqk"].shape[1] // 2 - value
        return layer.per_head(num_heads, value_dim=value, qk_dim=query)
