"""RetNet (arXiv 2307.08621) behind the comparison's input layer: retention with fixed decays and rotated keys.

``o_i = Σ_{j≤i} γ^{i−j} (q_i·k_j) v_j / sqrt(Σ_{j≤i} γ^{i−j})``, γ_a = 1 − 2^{−5−a} of head a, q and k turned by their
positions. The form is that of torchscale's recurrence; its parallel form has one more divisor, without a linear-time
form, that the norm behind it cancels up to eps.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuxi_torchrec.encoders.base import setting
from fuxi_torchrec.encoders.norms import rms_norm
from fuxi_torchrec.encoders.recurrent import BlockState, RecurrentBlock, RecurrentEncoder
from fuxi_torchrec.encoders.released import ReleasedLayer
from fuxi_torchrec.encoders.stack import Batch, FeedForwardConfig
from fuxi_torchrec.ops import recurrent
from fuxi_torchrec.ops.retention import retention
from fuxi_torchrec.ops.rotation import rotated, turns

_CHUNK = 64


@dataclass(frozen=True)
class RetNetConfig(FeedForwardConfig):
    """Shape of a RetNet encoder; the defaults are the published size for KuaiRand-27K."""

    kind: Literal["retnet"] = setting("retnet", "which encoder")
    num_heads: int = setting(4, "retention heads")
    ffn_multiple: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_divides("num_heads")
        if self.dim // self.num_heads % 2:
            raise ValueError(f"dim / num_heads = {self.dim // self.num_heads} must be even: columns turn in pairs")


class RetNetBlock(RecurrentBlock):
    """Retention, gated; then a gated feed-forward network. Norms come first."""

    rates: Tensor  # log γ, float64

    def __init__(self, config: RetNetConfig) -> None:
        super().__init__()
        d, hidden = config.dim, config.hidden_dim
        self.heads, self.width = config.num_heads, d // config.num_heads
        self.norm = nn.Parameter(torch.ones(d))
        self.qkvg = nn.Parameter(torch.empty(4 * d, d))
        self.out = nn.Parameter(torch.empty(d, d))
        self.ffn_norm = nn.Parameter(torch.ones(d))
        self.ffn_in = nn.Parameter(torch.empty(2 * hidden, d))  # activated, gate
        self.ffn_out = nn.Parameter(torch.empty(d, hidden))
        self.dropout = nn.Dropout(config.dropout)
        for part in self.qkvg.detach().chunk(4):
            nn.init.xavier_uniform_(part, gain=2**-2.5)
        nn.init.xavier_uniform_(self.out, gain=0.5)
        for weight in (self.ffn_in, self.ffn_out):
            nn.init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)
        # log(1 − 2^{−5−a})
        rates = torch.tensor([math.log1p(-(2.0 ** (-5 - a))) for a in range(self.heads)], dtype=torch.float64)
        self.register_buffer("rates", rates, persistent=False)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"retention": (self.heads, self.width, self.width)}

    def forward(
        self, x_TD: Tensor, batch: Batch, state: BlockState | None = None, with_state: bool = False
    ) -> tuple[Tensor, BlockState]:
        q, k, v, g = self._project(x_TD, batch.position_T, batch.kept)
        before = None if state is None else state["retention"]
        y, after = retention(q, k, v, self.rates.to(v.dtype), batch.chunks(_CHUNK), before, with_state=with_state)
        return self._merge(x_TD, y, g, batch.position_T), {} if after is None else {"retention": after}

    def step(self, x_BD: Tensor, count_B: Tensor, state: BlockState) -> tuple[Tensor, BlockState]:
        q, k, v, g = self._project(x_BD, count_B, {})
        log_decay, here = self.rates.to(v.dtype), torch.zeros_like(count_B)
        y = recurrent.read(q, k, v, log_decay, here, state["retention"])
        after = recurrent.write(k, v, log_decay, here + 1, state["retention"])
        return self._merge(x_BD, y, g, count_B), {"retention": after}

    def _project(self, x: Tensor, position: Tensor, kept: dict[Any, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, g = F.linear(rms_norm(x) * self.norm, self.qkvg).chunk(4, -1)
        q, k, v = (part.unflatten(-1, (self.heads, self.width)) for part in (q, k * self.width**-0.5, v))
        if "turns" not in kept:
            half = self.width // 2
            # the last frequency is 1e-4, not one step above it
            exponents = torch.arange(half, dtype=torch.float64, device=x.device) / max(1, half - 1)
            kept["turns"] = turns(position, 10000.0**-exponents, v.dtype)
        return rotated(q, *kept["turns"]), rotated(k, *kept["turns"]), v, g

    def _merge(self, x: Tensor, y: Tensor, g: Tensor, position: Tensor) -> Tensor:
        # Σ_{j≤i} γ^{i−j} = (1 − γ^i)/(1 − γ) of the i-th event
        mass = torch.expm1((position + 1).unsqueeze(1) * self.rates) / torch.expm1(self.rates)
        y = rms_norm(y / mass.sqrt().to(y.dtype).unsqueeze(-1)).flatten(-2)
        z = x + self.dropout(F.linear(F.silu(g) * y, self.out))
        active, gate = F.linear(rms_norm(z) * self.ffn_norm, self.ffn_in).chunk(2, -1)
        return z + self.dropout(F.linear(F.gelu(active) * gate, self.ffn_out))


class RetNetEncoder(RecurrentEncoder):
    """RetNet: constant state, no time; see the module."""

    config_class = RetNetConfig
    block_class = RetNetBlock
    config: RetNetConfig
    released_prefix = "_retnet.layers."
    released_tells_heads = False
    released_names: ClassVar = {
        "norm": "retention_layer_norm.weight",
        "qkvg": tuple(f"retention.{name}_proj.weight" for name in "qkvg"),
        "out": "retention.out_proj.weight",
        "ffn_norm": "final_layer_norm.weight",
        "ffn_in": ("ffn.fc1.weight", "ffn.gate.weight"),
        "ffn_out": "ffn.fc2.weight",
    }
    released_after: ClassVar = {"norm": "_retnet.layer_norm.weight"}

    def __init__(self, config: RetNetConfig) -> None:
        super().__init__(config)
        self.norm = nn.Parameter(torch.ones(config.dim))

    def finish(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD) * self.norm

    @classmethod
    def released_settings(cls, layer: ReleasedLayer, dim: int, num_heads: int) -> dict[str, Any]:
        return {"ffn_dim": len(layer["ffn.fc1.weight"])}
