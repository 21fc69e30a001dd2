"""TiM4Rec (arXiv 2409.16182) as the FuXi-Linear release has it: a state space model whose steps follow gaps in time.

The gaps of a user fill a vector of N slots that is normed, mixed by matrices over the slots and convolved; the result
scales the step size of every event. Slot n holds the request, and slot n + 1 the way back to zero, which dominates the
norm: that is how it was published.

Every output depends on all times of its user, later ones and the request's included, never on later items. So there is
no state that takes a new event: a user is encoded from its events at every query, and has at most N − 1 of them.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuxi_torchrec.encoders.base import check_positive, setting
from fuxi_torchrec.encoders.explain import Curve, half_lives
from fuxi_torchrec.encoders.released import ReleasedLayer, linear_names
from fuxi_torchrec.encoders.stack import Batch, FeedForwardConfig, PostNormFFN, StackEncoder, reset_linears
from fuxi_torchrec.ops.convolution import causal_conv
from fuxi_torchrec.ops.gated import gated_retention
from fuxi_torchrec.ops.precision import at_least_float32

_CHUNK, _TAPS, _EPS = 32, 4, 1e-10
_TIMES = "times"  # of what a batch keeps: the next block's vector of times


@dataclass(frozen=True)
class TiM4RecConfig(FeedForwardConfig):
    """Shape of a TiM4Rec encoder; the defaults are the published size for KuaiRand-27K."""

    kind: Literal["tim4rec"] = setting("tim4rec", "which encoder")
    state_dim: int = setting(32, "state elements of a channel")
    head_dim: int = setting(32, "channels of a head")
    expand: int = setting(2, "channels, in dims")
    conv_activation: Literal["silu", "hardswish"] = setting(
        "silu", "behind the convolutions; the released code without causal_conv1d takes hardswish"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("state_dim", "head_dim", "expand"):
            check_positive(name, getattr(self, name))
        if self.channels % self.head_dim:
            raise ValueError(f"expand x dim = {self.channels} is not divisible by head_dim = {self.head_dim}")
        if self.conv_activation not in ("silu", "hardswish"):
            raise ValueError(f"conv_activation must be 'silu' or 'hardswish', not {self.conv_activation!r}")
        if self.max_positions < 2:
            raise ValueError(f"max_positions must be at least 2: an event and a request, not {self.max_positions}")

    @property
    def channels(self) -> int:
        return self.expand * self.dim


class TiM4RecBlock(nn.Module):
    """The scan with its steps scaled by time, then a feed-forward network; norms come last."""

    def __init__(self, config: TiM4RecConfig) -> None:
        super().__init__()
        d, e, s, slots = config.dim, config.channels, config.state_dim, config.max_positions
        self.heads = e // config.head_dim
        self.widths = [e, e + 2 * s, self.heads]
        self.states, self.channels = s, e
        self.residual = config.num_layers > 1
        self.activation = F.silu if config.conv_activation == "silu" else F.hardswish
        self.in_proj, self.out_proj = nn.Linear(d, sum(self.widths)), nn.Linear(e, d)
        self.conv_weight = nn.Parameter(torch.empty(e + 2 * s, _TAPS))
        self.conv_bias = nn.Parameter(torch.empty(e + 2 * s))
        self.time_in, self.time_out = nn.Linear(slots, slots), nn.Linear(slots, slots)
        self.time_conv_1, self.time_conv_2 = (nn.Conv1d(self.heads, self.heads, _TAPS, groups=self.heads) for _ in "12")
        self.time_gate, self.time_norm = nn.Linear(slots, 1), nn.LayerNorm(slots, _EPS)
        self.step_bias = nn.Parameter(torch.empty(self.heads))
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(self.heads))
        self.inner_norm = nn.Parameter(torch.ones(e))
        self.norm = nn.LayerNorm(d, _EPS)
        self.ffn = PostNormFFN(config, F.hardswish)
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_linears(self.in_proj, self.out_proj, self.time_in, self.time_out, self.time_gate)
        convolutions = (self.time_conv_1.weight, self.time_conv_1.bias, self.time_conv_2.weight, self.time_conv_2.bias)
        for parameter in (self.conv_weight, self.conv_bias, *convolutions):
            assert parameter is not None
            nn.init.uniform_(parameter, -0.5, 0.5)
        # softplus⁻¹ of steps between .001 and .1
        steps = torch.empty(self.heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        with torch.no_grad():
            self.step_bias.copy_(steps + torch.log(-torch.expm1(-steps)))

    def forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        z, xbc, step = self.in_proj(x_TD).split(self.widths, -1)
        xbc, _ = causal_conv(xbc, self.conv_weight, self.conv_bias, batch.bounds, batch.user_T)
        u, B, C = self.activation(xbc).split([self.channels, self.states, self.states], -1)
        scale_TH = self._scaled(batch)[batch.user_T, :, batch.row_T]
        step = F.softplus(at_least_float32(step) * scale_TH + self.step_bias)
        u_THV = u.unflatten(-1, (self.heads, -1))
        y = (
            gated_retention(C, B, step.unsqueeze(2) * u_THV, step * -self.A_log.exp(), batch.chunks(_CHUNK))
            + self.D.unsqueeze(1) * u_THV
        )
        gated = y.flatten(1).to(z.dtype) * F.silu(z)
        w = self.dropout(self.out_proj(F.rms_norm(gated, gated.shape[-1:], eps=_EPS) * self.inner_norm))
        # the last block's times are used no more: connected all the same, or ranks would differ in what has a gradient
        unused = batch.kept[_TIMES].flatten()[:0].sum()
        return self.ffn(self.norm(w + x_TD if self.residual else w)) + unused

    def _scaled(self, batch: Batch) -> Tensor:
        """What times scale each head's steps by, (B, H, N); leaves the next block's times with the batch."""
        times_BHN = batch.kept.setdefault(self, batch.kept[_TIMES])  # the same again in a backward pass that recomputes
        mixed = times_BHN * self.time_out(F.silu(self.time_in(times_BHN)))
        mixed = mixed.expand(-1, self.heads, -1)
        for convolution in (self.time_conv_1, self.time_conv_2):
            mixed = self.activation(convolution(F.pad(mixed, (_TAPS - 1, 0))))
        gate = self.time_gate(times_BHN).sigmoid()
        batch.kept[_TIMES] = self.time_norm(gate * times_BHN + (1 - gate) * mixed)
        return mixed


class TiM4RecEncoder(StackEncoder):
    """TiM4Rec: times scale the steps of a scan; no state; see the module."""

    config_class = TiM4RecConfig
    block_class = TiM4RecBlock
    config: TiM4RecConfig
    scalars = ("conv_weight", "time_conv_1.weight", "time_conv_2.weight")
    released_prefix = "ssd_layers."
    released_names: ClassVar = {
        "conv_weight": "ssd.conv1d.weight",
        "conv_bias": "ssd.conv1d.bias",
        "step_bias": "ssd.dt_bias",
        "A_log": "ssd.A_log",
        "D": "ssd.D",
        "inner_norm": "ssd.norm.weight",
        **linear_names(in_proj="ssd.in_proj", out_proj="ssd.out_proj", norm="layer_norm"),
        **linear_names(time_in="ssd.mlp4time_scale.1", time_out="ssd.mlp4time_scale.3"),
        **linear_names(time_conv_1="ssd.conv1d4time_1", time_conv_2="ssd.conv1d4time_2"),
        **linear_names(time_gate="ssd.time_gate_residual.1", time_norm="ssd.time_layer_norm"),
        **linear_names(**{"ffn.input": "ffn.fc1", "ffn.output": "ffn.fc2", "ffn.norm": "ffn.layer_norm"}),
    }
    released_after: ClassVar = {"time_weight": "layer_norm_time.weight", "time_bias": "layer_norm_time.bias"}

    def __init__(self, config: TiM4RecConfig) -> None:
        super().__init__(config)
        self.time_weight = nn.Parameter(torch.ones(config.max_positions))
        self.time_bias = nn.Parameter(torch.zeros(config.max_positions))

    def curves(self, block: Any, per_second: int) -> list[Curve]:
        log_decay = -F.softplus(block.step_bias) * block.A_log.exp()
        return [half_lives("half-life in events, of a middling step", log_decay, "head")]

    @classmethod
    def released_settings(cls, layer: ReleasedLayer, dim: int, num_heads: int) -> dict[str, Any]:
        channels, heads = layer["ssd.out_proj.weight"].shape[1], len(layer["ssd.A_log"])
        states = (len(layer["ssd.in_proj.weight"]) - 2 * channels - heads) // 2
        if channels % dim:
            raise ValueError(f"{layer.prefix}ssd.out_proj.weight has {channels} columns, not a multiple of {dim}")
        told = {"state_dim": states, "head_dim": channels // heads, "expand": channels // dim}
        return {**told, "ffn_dim": len(layer["ffn.fc1.weight"])}

    def begin(self, batch: Batch) -> None:
        """The vector of times: gaps in int64, then a norm over the slots."""
        slots, lengths_B = self.config.max_positions, batch.bounds.diff()
        longest = max((b - a for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)), default=0)
        if longest > slots - 1:
            raise ValueError(
                f"x has a user with {longest} events, tim4rec of max_positions = {slots} takes at most {slots - 1}: "
                "give the user's latest events alone (batch.max_length), or train with a larger max_positions"
            )
        users = torch.arange(len(lengths_B), device=batch.device)
        filled = batch.time_T.new_zeros(len(lengths_B), slots)
        filled[batch.user_T, batch.row_T] = batch.time_T
        filled[users, lengths_B] = batch.request_B
        gaps = F.pad(filled.diff(dim=1), (1, 0)).to(self.positions.dtype)
        normed = F.layer_norm(self.dropout(gaps), (slots,), self.time_weight, self.time_bias, _EPS)
        batch.kept[_TIMES] = normed.unsqueeze(1)  # the same for every head of the first block
