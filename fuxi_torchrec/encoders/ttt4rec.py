"""TTT4Rec (arXiv 2409.19142) as the FuXi-Linear release has it: a head's state is a small network, trained on the way.

A head's network maps keys to values. Of a mini-batch of K events, counted from the user's first, every gradient is
taken at the weights before it; event p reads with the weights less τ_p times the gradients of the mini-batch so far,
its own included; after K events the step with τ_{K−1} becomes the new start. Inside a mini-batch that is computed for
all its events at once (the dual form). States hold the way from the learned start, and the sums of the mini-batch
under way.

Shape suffixes beside those of the package: M users of a step, K events of a mini-batch, F head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuxi_torchrec.encoders.base import check_positive, setting
from fuxi_torchrec.encoders.explain import Curve
from fuxi_torchrec.encoders.norms import EPS, rms_norm
from fuxi_torchrec.encoders.recurrent import BlockState, RecurrentBlock, RecurrentEncoder
from fuxi_torchrec.encoders.released import ReleasedLayer
from fuxi_torchrec.encoders.stack import Batch, FeedForwardConfig
from fuxi_torchrec.ops.precision import at_least_float32
from fuxi_torchrec.ops.rotation import rotated, turns

Weights = tuple[Tensor, ...]  # w1, b1 and, of an MLP, w2, b2; users and heads first


@dataclass(frozen=True)
class TTT4RecConfig(FeedForwardConfig):
    """Shape of a TTT4Rec encoder; the defaults are the published size for KuaiRand-27K."""

    kind: Literal["ttt4rec"] = setting("ttt4rec", "which encoder")
    num_heads: int = setting(4, "heads, each with a network of its own")
    inner: Literal["mlp", "linear"] = setting("mlp", "the network: two layers, or one")
    mini_batch: int = setting(64, "events whose gradients are taken at the same weights")
    ffn_multiple: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_divides("num_heads")
        check_positive("mini_batch", self.mini_batch)
        if self.inner not in ("mlp", "linear"):
            raise ValueError(f"inner must be 'mlp' or 'linear', not {self.inner!r}")
        if self.dim // self.num_heads % 2:
            raise ValueError(f"dim / num_heads = {self.dim // self.num_heads} must be even: columns turn in pairs")


class _Steps(NamedTuple):
    """Mini-batches of all users: the m-th of everyone who has one are a step. Longest histories stand first.

    Attributes:
        order_B: users by number of mini-batches, most first.
        active: how many have an m-th.
        row_SK: of each mini-batch, step after step, the packed row of each event; the number of rows where none is.
        slot_T: where each packed row went.
    """

    order_B: Tensor
    active: list[int]
    row_SK: Tensor
    slot_T: Tensor


def _steps(batch: Batch, size: int) -> _Steps:
    key = ("ttt", size)
    if key in batch.kept:
        return batch.kept[key]
    start_B = torch.zeros_like(batch.bounds[1:]) if batch.start_B is None else batch.start_B
    lengths_B = batch.bounds.diff()
    counts_B = torch.where(lengths_B > 0, (start_B + lengths_B - 1) // size - start_B // size + 1, 0)
    order_B = torch.argsort(counts_B, descending=True, stable=True)
    having: list[int] = counts_B[order_B].tolist()
    active = [sum(count > m for count in having) for m in range(having[0] if having else 0)]
    first = torch.tensor([0, *active], device=batch.device).cumsum(0)
    rank_B = torch.empty_like(order_B).scatter_(0, order_B, torch.arange(len(order_B), device=batch.device))
    step_T = batch.position_T // size - (start_B // size)[batch.user_T]
    slot_T = (first[step_T] + rank_B[batch.user_T]) * size + batch.position_T % size
    row_SK = torch.full((sum(active) * size,), batch.offsets[-1], device=batch.device)
    row_SK[slot_T] = torch.arange(batch.offsets[-1], device=batch.device)
    batch.kept[key] = _Steps(order_B, active, row_SK.view(-1, size), slot_T)
    return batch.kept[key]


class TTT4RecBlock(RecurrentBlock):
    """The inner networks, then a gated feed-forward network. Norms come first."""

    def __init__(self, config: TTT4RecConfig) -> None:
        super().__init__()
        d, hidden, size = config.dim, config.hidden_dim, config.mini_batch
        self.heads, self.width, self.size = config.num_heads, d // config.num_heads, size
        f = self.width
        self.norm = nn.Parameter(torch.ones(d))
        self.qkv = nn.Parameter(torch.empty(3 * d, d))
        self.rate_weight = nn.Parameter(torch.empty(self.heads, d))
        self.rate_bias = nn.Parameter(torch.zeros(self.heads))
        self.place = nn.Parameter(torch.zeros(size))  # of an event in its mini-batch: added to 1/(p + 1)
        inner = 4 * f if config.inner == "mlp" else f
        self.w1, self.b1 = (
            nn.Parameter(torch.empty(self.heads, f, inner)),
            nn.Parameter(torch.zeros(self.heads, 1, inner)),
        )
        self.deep = config.inner == "mlp"
        if self.deep:
            self.w2 = nn.Parameter(torch.empty(self.heads, inner, f))
            self.b2 = nn.Parameter(torch.zeros(self.heads, 1, f))
        self.inner_scale = nn.Parameter(torch.ones(self.heads, f))
        self.inner_shift = nn.Parameter(torch.zeros(self.heads, f))
        self.post_norm = nn.LayerNorm(d, EPS)
        self.out = nn.Parameter(torch.empty(d, d))
        self.ffn_norm = nn.Parameter(torch.ones(d))
        self.ffn_in, self.ffn_out = nn.Parameter(torch.empty(2 * hidden, d)), nn.Parameter(torch.empty(d, hidden))
        drawn = [self.qkv, self.rate_weight, self.w1, self.out, self.ffn_in, self.ffn_out]
        for weight in (*drawn, self.w2) if self.deep else drawn:
            nn.init.normal_(weight, std=0.02)

    @property
    def start(self) -> Weights:
        """The learned weights of the networks."""
        return (self.w1, self.b1, self.w2, self.b2) if self.deep else (self.w1, self.b1)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: tuple(w.shape) for name, w in zip(("w1", "b1", "w2", "b2"), self.start, strict=False)}
        return {**shapes, **{f"sum_{name}": shape for name, shape in shapes.items()}}

    def forward(
        self, x_TD: Tensor, batch: Batch, state: BlockState | None = None, with_state: bool = False
    ) -> tuple[Tensor, BlockState]:
        steps = _steps(batch, self.size)
        rows = self._project(x_TD, batch.position_T)
        q, k, v, rate = (torch.cat((part, part.new_zeros(1, *part.shape[1:]))) for part in rows)
        names = list(self.state_shapes())
        if state is None:
            held = [x.new_zeros(len(steps.order_B), *x.shape) for x in (*self.start, *self.start)]
        else:
            held = [state[name][steps.order_B] for name in names]
        ys, after, first = list[Tensor](), [part.clone() for part in held], 0
        for users in steps.active:
            row_MK = steps.row_SK[first : first + users]
            parts = [part[row_MK].transpose(1, 2) for part in (q, k, v)]  # (M, H, K, F)
            arguments = (*parts, rate[row_MK].transpose(1, 2), row_MK[:, -1] < len(x_TD), *(h[:users] for h in held))
            if torch.is_grad_enabled():
                y, *held = checkpoint(self._mini_batch, *arguments, use_reentrant=False)
            else:
                y, *held = self._mini_batch(*arguments)
            ys.append(y.transpose(1, 2).flatten(0, 1))
            if with_state:
                for whole, part in zip(after, held, strict=True):
                    whole[:users] = part
            first += users
        y = torch.cat(ys)[steps.slot_T].flatten(1)
        if not with_state:
            return self._merge(x_TD, y), {}
        place_B = torch.argsort(steps.order_B)
        return self._merge(x_TD, y), {name: part[place_B] for name, part in zip(names, after, strict=True)}

    def step(self, x_BD: Tensor, count_B: Tensor, state: BlockState) -> tuple[Tensor, BlockState]:
        q, k, v, rate = (part.unsqueeze(2) for part in self._project(x_BD, count_B))  # (B, H, 1, ...)
        held, names = list(state.values()), list(state)
        half = len(held) // 2
        weights = self._weights(held[:half])
        keys = self._gradients(k, v, weights)
        sums = [total + new for total, new in zip(held[half:], self._products(keys, rate), strict=True)]
        place = count_B % self.size
        token_B111 = self._tokens()[place].view(-1, 1, 1, 1)
        stepped = [token_B111 * total for total in sums]
        y = self._read(q, tuple(w - change for w, change in zip(weights, stepped, strict=True)))
        full = (place == self.size - 1).view(-1, 1, 1, 1)
        moved = [torch.where(full, h - change, h) for h, change in zip(held[:half], stepped, strict=True)]
        sums = [torch.where(full, 0.0, total) for total in sums]
        return self._merge(x_BD, y.squeeze(2).flatten(1)), dict(zip(names, (*moved, *sums), strict=True))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v (X, H, F) and the learning rate of each event and head (X, H)."""
        h = rms_norm(x) * self.norm
        q, k, v = (part.unflatten(-1, (self.heads, self.width)) for part in F.linear(h, self.qkv).chunk(3, -1))
        frequencies = 10000.0 ** (-torch.arange(0, self.width, 2, dtype=torch.float64, device=x.device) / self.width)
        cos_sin = turns(position % self.size, frequencies, v.dtype)
        rate = torch.sigmoid(F.linear(h, self.rate_weight, self.rate_bias)) / self.width
        q, k, v, rate = (at_least_float32(part) for part in (rotated(q, *cos_sin), rotated(k, *cos_sin), v, rate))
        return q, k, v, rate

    def _tokens(self) -> Tensor:
        """τ_p = max(0, 1/(p + 1) + learned)."""
        first = 1 / torch.arange(1, self.size + 1, dtype=self.place.dtype, device=self.place.device)
        return (first + self.place).clamp(min=0)

    def _weights(self, moved: Sequence[Tensor]) -> Weights:
        return tuple(start + way for start, way in zip(self.start, moved, strict=True))

    def _ln(self, z: Tensor) -> Tensor:
        unit = F.layer_norm(z, z.shape[-1:], eps=EPS)
        return unit * self.inner_scale.unsqueeze(1) + self.inner_shift.unsqueeze(1)

    def _gradients(self, k: Tensor, v: Tensor, weights: Weights) -> list[tuple[Tensor, Tensor]]:
        """Of each layer its inputs, and the gradient of ½|ln(Z) − (v − k)|² by its outputs, at the given weights."""
        scale, shift = self.inner_scale.unsqueeze(1), self.inner_shift.unsqueeze(1)
        z1 = k @ weights[0] + weights[1]
        x2 = F.gelu(z1, approximate="tanh")
        z = x2 @ weights[2] + weights[3] if self.deep else z1
        std = torch.sqrt(z.var(-1, unbiased=False, keepdim=True) + EPS)
        unit = (z - z.mean(-1, keepdim=True)) / std
        e = (scale * unit + shift - (v - k)) * scale
        g = (e - e.mean(-1, keepdim=True) - unit * (e * unit).mean(-1, keepdim=True)) / std
        return [(k, (g @ weights[2].mT) * _gelu_slope(z1)), (x2, g)] if self.deep else [(k, g)]

    def _products(self, layers: Sequence[tuple[Tensor, Tensor]], rate: Tensor) -> list[Tensor]:
        """Σ_j η_j xᵀg and Σ_j η_j g of every layer."""
        weighted = [(x, rate.unsqueeze(-1) * g) for x, g in layers]
        return [part for x, g in weighted for part in (x.mT @ g, g.sum(-2, keepdim=True))]

    def _read(self, q: Tensor, weights: Weights) -> Tensor:
        z = q @ weights[0] + weights[1]
        if self.deep:
            z = F.gelu(z, approximate="tanh") @ weights[2] + weights[3]
        return q + self._ln(z)

    def _mini_batch(
        self, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, full_M: Tensor, *held: Tensor
    ) -> tuple[Tensor, ...]:
        """Outputs of a mini-batch, or a part of one, and what is held after it; empty slots have rate 0."""
        half = len(held) // 2
        weights, sums = self._weights(held[:half]), held[half:]
        layers, token = self._gradients(k, v, weights), self._tokens()
        # what event p reads of the gradient of event j ≤ p
        E = (token.unsqueeze(1) * rate.unsqueeze(-2)).tril()
        z = q
        for n, (x, g) in enumerate(layers):
            w, b, sum_w, sum_b = weights[2 * n], weights[2 * n + 1], sums[2 * n], sums[2 * n + 1]
            z = z if n == 0 else F.gelu(z, approximate="tanh")
            earlier = token.unsqueeze(1) * (z @ sum_w + sum_b)  # of the mini-batch's part before these events
            z = z @ w + b - earlier - (E * (z @ x.mT) + E) @ g
        totals = [total + new for total, new in zip(sums, self._products(layers, rate), strict=True)]
        full = full_M.view(-1, 1, 1, 1)
        moved = [torch.where(full, h - token[-1] * total, h) for h, total in zip(held[:half], totals, strict=True)]
        return (q + self._ln(z), *moved, *(torch.where(full, 0.0, total) for total in totals))

    def _merge(self, x: Tensor, y: Tensor) -> Tensor:
        z = x + F.linear(self.post_norm(y).to(x.dtype), self.out)
        active, linear = F.linear(rms_norm(z) * self.ffn_norm, self.ffn_in).chunk(2, -1)
        return z + F.linear(F.silu(active) * linear, self.ffn_out)


