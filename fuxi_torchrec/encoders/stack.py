"""What the comparison encoders share: rows with positions in, a stack of blocks.

A block is a module that takes rows (T, D) and a :class:`Batch`, and gives rows, perhaps with what a state needs beside
them: :mod:`recurrent` has blocks with states of constant size, :mod:`cached` those that keep something of every event.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuxi_torchrec.encoders import checks
from fuxi_torchrec.encoders.base import EncoderConfig, ParameterGroups, SequenceEncoder, check_positive, setting
from fuxi_torchrec.encoders.explain import Curve, Curves
from fuxi_torchrec.encoders.released import POSITIONS, Names, ReleasedLayer, released_layers
from fuxi_torchrec.ops.chunks import Chunks

_LEAST = 4  # events of a chunk that are worth one, however short histories are


@dataclass(frozen=True)
class StackConfig(EncoderConfig):
    """What the comparison encoders' configurations share."""

    kind: str = setting("", "which encoder")
    dim: int = setting(128, "width d of rows and outputs")
    num_layers: int = setting(4, "number of blocks")
    max_positions: int = setting(1035, "rows of the position table; later events use the last row")
    dropout: float = setting(0.0, "where the published model has it", training=True)
    activation_checkpointing: bool = setting(
        False, "compute each block again in the backward pass: less memory, more time", operational=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("num_layers", self.num_layers)
        if not isinstance(self.dropout, int | float) or not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout!r}")

    def check_divides(self, name: str, whole: str = "dim") -> None:
        """Refuse a number of heads, say, that does not divide a width."""
        check_positive(name, getattr(self, name))
        if getattr(self, whole) % getattr(self, name):
            raise ValueError(f"{whole} = {getattr(self, whole)} is not divisible by {name} = {getattr(self, name)}")


@dataclass(frozen=True)
class FeedForwardConfig(StackConfig):
    """The same for blocks with a feed-forward network."""

    ffn_dim: int | None = setting(None, "width of the feed-forward network; the published multiple of dim if null")
    ffn_multiple: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("ffn_dim", self.hidden_dim)

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward network."""
        return self.ffn_multiple * self.dim if self.ffn_dim is None else self.ffn_dim

    def decisive(self) -> dict[str, Any]:
        return {**super().decisive(), "ffn_dim": self.hidden_dim}


class PostNormFFN(nn.Module):
    """``LN(W_2 f(W_1 a) + a)``."""

    def __init__(self, config: FeedForwardConfig, activation: Callable[[Tensor], Tensor], eps: float = 1e-12) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(config.dim, config.hidden_dim), nn.Linear(config.hidden_dim, config.dim)
        self.norm, self.activation = nn.LayerNorm(config.dim, eps), activation
        self.dropout = nn.Dropout(config.dropout)
        reset_linears(self.input, self.output)

    def forward(self, a: Tensor) -> Tensor:
        inner = self.dropout(self.activation(self.input(a)))
        return self.norm(self.dropout(self.output(inner)) + a)


def reset_linears(*linears: nn.Linear) -> None:
    """N(0, .02), biases 0."""
    for linear in linears:
        nn.init.normal_(linear.weight, std=0.02)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)


class Batch:
    """The histories of B users, T events in all: what is decided before any weight is used.

    Args:
        offsets: B + 1 bounds of the users' rows, on the host.
        time_T: int64 time of each event.
        request_B: int64 time that follows each user's last event.
        start_B: events of each user before its first row; 0 if None.
    """

    def __init__(self, offsets: list[int], time_T: Tensor, request_B: Tensor, start_B: Tensor | None = None) -> None:
        self.offsets, self.time_T, self.request_B, self.start_B = offsets, time_T, request_B, start_B
        self.device = time_T.device
        self._chunks: dict[int, Chunks] = {}
        self.kept: dict[Any, Any] = {}  # what blocks computed from the batch alone

    @cached_property
    def bounds(self) -> Tensor:
        return torch.tensor(self.offsets, dtype=torch.int64).to(self.device, non_blocking=True)

    @cached_property
    def user_T(self) -> Tensor:
        users = torch.arange(len(self.offsets) - 1, device=self.device)
        return torch.repeat_interleave(users, self.bounds.diff(), output_size=self.offsets[-1])

    @cached_property
    def row_T(self) -> Tensor:
        """The place of each row among its user's rows, from 0."""
        return torch.arange(self.offsets[-1], device=self.device) - self.bounds[self.user_T]

    @cached_property
    def position_T(self) -> Tensor:
        """Events of the user before each one."""
        return self.row_T if self.start_B is None else self.row_T + self.start_B[self.user_T]

    @cached_property
    def next_time_T(self) -> Tensor:
        """The time of each event's successor, of the last one that of the request."""
        following = torch.cat((self.time_T[1:], self.time_T[:1]))
        some = self.bounds.diff() > 0
        return following.index_copy(0, self.bounds[1:][some] - 1, self.request_B[some])

    def chunks(self, size: int) -> Chunks:
        """Chunks of at most so many events; of fewer where no history is that long."""
        longest = max((b - a for a, b in itertools.pairwise(self.offsets)), default=0)
        size = min(size, max(_LEAST, longest))
        if size not in self._chunks:
            self._chunks[size] = Chunks(self.offsets, size, self.device)
        return self._chunks[size]


