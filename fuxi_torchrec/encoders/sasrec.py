"""SASRec (arXiv 1808.09781) as the FuXi-Linear release has it: causal softmax attention, no time.

``h = LN(x)``, ``y = LN(h + Attention(h W_q, x W_k, x W_v) W_o)``, ``out = y + W_2 relu(W_1 y)``: keys and values come
from the rows before the norm, the residual from those behind it. The paper has x + f(LN(x)) in both places.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fuxi_torchrec.encoders.base import setting
from fuxi_torchrec.encoders.cached import CachedBlock, CachedEncoder, Earlier, Kept, tile_chunks
from fuxi_torchrec.encoders.released import ReleasedLayer, linear_names
from fuxi_torchrec.encoders.stack import Batch, FeedForwardConfig
from fuxi_torchrec.ops import cached
from fuxi_torchrec.ops.precision import at_least_float32
from fuxi_torchrec.ops.softmax import softmax_attention

_EPS = 1e-8


@dataclass(frozen=True)
class SASRecConfig(FeedForwardConfig):
    """Shape of a SASRec encoder; the defaults are the published size for KuaiRand-27K."""

    kind: Literal["sasrec"] = setting("sasrec", "which encoder")
    num_heads: int = setting(4, "attention heads")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_divides("num_heads")


class SASRecBlock(CachedBlock):
    """Softmax attention, then a feed-forward network."""

    def __init__(self, config: SASRecConfig) -> None:
        super().__init__()
        d, hidden = config.dim, config.hidden_dim
        self.heads, self.width = config.num_heads, d // config.num_heads
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.ffn_in, self.ffn_out = nn.Linear(d, hidden), nn.Linear(hidden, d)
        self.dropout = nn.Dropout(config.dropout)
        for weight in (self.qkv.weight, self.out.weight, self.ffn_in.weight, self.ffn_out.weight):
            nn.init.xavier_normal_(weight)
        for linear in (self.qkv, self.out):
            nn.init.zeros_(linear.bias)

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        return ((self.heads, self.width),) * 2

    def forward(self, x_TD: Tensor, batch: Batch, earlier: Earlier | None = None) -> tuple[Tensor, Kept]:
        h, d = _norm(x_TD), x_TD.shape[1]
        q = F.linear(h, self.qkv.weight[:d], self.qkv.bias[:d])
        k, v = F.linear(x_TD, self.qkv.weight[d:], self.qkv.bias[d:]).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v))
        dropped = self.dropout.p if self.training else 0.0
        mixed, log_sum = softmax_attention(q, k, v, tile_chunks(batch), dropped)
        if earlier is not None:
            for rows, _, _, (k_HEK, v_HEV) in earlier.blocks(self.heads):
                mixed[rows] = cached.softmax(q[rows], k_HEK, v_HEV, mixed[rows], log_sum[rows])
        y = _norm(h + self.out(mixed.flatten(1).to(q.dtype)))
        inner = self.dropout(F.relu(self.ffn_in(y)))
        return y + self.dropout(self.ffn_out(inner)), (k, v)


def _norm(x: Tensor) -> Tensor:
    """A row of little variance is amplified much: in float32 at least."""
    return F.layer_norm(at_least_float32(x), x.shape[-1:], eps=_EPS)


class SASRecEncoder(CachedEncoder):
    """SASRec: attends to every event, no time; see the module."""

    config_class = SASRecConfig
    block_class = SASRecBlock
    config: SASRecConfig
    released_prefix = ("attention_layers.", "forward_layers.")
    released_tells_heads = False
    released_names: ClassVar = {
        "qkv.weight": "in_proj_weight",
        "qkv.bias": "in_proj_bias",
        **linear_names(out="out_proj", ffn_in="_conv1d.0", ffn_out="_conv1d.3"),
    }

    @classmethod
    def released_settings(cls, layer: ReleasedLayer, dim: int, num_heads: int) -> dict[str, Any]:
        return {"ffn_dim": len(layer["_conv1d.0.weight"])}
