"""Other ways to see time and order, in place of the temporal or the positional channel: for comparison.

n is the history's length, d the width. A growing one weighs every pair of events, tile by tile: time n²·d, memory n·d,
and no state of constant size. The others cost n·d and have one.

| ``model.temporal`` | ``y_i =`` | an event after n others |
|---|---|---|
| ``retention`` | the channel of the paper | constant |
| ``bucket`` | ``Σ ts[b(Δ)] v_j``, FuXi-α's map | n·d |
| ``exp``, ``pow`` | ``Σ a·exp(−e^b Δ) v_j``, ``Σ a·(1 + Δ)^(−b) v_j``, FuXi-β's maps | n·d |
| ``hstu`` | ``Σ silu(q_i·k_j + ts[b(Δ)]) v_j / N``, HSTU's attention with its bias of time | n·2d |
| ``absolute`` | ``v_i + W [sin φ(t_i), cos φ(t_i), sin φ(t_{i+1}), cos φ(t_{i+1})]`` | constant |
| ``scaled`` | ``α Σ Π (1 + gap)^{−a} v_j + β v_i``: gaps scale the steps of a scan, as TiM4Rec's do | constant |

| ``model.positional`` | ``y_i =`` | an event after n others |
|---|---|---|
| ``kernel`` | the channel of the paper | constant |
| ``table`` | ``Σ pos[i−j] v_j``, FuXi-α's and β's map | n·d |
| ``t5`` | the same with one weight for each of T5's 32 buckets of distance | n·d |
| ``alibi`` | ``Σ e^{−m_a (i−j)} v_j``, m_a = 2^{−8a/H} of head a = 1..H: e to the power of ALiBi's bias | constant |
| ``rope`` | no channel: queries and keys of the retention channel turn with the position | constant |

Sums are over j ≤ i, Δ = t_{i+1} − t_j in the data's unit, N is ``max_positions``. ``use_temporal`` and
``use_positional`` take a channel away.
"""

import itertools
import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuxi_torchrec.encoders.fuxi_linear.channels import (
    GENERAL,
    Channel,
    Form,
    PositionalChannel,
    RetentionChannel,
    Step,
    TemporalChannel,
)
from fuxi_torchrec.encoders.fuxi_linear.config import FuXiLinearConfig
from fuxi_torchrec.encoders.fuxi_linear.sequences import TICKS_OF_LOG, Sequences
from fuxi_torchrec.ops import recurrent, tiles
from fuxi_torchrec.ops.precision import at_least_float32
from fuxi_torchrec.ops.retention import retention, retention_state
from fuxi_torchrec.ops.rotation import rotated, turns
from fuxi_torchrec.ops.time_maps import BUCKETS, Kind, TimeMap

_PAIRS = 128  # events of a chunk where all pairs of chunks are looked at
_T5_BUCKETS, _T5_EXACT, _T5_FURTHEST = 32, 16, 128