class StackEncoder(SequenceEncoder):
    """Rows ``x_i = Dropout(sqrt(d) e_i + P[i−1])``, then blocks, then perhaps a norm.

    Attributes:
        block_class: of the blocks, made of the configuration.
        scalars: parameters of more than one dimension that are not decayed, by the end of their names.
        tables: parameters that are looked up, beside the positions, by the end of their names.
        released_prefix: of the names of a layer's released parameters.
        released_names: of a block's parameters, by ours; several are stacked.
        released_after: of the encoder's own parameters beside the positions, by ours.
        released_tells_heads: whether names and shapes of released parameters tell how many heads there are.
    """

    config: StackConfig
    block_class: ClassVar[type[nn.Module]]
    scalars: ClassVar[tuple[str, ...]] = ()
    tables: ClassVar[tuple[str, ...]] = ()
    released_prefix: ClassVar[str | tuple[str, ...]]
    released_names: ClassVar[Names]
    released_after: ClassVar[Mapping[str, str]] = {}
    released_tells_heads: ClassVar[bool] = True

    def __init__(self, config: StackConfig) -> None:
        super().__init__(config)
        self.positions = nn.Parameter(torch.empty(config.max_positions, config.dim))
        self.blocks = nn.ModuleList([self.block_class(config) for _ in range(config.num_layers)])
        self.dropout = nn.Dropout(config.dropout)
        self.reset_positions()

    def reset_positions(self) -> None:
        """A normal distribution of variance 1/d, cut at two deviations."""
        nn.init.trunc_normal_(self.positions, a=-2, b=2)
        with torch.no_grad():
            self.positions.mul_(self.config.dim**-0.5)

    def begin(self, batch: Batch) -> None:
        """What precedes the first block: something for the batch to keep, or to refuse."""

    def finish(self, x_TD: Tensor) -> Tensor:
        """What follows the last block."""
        return x_TD

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        timestamps: Tensor,
        request_timestamps: Tensor,
        *,
        validate: bool | None = None,
    ) -> Tensor:
        bounds = checks.batch(self.config, self.positions, x, offsets, timestamps, validate, request_timestamps)
        if not len(x):
            return self._nothing(x)
        batch = Batch(bounds, timestamps, request_timestamps)
        self.begin(batch)
        rows = self._embed(x, batch.position_T)
        for block in self.blocks:
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                rows = checkpoint(self._run, block, rows, batch, use_reentrant=False)
            else:
                rows = self._run(block, rows, batch)
        return self.finish(rows)

    @classmethod
    def released_settings(cls, layer: ReleasedLayer, dim: int, num_heads: int) -> dict[str, Any]:
        """What the shapes of a layer's released parameters tell of the configuration."""
        return {}

    @classmethod
    def from_official(
        cls, params: Mapping[str, Tensor], *, num_heads: int | None = None, **unknown: Any
    ) -> "StackEncoder":
        """With released weights.

        Args:
            params: by their released names.
            num_heads: where names and shapes do not tell it.
            unknown: other settings that they do not tell, as ``dropout``.
        """
        layers = released_layers(params, cls.released_prefix)
        rows, dim = params[POSITIONS].shape
        settings: dict[str, Any] = {"dim": dim, "num_layers": len(layers), "max_positions": rows, **unknown}
        if not cls.released_tells_heads:
            if num_heads is None:
                raise ValueError("num_heads must be given: names and shapes of the parameters do not tell it")
            settings["num_heads"] = num_heads
        settings |= cls.released_settings(layers[0], dim, num_heads or 1)
        if num_heads not in (None, settings.get("num_heads")):
            told = f"{settings['num_heads']} heads" if "num_heads" in settings else "no heads"
            raise ValueError(f"num_heads is {num_heads}, but the parameters are those of a model with {told}")
        config = cls.config_class(**settings)
        encoder = cls(cast(StackConfig, config))
        for block, layer in zip(encoder.blocks, layers, strict=True):
            layer.copy_to(block, encoder.released_names)
        own = dict(encoder.named_parameters(recurse=False))
        for name, released in {"positions": POSITIONS, **cls.released_after}.items():
            if released not in params:
                raise ValueError(f"params has no {released!r}: not the parameters of this model, or of another version")
            with torch.no_grad():
                own[name].copy_(params[released])
        return encoder

    def optimizer_groups(self) -> ParameterGroups:
        """Tables are what ``tables`` names and the positions; vectors, and what ``scalars`` names, are scalars."""
        groups = ParameterGroups([], [self.positions], [])
        for name, parameter in self.named_parameters():
            if name.endswith(self.tables):
                groups.tables.append(parameter)
            elif parameter is not self.positions:
                scalar = parameter.ndim < 2 or name.endswith(self.scalars)
                (groups.scalars if scalar else groups.matrices).append(parameter)
        return groups

    def activation_bytes(self, events: int) -> int:
        """What is kept, and a block's share again: while it runs backwards its gradients stand beside it."""
        kept = super().activation_bytes(events)
        if not self.config.activation_checkpointing:
            return kept + kept // self.config.num_layers
        plain = type(self)(replace(self.config, activation_checkpointing=False))
        return kept + 2 * plain.activation_bytes(events) // (self.config.num_layers + 1)

    def curves(self, block: Any, per_second: int) -> list[Curve]:
        """What a block has to show."""
        return []

    @torch.no_grad()
    def explain(self, per_second: int) -> Curves | None:
        found = [self.curves(block, per_second) for block in self.blocks]
        return Curves(found) if found[0] else None

    # --- inside ------------------------------------------------------------------------------------------------------

    def _run(self, block: nn.Module, rows: Tensor, batch: Batch) -> Tensor:
        y = block(rows, batch)
        return y[0] if isinstance(y, tuple) else y

    def _embed(self, x: Tensor, position: Tensor) -> Tensor:
        rows = self.positions[position.clamp(max=self.config.max_positions - 1)]
        return self.dropout(torch.add(rows, x, alpha=math.sqrt(self.config.dim)))

    def _nothing(self, x: Tensor) -> Tensor:
        """No rows, connected to every parameter: a rank without events still takes part in the reduction."""
        wide = x.to(torch.promote_types(x.dtype, self.positions.dtype))
        return wide + sum(p.flatten()[:0].sum() for p in self.parameters() if p.requires_grad)
