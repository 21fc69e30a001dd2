"""The three channels: each reads its own columns of a block's projection and gives (T, D) rows.

All share one interface, so that a block treats them alike. The chunkwise form uses each channel's own structure; the
parallel and the recurrent form put the channel in the terms of the general definition (``fuxi_torchrec.ops``).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuxi_torchrec.encoders.fuxi_linear.config import FuXiLinearConfig
from fuxi_torchrec.encoders.fuxi_linear.sequences import Sequences
from fuxi_torchrec.encoders.norms import rms_norm
from fuxi_torchrec.ops import parallel, recurrent
from fuxi_torchrec.ops.positional import positional, positional_state
from fuxi_torchrec.ops.precision import at_least_float32
from fuxi_torchrec.ops.retention import retention, retention_state
from fuxi_torchrec.ops.temporal import STATE_DTYPE, temporal, temporal_state

Form = Literal["chunkwise", "parallel", "recurrent"]

_Heads = tuple[Tensor, Tensor, Tensor]
_General = Callable[..., tuple[Tensor, Tensor]]
GENERAL: dict[str, _General] = {"parallel": parallel.attention, "recurrent": recurrent.attention}


class Step(NamedTuple):
    """One event of each of B users, as the channels need it.

    Attributes:
        position_B: its row in the position tables.
        ticks_B: int64, from its time to the next one's.
        key_BHK, query_BGK: its temporal keys, and queries at the next one's time.
    """

    position_B: Tensor
    ticks_B: Tensor
    key_BHK: Tensor
    query_BGK: Tensor


class Channel(nn.Module, ABC):
    """What the channels have in common.

    Attributes:
        columns: how many columns of the projection it takes.
        state_shape: of one user.
        state_dtype: None for that of the rows.
        uniform_values: whether its columns of the projection start as U(±1/sqrt(d)).
    """

    columns: int
    state_shape: tuple[int, ...]
    state_dtype: torch.dtype | None = None
    uniform_values = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """A channel that leaves the meta device gets its constants then: they are in no checkpoint."""
        came_from_meta = any(buffer.is_meta for buffer in self.buffers())
        changed = super()._apply(fn, recurse)
        if came_from_meta and isinstance(self, RetentionChannel | TemporalChannel):
            _fill(self)
        return changed

    @abstractmethod
    def reset_parameters(self) -> None: ...

    def tables(self) -> list[nn.Parameter]:
        """Parameters whose rows are looked up: trained like embeddings."""
        return []

    @abstractmethod
    def forward(
        self, rows: Tensor, sequences: Sequences, form: Form, state: Tensor | None = None, with_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """All events of all users, and the state after each user's last if wanted."""

    @abstractmethod
    def final_state(self, rows: Tensor, sequences: Sequences, state: Tensor) -> Tensor:
        """The state after each user's last event, where outputs are not needed; chunkwise, without gradients."""

    @abstractmethod
    def step_output(self, rows: Tensor, step: Step, state: Tensor) -> Tensor:
        """One event of each user, from a state that is not changed."""

    @abstractmethod
    def step_state(self, rows: Tensor, step: Step, state: Tensor) -> Tensor:
        """The state after one event of each user."""