def _gelu_slope(x: Tensor) -> Tensor:
    """The derivative of the tanh form, with the released code's constants."""
    th = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    return 0.5 * x * (1 - th * th) * (0.79788456 + 0.1070322243 * x * x) + 0.5 * (1 + th)


class TTT4RecEncoder(RecurrentEncoder):
    """TTT4Rec: constant state, no time; see the module."""

    config_class = TTT4RecConfig
    block_class = TTT4RecBlock
    config: TTT4RecConfig
    scalars = ("rate_weight", "inner_scale", "inner_shift", "b1", "b2")
    released_prefix = "_ttt_layers.layers."
    released_names: ClassVar = {
        "norm": "seq_norm.weight",
        "qkv": tuple(f"seq_modeling_block.{name}_proj.weight" for name in "qkv"),
        "rate_weight": "seq_modeling_block.learnable_ttt_lr_weight",
        "rate_bias": "seq_modeling_block.learnable_ttt_lr_bias",
        "place": "seq_modeling_block.learnable_token_idx",
        **{name.lower(): f"seq_modeling_block.{name}" for name in ("W1", "b1", "W2", "b2")},
        "inner_scale": "seq_modeling_block.ttt_norm_weight",
        "inner_shift": "seq_modeling_block.ttt_norm_bias",
        "post_norm.weight": "seq_modeling_block.post_norm.weight",
        "post_norm.bias": "seq_modeling_block.post_norm.bias",
        "out": "seq_modeling_block.o_proj.weight",
        "ffn_norm": "ffn_norm.weight",
        "ffn_in": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "ffn_out": "mlp.down_proj.weight",
    }
    released_after: ClassVar = {"norm": "_ttt_layers.norm.weight"}

    def __init__(self, config: TTT4RecConfig) -> None:
        super().__init__(config)
        self.norm = nn.Parameter(torch.ones(config.dim))

    def finish(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD) * self.norm

    def curves(self, block: Any, per_second: int) -> list[Curve]:
        token = block._tokens().tolist()
        title = "step of the inner network by place in the mini-batch"
        return [Curve(title, [float(n) for n in range(len(token))], token, "place")]

    @classmethod
    def released_settings(cls, layer: ReleasedLayer, dim: int, num_heads: int) -> dict[str, Any]:
        return {
            "num_heads": len(layer["seq_modeling_block.W1"]),
            "inner": "mlp" if "seq_modeling_block.W2" in layer else "linear",
            "mini_batch": len(layer["seq_modeling_block.learnable_token_idx"]),
            "ffn_dim": len(layer["mlp.gate_proj.weight"]),
        }
