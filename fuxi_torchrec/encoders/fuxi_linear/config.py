"""The encoder's configuration."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fuxi_torchrec.encoders.base import EncoderConfig, check_positive, setting


def geometric_periods(first: int, ratio: int, count: int) -> tuple[int, ...]:
    """Periods ``first · ratio^k``, k = 0 .. count − 1, as in the paper.

    Example:
        >>> geometric_periods(1024, 8, 4)
        (1024, 8192, 65536, 524288)
    """
    return tuple(first * ratio**k for k in range(count))


TEMPORAL = ("retention", "bucket", "exp", "pow", "hstu", "absolute", "scaled")
POSITIONAL = ("kernel", "table", "t5", "alibi", "rope")
_GROWING = ("bucket", "exp", "pow", "hstu", "table", "t5")  # look at every earlier event


@dataclass(frozen=True)
class FuXiLinearConfig(EncoderConfig):
    """Shape and switches of a FuXi-Linear encoder; checked when made.

    Every setting has a default, the same here and in a YAML file. That of ``temporal_periods`` is an hour, a day, a
    week and a year in seconds: name them if the data's times are in another unit.

    Example:
        >>> FuXiLinearConfig(dim=64, num_layers=2, num_heads=2, temporal_periods=(3600, 86400)).num_scales
        2
    """

    kind: Literal["fuxi_linear"] = setting("fuxi_linear", "which encoder: a known name, or package.module:Class")
    dim: int = setting(128, "width d of rows and outputs")
    num_layers: int = setting(4, "number of blocks")
    num_heads: int = setting(4, "retention heads")
    max_positions: int = setting(16384, "rows of the position tables; later events use the last row")
    temporal_periods: tuple[int, ...] = setting(
        (3600, 86400, 604800, 31536000), "periods of the temporal scales, in the data's time unit"
    )
    kernel_dim: int = setting(32, "width of the positional kernel")
    ffn_dim: int | None = setting(None, "width of the feed-forward network; dim if null")
    dropout: float = setting(0.0, "on inputs, merged channels and the feed-forward network's input", training=True)
    preset: Literal["paper", "official"] = setting("paper", "where text and released code differ: which one to follow")
    use_retention: bool = setting(True, "ablation: the retention channel")
    use_positional: bool = setting(True, "ablation: the positional channel")
    use_temporal: bool = setting(True, "ablation: the temporal channel")
    temporal: Literal["retention", "bucket", "exp", "pow", "hstu", "absolute", "scaled"] = setting(
        "retention", "what the temporal channel is; others than retention are for comparison"
    )
    positional: Literal["kernel", "table", "t5", "alibi", "rope"] = setting(
        "kernel", "what the positional channel is; others than kernel are for comparison"
    )
    temporal_phases: bool = setting(True, "ablation: cos and sin of the times; false puts 1/sqrt(2) in their place")
    temporal_mix: bool = setting(True, "scale the temporal output and add its input, both learned")
    temporal_half_life: float = setting(
        1.0,
        "half-life of the temporal scales at the start, in their periods; paper: 1; habits need longer memory",
        training=True,
    )
    learn_temporal_decay: bool = setting(True, "false fixes the temporal decays at their start", training=True)
    activation_checkpointing: bool = setting(
        False, "compute each block again in the backward pass: less memory, more time", operational=True
    )
    retention_chunk: int = setting(64, "events a chunk; changes speed, not results", operational=True)
    positional_chunk: int = setting(64, "events a chunk; changes speed, not results", operational=True)
    temporal_chunk: int = setting(16, "events a chunk; changes speed, not results", operational=True)

    def __post_init__(self) -> None:
        if not isinstance(self.temporal_periods, Sequence):
            raise ValueError(f"temporal_periods must be a sequence of integers, not {self.temporal_periods!r}")
        object.__setattr__(self, "temporal_periods", tuple(self.temporal_periods))
        super().__post_init__()
        chunks = ("retention_chunk", "positional_chunk", "temporal_chunk")
        for name in ("num_layers", "num_heads", "kernel_dim", *chunks):
            check_positive(name, getattr(self, name))
        check_positive("ffn_dim", self.hidden_dim)
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
        self._check_variants()

    def _check_variants(self) -> None:
        for name, known in (("temporal", TEMPORAL), ("positional", POSITIONAL)):
            if (given := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {given!r}")
            if given != known[0] and not getattr(self, f"use_{name}"):
                raise ValueError(f"{name} is {given}, and use_{name} is false: leave one of them out")
        if not self.temporal_phases and self.temporal != "retention":
            raise ValueError(f"temporal_phases=False belongs to temporal: retention, not {self.temporal}")
        if self.positional == "rope" and not (self.use_retention and self.dim // self.num_heads % 2 == 0):
            raise ValueError(
                "positional: rope turns pairs of the retention channel's columns: it needs that channel, and "
                f"dim / num_heads = {self.dim} / {self.num_heads} to be even"
            )
        if (self.temporal == "hstu" or self.positional == "alibi") and self.dim % self.num_heads:
            raise ValueError(f"dim = {self.dim} is not divisible by num_heads = {self.num_heads}")

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
        return len(self.temporal_periods)

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward network."""
        return self.dim if self.ffn_dim is None else self.ffn_dim

    @property
    def whole(self) -> bool:
        """Whether every channel is there and the paper's: what native kernels compute."""
        used = self.use_retention and self.use_temporal and self.use_positional
        return used and (self.temporal, self.positional) == ("retention", "kernel")

    @property
    def growing(self) -> bool:
        """Whether a channel looks at every earlier event, so that no state has a constant size."""
        return self.temporal in _GROWING or self.positional in _GROWING

    @property
    def uses_phases(self) -> bool:
        """Whether times enter as phases of the periods."""
        return self.temporal_phases and self.temporal != "scaled"

    def decisive(self) -> dict[str, Any]:
        found = {**super().decisive(), "ffn_dim": self.hidden_dim}
        usual = {"temporal": TEMPORAL[0], "positional": POSITIONAL[0]}  # as if there were no others
        return {name: value for name, value in found.items() if usual.get(name) != value}

    def activation_widths(self) -> float:
        """Elements that one block keeps of an event for the backward pass, in units of ``dim``.

        Example:
            >>> FuXiLinearConfig(dim=128, temporal_periods=(3600, 86400)).activation_widths()
            30.1
        """
        rotated = self.positional == "rope"
        channels = [
            (15.5 if rotated else 11.5, self.use_retention),
            (5.5, self.use_positional and not rotated),
            (11.5 if self.temporal == "hstu" else 5.1, self.use_temporal),
        ]
        kept = 4.0 + 4.0 * self.hidden_dim / self.dim + sum(width for width, used in channels if used)
        if self.dropout:
            kept += sum(used for _, used in channels) + 1
        return kept + (2.0 if self.preset == "official" else 0.0)
