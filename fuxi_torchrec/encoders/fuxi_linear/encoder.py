"""FuXi-Linear: the encoder."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuxi_torchrec.encoders import checks
from fuxi_torchrec.encoders.base import Explanation, ParameterGroups, SequenceEncoder
from fuxi_torchrec.encoders.fuxi_linear import official
from fuxi_torchrec.encoders.fuxi_linear.block import Block, BlockState
from fuxi_torchrec.encoders.fuxi_linear.channels import Channel, Form, Step
from fuxi_torchrec.encoders.fuxi_linear.config import FuXiLinearConfig
from fuxi_torchrec.encoders.fuxi_linear.sequences import Sequences, temporal_vectors, ticks
from fuxi_torchrec.encoders.fuxi_linear.tiles import Tile, part, tiles
from fuxi_torchrec.encoders.state import EncoderState
from fuxi_torchrec.ops import backends
from fuxi_torchrec.ops.native import decode
from fuxi_torchrec.ops.placement import placed
from fuxi_torchrec.ops.triton import block as triton

# So many elements, events x width, pass through all blocks at once. On a CPU, buffers of this size stay near the cache
# and are used again; larger ones would be fetched from the system, page by page, every time.
TILE_ELEMENTS = {"cpu": 2**19}
TILE_ELEMENTS_ELSEWHERE = 2**23
_BACKWARD = 16  # widths an event, in flight in a block's backward pass


class FuXiLinearEncoder(SequenceEncoder):
    """Rows and times of events in, one vector per event or per user out, in time linear in the number of events.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> encoder = FuXiLinearEncoder(FuXiLinearConfig(dim=16, num_layers=2, num_heads=2, max_positions=64,
        ...                                              temporal_periods=(3600, 86400))).eval()
        >>> x = torch.randn(5, 16)                       # events of two users: 3 and 2
        >>> offsets = torch.tensor([0, 3, 5])
        >>> times = torch.tensor([1000, 2000, 9000, 500, 700])
        >>> now = torch.tensor([10000, 10000])
        >>> y = encoder(x, offsets, times, now)
        >>> y.shape
        torch.Size([5, 16])
        >>> state = encoder.append(encoder.init_state(2), x, offsets, times)
        >>> torch.allclose(encoder.query(state, now), y[[2, 4]], atol=1e-5)
        True
    """

    config_class = FuXiLinearConfig
    config: FuXiLinearConfig

    def __init__(self, config: FuXiLinearConfig) -> None:
        super().__init__(config)
        self.state_kind = "growing" if config.growing else "constant"
        self.positions = nn.Parameter(torch.empty(config.max_positions, config.dim))
        self.blocks = nn.ModuleList([Block(config)])
        # official: one set of temporal decays, in block 0, for all blocks
        shared = self.layers[0].temporal if config.preset == "official" else None
        self.blocks.extend(Block(config, shared) for _ in range(1, config.num_layers))
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    @property
    def layers(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks]

    def reset_parameters(self) -> None:
        nn.init.xavier_normal_(self.positions)
        for block in self.layers:
            block.reset_parameters()

    @classmethod
    def from_official(  # type: ignore[override]
        cls, params: Mapping[str, Tensor], temporal_periods: tuple[int, ...], dropout: float = 0.0
    ) -> "FuXiLinearEncoder":
        """An encoder with weights trained with the released code; ``official.py`` beside this lists its names."""
        encoder = cls(official.infer_config(params, temporal_periods, dropout))
        official.load(encoder.positions, encoder.layers, params)
        return encoder

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        timestamps: Tensor,
        request_timestamps: Tensor,
        *,
        form: Form = "chunkwise",
        validate: bool | None = None,
    ) -> Tensor:
        """Every position's output, each queried at the time of the event after it, the last at the request time.

        Args:
            x: (T, D) event rows of all users, one user after another.
            offsets: (B + 1,) int64 bounds of the users' rows; kept on the host it saves a device sync.
            timestamps: (T,) int64, in the unit of ``temporal_periods``.
            request_timestamps: (B,) int64; before the user's last event nothing decays, the phase is its own.
            form: how to compute; the result is the same.
            validate: check values too (finite rows, monotone offsets, possible times); by default on the CPU only.

        Returns:
            (T, D); a user without events has no row.
        """
        if form not in ("chunkwise", "parallel", "recurrent"):
            raise ValueError(f"form must be 'chunkwise', 'parallel' or 'recurrent', not {form!r}")
        bounds = checks.batch(self.config, self.positions, x, offsets, timestamps, validate, request_timestamps)
        if not len(x):
            # connected to every parameter: a rank without events still takes part in the gradients' reduction
            wide = x.to(torch.promote_types(x.dtype, self.positions.dtype))  # as with events, also under autocast
            return wide + sum(p.flatten()[:0].sum() for p in self.parameters() if p.requires_grad)
        dtype = torch.promote_types(x.dtype, torch.float32)
        sequences = Sequences(self.config, bounds, timestamps, request_timestamps, dtype)
        rows = self._embed(x, sequences.position_T)
        if form == "chunkwise":
            return self._tiled(rows, sequences)
        for block in self.layers:
            rows, _ = self._run(block, rows, sequences, form)
        return rows

    # a configuration whose state grows is served as the base class does: from the events themselves

    def init_state(self, batch_size: int) -> Any:
        if batch_size < 0:
            raise ValueError(f"batch_size must not be negative, but is {batch_size}")
        if self.config.growing:
            return super().init_state(batch_size)
        like = self.positions.detach()
        checks.precision(like.device)

        def zeros(channel: Channel) -> Tensor:
            return like.new_zeros(batch_size, *channel.state_shape, dtype=channel.state_dtype or like.dtype)

        memory = tuple({name: zeros(channel) for name, channel in block.channels.items()} for block in self.layers)
        count, time = (like.new_zeros(batch_size, dtype=torch.int64) for _ in range(2))
        known = None if like.device.type == "cpu" else (0,) * batch_size
        return EncoderState(self.fingerprint, count, time, like.new_zeros(batch_size, self.config.dim), memory, known)

    @torch.no_grad()
    def append(
        self, state: Any, x: Tensor, offsets: Tensor, timestamps: Tensor, *, validate: bool | None = None
    ) -> Any:
        if self.config.growing:
            return super().append(state, x, offsets, timestamps, validate=validate)
        checks.state(self, state, self.positions)
        bounds = checks.batch(self.config, self.positions, x, offsets, timestamps, validate, state=state)
        if not len(x):
            return state
        new = [b - a for a, b in itertools.pairwise(bounds)]
        if max(new) > 1:
            sequences = Sequences(self.config, bounds, timestamps, timestamps[:0], x.dtype, state.count)
            return self._append_many(state, self._embed(x, sequences.position_T), bounds, timestamps)
        if min(new) == 1:
            return self.append_one(state, x, timestamps)
        users = [user for user, events in enumerate(new) if events]
        return state.put(users, self.append_one(state.select(users), x, timestamps))

    @torch.no_grad()
    def query(self, state: Any, request_timestamps: Tensor, *, validate: bool | None = None) -> Tensor:
        if self.config.growing:
            return super().query(state, request_timestamps, validate=validate)
        checks.state(self, state, self.positions)
        checks.requests(request_timestamps, len(state), self.positions.device, validate)
        return self.query_unchecked(state, request_timestamps)

    def append_one(self, state: EncoderState, rows: Tensor, times: Tensor) -> EncoderState:
        """One new event for every user: commit the pending one with its real successor, then wait with the new one."""
        rows = self._embed(rows, state.count.clamp(max=self.config.max_positions - 1))
        if self._decodes_natively():
            kept = decode.append(_pending(state), times, self._weights())
            names = tuple(state.memory[0])
            blocks = tuple(dict(zip(names, kept[n : n + 3], strict=True)) for n in range(0, len(kept), 3))
            return _committed(state, rows, times, blocks)
        if self._decodes_in_triton():
            after = self._triton_steps(state, times, store=True)[1]
            return _committed(state, rows, times, after)
        step, x, kept_by = self._step(state, times), state.pending, list[BlockState]()
        waiting_B1 = (state.count > 0).to(rows.dtype).unsqueeze(1)
        for block, memory in zip(self.layers, state.memory, strict=True):
            if len(kept_by) + 1 < len(self.blocks):
                x, columns = block.step_output(x, step, memory)
            else:  # the last block's output is not needed
                columns = block.project_columns(x)
            # zero columns, of a user without a pending event, write nothing
            kept_by.append(block.step_state([column * waiting_B1 for column in columns], step, memory))
        return _committed(state, rows, times, tuple(kept_by))

    def query_unchecked(self, state: EncoderState, request_timestamps: Tensor) -> Tensor:
        """The last block's output of the pending events, queried at a time."""
        if self._decodes_natively():
            return decode.query(_pending(state), request_timestamps, self._weights())
        if self._decodes_in_triton():
            return self._triton_steps(state, request_timestamps, store=False)[0] * (state.count > 0).unsqueeze(1)
        step, rows = self._step(state, request_timestamps), state.pending
        for block, memory in zip(self.layers, state.memory, strict=True):
            rows, _ = block.step_output(rows, step, memory)
        return rows * (state.count > 0).unsqueeze(1)

    # --- training and looking ----------------------------------------------------------------------------------------

    def optimizer_groups(self) -> ParameterGroups:
        """The tables of positions and the positional kernels are tables; decays, α and β are scalars."""
        channels = [channel for block in self.layers for channel in block.channels.values()]
        tables = [self.positions, *(table for channel in channels for table in channel.tables())]
        apart = {id(parameter) for parameter in tables}
        matrices, _, scalars = ParameterGroups.by_shape([p for p in self.parameters() if id(p) not in apart])
        return ParameterGroups(matrices, tables, scalars)

    def activation_bytes(self, events: int) -> int:
        kept, layers = self.config.activation_widths(), self.config.num_layers
        # of checkpointed blocks only the inputs are kept
        widths = layers * kept if not self.config.activation_checkpointing else layers + kept
        return int(4 * self.config.dim * events * (widths + _BACKWARD))

    def explain(self, per_second: int) -> Explanation:
        """Temporal scales, decays and the positional kernel of each block."""
        from fuxi_torchrec.encoders.fuxi_linear.explain import Learned, learned

        return Learned(learned(self), per_second)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _embed(self, x: Tensor, position: Tensor) -> Tensor:
        """``x_i = Dropout(sqrt(d) e_i + P[i−1])``."""
        return self.dropout(torch.add(self.positions[position], x, alpha=math.sqrt(self.config.dim)))

    def _step(self, state: EncoderState, next_time_B: Tensor) -> Step:
        """The pending events, followed by something at ``next_time_B``."""
        position = (state.count - 1).clamp(0, self.config.max_positions - 1)
        passed = ticks(self.config, state.pending_time, next_time_B)
        vectors = temporal_vectors(
            *(self.config, state.pending_time, next_time_B, state.pending.dtype),
            getattr(self.layers[0].temporal, "periods", None),
        )
        return Step(position, passed, *vectors)

    def _decodes_natively(self) -> bool:
        return self.config.whole and backends.native_decode(self.positions)

    def _decodes_in_triton(self) -> bool:
        return self.layers[0].in_triton(self.positions) and backends.decoding()

    def _triton_steps(
        self, state: EncoderState, next_time_B: Tensor, store: bool
    ) -> tuple[Tensor, tuple[BlockState, ...]]:
        """The pending events through all blocks: the last one's output, or what all of them then keep."""
        step, x = self._step(state, next_time_B), state.pending
        after: list[BlockState] = []
        event = triton.Step(state.count, step.ticks_B, step.key_BHK, step.query_BGK, step.position_B)
        for block, memory in zip(self.layers, state.memory, strict=True):
            last = store and len(after) + 1 == len(self.blocks)  # its output is not needed
            x, kept = block.triton_step(x, event, memory, store, not last)
            after.append(kept)
        return x, tuple(after)

    def _weights(self) -> decode.Weights:
        parameters = [parameter for block in self.layers for parameter in block.decode_parameters()]
        config = self.config
        return decode.Weights(parameters, config.temporal_periods, config.preset == "official", config.temporal_phases)

    def _append_many(self, state: EncoderState, rows: Tensor, bounds: list[int], time_T: Tensor) -> EncoderState:
        """Commit the pending event and all new ones but the last; then wait with the last.

        ``rows`` are the new events' as they enter the first block, ``bounds`` the B + 1 of each user's. What
        depends on how many there are is computed on the host.
        """
        users, seen = len(state), state.counts()
        at, waiting_B = torch.tensor(bounds), (torch.tensor(seen) > 0).long()
        new_B = at.diff()
        committed_B = torch.where(new_B > 0, new_B + waiting_B - 1, 0)
        commit_at = torch.cat((committed_B.new_zeros(1), committed_B.cumsum(0)))
        user_X = torch.repeat_interleave(torch.arange(users), committed_B)
        event_X = torch.arange(len(user_X)) - commit_at[user_X]
        # of the pending events first, then of the new ones
        new_X = users + at[user_X] + event_X - waiting_B[user_X]
        source_X = torch.where(event_X < waiting_B[user_X], user_X, new_X)
        device = rows.device
        last_B = placed((at[1:] - 1).clamp(min=0), device)
        blocks = [{name: x.clone() for name, x in memory.items()} for memory in state.memory]
        if len(user_X):
            source = placed(source_X, device)
            times = torch.cat((state.pending_time, time_T))[source]
            start_B = (state.count - 1).clamp(min=0)
            sequences = Sequences(self.config, commit_at.tolist(), times, time_T[last_B], rows.dtype, start_B)
            self._commit(torch.cat((state.pending, rows))[source], sequences, blocks)
        new = placed(new_B, device)
        touched = new > 0
        return replace(
            state,
            count=state.count + new,
            pending=torch.where(touched[:, None], rows[last_B], state.pending),
            pending_time=torch.where(touched, time_T[last_B], state.pending_time),
            memory=tuple(blocks),
            known=None if state.known is None else tuple(int(n) + m for n, m in zip(new_B, seen, strict=True)),
        )

    def _tiles(self, rows: Tensor, sequences: Sequences) -> Iterator[tuple[Tile, Sequences, Tensor]]:
        """Tiles of a batch: where they lie, what they cover, and their rows."""
        elements = TILE_ELEMENTS.get(rows.device.type, TILE_ELEMENTS_ELSEWHERE)
        size = len(rows) if self.config.growing else max(1, elements // self.config.dim)  # no state to go on from
        for tile in tiles(sequences.offsets, size):
            yield tile, part(sequences, tile), rows[tile.first_row : tile.end_row]

    def _tiled(self, rows: Tensor, sequences: Sequences) -> Tensor:
        """All blocks over one tile of rows after another; a user cut by a tile's edge goes on from its state."""
        outputs, carried = [], list[BlockState]()
        for tile, covered, x in self._tiles(rows, sequences):
            before, carried = carried, []
            for layer, block in enumerate(self.layers):
                state = None
                if tile.goes_on:
                    state = {name: _extended(s, len(tile.offsets) - 1) for name, s in before[layer].items()}
                x, after = self._run(block, x, covered, "chunkwise", state, tile.cut)
                carried.append({name: s[-1:] for name, s in after.items()})
            outputs.append(x)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _commit(self, rows: Tensor, sequences: Sequences, blocks: list[BlockState]) -> None:
        """The same without outputs: the states of all users are replaced by those after their last rows."""
        for tile, covered, x in self._tiles(rows, sequences):
            users = slice(tile.first_user, tile.end_user)
            for block, whole in zip(self.layers, blocks, strict=True):
                state = {name: s[users] for name, s in whole.items()}
                if whole is not blocks[-1]:
                    x, state = block(x, covered, "chunkwise", state, True)
                else:  # the last block's output is not needed
                    state = block.final_state(x, covered, state)
                for name, s in state.items():
                    whole[name][users] = s

    def _run(
        self,
        block: Block,
        x: Tensor,
        sequences: Sequences,
        form: Form,
        state: BlockState | None = None,
        with_state: bool = False,
    ) -> tuple[Tensor, BlockState]:
        """One block; its activations are kept for the backward pass, or recomputed there."""
        if self.config.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, sequences, form, state, with_state, use_reentrant=False)
        return block(x, sequences, form, state, with_state)


def _committed(state: EncoderState, rows: Tensor, times: Tensor, memory: tuple[BlockState, ...]) -> EncoderState:
    """The state that has the pending events in its memory and waits with others."""
    known = None if state.known is None else tuple(seen + 1 for seen in state.known)
    return replace(state, count=state.count + 1, pending=rows, pending_time=times.clone(), memory=memory, known=known)


def _pending(state: EncoderState) -> decode.Pending:
    memory = [block[name] for block in state.memory for name in ("retention", "temporal", "positional")]
    return decode.Pending(state.count, state.pending_time, state.pending, memory)


def _extended(first: Tensor, users: int) -> Tensor:
    """The first user's state, and zero for the others."""
    return torch.cat((first, first.new_zeros(users - 1, *first.shape[1:])))