class GrowingChannel(Channel):
    """A channel that looks at every earlier event: it has no state."""

    state_shape = (0,)

    def forward(
        self, rows: Tensor, sequences: Sequences, form: Form, state: Tensor | None = None, with_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if form == "chunkwise":
            return self.tiled(rows, sequences), None
        if form == "recurrent":
            raise ValueError(f"{type(self).__name__} has no recurrent form: its state grows with the history")
        pairs = itertools.pairwise(sequences.offsets)
        return torch.cat([self.of_user(rows, sequences, slice(a, b)) for a, b in pairs]), None

    @abstractmethod
    def tiled(self, rows: Tensor, sequences: Sequences) -> Tensor:
        """All users, tile by tile."""

    @abstractmethod
    def of_user(self, rows: Tensor, sequences: Sequences, user: slice) -> Tensor:
        """The definition: the map of all pairs of one user's events."""

    def final_state(self, rows: Tensor, sequences: Sequences, state: Tensor) -> Tensor:
        raise NotImplementedError

    def step_output(self, rows: Tensor, step: Step, state: Tensor) -> Tensor:
        raise NotImplementedError

    def step_state(self, rows: Tensor, step: Step, state: Tensor) -> Tensor:
        raise NotImplementedError


# --- time ------------------------------------------------------------------------------------------------------------


class TimeMapChannel(GrowingChannel):
    """``y_i = Σ_{j≤i} φ(t_{i+1} − t_j) v_j``, φ a map of :mod:`fuxi_torchrec.ops.time_maps`."""

    kinds: ClassVar[dict[str, Kind]] = {"bucket": "buckets", "exp": "exp", "pow": "pow"}

    def __init__(self, config: FuXiLinearConfig) -> None:
        super().__init__()
        self.columns, self.kind = config.dim, self.kinds[config.temporal]
        self.weights = nn.Parameter(torch.empty(BUCKETS if self.kind == "buckets" else 2))

    def reset_parameters(self) -> None:
        """As FuXi-α's and β's."""
        if self.kind == "buckets":
            nn.init.normal_(self.weights, std=0.02)
            return
        nn.init.uniform_(self.weights.detach()[0], -0.2, 0.2)
        nn.init.uniform_(self.weights.detach()[1], *((-2.0, 0.0) if self.kind == "exp" else (0.4, 0.8)))

    def tables(self) -> list[nn.Parameter]:
        return [self.weights] if self.kind == "buckets" else []

    def tiled(self, rows: Tensor, sequences: Sequences) -> Tensor:
        clocks = sequences.time_T, sequences.next_time_T
        return tiles.time_map(rows, at_least_float32(self.weights), self.kind, clocks, sequences.chunks(_PAIRS))

    def of_user(self, rows: Tensor, sequences: Sequences, user: slice) -> Tensor:
        gap = sequences.next_time_T[user].unsqueeze(1) - sequences.time_T[user]
        weights = at_least_float32(self.weights)
        if self.kind == "buckets":
            return _weighed(TimeMap("buckets", weights).weights(gap), rows[user])
        scale, rate = weights.unbind()
        passed = gap.clamp(min=0).to(weights.dtype)
        decay = torch.exp(-rate.exp() * passed) if self.kind == "exp" else (1 + passed) ** -rate
        return _weighed(scale * decay, rows[user])


class BiasedAttentionChannel(GrowingChannel):
    """``y_i = Σ_{j≤i} silu(q_i·k_j + ts[b(t_{i+1} − t_j)]) v_j / N``, N = ``max_positions``."""

    uniform_values = False

    def __init__(self, config: FuXiLinearConfig) -> None:
        super().__init__()
        self.columns, self.heads, self.divisor = 3 * config.dim, config.num_heads, config.max_positions
        self.weights = nn.Parameter(torch.empty(BUCKETS))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weights, std=0.02)

    def tables(self) -> list[nn.Parameter]:
        return [self.weights]

    def tiled(self, rows: Tensor, sequences: Sequences) -> Tensor:
        q, k, v = self._heads(rows)
        weights, clocks = at_least_float32(self.weights), (sequences.time_T, sequences.next_time_T)
        nowhere = weights.new_zeros(1)  # no weight of the distance
        y = tiles.biased_attention(q, k, v, nowhere, weights, clocks, sequences.chunks(_PAIRS))
        return y.flatten(1) / self.divisor

    def of_user(self, rows: Tensor, sequences: Sequences, user: slice) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in self._heads(at_least_float32(rows[user])))
        gap = sequences.next_time_T[user].unsqueeze(1) - sequences.time_T[user]
        scores = F.silu(q @ k.mT + TimeMap("buckets", at_least_float32(self.weights)).weights(gap)).tril()
        return (scores @ v).transpose(0, 1).flatten(1) / self.divisor

    def _heads(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = F.silu(rows).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return q, k, v


class AbsoluteTimeChannel(Channel):
    """``y_i = v_i + W [phases of t_i, phases of t_{i+1}]``: it looks at no other event."""

    state_shape = (0,)

    def __init__(self, config: FuXiLinearConfig) -> None:
        super().__init__()
        self.columns, self.scales = config.dim, config.num_scales
        self.embedding = nn.Parameter(torch.empty(4 * config.num_scales, config.dim))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.embedding, std=0.02)

    def forward(
        self, rows: Tensor, sequences: Sequences, form: Form, state: Tensor | None = None, with_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        nothing = rows.new_zeros(len(sequences.offsets) - 1, 0) if with_state else None
        return self._embedded(rows, *sequences.phases), nothing

    def final_state(self, rows: Tensor, sequences: Sequences, state: Tensor) -> Tensor:
        return state

    def step_output(self, rows: Tensor, step: Step, state: Tensor) -> Tensor:
        return self._embedded(rows, step.key_BHK, step.query_BGK)

    def step_state(self, rows: Tensor, step: Step, state: Tensor) -> Tensor:
        return state

    def _embedded(self, rows: Tensor, key_XHK: Tensor, query_XGK: Tensor) -> Tensor:
        # queries of the sin heads are (sin, −cos) of the next event's time: the cos heads' add nothing
        phases = torch.cat((key_XHK, query_XGK[:, : self.scales]), 1).flatten(1)
        embedding = at_least_float32(self.embedding)
        return rows + phases.to(embedding.dtype) @ embedding


class ScaledChannel(TemporalChannel):
    """``y_i = α Σ_{j≤i} Π_{j≤m≤i} (1 + g_m)^{−a} v_j + β v_i`` with the gaps g_m = max(0, t_{m+1} − t_m).

    It is the temporal channel on a clock that passes log(1 + g) in a gap, without phases. a starts at 1, 1/2, 1/4, …
    """

    def rates(self, config: FuXiLinearConfig) -> list[float]:
        # with the paper's start of w, logsigmoid(w) = −ln 2 / 2π
        return [2.0**-k * (2 * math.pi / math.log(2)) / TICKS_OF_LOG for k in range(config.num_scales)]


# --- order -----------------------------------------------------------------------------------------------------------


class DistanceChannel(GrowingChannel):
    """``y_i = Σ_{j≤i} w[i − j] v_j``: a weight of every distance, or of every bucket of distances."""

    def __init__(self, config: FuXiLinearConfig) -> None:
        super().__init__()
        self.columns, self.positions = config.dim, config.max_positions
        self.bucketed = config.positional == "t5"
        self.weights = nn.Parameter(torch.empty(_T5_BUCKETS if self.bucketed else config.max_positions))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weights, std=0.02)

    def tables(self) -> list[nn.Parameter]:
        return [self.weights]

    def by_distance(self) -> Tensor:
        """From distance 0 on; larger ones take the last."""
        weights = at_least_float32(self.weights)
        return weights[t5_buckets(self.positions).to(weights.device)] if self.bucketed else weights

    def tiled(self, rows: Tensor, sequences: Sequences) -> Tensor:
        return tiles.distance_map(rows, self.by_distance(), sequences.chunks(_PAIRS))

    def of_user(self, rows: Tensor, sequences: Sequences, user: slice) -> Tensor:
        event = torch.arange(user.stop - user.start, device=rows.device)
        apart = (event.unsqueeze(1) - event).clamp(0, self.positions - 1)
        return _weighed(self.by_distance()[apart], rows[user])


