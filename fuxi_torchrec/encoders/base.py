"""The contract of encoders: rows and times of events in, one vector per event or per user out.

An encoder implements ``forward``; everything else has a default. ``append`` then holds each user's events and ``query``
runs ``forward`` over them, so that it can be trained, evaluated, exported and served. An encoder whose state has a size
that does not depend on the history says ``state_kind = "constant"`` and gives ``init_state``, ``append``, ``query``,
``append_one`` and ``query_unchecked`` itself; its states are stored in exports, and its programs exported.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fuxi_torchrec.encoders import checks
from fuxi_torchrec.encoders.state import EncoderState, GrowingState, States

_FORMAT = 2  # of what a configuration stands for; part of the fingerprint
_QUERY_EVENTS = 2**16  # held events that one call of forward answers from
_MEASURED = 256  # events of which activations are measured
_MOST, _MOST_LAYERS = 2**28, 2**10  # of a size and of layers: beyond them even counting overflows, or takes long


def setting(default: Any, help: str, operational: bool = False, training: bool = False, **bounds: float) -> Any:
    """A field of a configuration; ``help`` is the comment beside it.

    An ``operational`` one changes cost and not results, and may change when a run is resumed; one of ``training``
    decides how parameters are found and not what they mean. ``bounds`` are those of the sections of an experiment.
    """
    about = {"help": help, "operational": operational, "training": training}
    return field(default=default, metadata={**about, **bounds})


@dataclass(frozen=True)
class EncoderConfig:
    """What the configurations of all encoders have.

    Attributes:
        kind: the encoder's name in the registry, or ``package.module:Class``.
        dim: width of rows and outputs.
        max_positions: events after which positions are not told apart any more; a user that passes it in a refresh is
            encoded anew from its last events.
    """

    kind: str
    dim: int
    max_positions: int

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if isinstance(value := getattr(self, each.name), list):  # as JSON has them
                object.__setattr__(self, each.name, tuple(value))
        for name in ("dim", "max_positions"):
            check_positive(name, getattr(self, name))
        if getattr(self, "num_layers", 1) > _MOST_LAYERS:
            raise ValueError(f"num_layers must be at most {_MOST_LAYERS}")

    def decisive(self) -> dict[str, Any]:
        """The settings that decide what parameters and states mean."""
        given = {f.name: f.metadata for f in dataclasses.fields(self)}
        skipped = {name for name, about in given.items() if about.get("operational") or about.get("training")}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in skipped}

    def fingerprint(self) -> int:
        """63 bits over everything that decides what a state means."""
        digest = hashlib.sha256(json.dumps([_FORMAT, self.decisive()], sort_keys=True).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def identity(self) -> str:
        """Kind and fingerprint: what checkpoints belong to."""
        return f"{self.kind}-{self.fingerprint():016x}"


def check_positive(name: str, value: object) -> None:
    """Refuse what is no positive integer, True included."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
    if value > _MOST:
        raise ValueError(f"{name} must be at most {_MOST}")


class ParameterGroups(NamedTuple):
    """How an encoder's parameters are trained.

    Attributes:
        matrices: with weight decay.
        tables: rows that are looked up, as those of positions: without, like embeddings.
        scalars: decays and weights that must travel far: without, and with a learning rate of their own.
    """

    matrices: list[nn.Parameter]
    tables: list[nn.Parameter]
    scalars: list[nn.Parameter]

    @staticmethod
    def by_shape(parameters: list[nn.Parameter]) -> "ParameterGroups":
        """Matrices and scalars, by their number of dimensions."""
        return ParameterGroups([p for p in parameters if p.ndim > 1], [], [p for p in parameters if p.ndim < 2])


class Explanation(Protocol):
    """What an encoder has learned, for people."""

    def text(self) -> str: ...

    def draw(self, title: str, output: Path) -> None:
        """As a figure; matplotlib is needed here alone."""


