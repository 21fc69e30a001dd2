"""Mamba4Rec (arXiv 2403.03900) as the FuXi-Linear release has it: a selective scan of each channel.

``h_i = e^{Δ_i A} h_{i−1} + Δ_i u_i B_iᵀ``, ``y_i = h_i C_i + D u_i``, where Δ, B and C follow from the event.
Against the original: no norm behind the embedding, and a table of positions.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuxi_torchrec.encoders.base import check_positive, setting
from fuxi_torchrec.encoders.explain import Curve, half_lives
from fuxi_torchrec.encoders.recurrent import BlockState, RecurrentBlock, RecurrentEncoder
from fuxi_torchrec.encoders.released import ReleasedLayer, linear_names
from fuxi_torchrec.encoders.stack import Batch, FeedForwardConfig, PostNormFFN, reset_linears
from fuxi_torchrec.ops.convolution import causal_conv, conv_step
from fuxi_torchrec.ops.precision import at_least_float32
from fuxi_torchrec.ops.scans import selective_scan

_CHUNK, _TAPS, _EPS = 32, 4, 1e-12


@dataclass(frozen=True)
class Mamba4RecConfig(FeedForwardConfig):
    """Shape of a Mamba4Rec encoder; the defaults are the published size for KuaiRand-27K."""

    kind: Literal["mamba4rec"] = setting("mamba4rec", "which encoder")
    state_dim: int = setting(32, "state elements of a channel")
    expand: int = setting(2, "channels, in dims")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("state_dim", "expand"):
            check_positive(name, getattr(self, name))


class Mamba4RecBlock(RecurrentBlock):
    """The selective scan, then a feed-forward network; norms come last."""

    def __init__(self, config: Mamba4RecConfig) -> None:
        super().__init__()
        d, e, s = config.dim, config.expand * config.dim, config.state_dim
        self.channels, self.states, self.rank = e, s, math.ceil(d / 16)
        self.residual = config.num_layers > 1  # as published: a single layer has none around the scan
        self.in_proj = nn.Linear(d, 2 * e, bias=False)
        self.conv_weight, self.conv_bias = nn.Parameter(torch.empty(e, _TAPS)), nn.Parameter(torch.empty(e))
        self.x_proj = nn.Linear(e, self.rank + 2 * s, bias=False)
        self.step_proj = nn.Linear(self.rank, e)
        self.A_log = nn.Parameter(torch.arange(1.0, s + 1).log().repeat(e, 1))
        self.D = nn.Parameter(torch.ones(e))
        self.out_proj = nn.Linear(e, d, bias=False)
        self.norm = nn.LayerNorm(d, _EPS)
        self.ffn = PostNormFFN(config, F.gelu, _EPS)
        self.dropout = nn.Dropout(config.dropout)
        reset_linears(self.in_proj, self.x_proj, self.step_proj, self.out_proj)
        for parameter in (self.conv_weight, self.conv_bias):
            nn.init.uniform_(parameter, -0.5, 0.5)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"scan": (self.channels, self.states), "inputs": (_TAPS - 1, self.channels)}

    def forward(
        self, x_TD: Tensor, batch: Batch, state: BlockState | None = None, with_state: bool = False
    ) -> tuple[Tensor, BlockState]:
        u, z = self.in_proj(x_TD).chunk(2, -1)
        before, inputs = (None, None) if state is None else (state["scan"], state["inputs"])
        u, inputs = causal_conv(u, self.conv_weight, self.conv_bias, batch.bounds, batch.user_T, inputs)
        u = F.silu(u)
        step, B, C, A = self._selected(u)
        y, after = selective_scan(u, step, A, B, C, batch.chunks(_CHUNK), before, with_state)
        return self._merge(x_TD, y, u, z), {} if after is None else {"scan": after, "inputs": inputs}

    def step(self, x_BD: Tensor, count_B: Tensor, state: BlockState) -> tuple[Tensor, BlockState]:
        u, z = self.in_proj(x_BD).chunk(2, -1)
        u, inputs = conv_step(u, self.conv_weight, self.conv_bias, state["inputs"])
        u = F.silu(u)
        step, B, C, A = self._selected(u)
        h = torch.exp(step.unsqueeze(2) * A) * state["scan"] + (step * u).unsqueeze(2) * B.unsqueeze(1)
        y = (h @ C.unsqueeze(2)).squeeze(2)
        return self._merge(x_BD, y, u, z), {"scan": h, "inputs": inputs}

    def _selected(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Δ, B, C and A."""
        low, B, C = self.x_proj(u).split([self.rank, self.states, self.states], -1)
        step = F.softplus(at_least_float32(self.step_proj(low)))
        return step, at_least_float32(B), at_least_float32(C), -self.A_log.exp()

    def _merge(self, x: Tensor, y: Tensor, u: Tensor, z: Tensor) -> Tensor:
        w = self.dropout(self.out_proj((y + self.D * u).to(z.dtype) * F.silu(z)))
        a = self.norm(w + x if self.residual else w)
        return self.ffn(a)


class Mamba4RecEncoder(RecurrentEncoder):
    """Mamba4Rec: constant state, no time; see the module."""

    config_class = Mamba4RecConfig
    block_class = Mamba4RecBlock
    config: Mamba4RecConfig
    scalars = ("A_log", "conv_weight")
    released_prefix = "mamba_layers."
    released_names: ClassVar = {
        "conv_weight": "mamba.conv1d.weight",
        "conv_bias": "mamba.conv1d.bias",
        "A_log": "mamba.A_log",
        "D": "mamba.D",
        **{f"{name}.weight": f"mamba.{name}.weight" for name in ("in_proj", "x_proj", "out_proj")},
        **linear_names(step_proj="mamba.dt_proj", norm="LayerNorm"),
        **linear_names(**{"ffn.input": "ffn.w_1", "ffn.output": "ffn.w_2", "ffn.norm": "ffn.LayerNorm"}),
    }

    def curves(self, block: Any, per_second: int) -> list[Curve]:
        step = F.softplus(block.step_proj.bias).unsqueeze(1)
        return [half_lives("half-life in events, of a middling step", -step * block.A_log.exp(), "channel")]

    @classmethod
    def released_settings(cls, layer: ReleasedLayer, dim: int, num_heads: int) -> dict[str, Any]:
        channels, states = layer["mamba.A_log"].shape
        if channels % dim:
            raise ValueError(f"{layer.prefix}mamba.A_log has {channels} channels, not a multiple of {dim}")
        return {"state_dim": states, "expand": channels // dim, "ffn_dim": len(layer["ffn.w_1.weight"])}
