"""FuXi-α (arXiv 2502.03036): three maps over every pair of events, of content, distance and time, side by side.

``[Σ pos[i−j] v_j | Σ ts[b(t_{i+1} − t_j)] v_j | Σ silu(q_i·k_j) v_j / N]`` over j ≤ i, head by head, normed and gated;
then a gated feed-forward network. N is ``max_positions``, whatever the history's length.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuxi_torchrec.encoders.base import check_positive, setting
from fuxi_torchrec.encoders.cached import Earlier, Kept, PendingBlock, PendingEncoder, tile_chunks
from fuxi_torchrec.encoders.hstu import RelativeWeights
from fuxi_torchrec.encoders.norms import rms_norm
from fuxi_torchrec.encoders.released import Names, ReleasedLayer, linear_names
from fuxi_torchrec.encoders.stack import Batch, FeedForwardConfig
from fuxi_torchrec.ops import cached
from fuxi_torchrec.ops.tiles import content_attention, relative_maps
from fuxi_torchrec.ops.time_maps import TimeMap


@dataclass(frozen=True)
class FuXiAlphaConfig(FeedForwardConfig):
    """Shape of a FuXi-α encoder; the defaults are the published size for KuaiRand-27K."""

    kind: Literal["fuxi_alpha"] = setting("fuxi_alpha", "which encoder")
    num_heads: int = setting(4, "attention heads")
    qk_dim: int = setting(32, "width of a head's queries and keys")
    value_dim: int = setting(32, "width of a head's values")
    ffn_multiple: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_heads", "qk_dim", "value_dim"):
            check_positive(name, getattr(self, name))


class GatedFFN(nn.Module):
    """``z = W_0 o + x``, ``(silu(W_1 RMS(z)) ⊙ (W_3 RMS(z))) W_2 + z``: the multi-stage network of FuXi-α and β."""

    released_names: ClassVar[Names] = {
        **linear_names(**{"ffn.merge": "_mffn.lin0"}),
        "ffn.input": ("_mffn.lin1.weight", "_mffn.lin3.weight"),
        "ffn.output": "_mffn.lin2.weight",
    }

    def __init__(self, config: FeedForwardConfig, width: int) -> None:
        super().__init__()
        self.merge = nn.Linear(width, config.dim)
        self.input = nn.Parameter(torch.empty(2 * config.hidden_dim, config.dim))  # activated, gate
        self.output = nn.Parameter(torch.empty(config.dim, config.hidden_dim))
        self.dropout = nn.Dropout(config.dropout)
        for weight in (self.merge.weight, *self.input.detach().chunk(2), self.output):
            nn.init.xavier_uniform_(weight)

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        z = self.merge(self.dropout(o)) + x
        active, gate = F.linear(self.dropout(rms_norm(z)), self.input).chunk(2, -1)
        return F.linear(F.silu(active) * gate, self.output) + z


class FuXiAlphaBlock(PendingBlock):
    """The three maps, then the feed-forward network."""

    def __init__(self, config: FuXiAlphaConfig) -> None:
        super().__init__()
        self.heads, self.keys, self.values = config.num_heads, config.qk_dim, config.value_dim
        value, query = self.heads * self.values, self.heads * self.keys
        self.widths = [3 * value, value, query, query]
        self.uvqk = nn.Parameter(torch.empty(config.dim, sum(self.widths)).normal_(std=0.02))
        self.relative = RelativeWeights(config.max_positions)
        self.ffn = GatedFFN(config, 3 * value)

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        return (self.heads, self.keys), (self.heads, self.values)

    def forward(self, x_TD: Tensor, batch: Batch, earlier: Earlier | None = None) -> tuple[Tensor, Kept]:
        u, v_THV, q, k = self._project(x_TD)
        distance_P, time_P = self.relative.by_distance, self.relative.time_table
        clocks, chunks = (batch.time_T, batch.next_time_T), tile_chunks(batch)
        by_content = content_attention(q, k, v_THV, chunks)
        by_position, by_time = relative_maps(v_THV.flatten(1), distance_P, time_P, "buckets", clocks, chunks)
        if earlier is not None:
            time = TimeMap("buckets", time_P)
            for rows, queries, time_E, (k_HEK, v_HEV) in earlier.blocks(self.heads):
                maps = (
                    cached.position_map(distance_P, queries, len(time_E)),
                    cached.time_map(time, clocks[1][rows], time_E),
                    cached.content(q[rows], k_HEK),
                )
                of_position, of_time, of_content = cached.weighted(v_HEV, *maps)
                by_position[rows] += of_position
                by_time[rows] += of_time
                by_content[rows] += of_content.view_as(by_content[rows])
        y = head_by_head(self.heads, by_position, by_time, by_content.flatten(1) / self.relative.positions)
        return self.ffn(u * rms_norm(y).to(u.dtype), x_TD), (k, v_THV)

    def kept(self, x_TD: Tensor) -> Kept:
        _, v_THV, _, k = self._project(x_TD)
        return k, v_THV

    def _project(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        u, *parts = F.silu(rms_norm(x_TD) @ self.uvqk).split(self.widths, -1)
        return u, *(part.unflatten(-1, (self.heads, -1)) for part in parts)


def head_by_head(heads: int, *parts: Tensor) -> Tensor:
    """Columns of head 0 of every part, then of head 1, ..."""
    return torch.cat([part.unflatten(1, (heads, -1)) for part in parts], 2).flatten(1)


class FuXiAlphaEncoder(PendingEncoder):
    """FuXi-α: attends to every event, time-aware; see the module."""

    config_class = FuXiAlphaConfig
    block_class = FuXiAlphaBlock
    config: FuXiAlphaConfig
    tables = ("position_table", "time_table")
    released_prefix = "_fuxi._attention_layers."
    released_tells_heads = False
    released_names: ClassVar = {
        "uvqk": "_uvqk",
        "relative.position_table": "_rel_attn_bias._pos_w",
        "relative.time_table": "_rel_attn_bias._ts_w",
        **GatedFFN.released_names,
    }

    @classmethod
    def released_settings(cls, layer: ReleasedLayer, dim: int, num_heads: int) -> dict[str, Any]:
        layer.require("_rel_attn_bias._ts_w")  # which FuXi-β does not have
        value = layer["_mffn.lin0.weight"].shape[1] // 3
        query = (layer["_uvqk"].shape[1] - 4 * value) // 2
        told = layer.per_head(num_heads, value_dim=value, qk_dim=query)
        return {**told, "ffn_dim": len(layer["_mffn.lin1.weight"])}
