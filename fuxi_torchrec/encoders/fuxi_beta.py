"""FuXi-β (arXiv 2508.10615): maps of distance and of time over every pair of events, without queries and keys.

``[Σ pos[i−j] v_j | Σ φ(t_{i+1} − t_j) v_j]`` over j ≤ i, head by head, normed and gated; then FuXi-α's feed-forward
network. φ is a learned function of the time passed, in the data's own unit: ``exp``, a·exp(−e^b·Δ), or ``pow``,
a·(1 + Δ)^(−b), with Δ at least 0.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuxi_torchrec.encoders.base import check_positive, setting
from fuxi_torchrec.encoders.cached import Earlier, Kept, PendingBlock, PendingEncoder, tile_chunks
from fuxi_torchrec.encoders.explain import Curve
from fuxi_torchrec.encoders.fuxi_alpha import GatedFFN, head_by_head
from fuxi_torchrec.encoders.hstu import DistanceWeights
from fuxi_torchrec.encoders.norms import rms_norm
from fuxi_torchrec.encoders.released import Names, ReleasedLayer
from fuxi_torchrec.encoders.stack import Batch, FeedForwardConfig
from fuxi_torchrec.ops import cached
from fuxi_torchrec.ops.precision import at_least_float32
from fuxi_torchrec.ops.tiles import relative_maps
from fuxi_torchrec.ops.time_maps import TimeMap


@dataclass(frozen=True)
class FuXiBetaConfig(FeedForwardConfig):
    """Shape of a FuXi-β encoder; the defaults are the published size for KuaiRand-27K."""

    kind: Literal["fuxi_beta"] = setting("fuxi_beta", "which encoder")
    num_heads: int = setting(4, "heads; they decide the order of columns only")
    value_dim: int = setting(32, "width of a head's values")
    time_function: Literal["exp", "pow"] = setting("exp", "a·exp(−e^b·Δ), or a·(1 + Δ)^(−b)")
    ffn_multiple: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_heads", "value_dim"):
            check_positive(name, getattr(self, name))
        if self.time_function not in ("exp", "pow"):
            raise ValueError(f"time_function must be 'exp' or 'pow', not {self.time_function!r}")


class FuXiBetaBlock(PendingBlock):
    """The two maps, then the feed-forward network."""

    def __init__(self, config: FuXiBetaConfig) -> None:
        super().__init__()
        self.heads, self.function = config.num_heads, config.time_function
        value = config.num_heads * config.value_dim
        self.widths = [2 * value, value]
        self.uv = nn.Parameter(torch.empty(config.dim, sum(self.widths)).normal_(std=0.02))
        self.relative = DistanceWeights(config.max_positions)
        self.time_scale = nn.Parameter(torch.empty(1).uniform_(-0.2, 0.2))
        low, high = (-2, 0) if self.function == "exp" else (0.4, 0.8)
        self.time_rate = nn.Parameter(torch.empty(1).uniform_(low, high))
        self.ffn = GatedFFN(config, 2 * value)

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        return ((self.heads, self.widths[1] // self.heads),)

    def forward(self, x_TD: Tensor, batch: Batch, earlier: Earlier | None = None) -> tuple[Tensor, Kept]:
        u, v = self._project(x_TD)
        distance_P, time_P = self.relative.by_distance, at_least_float32(torch.cat((self.time_scale, self.time_rate)))
        clocks = batch.time_T, batch.next_time_T
        by_position, by_time = relative_maps(v, distance_P, time_P, self.function, clocks, tile_chunks(batch))
        if earlier is not None:
            time = TimeMap(self.function, time_P)
            for rows, queries, time_E, (v_HEV,) in earlier.blocks(self.heads):
                maps = (
                    cached.position_map(distance_P, queries, len(time_E)),
                    cached.time_map(time, clocks[1][rows], time_E),
                )
                of_position, of_time = cached.weighted(v_HEV, *maps)
                by_position[rows] += of_position
                by_time[rows] += of_time
        y = rms_norm(head_by_head(self.heads, by_position, by_time))
        return self.ffn(u * y.to(u.dtype), x_TD), (v.unflatten(-1, (self.heads, -1)),)

    def kept(self, x_TD: Tensor) -> Kept:
        _, v = self._project(x_TD)
        return (v.unflatten(-1, (self.heads, -1)),)

    def _project(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        return F.silu(rms_norm(x_TD) @ self.uv).split(self.widths, -1)


class FuXiBetaEncoder(PendingEncoder):
    """FuXi-β: attention-free maps over every event, time-aware; see the module."""

    config_class = FuXiBetaConfig
    block_class = FuXiBetaBlock
    config: FuXiBetaConfig
    tables = ("position_table",)
    released_prefix = "_fuxi._attention_layers."
    released_tells_heads = False

    @property
    def released_names(self) -> Names:  # type: ignore[override]
        return _names(self.config.time_function)

    def curves(self, block: Any, per_second: int) -> list[Curve]:
        gap = torch.cat((torch.zeros(1), torch.logspace(-3, 8, 45) * per_second)).long().unique()
        weights = TimeMap(block.function, torch.cat((block.time_scale, block.time_rate))).weights(gap)
        over_time = Curve("weight of an event after a time", (gap / per_second).tolist(), weights.tolist(), "time")
        return [over_time, *super().curves(block, per_second)]

    @classmethod
    def released_settings(cls, layer: ReleasedLayer, dim: int, num_heads: int) -> dict[str, Any]:
        function = "exp" if "_rel_attn_bias._exp_a" in layer else "pow"
        layer.require(f"_rel_attn_bias._{function}_a")  # which FuXi-α does not have
        told = layer.per_head(num_heads, value_dim=layer["_mffn.lin0.weight"].shape[1] // 2)
        return {**told, "time_function": function, "ffn_dim": len(layer["_mffn.lin1.weight"])}


def _names(function: str) -> Names:
    return {
        "uv": "_uvqk",
        "relative.position_table": "_rel_attn_bias._pos_w",
        "time_scale": f"_rel_attn_bias._{function}_a",
        "time_rate": f"_rel_attn_bias._{function}_b",
        **GatedFFN.released_names,
    }