class RetentionChannel(Channel):
    """``y_i = Σ_{j≤i} λ_a^{i−j} (q_i·k_j) v_j`` per head a; ``official``: exponent i − j + 1 and no norm here."""

    uniform_values = False

    def __init__(self, config: FuXiLinearConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.width = config.dim // config.num_heads
        self.columns = 3 * config.dim
        self.state_shape = (self.heads, self.width, self.width)
        self.official = config.preset == "official"
        self.lag = 1 if self.official else 0
        self.decay = nn.Parameter(torch.empty(self.heads))
        self.up_to: Tensor
        self.register_buffer("up_to", torch.empty(self.heads, self.heads), persistent=False)
        _fill(self)

    def reset_parameters(self) -> None:
        """λ_a starts near exp(−2^{−a})."""
        nn.init.normal_(self.decay, std=0.02)

    def log_decay(self) -> Tensor:
        """log λ_a = −exp(−Σ_{b≤a} softplus(w_b))."""
        softplus = F.softplus(at_least_float32(self.decay))
        # not cumsum, which has no deterministic kernel for floats on GPUs
        return -torch.exp((self.up_to * softplus).sum(1))

    def forward(
        self, rows: Tensor, sequences: Sequences, form: Form, state: Tensor | None = None, with_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The columns are q, k, v before their activation."""
        y, final = self.attend(self._heads(rows, sequences), sequences, form, state, with_state)
        return self._normed(y.flatten(-2)), final

    def attend(
        self, heads: _Heads, sequences: Sequences, form: Form, state: Tensor | None, with_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The sum itself, from q, k, v (T, H, K) after their activation."""
        log_decay = self.log_decay()
        if form == "chunkwise":
            return retention(*heads, log_decay, sequences.retention_chunks, state, self.lag, with_state)
        clock = torch.arange(len(heads[0]), device=log_decay.device)
        clocks = (clock, clock + self.lag, clock + 1)
        return GENERAL[form](*map(at_least_float32, heads), log_decay, *clocks, sequences.offsets, state)

    def final_state(self, rows: Tensor, sequences: Sequences, state: Tensor) -> Tensor:
        _, k, v = self._heads(rows, sequences)
        return retention_state(k, v, self.log_decay(), sequences.retention_chunks, state)

    def step_output(self, rows: Tensor, step: Step, state: Tensor) -> Tensor:
        y = recurrent.read(*self._heads(rows, step), self.log_decay(), torch.full_like(step.ticks_B, self.lag), state)
        return self._normed(y.flatten(-2))

    def step_state(self, rows: Tensor, step: Step, state: Tensor) -> Tensor:
        _, k, v = self._heads(rows, step)
        return recurrent.write(k, v, self.log_decay(), torch.ones_like(step.ticks_B), state)

    def _heads(self, rows: Tensor, at: Sequences | Step) -> _Heads:
        q, k, v = F.silu(rows).unflatten(-1, (3, self.heads, self.width)).unbind(-3)
        return q, k, v

    def _normed(self, y: Tensor) -> Tensor:
        return y if self.official else rms_norm(y)


@torch.no_grad()
def _fill(channel: "RetentionChannel | TemporalChannel") -> None:
    """The constants that are kept on the device."""
    if isinstance(channel, RetentionChannel):
        channel.up_to.copy_(-torch.ones(channel.heads, channel.heads, device="cpu").tril())
        return
    rates, periods = channel._constants
    theta = torch.tensor(rates, dtype=torch.float64, device="cpu")
    channel.theta_bits.copy_(theta.view(torch.int64))
    channel.periods.copy_(torch.tensor(periods, dtype=torch.int64, device="cpu"))


def _start_of_decay(half_life: float) -> float:
    """The raw decay with which a scale forgets half in so many periods: r_k = 2^{−1/(h P_k)}; 2.148724 for h = 1."""
    return -math.log(math.expm1(math.log(2) / (2 * math.pi * half_life)))


class TemporalChannel(Channel):
    """``y_i = α Σ_{j≤i} r_k^{c_{i+1} − c_j} sin|cos(φ_k(t_{i+1}) − φ_k(t_j)) v_j + β v_i``, sin heads then cos heads.

    With ``shared``, a channel, the decays are that one's.
    """

    state_dtype = STATE_DTYPE
    decay: Tensor | None

    def __init__(self, config: FuXiLinearConfig, shared: "TemporalChannel | None" = None) -> None:
        super().__init__()
        self.scales = config.num_scales
        self.width = config.dim // (2 * self.scales)
        self.columns = config.dim
        self.state_shape = (2 * self.scales, 2, self.width)
        self.paper, self.half_life = config.preset == "paper", config.temporal_half_life
        # as bits: an encoder that was float32 for a while has its θ still
        self.theta_bits: Tensor
        self.periods: Tensor
        for name in ("theta_bits", "periods"):
            self.register_buffer(name, torch.empty(self.scales, dtype=torch.int64), persistent=False)
        self._constants = (self.rates(config), config.temporal_periods)
        _fill(self)
        # in a tuple, so that it is not a submodule of this one
        self._shared: tuple[TemporalChannel, ...] = () if shared is None else (shared,)
        raw = None if shared is not None else torch.empty(self.scales)
        if config.learn_temporal_decay:
            self.register_parameter("decay", None if raw is None else nn.Parameter(raw))
        else:
            self.register_buffer("decay", raw)
        self.alpha = nn.Parameter(torch.empty(2 * self.scales)) if config.temporal_mix else None
        self.beta = nn.Parameter(torch.empty(2 * self.scales)) if config.temporal_mix else None

    def reset_parameters(self) -> None:
        """Decays of the preset, α near 0, β at 1."""
        if self.decay is not None:
            if self.paper:
                nn.init.constant_(self.decay, _start_of_decay(self.half_life))
            elif self.decay.requires_grad:
                nn.init.normal_(self.decay, std=0.02)
            else:
                nn.init.zeros_(self.decay)
        if self.alpha is not None and self.beta is not None:
            nn.init.normal_(self.alpha, std=0.02)
            nn.init.ones_(self.beta)

    def rates(self, config: FuXiLinearConfig) -> list[float]:
        """θ_k = 2π/P_k."""
        return [2 * math.pi / period for period in config.temporal_periods]

    def decays_of(self) -> dict[str, Any]:
        """Where its decays are kept, by name: among its own or block 0's parameters, or buffers if they are fixed."""
        if self.decay is None:
            return self._shared[0].decays_of()
        return self._parameters if "decay" in self._parameters else self._buffers

    def raw_decay(self) -> Tensor:
        """w_k, its own or the shared one."""
        return self._shared[0].raw_decay() if self.decay is None else self.decay

    def log_decay(self) -> Tensor:
        """log r_k = θ_k · logsigmoid(w_k), θ_k = 2π/P_k."""
        raw = at_least_float32(self.raw_decay())
        return self.theta_bits.view(torch.float64).to(raw.dtype) * F.logsigmoid(raw)

    def gain_and_skip(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """α and β of the sub-heads; 1 and 0 without mixing."""
        if self.alpha is None or self.beta is None:
            return like.new_ones(2 * self.scales), like.new_zeros(2 * self.scales)
        return at_least_float32(self.alpha), at_least_float32(self.beta)

    def forward(
        self, rows: Tensor, sequences: Sequences, form: Form, state: Tensor | None = None, with_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The columns are the sub-heads' values."""
        v, log_decay = self._heads(rows), self.log_decay()
        gain, skip = self.gain_and_skip(log_decay)
        if form == "chunkwise":
            y, final = temporal(v, log_decay, gain, skip, sequences.temporal_chunks, state, with_state)
            return y.flatten(-2), final
        v = at_least_float32(v)
        if state is None:
            state = v.new_zeros(len(sequences.offsets) - 1, *self.state_shape, dtype=self.state_dtype)
        (key, query), (clock, next_clock) = sequences.phases, sequences.clocks
        heads = (query, key.repeat(1, 2, 1), v, log_decay.repeat(2))
        y, final = GENERAL[form](*heads, clock, next_clock, next_clock, sequences.offsets, state)
        return (gain[:, None] * y + skip[:, None] * v).flatten(-2), final

    def final_state(self, rows: Tensor, sequences: Sequences, state: Tensor) -> Tensor:
        return temporal_state(self._heads(rows), self.log_decay(), sequences.temporal_chunks, state)

    def step_output(self, rows: Tensor, step: Step, state: Tensor) -> Tensor:
        v, log_decay = at_least_float32(self._heads(rows)), self.log_decay()
        gain, skip = self.gain_and_skip(log_decay)
        y = recurrent.read(step.query_BGK, step.key_BHK.repeat(1, 2, 1), v, log_decay.repeat(2), step.ticks_B, state)
        return (gain[:, None] * y + skip[:, None] * v).flatten(-2)

    def step_state(self, rows: Tensor, step: Step, state: Tensor) -> Tensor:
        key_BGK = step.key_BHK.repeat(1, 2, 1)
        return recurrent.write(key_BGK, self._heads(rows), self.log_decay().repeat(2), step.ticks_B, state)

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (2 * self.scales, self.width))


class PositionalChannel(Channel):
    """``y_i = α (2/d_p) Σ_{j≤i} (κ_i·κ_j) v_j + β v_i`` with κ_i the learned kernel row of position i."""

    def __init__(self, config: FuXiLinearConfig) -> None:
        super().__init__()
        self.columns = config.dim
        self.state_shape = (config.kernel_dim, config.dim)
        self.kernel = nn.Parameter(torch.empty(config.max_positions, config.kernel_dim))
        self.alpha = nn.Parameter(torch.empty(()))
        self.beta = nn.Parameter(torch.empty(()))

    def tables(self) -> list[nn.Parameter]:
        return [self.kernel]

    def reset_parameters(self) -> None:
        """κ starts as [sin(pω) | cos(pω)], α near 0, β at 1."""
        rows, width = self.kernel.shape
        omega = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
        angle = torch.arange(rows, dtype=torch.float64)[:, None] * omega
        with torch.no_grad():
            self.kernel.copy_(torch.cat((angle.sin(), angle.cos()), dim=1))
        nn.init.normal_(self.alpha, std=0.02)
        nn.init.ones_(self.beta)

    def gain_and_skip(self) -> tuple[Tensor, Tensor]:
        """α · 2/d_p and β."""
        return at_least_float32(self.alpha) * (2.0 / self.kernel.shape[1]), at_least_float32(self.beta)

    def forward(
        self, rows: Tensor, sequences: Sequences, form: Form, state: Tensor | None = None, with_state: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The columns are the values."""
        table, (gain, skip) = at_least_float32(self.kernel), self.gain_and_skip()
        if form == "chunkwise":
            return positional(rows, table, gain, skip, *sequences.positional_chunks, state, with_state)
        v = at_least_float32(rows)
        kernel = table[sequences.position_T].unsqueeze(1)
        still = torch.zeros_like(sequences.position_T)
        before = None if state is None else state.unsqueeze(1)
        heads = (kernel, kernel, v.unsqueeze(1), v.new_zeros(1))
        y, final = GENERAL[form](*heads, still, still, still, sequences.offsets, before)
        return gain * y.squeeze(1) + skip * v, final.squeeze(1)

    def final_state(self, rows: Tensor, sequences: Sequences, state: Tensor) -> Tensor:
        return positional_state(rows, at_least_float32(self.kernel), *sequences.positional_chunks, state)

    def step_output(self, rows: Tensor, step: Step, state: Tensor) -> Tensor:
        kernel, v = at_least_float32(self.kernel)[step.position_B].unsqueeze(1), at_least_float32(rows)
        heads = (kernel, kernel, v.unsqueeze(1), v.new_zeros(1))
        y = recurrent.read(*heads, torch.zeros_like(step.ticks_B), state.unsqueeze(1)).squeeze(1)
        gain, skip = self.gain_and_skip()
        return gain * y + skip * v

    def step_state(self, rows: Tensor, step: Step, state: Tensor) -> Tensor:
        kernel = at_least_float32(self.kernel)[step.position_B]
        return torch.addcmul(state, kernel.unsqueeze(2).to(state.dtype), rows.unsqueeze(1).to(state.dtype))
