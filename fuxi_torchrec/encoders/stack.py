"""What the comparison encoders share: rows with positions in, a stack of blocks, states.

A block is a module that takes rows (T, D) and a :class:`Batch`. Blocks of a :class:`RecurrentEncoder` also take and
give a state of constant size.
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
from fuxi_torchrec.encoders.state import EncoderState
from fuxi_torchrec.ops.chunks import Chunks

_LEAST = 4  # events of a chunk that are worth one, however short histories are

BlockState = dict[str, Tensor]


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
        scalars: parameters of more than one dimension that are not decayed, by the end of their names.
        tables: parameters that are looked up, beside the positions, by the end of their names.
        released_prefix: of the names of a layer's released parameters.
        released_names: of a block's parameters, by ours; several are stacked.
        released_after: of the encoder's own parameters beside the positions, by ours.
    """

    config: StackConfig
    scalars: ClassVar[tuple[str, ...]] = ()
    tables: ClassVar[tuple[str, ...]] = ()
    released_prefix: ClassVar[str | tuple[str, ...]]
    released_names: ClassVar[Names]
    released_after: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: StackConfig) -> None:
        super().__init__(config)
        self.positions = nn.Parameter(torch.empty(config.max_positions, config.dim))
        self.blocks = nn.ModuleList([self.make_block() for _ in range(config.num_layers)])
        self.dropout = nn.Dropout(config.dropout)
        self.reset_positions()

    def make_block(self) -> nn.Module:
        """A new block of the configuration."""
        raise NotImplementedError

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
    def from_official(cls, params: Mapping[str, Tensor], **unknown: Any) -> "StackEncoder":
        """With released weights; ``unknown`` is what their shapes do not tell, and perhaps ``dropout``."""
        layers = released_layers(params, cls.released_prefix)
        rows, dim = params[POSITIONS].shape
        told: dict[str, Any] = {"dim": dim, "num_layers": len(layers), "max_positions": rows}
        config = cls.config_class(
            **told, **cls.released_settings(layers[0], dim, unknown.get("num_heads", 1)), **unknown
        )
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
        return block(rows, batch)

    def _embed(self, x: Tensor, position: Tensor) -> Tensor:
        rows = self.positions[position.clamp(max=self.config.max_positions - 1)]
        return self.dropout(torch.add(rows, x, alpha=math.sqrt(self.config.dim)))

    def _nothing(self, x: Tensor) -> Tensor:
        """No rows, connected to every parameter: a rank without events still takes part in the reduction."""
        wide = x.to(torch.promote_types(x.dtype, self.positions.dtype))
        return wide + sum(p.flatten()[:0].sum() for p in self.parameters() if p.requires_grad)


class RecurrentBlock(nn.Module):
    """A block with a state of constant size that ignores time."""

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """What it keeps of a user, by name."""
        raise NotImplementedError

    def forward(
        self, x_TD: Tensor, batch: Batch, state: BlockState | None = None, with_state: bool = False
    ) -> tuple[Tensor, BlockState]:
        """All events of all users, and the state after each user's last; empty unless ``with_state``."""
        raise NotImplementedError

    def step(self, x_BD: Tensor, count_B: Tensor, state: BlockState) -> tuple[Tensor, BlockState]:
        """One event of every user that has seen so many before, and the state after it."""
        raise NotImplementedError


class RecurrentEncoder(StackEncoder):
    """An encoder that ignores time and whose state has a constant size.

    Nothing waits for the time of a successor: what the state holds as pending is the last event's output.
    """

    state_kind = "constant"

    @property
    def layers(self) -> list[RecurrentBlock]:
        return [cast(RecurrentBlock, block) for block in self.blocks]

    def init_state(self, batch_size: int) -> EncoderState:
        if batch_size < 0:
            raise ValueError(f"batch_size must not be negative, but is {batch_size}")
        like = self.positions.detach()
        count, time = (like.new_zeros(batch_size, dtype=torch.int64) for _ in range(2))
        memory = tuple(self._fresh(block, batch_size) for block in self.layers)
        return EncoderState(self.fingerprint, count, time, like.new_zeros(batch_size, self.config.dim), memory)

    def _fresh(self, block: RecurrentBlock, users: int) -> BlockState:
        like = self.positions.detach()
        return {name: like.new_zeros(users, *shape) for name, shape in block.state_shapes().items()}

    @torch.no_grad()
    def append(
        self, state: EncoderState, x: Tensor, offsets: Tensor, timestamps: Tensor, *, validate: bool | None = None
    ) -> EncoderState:
        checks.state(self, state, self.positions)
        bounds = checks.batch(self.config, self.positions, x, offsets, timestamps, validate, state=state)
        if not len(x):
            return state
        if all(b - a == 1 for a, b in itertools.pairwise(bounds)):
            return self.append_one(state, x, timestamps)
        batch = Batch(bounds, timestamps, timestamps[:0], state.count)
        rows, memory = self._embed(x, batch.position_T), []
        for block, before in zip(self.layers, state.memory, strict=True):
            rows, after = block(rows, batch, before, True)
            memory.append(after)
        touched = batch.bounds.diff() > 0
        last_B = (batch.bounds[1:] - 1).clamp(min=0)
        return replace(
            state,
            count=state.count + batch.bounds.diff(),
            pending=torch.where(touched[:, None], self.finish(rows)[last_B], state.pending),
            pending_time=torch.where(touched, timestamps[last_B], state.pending_time),
            memory=tuple(memory),
        )

    @torch.no_grad()
    def query(self, state: EncoderState, request_timestamps: Tensor, *, validate: bool | None = None) -> Tensor:
        """The last event's output, at whatever time."""
        checks.state(self, state, self.positions)
        checks.requests(request_timestamps, len(state), self.positions.device, validate)
        return self.query_unchecked(state, request_timestamps)

    def append_one(self, state: EncoderState, rows: Tensor, times: Tensor) -> EncoderState:
        x, memory = self._embed(rows, state.count), []
        for block, before in zip(self.layers, state.memory, strict=True):
            x, after = block.step(x, state.count, before)
            memory.append(after)
        return replace(
            state, count=state.count + 1, pending=self.finish(x), pending_time=times.clone(), memory=tuple(memory)
        )

    def query_unchecked(self, state: EncoderState, request_timestamps: Tensor) -> Tensor:
        return state.pending.clone()

    def _run(self, block: nn.Module, rows: Tensor, batch: Batch) -> Tensor:
        y, _ = block(rows, batch)
        return y
