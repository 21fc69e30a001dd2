"""Random encoders and ragged batches for tests."""

from dataclasses import dataclass

import torch

from fuxi_torchrec import FuXiLinearConfig, FuXiLinearEncoder

CHUNK = 4
GAPS = [0, 0, 1, 59, 3_600, 86_400, 30 * 31_536_000, -5, -40_000]


def make_encoder(dtype=torch.float64, seed=0, **changes):
    """A small encoder with parameters away from their start, so that every term counts."""
    settings = {
        "dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "max_positions": 11,
        "kernel_dim": 6,
        "ffn_dim": 24,
        "temporal_periods": (7, 86_400),
        "retention_chunk": CHUNK,
        "positional_chunk": CHUNK,
        "temporal_chunk": CHUNK,
    }
    torch.manual_seed(seed)
    encoder = FuXiLinearEncoder(FuXiLinearConfig(**{**settings, **changes}))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter += torch.randn_like(parameter) * (0.3 if parameter.dim() < 2 else 0.1)
    return encoder.to(dtype).eval()


@dataclass
class Batch:
    x: torch.Tensor
    offsets: torch.Tensor
    timestamps: torch.Tensor
    request: torch.Tensor

    @property
    def inputs(self):
        return self.x, self.offsets, self.timestamps, self.request

    def user(self, u):
        a, b = int(self.offsets[u]), int(self.offsets[u + 1])
        return Batch(self.x[a:b], torch.tensor([0, b - a]), self.timestamps[a:b], self.request[u : u + 1])


def make_batch(lengths, seed=0, dim=16, dtype=torch.float64, gaps=GAPS, start=1_700_000_000):
    generator = torch.Generator().manual_seed(seed)
    events = sum(lengths)
    x = torch.randn(events, dim, generator=generator, dtype=torch.float64).to(dtype)
    drawn = torch.tensor(gaps)[torch.randint(len(gaps), (events + len(lengths),), generator=generator)]
    times, request = [], []
    for n in lengths:
        t = start + drawn[: n + 1].cumsum(0)
        drawn = drawn[n + 1 :]
        times.append(t[:-1])
        request.append(t[-1])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    empty = torch.zeros(0, dtype=torch.int64)
    return Batch(x, offsets, torch.cat([empty, *times]), torch.stack(request) if request else empty)
