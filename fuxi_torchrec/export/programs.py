"""The encoder as portable programs: a user's vector at a time, and one event more, from plain tensors to plain tensors.

They run wherever ``torch.export.load`` does, without this package. An encoder of constant state has them. A state is
:meth:`EncoderState.flat`, users first: ``count``, ``pending_time``, ``pending``, then one tensor per channel; with a
bias for items of users' windows, :meth:`WindowState.tensors` follow: ``items``, ``events``, ``counts``, ``gaps``,
``times``.
"""

import io
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fuxi_torchrec.encoders import make_encoder
from fuxi_torchrec.encoders.base import SequenceEncoder
from fuxi_torchrec.encoders.state import EncoderState
from fuxi_torchrec.export.bundle import ExportError, scaled
from fuxi_torchrec.tasks.repeats import RepeatBias
from fuxi_torchrec.tasks.window_state import WindowState

QUERY, APPEND = "query.pt2", "append.pt2"
TOLERANCE = 1e-5  # the encoder may run other kernels than its programs, which need nothing but torch
_CHECKED = (1, 2, 3, 8)  # users of a batch
_WINDOW = len(fields(WindowState))  # tensors of a state that are of the window


class _Program(nn.Module):
    def __init__(self, encoder: SequenceEncoder) -> None:
        super().__init__()
        self.encoder = encoder
        self._like = cast(EncoderState, encoder.init_state(0))


class Query(_Program):
    """``(state, request times (B,)) -> (B, D)``: users' vectors as the score uses them."""

    def __init__(self, encoder: SequenceEncoder, similarity: str) -> None:
        super().__init__(encoder)
        self.similarity = similarity

    def forward(self, state: tuple[Tensor, ...], request_times: Tensor) -> Tensor:
        with torch.no_grad():
            return scaled(self.encoder.query_unchecked(self._like.from_flat(state), request_times), self.similarity)


class QueryWithUsers(Query):
    """``(state, request times (B,), rows of the users (B, D)) -> (B, D)``: the same of users with features."""

    def forward(self, state: tuple[Tensor, ...], request_times: Tensor, user_rows: Tensor) -> Tensor:  # type: ignore[override]
        with torch.no_grad():
            found = self.encoder.query_unchecked(self._like.from_flat(state), request_times)
            return scaled(found + user_rows, self.similarity)


