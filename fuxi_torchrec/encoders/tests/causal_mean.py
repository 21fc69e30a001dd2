"""A second encoder, as small as one can be: ``forward`` alone, everything else by the contract's defaults."""

from dataclasses import dataclass

import torch
from torch import nn

from fuxi_torchrec.encoders import checks
from fuxi_torchrec.encoders.base import EncoderConfig, SequenceEncoder, setting

KIND = f"{__name__}:CausalMean"


@dataclass(frozen=True)
class CausalMeanConfig(EncoderConfig):
    kind: str = setting(KIND, "which encoder")
    dim: int = setting(32, "width")
    max_positions: int = setting(128, "events that are told apart")
    per_day: float = setting(0.5, "weight of the days since the last event")


class CausalMean(SequenceEncoder):
    """``y_i = mean(x_1 .. x_i) W · (1 + c · days from t_i to t_{i+1})``."""

    config_class = CausalMeanConfig
    config: CausalMeanConfig

    def __init__(self, config: CausalMeanConfig) -> None:
        super().__init__(config)
        self.map = nn.Parameter(torch.eye(config.dim) + 0.1 * torch.randn(config.dim, config.dim))

    def forward(self, x, offsets, timestamps, request_timestamps, *, validate=None):
        checks.batch(self.config, self.map, x, offsets, timestamps, validate, request_timestamps)
        first = offsets[:-1].repeat_interleave(offsets.diff())
        index = torch.arange(len(x), device=x.device)
        total = torch.cat((x.new_zeros(1, x.shape[1], dtype=torch.float64), x.double().cumsum(0)))
        mean = (total[1:] - total[first]) / (index - first + 1).unsqueeze(1)
        following = torch.cat((timestamps[1:], timestamps[:1]))
        some = offsets.diff() > 0
        following[offsets[1:][some] - 1] = request_timestamps[some]
        days = (following - timestamps).clamp(min=0) / 86_400
        return (mean.to(x.dtype) @ self.map) * (1 + self.config.per_day * days.to(x.dtype)).unsqueeze(1)