class SequenceEncoder(nn.Module):
    """The base of all encoders.

    Attributes:
        state_kind: ``constant`` if a user's state has one size, whatever the history; ``growing`` if it grows with it.
        fingerprint: of the configuration.
    """

    config_class: ClassVar[type[EncoderConfig]]
    state_kind: Literal["constant", "growing"] = "growing"
    config: EncoderConfig

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.fingerprint = config.fingerprint()

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        timestamps: Tensor,
        request_timestamps: Tensor,
        *,
        validate: bool | None = None,
    ) -> Tensor:
        """Every position's output: it may depend on the events up to its own and on the time of the one after it.

        Args:
            x: (T, D) event rows of all users, one user after another.
            offsets: (B + 1,) int64 bounds of the users' rows.
            timestamps: (T,) int64.
            request_timestamps: (B,) int64, the time that follows each user's last event.
            validate: check values too; by default on the CPU only.

        Returns:
            (T, D), connected to every parameter also without events: all ranks take part in the gradients' reduction.
        """
        raise NotImplementedError

    # --- serving -----------------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Of a user's state as a record; 0 if it grows and none is stored."""
        if self.state_kind != "constant":
            return 0
        return int(self.init_state(1).to_bytes().shape[1])  # type: ignore[attr-defined]

    def init_state(self, batch_size: int) -> States:
        """The state of users without events."""
        like = self._like.detach()
        return GrowingState(
            self.fingerprint,
            like.new_zeros(0, self.config.dim),
            like.new_zeros(0, dtype=torch.int64),
            like.new_zeros(batch_size + 1, dtype=torch.int64),
        )

    @torch.no_grad()
    def append(
        self, state: Any, x: Tensor, offsets: Tensor, timestamps: Tensor, *, validate: bool | None = None
    ) -> States:
        """The state after any number of new events per user, 0 included; the given state is not changed.

        Rows, offsets and timestamps of the new events are as in :meth:`forward`.
        """
        checks.state(self, state, self._like)
        checks.batch(self.config, self._like, x, offsets, timestamps, validate, state=state)
        return state.appended(x, offsets.to(x.device), timestamps) if len(x) else state

    @torch.no_grad()
    def query(self, state: Any, request_timestamps: Tensor, *, validate: bool | None = None) -> Tensor:
        """Each user at a request time: (B, D), zero for users without events. The state is unchanged."""
        checks.state(self, state, self._like)
        checks.requests(request_timestamps, len(state), self._like.device, validate)
        parts = [self._last_outputs(state, request_timestamps, *users) for users in state.batches(_QUERY_EVENTS)]
        return torch.cat([state.rows.new_zeros(0, self.config.dim), *parts])

    # what exported programs run: encoders of constant state have both

    def append_one(self, state: EncoderState, rows: Tensor, times: Tensor) -> EncoderState:
        """One event more of every user, (B, D) rows at (B,) times, unchecked."""
        raise NotImplementedError

    def query_unchecked(self, state: EncoderState, request_timestamps: Tensor) -> Tensor:
        """:meth:`query` without its checks."""
        raise NotImplementedError

    # --- training and looking ----------------------------------------------------------------------------------------

    @classmethod
    def from_official(cls, params: Mapping[str, Tensor], **unknown: Any) -> "SequenceEncoder":
        """An encoder with weights trained with the released code."""
        raise ValueError(f"{cls.__name__}: no released weights are known")

    def optimizer_groups(self) -> ParameterGroups:
        """How the parameters are trained: by default as their shapes suggest."""
        return ParameterGroups.by_shape(list(self.parameters()))

    def activation_bytes(self, events: int) -> int:
        """What a forward and backward pass over so many events holds at its peak, in float32, parameters left out.

        By default what a pass over a few events keeps, in proportion; parameters may be on the meta device.
        """
        measured = max(1, min(_MEASURED, self.config.max_positions - 1))
        with torch.device("cpu"):
            copy = type(self)(self.config)
            own = {p.untyped_storage().data_ptr() for p in copy.parameters()}
            kept: dict[int, tuple[int, Tensor]] = {}  # with the tensor, or its place is used again

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    kept[storage.data_ptr()] = storage.nbytes(), tensor
                return tensor

            x = torch.randn(measured, self.config.dim, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                copy(x, torch.tensor([0, measured]), torch.arange(measured), torch.tensor([measured]))
        return sum(size for size, _ in kept.values()) * events // measured

    def explain(self, per_second: int) -> Explanation | None:
        """What it has learned, None if there is nothing to show; the data's time unit has so many ticks a second."""
        return None

    # --- inside ------------------------------------------------------------------------------------------------------

    @property
    def _like(self) -> Tensor:
        """A parameter, for device and dtype."""
        return next(self.parameters())

    def _last_outputs(self, state: GrowingState, times: Tensor, first: int, end: int) -> Tensor:
        part = state.select(range(first, end))
        some, outputs = part.count > 0, part.rows.new_zeros(end - first, self.config.dim)
        if len(part.rows):
            every = self(part.rows, part.bounds, part.times, times[first:end], validate=False)
            outputs[some] = every[part.bounds[1:][some] - 1]
        return outputs