def t5_buckets(distances: int) -> Tensor:
    """The bucket of each distance from 0 on: one each below 16, then logarithmic up to 128, as T5's without look-ahead.

    Example:
        >>> t5_buckets(200)[[0, 15, 16, 17, 64, 127, 199]].tolist()
        [0, 15, 16, 16, 26, 31, 31]
    """
    distance = torch.arange(distances, dtype=torch.float64)
    steps = torch.log(distance.clamp(min=1) / _T5_EXACT) / math.log(_T5_FURTHEST / _T5_EXACT)
    far = _T5_EXACT + (steps * (_T5_BUCKETS - _T5_EXACT)).floor()
    return torch.where(distance < _T5_EXACT, distance, far).clamp(max=_T5_BUCKETS - 1).long()


class AlibiChannel(Channel):
    """``y_i = Σ_{j≤i} e^{−m_a (i−j)} v_j`` with fixed slopes m_a = 2^{−8a/H}, a = 1..H."""

    def __init__(self, config: FuXiLinearConfig) -> None:
        super().__init__()
        self.columns, self.heads = config.dim, config.num_heads
        self.state_shape = (self.heads, 1, config.dim // self.heads)
        self.slopes_of = [2.0 ** (-8 * a / self.heads) for a in range(1, self.heads + 1)]

    def reset_parameters(self) -> None:
        """Nothing is learned."""

    def forward(
        self, rows: Tensor, sequences: Sequences, form: Form, state: Tensor | None = None, with_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        one, v, log_decay = self._heads(rows)
        if form == "chunkwise":
            y, final = retention(one, one, v, log_decay, sequences.retention_chunks, state, 0, with_state)
            return y.flatten(-2), final
        clock = torch.arange(len(v), device=v.device)
        y, final = GENERAL[form](one, one, v, log_decay, clock, clock, clock + 1, sequences.offsets, state)
        return y.flatten(-2), final

    def final_state(self, rows: Tensor, sequences: Sequences, state: Tensor) -> Tensor:
        one, v, log_decay = self._heads(rows)
        return retention_state(one, v, log_decay, sequences.retention_chunks, state)

    def step_output(self, rows: Tensor, step: Step, state: Tensor) -> Tensor:
        one, v, log_decay = self._heads(rows)
        return recurrent.read(one, one, v, log_decay, torch.zeros_like(step.ticks_B), state).flatten(-2)

    def step_state(self, rows: Tensor, step: Step, state: Tensor) -> Tensor:
        one, v, log_decay = self._heads(rows)
        return recurrent.write(one, v, log_decay, torch.ones_like(step.ticks_B), state)

    def _heads(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v = at_least_float32(rows).unflatten(-1, (self.heads, -1))
        return v.new_ones(*v.shape[:-1], 1), v, -v.new_tensor(self.slopes_of)


class RotatedRetention(RetentionChannel):
    """The retention channel with queries and keys that turn with the position."""

    def _heads(self, rows: Tensor, at: Sequences | Step) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._heads(rows, at)
        half = self.width // 2
        exponents = torch.arange(half, dtype=torch.float64, device=rows.device) / half
        position = at.position_B if isinstance(at, Step) else at.position_T
        cos, sin = turns(position, 10000.0**-exponents, q.dtype)
        return rotated(q, cos, sin), rotated(k, cos, sin), v


# --- which one -------------------------------------------------------------------------------------------------------


def retention_channel(config: FuXiLinearConfig) -> RetentionChannel | None:
    """As the configuration has it."""
    if not config.use_retention:
        return None
    return RotatedRetention(config) if config.positional == "rope" else RetentionChannel(config)


def temporal_channel(config: FuXiLinearConfig, shared: Channel | None) -> Channel | None:
    """As the configuration has it; with decays of another block's if that is given and has them."""
    if not config.use_temporal:
        return None
    if config.temporal in ("retention", "scaled"):
        kind: Any = TemporalChannel if config.temporal == "retention" else ScaledChannel
        made: Channel = kind(config, shared if isinstance(shared, TemporalChannel) else None)
        return made
    others: dict[str, Any] = {"absolute": AbsoluteTimeChannel, "hstu": BiasedAttentionChannel}
    other: Channel = others.get(config.temporal, TimeMapChannel)(config)
    return other


def positional_channel(config: FuXiLinearConfig) -> Channel | None:
    """As the configuration has it; rotated queries and keys need none."""
    if not config.use_positional or config.positional == "rope":
        return None
    every: dict[str, Any] = {"kernel": PositionalChannel, "alibi": AlibiChannel}
    made: Channel = every.get(config.positional, DistanceChannel)(config)
    return made


def _weighed(map_nn: Tensor, rows: Tensor) -> Tensor:
    return map_nn.tril() @ at_least_float32(rows)
