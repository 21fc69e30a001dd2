"""The encoder's configuration."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

_FORMAT = 1  # of the numbers a config stands for; part of the fingerprint


def _key(default: Any, help: str, operational: bool = False) -> Any:
    """A setting; an operational one changes cost and not results."""
    return field(default=default, metadata={"help": help, "operational": operational})


def geometric_periods(first: int, ratio: int, count: int) -> tuple[int, ...]:
    """Periods ``first · ratio^k``, k = 0 .. count − 1, as in the paper.

    Example:
        >>> geometric_periods(1024, 8, 4)
        (1024, 8192, 65536, 524288)
    """
    return tuple(first * ratio**k for k in range(count))


@dataclass(frozen=True)
class FuXiLinearConfig:
    """Shape and switches of a FuXi-Linear encoder; checked when made.

    Example:
        >>> FuXiLinearConfig(dim=64, num_layers=2, num_heads=2, temporal_periods=(3600, 86400)).num_scales
        2
    """

    dim: int = _key(128, "width d of rows and outputs")
    num_layers: int = _key(4, "number of blocks")
    num_heads: int = _key(4, "retention heads")
    max_positions: int = _key(16384, "rows of the position tables; later events use the last row")
    temporal_periods: tuple[int, ...] = _key((), "periods of the temporal scales, in the data's time unit")
    kernel_dim: int = _key(32, "width of the positional kernel")
    ffn_dim: int | None = _key(None, "width of the feed-forward network; dim if null")
    dropout: float = _key(0.0, "on inputs, merged channels and the feed-forward network's input")
    preset: Literal["paper", "official"] = _key("paper", "where text and released code differ: which one to follow")
    use_retention: bool = _key(True, "ablation: the retention channel")
    use_positional: bool = _key(True, "ablation: the positional channel")
    use_temporal: bool = _key(True, "ablation: the temporal channel")
    temporal_phases: bool = _key(True, "ablation: cos and sin of the times; false puts 1/sqrt(2) in their place")
    temporal_mix: bool = _key(True, "scale the temporal output and add its input, both learned")
    temporal_half_life: float = _key(
        1.0, "half-life of the temporal scales at the start, in their periods; paper: 1; habits need longer memory"
    )
    learn_temporal_decay: bool = _key(True, "false fixes the temporal decays at their start")
    activation_checkpointing: bool = _key(
        False, "compute each block again in the backward pass: less memory, more time", operational=True
    )
    retention_chunk: int = _key(64, "events a chunk; changes speed, not results", operational=True)
    positional_chunk: int = _key(64, "events a chunk; changes speed, not results", operational=True)
    temporal_chunk: int = _key(16, "events a chunk; changes speed, not results", operational=True)

    def __post_init__(self) -> None:
        if not isinstance(self.temporal_periods, Sequence):
            raise ValueError(f"temporal_periods must be a sequence of integers, not {self.temporal_periods!r}")
        object.__setattr__(self, "temporal_periods", tuple(self.temporal_periods))
        for name in ("dim", "num_layers", "num_heads", "max_positions", "kernel_dim"):
            _check_positive(name, getattr(self, name))
        for name in ("retention_chunk", "positional_chunk", "temporal_chunk"):
            _check_positive(name, getattr(self, name))
        if self.ffn_dim is not None:
            _check_positive("ffn_dim", self.ffn_dim)
        if self.preset not in ("paper", "official"):
            raise ValueError(f"preset must be 'paper' or 'official', not {self.preset!r}")
        if not isinstance(self.dropout, int | float) or not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout!r}")
        if not isinstance(self.temporal_half_life, int | float) or not 1e-2 <= self.temporal_half_life <= 1e6:
            raise ValueError(f"temporal_half_life must be .01 to 1e6 periods, not {self.temporal_half_life!r}")
        if self.preset == "official" and self.temporal_half_life != 1.0:
            raise ValueError("temporal_half_life belongs to the paper preset: official draws its decays")
        if not (self.use_retention or self.use_positional or self.use_temporal):
            raise ValueError(
                "use_retention, use_positional and use_temporal are all off: at least one channel is needed"
            )
        if self.use_retention and self.dim % self.num_heads:
            raise ValueError(f"dim = {self.dim} is not divisible by num_heads = {self.num_heads}")
        if self.use_positional and self.kernel_dim % 2:
            raise ValueError(f"kernel_dim = {self.kernel_dim} must be even: half sine, half cosine")
        self._check_periods()

    def _check_periods(self) -> None:
        if self.use_temporal and not self.temporal_periods:
            raise ValueError(
                "temporal_periods is empty: name the scales in the data's time unit, for example "
                "(3600, 86400, 604800, 31536000) for seconds, or set use_temporal=False"
            )
        for period in self.temporal_periods:
            if isinstance(period, bool) or not isinstance(period, int) or not 1 <= period < 2**62:
                raise ValueError(f"temporal_periods must be positive integers below 2^62, not {period!r}")
        if self.use_temporal and self.dim % (2 * self.num_scales):
            raise ValueError(
                f"dim = {self.dim} is not divisible by 2 x {self.num_scales}: each of the {self.num_scales} "
                "temporal_periods has a sin and a cos head"
            )

    @property
    def num_scales(self) -> int:
        """Number of temporal scales."""
        return len(self.temporal_periods)

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward network."""
        return self.dim if self.ffn_dim is None else self.ffn_dim

    def fingerprint(self) -> int:
        """63 bits over everything that decides what a state means; speed and training switches left out."""
        skipped = {"dropout", "activation_checkpointing", "learn_temporal_decay", "temporal_half_life"}
        skipped |= {"retention_chunk", "positional_chunk", "temporal_chunk"}
        plain = {k: v for k, v in dataclasses.asdict(self).items() if k not in skipped}
        plain["ffn_dim"] = self.hidden_dim
        digest = hashlib.sha256(json.dumps([_FORMAT, plain], sort_keys=True).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
