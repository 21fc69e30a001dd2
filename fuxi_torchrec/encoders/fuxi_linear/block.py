"""One block: norm, one projection, three channels, gated merge, multi-stage feed-forward network."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuxi_torchrec.encoders.fuxi_linear.channels import Channel, Form, PositionalChannel, Step, TemporalChannel
from fuxi_torchrec.encoders.fuxi_linear.config import FuXiLinearConfig
from fuxi_torchrec.encoders.fuxi_linear.sequences import Sequences
from fuxi_torchrec.encoders.fuxi_linear.variants import positional_channel, retention_channel, temporal_channel
from fuxi_torchrec.encoders.norms import layer_norm, rms_norm
from fuxi_torchrec.ops import backends
from fuxi_torchrec.ops.native import block as native
from fuxi_torchrec.ops.native import rows as by_row
from fuxi_torchrec.ops.product import product
from fuxi_torchrec.ops.triton import Shape
from fuxi_torchrec.ops.triton import block as triton

# What a block keeps of B users: a tensor per channel, by the channel's name.
BlockState = dict[str, Tensor]


class _Slots:
    """Where parameters are kept. A class of its own: torch.export copies lists and dictionaries while it traces."""

    def __init__(self, slots: list[tuple[dict[str, Any], str]]) -> None:
        self._slots = slots

    def tensors(self) -> list[Tensor]:
        return [parameters[name] for parameters, name in self._slots]


class Block(nn.Module):
    """``z = o·W_0 + x`` with o the gated channels; ``out = ((m W_1) ⊙ SiLU(m W_2)) W_3 + z`` with m = RMSNorm(z).

    With ``shared_decay``, a temporal channel, the decays of this block's are that one's.
    """

    def __init__(self, config: FuXiLinearConfig, shared_decay: Channel | None = None) -> None:
        super().__init__()
        backends.found()  # loaded now, and not while a compiler looks on
        d, hidden = config.dim, config.hidden_dim
        self.official = config.preset == "official"
        self.norm = layer_norm if self.official else rms_norm
        # in the order of the merge
        self.retention = retention_channel(config)
        self.temporal = temporal_channel(config, shared_decay)
        self.positional = positional_channel(config)
        self.whole = config.whole
        # columns: u of every channel, then each channel's own
        self.gate_dim = d * len(self.channels)
        self.widths = [self.gate_dim, *(channel.columns for channel in self.channels.values())]
        self.in_proj = nn.Parameter(torch.empty(d, sum(self.widths)))
        self.out_proj = nn.Parameter(torch.empty(self.gate_dim, d))  # W_0
        self.ffn_in = nn.Parameter(torch.empty(d, 2 * hidden))  # W_1 | W_2
        self.ffn_out = nn.Parameter(torch.empty(hidden, d))  # W_3
        self.dropout = nn.Dropout(config.dropout)
        self._slots: _Slots | None = None
        shape = Shape(d, config.num_heads, config.num_scales, config.kernel_dim)
        self._shape = shape if config.whole else None

    @property
    def channels(self) -> dict[str, Channel]:
        every = {"retention": self.retention, "temporal": self.temporal, "positional": self.positional}
        return {name: channel for name, channel in every.items() if channel is not None}

    def reset_parameters(self) -> None:
        """N(0, 0.02), but U(±1/sqrt(d)) for the values of the temporal and positional channels."""
        for weight in (self.in_proj, self.out_proj, self.ffn_in, self.ffn_out):
            nn.init.normal_(weight, std=0.02)
        bound = self.in_proj.shape[0] ** -0.5
        for _, channel, part in self._with(self.in_proj.detach().split(self.widths, dim=1)[1:]):
            if channel.uniform_values:
                nn.init.uniform_(part, -bound, bound)
            channel.reset_parameters()

    def project(self, x_TD: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The gate u, and each channel's columns, from one matrix product."""
        u, *columns = (self.norm(x_TD) @ self.in_proj).split(self.widths, dim=-1)
        return F.silu(u) if self.official else u, columns

    def project_columns(self, x_TD: Tensor) -> Sequence[Tensor]:
        """Each channel's columns alone, where the block's output is not needed."""
        return (self.norm(x_TD) @ self.in_proj[:, self.gate_dim :]).split(self.widths[1:], dim=-1)

    def merge(self, x_TD: Tensor, u: Tensor, ys: Sequence[Tensor]) -> Tensor:
        """Norm and gate the channels' rows, mix them, and run the feed-forward network."""
        gated = torch.cat([self.norm(y) for y in ys], dim=-1).to(u.dtype) * u
        # not addmm: it rounds onto the residual at every step of the sum when there are one or two rows
        z = self.dropout(gated) @ self.out_proj + x_TD
        linear, gate = (self.dropout(rms_norm(z)) @ self.ffn_in).chunk(2, dim=-1)
        return (linear * F.silu(gate)) @ self.ffn_out + z

    def forward(
        self,
        x_TD: Tensor,
        sequences: Sequences,
        form: Form = "chunkwise",
        state: BlockState | None = None,
        with_state: bool = False,
    ) -> tuple[Tensor, BlockState]:
        """All events of all users, and the state after each user's last; empty unless ``with_state``.

        ``state`` is the one before each user's first row; zero if None.
        """
        if form == "chunkwise" and self.whole and backends.native_block(x_TD):
            return self._native(x_TD, sequences, state, with_state)
        if form == "chunkwise" and self.in_triton(x_TD):
            return self._triton(x_TD, sequences, state, with_state)
        u, columns = self.project(x_TD)
        ys, after = [], {}
        for name, channel, rows in self._with(columns):
            y, final = channel(rows, sequences, form, None if state is None else state[name], with_state)
            ys.append(y)
            if with_state:
                after[name] = cast(Tensor, final)
        return self.merge(x_TD, u, ys), after

    def _native(
        self, x_TD: Tensor, sequences: Sequences, state: BlockState | None, with_state: bool
    ) -> tuple[Tensor, BlockState]:
        """The same as :meth:`forward`, all channels and their merge in one operator."""
        parameters = self._fused_parameters()
        events = native.Events(sequences.bounds, *sequences.phases, sequences.ticks_T, sequences.start_B)
        before = None if state is None else native.Memory(**state)
        normed = by_row.layer_norm(x_TD) if self.official else by_row.rms_norm(x_TD)
        projection = product(normed, self.in_proj)
        gated, after = native.block(projection, events, parameters, before, self.official, with_state)
        z = product(self.dropout(gated), self.out_proj) + x_TD  # from here on as in merge
        hidden = by_row.swiglu(product(self.dropout(by_row.rms_norm(z)), self.ffn_in))
        return product(hidden, self.ffn_out) + z, {} if after is None else after._asdict()

    def _fused_parameters(self) -> native.Parameters:
        """Of the channels, as one operator takes them all."""
        assert self.retention is not None
        assert isinstance(self.temporal, TemporalChannel) and isinstance(self.positional, PositionalChannel)
        temporal_log = self.temporal.log_decay()
        mix = self.temporal.gain_and_skip(temporal_log)
        positional = (self.positional.kernel, *self.positional.gain_and_skip())
        return native.Parameters(self.retention.log_decay(), temporal_log, *mix, *positional)

    def in_triton(self, x_TD: Tensor) -> bool:
        """Whether such rows pass through Triton kernels."""
        return self._shape is not None and backends.triton_block(x_TD, self._shape)

    def _triton(
        self, x_TD: Tensor, sequences: Sequences, state: BlockState | None, with_state: bool
    ) -> tuple[Tensor, BlockState]:
        """The same as :meth:`forward`, all channels and their merge in one operator, the norms in one each."""
        before = None if state is None else native.Memory(**state)
        gated, after = triton.block(
            *(self._triton_projection(x_TD), sequences.triton_events, self._fused_parameters(), before),
            *(self.official, with_state),
        )
        return self._triton_mix(x_TD, gated), {} if after is None else after._asdict()

    def _triton_projection(self, x_TD: Tensor) -> Tensor:
        return triton.norm(x_TD, self.official) @ self.in_proj

    def _triton_mix(self, x_TD: Tensor, gated: Tensor) -> Tensor:
        z = self.dropout(gated) @ self.out_proj + x_TD  # from here on as in merge
        linear, gate = (self.dropout(triton.norm(z, False)) @ self.ffn_in).chunk(2, dim=-1)
        return (linear * F.silu(gate)) @ self.ffn_out + z

    def triton_step(
        self, x_BD: Tensor, event: triton.Step, state: BlockState, store: bool, output: bool
    ) -> tuple[Tensor, BlockState]:
        """One event of each user: the block's output, if wanted, and the state after it, if wanted."""
        gated, after = triton.step(
            *(self._triton_projection(x_BD), event, self._fused_parameters(), native.Memory(**state)),
            *(self.official, store),
        )
        return self._triton_mix(x_BD, gated) if output else x_BD, {} if after is None else after._asdict()

    def decode_parameters(self) -> list[Tensor]:
        """As :class:`fuxi_torchrec.ops.native.decode.Weights` has them; every channel must be on."""
        if self._slots is None:
            self._slots = self._decode_slots()
        return self._slots.tensors()

    def _decode_slots(self) -> _Slots:
        """Where they are kept, a module's own dictionary: looking each up as an attribute takes a third of a query."""
        retention, temporal, positional = self.retention, self.temporal, self.positional
        assert retention is not None
        assert isinstance(temporal, TemporalChannel) and isinstance(positional, PositionalChannel)
        mix: dict[str, Any] = temporal._parameters
        if temporal.alpha is None:
            mix = dict.fromkeys(("alpha", "beta"), self.in_proj.new_empty(0))
        slots = [
            *((self._parameters, name) for name in ("in_proj", "out_proj", "ffn_in", "ffn_out")),
            *((retention._parameters, "decay"), (temporal.decays_of(), "decay"), (mix, "alpha"), (mix, "beta")),
            *((positional._parameters, name) for name in ("kernel", "alpha", "beta")),
        ]
        return _Slots(slots)

    def final_state(self, x_TD: Tensor, sequences: Sequences, state: BlockState) -> BlockState:
        """The state after each user's last row, where the block's output is not needed; without gradients."""
        if self.in_triton(x_TD):
            projection, before = self._triton_projection(x_TD), native.Memory(**state)
            parameters = self._fused_parameters()
            return triton.states(projection, sequences.triton_events, parameters, before, self.official)._asdict()
        columns = self.project_columns(x_TD)
        return {name: channel.final_state(rows, sequences, state[name]) for name, channel, rows in self._with(columns)}

    def step_output(self, x_BD: Tensor, step: Step, state: BlockState) -> tuple[Tensor, Sequence[Tensor]]:
        """One event of each user, from a state that is not changed; and the columns that :meth:`step_state` takes."""
        u, columns = self.project(x_BD)
        ys = [channel.step_output(rows, step, state[name]) for name, channel, rows in self._with(columns)]
        return self.merge(x_BD, u, ys), columns

    def step_state(self, columns: Sequence[Tensor], step: Step, state: BlockState) -> BlockState:
        """The state after one event of each user."""
        return {name: channel.step_state(rows, step, state[name]) for name, channel, rows in self._with(columns)}

    def _with(self, columns: Sequence[Tensor]) -> Iterator[tuple[str, Channel, Tensor]]:
        for (name, channel), rows in zip(self.channels.items(), columns, strict=True):
            yield name, channel, rows
