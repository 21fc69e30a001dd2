"""The encoder as portable programs: a user's vector at a time, and one event more, from plain tensors to plain tensors.

They run wherever ``torch.export.load`` does, without this package. An encoder of constant state has them. A state is
:meth:`EncoderState.flat`, users first: ``count``, ``pending_time``, ``pending``, then one tensor per channel.
"""

import io
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fuxi_torchrec.encoders import make_encoder
from fuxi_torchrec.encoders.base import SequenceEncoder
from fuxi_torchrec.encoders.state import EncoderState
from fuxi_torchrec.export.bundle import ExportError, scaled

QUERY, APPEND = "query.pt2", "append.pt2"
TOLERANCE = 1e-5  # the encoder may run other kernels than its programs, which need nothing but torch
_CHECKED = (1, 2, 3, 8)  # users of a batch


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


class Append(_Program):
    """``(state, rows (B, D), times (B,)) -> state`` after one event more of every user."""

    def forward(self, state: tuple[Tensor, ...], rows: Tensor, times: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.encoder.append_one(self._like.from_flat(state), rows, times).flat()


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


def write_programs(encoder: SequenceEncoder, similarity: str, directory: Path, with_user_rows: bool = False) -> float:
    """Export both, save them, and compare what was saved with the encoder; the largest difference.

    Args:
        with_user_rows: the query takes what features of users add to the encoder's output.
    """
    state, rows, times = example(encoder, 4)
    batch = torch.export.Dim("batch", min=1)
    per_user = tuple({0: batch} for _ in state.flat())
    programs: dict[str, tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]] = {
        QUERY: (Query(encoder, similarity), (state.flat(), times), (per_user, {0: batch})),
        APPEND: (Append(encoder), (state.flat(), rows, times), (per_user, {0: batch}, {0: batch})),
    }
    if with_user_rows:
        shapes = (per_user, {0: batch}, {0: batch})
        programs[QUERY] = (QueryWithUsers(encoder, similarity), (state.flat(), times, rows), shapes)
    directory.mkdir(parents=True, exist_ok=True)
    loaded = {}
    for name, (program, arguments, shapes) in programs.items():
        exported = torch.export.export(program.eval(), arguments, dynamic_shapes=shapes, strict=False)
        written = io.BytesIO()
        torch.export.save(exported, written)  # to memory: on a full disk torch ends the process
        (directory / name).write_bytes(written.getvalue())
        written.seek(0)
        loaded[name] = torch.export.load(written).module()
    worst = 0.0
    for users in _CHECKED:
        state, rows, times = example(encoder, users, seed=users)
        eager = cast(EncoderState, encoder.append(state, rows, torch.arange(users + 1), times))
        more = (rows,) if with_user_rows else ()
        queried = scaled(encoder.query(eager, times + 3600) + (rows if with_user_rows else 0), similarity)
        pairs = list(zip(eager.flat(), loaded[APPEND](state.flat(), rows, times), strict=True))
        pairs.append((queried, loaded[QUERY](eager.flat(), times + 3600, *more)))
        for ours, theirs in pairs:
            worst = max(worst, float((ours.double() - theirs.double()).abs().max()) if ours.numel() else 0.0)
    if not worst <= TOLERANCE:
        raise ExportError(f"{directory}: the exported programs differ from the encoder by {worst:.1e}")
    return worst


def detached(encoder: SequenceEncoder) -> SequenceEncoder:
    """A copy with the same weights, on the host and for evaluation only."""
    copy = make_encoder(encoder.config)
    copy.load_state_dict({name: value.detach().cpu() for name, value in encoder.state_dict().items()})
    return copy.eval().requires_grad_(False)
