"""RecBLR (arXiv 2407.11285) behind the comparison's input layer: a gated linear recurrence of each column.

``h_i = α_i h_{i−1} + sqrt(1 − α_i² + 1e-8) σ(g_i) u_i`` with ``log α_i = −softplus(Λ) σ(r_i)``, u convolved over four
events. The original pads with zeros in front of the convolution, whose bias then feeds the recurrence for a while that
depends on the batch; here nothing stands before the first event.
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
from fuxi_torchrec.ops.scans import diagonal_scan

_CHUNK, _TAPS, _EPS = 64, 4, 1e-12


@dataclass(frozen=True)
class RecBLRConfig(FeedForwardConfig):
    """Shape of a RecBLR encoder; the defaults are the published size for KuaiRand-27K."""

    kind: Literal["recblr"] = setting("recblr", "which encoder")
    expand: int = setting(1, "width of the recurrence, in dims")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("expand", self.expand)


class RecBLRBlock(RecurrentBlock):
    """The recurrence, then a feed-forward network; norms come last."""

    def __init__(self, config: RecBLRConfig) -> None:
        super().__init__()
        d, inner = config.dim, config.expand * config.dim
        self.width = inner
        self.input = nn.Linear(d, 2 * inner, bias=False)
        self.conv_weight, self.conv_bias = nn.Parameter(torch.empty(inner, _TAPS)), nn.Parameter(torch.empty(inner))
        self.gates = nn.Linear(inner, 2 * inner)
        # decays start between .9 and .999 where the gate is open
        first, last = (math.log(1 / decay - 1) for decay in (0.9, 0.999))
        self.rate = nn.Parameter(torch.linspace(first, last, inner))  # Λ
        self.output = nn.Linear(inner, d, bias=False)
        self.norm = nn.LayerNorm(d, _EPS)
        self.ffn = PostNormFFN(config, F.silu, _EPS)
        self.dropout = nn.Dropout(config.dropout)
        reset_linears(self.input, self.gates, self.output)
        for parameter in (self.conv_weight, self.conv_bias):
            nn.init.uniform_(parameter, -0.5, 0.5)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"recurrence": (self.width,), "inputs": (_TAPS - 1, self.width)}

    def forward(
        self, x_TD: Tensor, batch: Batch, state: BlockState | None = None, with_state: bool = False
    ) -> tuple[Tensor, BlockState]:
        u, z = self.input(x_TD).chunk(2, -1)
        before, inputs = (None, None) if state is None else (state["recurrence"], state["inputs"])
        u, inputs = causal_conv(u, self.conv_weight, self.conv_bias, batch.bounds, batch.user_T, inputs)
        h, after = diagonal_scan(*self._gated(F.silu(u)), batch.chunks(_CHUNK), before, with_state)
        y = self._merge(x_TD, h, z)
        return y, {} if after is None else {"recurrence": after, "inputs": inputs}

    def step(self, x_BD: Tensor, count_B: Tensor, state: BlockState) -> tuple[Tensor, BlockState]:
        u, z = self.input(x_BD).chunk(2, -1)
        u, inputs = conv_step(u, self.conv_weight, self.conv_bias, state["inputs"])
        log_decay, update = self._gated(F.silu(u))
        h = log_decay.exp() * state["recurrence"] + update
        return self._merge(x_BD, h, z), {"recurrence": h, "inputs": inputs}

    def _gated(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """log α, and what is added; in float32 at least: α is near 1."""
        r, g = at_least_float32(self.gates(u)).chunk(2, -1)
        log_decay = -F.softplus(self.rate) * r.sigmoid()
        return log_decay, torch.sqrt(1e-8 - torch.expm1(2 * log_decay)) * g.sigmoid() * u

    def _merge(self, x: Tensor, h: Tensor, z: Tensor) -> Tensor:
        return self.ffn(self.norm(self.dropout(self.output(F.silu(z) * h.to(z.dtype))) + x))


class RecBLREncoder(RecurrentEncoder):
    """RecBLR: constant state, no time; see the module."""

    config_class = RecBLRConfig
    block_class = RecBLRBlock
    config: RecBLRConfig
    scalars = ("conv_weight",)
    released_prefix = "recurrent_layers."
    released_names: ClassVar = {
        "conv_weight": "behavior_modeling.conv1d.weight",
        "conv_bias": "behavior_modeling.conv1d.bias",
        "rate": "behavior_modeling.Lambda",
        "input.weight": "behavior_modeling.input.weight",
        "output.weight": "behavior_modeling.output.weight",
        **linear_names(gates="behavior_modeling.gates", norm="layer_norm"),
        **linear_names(**{"ffn.input": "ffn.w_1", "ffn.output": "ffn.w_2", "ffn.norm": "ffn.layer_norm"}),
    }

    def curves(self, block: Any, per_second: int) -> list[Curve]:
        return [half_lives("half-life in events, the gate half open", -F.softplus(block.rate) / 2, "channel")]

    @classmethod
    def released_settings(cls, layer: ReleasedLayer, dim: int, num_heads: int) -> dict[str, Any]:
        width = len(layer["behavior_modeling.Lambda"])
        if width % dim:
            raise ValueError(f"{layer.prefix}behavior_modeling.Lambda has {width} values, not a multiple of {dim}")
        return {"expand": width // dim, "ffn_dim": len(layer["ffn.w_1.weight"])}
