"""Encoders that ignore time, with a state of constant size."""

import itertools
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from fuxi_torchrec.encoders import checks
from fuxi_torchrec.encoders.stack import Batch, StackEncoder
from fuxi_torchrec.encoders.state import EncoderState

BlockState = dict[str, Tensor]


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