class WindowQuery(nn.Module):
    """``(state, request times (B,), ...) -> vectors (B, D), items (B, W), bias (B, W), shift (B, D)``, takes what the
    query without a bias does.

    An item of the window, where it is not 0, scores ``(<vector + shift, e> + bias) / temperature``.
    """

    def __init__(self, query: nn.Module, bias: RepeatBias, temperature: float) -> None:
        super().__init__()
        self.query, self.bias, self.temperature = query, bias, temperature

    def forward(
        self, state: tuple[Tensor, ...], request_times: Tensor, user_rows: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        more = () if user_rows is None else (user_rows,)
        vectors, windows = self.query(state[:-_WINDOW], request_times, *more), WindowState(*state[-_WINDOW:])
        found = windows.correction(self.bias, state[0], vectors, request_times, self.temperature)
        return vectors, found.ids, found.bias, found.shift


class Append(_Program):
    """``(state, rows (B, D), times (B,)) -> state`` after one event more of every user."""

    def forward(self, state: tuple[Tensor, ...], rows: Tensor, times: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.encoder.append_one(self._like.from_flat(state), rows, times).flat()


class WindowAppend(Append):
    """``(state, rows (B, D), times (B,), items (B,)) -> state``: dense indices of the items, 0 for unknown ones."""

    def forward(self, state: tuple[Tensor, ...], rows: Tensor, times: Tensor, items: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        windows = WindowState(*state[-_WINDOW:]).append_one(items, state[0], times)
        return (*super().forward(state[:-_WINDOW], rows, times), *windows.tensors())


def example(encoder: SequenceEncoder, users: int, seed: int = 0) -> tuple[EncoderState, Tensor, Tensor]:
    """States of users after 0, 1, 2, ... events, and a row and a time of one event more of each."""
    draw = torch.Generator().manual_seed(seed)
    dim, lengths = encoder.config.dim, torch.arange(users) % 5
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    times = 1_700_000_000 + torch.randint(0, 86_400, (total,), generator=draw).sort().values
    rows = torch.randn(total, dim, generator=draw) * dim**-0.5
    state = cast(EncoderState, encoder.append(encoder.init_state(users), rows, offsets, times))
    later = 1_700_086_400 + torch.randint(0, 86_400, (users,), generator=draw)
    return state, torch.randn(users, dim, generator=draw) * dim**-0.5, later


def write_programs(
    encoder: SequenceEncoder,
    similarity: str,
    directory: Path,
    with_user_rows: bool = False,
    bias: RepeatBias | None = None,
    temperature: float = 1.0,
) -> float:
    """Export both, save them, and compare what was saved with the encoder; the largest difference.

    Args:
        with_user_rows: the query takes what features of users add to the encoder's output.
        bias: for items of users' windows, which are part of the state then.
    """
    window = bias.config.window if bias is not None else 0
    query: nn.Module = (QueryWithUsers if with_user_rows else Query)(encoder, similarity)
    made = (query, Append(encoder)) if bias is None else (WindowQuery(query, bias, temperature), WindowAppend(encoder))
    batch, (state, appended, times) = torch.export.Dim("batch", min=1), _arguments(encoder, 4, window)
    asked = (times, appended[0]) if with_user_rows else (times,)
    per_user = {0: batch}
    shapes = tuple(per_user for _ in state)
    programs: dict[str, tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]] = {
        QUERY: (made[0], (state, *asked), (shapes, *(per_user for _ in asked))),
        APPEND: (made[1], (state, *appended), (shapes, *(per_user for _ in appended))),
    }
    directory.mkdir(parents=True, exist_ok=True)
    loaded = {}
    for name, (program, arguments, shape) in programs.items():
        exported = torch.export.export(program.eval(), arguments, dynamic_shapes=shape, strict=False)
        written = io.BytesIO()
        torch.export.save(exported, written)  # to memory: on a full disk torch ends the process
        (directory / name).write_bytes(written.getvalue())
        written.seek(0)
        loaded[name] = torch.export.load(written).module()
    worst = 0.0
    for users in _CHECKED:
        state, appended, times = _arguments(encoder, users, window, seed=users)
        more = (appended[0],) if with_user_rows else ()
        after, found = _expected(encoder, similarity, bias, temperature, state, appended, more)
        queried = loaded[QUERY](after, times + 3600, *more)
        pairs = [*zip(after, loaded[APPEND](state, *appended), strict=True)]
        pairs += zip(found, queried if bias is not None else [queried], strict=True)
        for ours, theirs in pairs:
            worst = max(worst, float((ours.double() - theirs.double()).abs().max()) if ours.numel() else 0.0)
    if not worst <= TOLERANCE:
        raise ExportError(f"{directory}: the exported programs differ from the encoder by {worst:.1e}")
    return worst


_Tensors = tuple[Tensor, ...]


def _arguments(encoder: SequenceEncoder, users: int, window: int, seed: int = 0) -> tuple[_Tensors, _Tensors, Tensor]:
    """A state, what is appended to it, and times."""
    state, rows, times = example(encoder, users, seed)
    if not window:
        return state.flat(), (rows, times), times
    draw = np.random.default_rng(seed)
    offsets = np.concatenate([[0], state.count.cumsum(0).numpy()])
    items, when = draw.integers(0, 4, offsets[-1]), draw.integers(0, 10**9, offsets[-1])
    windows = WindowState.of(items, offsets, when, window)
    more = torch.from_numpy(draw.integers(0, 4, users))
    return (*state.flat(), *windows.tensors()), (rows, times, more), times


def _expected(
    encoder: SequenceEncoder,
    similarity: str,
    bias: RepeatBias | None,
    temperature: float,
    state: _Tensors,
    appended: _Tensors,
    user_rows: _Tensors,
) -> tuple[_Tensors, _Tensors]:
    """The state after what is appended, and what a query of it an hour later gives, by the encoder itself."""
    rows, times, *items = appended
    like, users = cast(EncoderState, encoder.init_state(0)), len(times)
    before = like.from_flat(state[: len(like.flat())])
    after = cast(EncoderState, encoder.append(before, rows, torch.arange(users + 1), times))
    vectors = scaled(encoder.query(after, times + 3600) + sum(user_rows), similarity)
    if bias is None:
        return after.flat(), (vectors,)
    new = (each.numpy() for each in (items[0], torch.arange(users + 1), times, before.count))
    windows = WindowState(*state[-_WINDOW:]).append(*new)
    found = windows.correction(bias, after.count, vectors, times + 3600, temperature)
    return (*after.flat(), *windows.tensors()), (vectors, found.ids, found.bias, found.shift)


def detached(encoder: SequenceEncoder) -> SequenceEncoder:
    """A copy with the same weights, on the host and for evaluation only."""
    copy = make_encoder(encoder.config)
    copy.load_state_dict({name: value.detach().cpu() for name, value in encoder.state_dict().items()})
    return copy.eval().requires_grad_(False)
