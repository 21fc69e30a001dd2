"""What FuXi-Linear is measured against: a causal softmax encoder of the same width, as plain and as fast as torch is.

Pre-norm blocks of multi-head ``scaled_dot_product_attention`` and a feed-forward network of width 4d; with a key-value
cache for decoding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SoftmaxBlock(nn.Module):
    """Attention and feed-forward network, both with a residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as (B, heads, n, width)."""
        batch, events, dim = x.shape
        qkv = self.qkv(F.layer_norm(x, (dim,))).view(batch, events, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return q, k, v

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """Output projection and feed-forward network."""
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d), causal."""
        q, k, v = self.heads_of(x)
        return self.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def decode(self, x: Tensor, keys: Tensor, values: Tensor, at: int) -> Tensor:
        """One event (B, 1, d) at position ``at`` of a cache (B, heads, max, width), which it enters."""
        q, k, v = self.heads_of(x)
        keys[:, :, at], values[:, :, at] = k[:, :, 0], v[:, :, 0]
        return self.finish(x, F.scaled_dot_product_attention(q, keys[:, :, : at + 1], values[:, :, : at + 1]))


class SoftmaxEncoder(nn.Module):
    """A stack of blocks."""

    def __init__(self, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SoftmaxBlock(dim, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d), causal."""
        for block in self.blocks:
            x = block(x)
        return x

    def decode(self, x: Tensor, cache: list[tuple[Tensor, Tensor]], at: int) -> Tensor:
        """One event at position ``at``."""
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            assert isinstance(block, SoftmaxBlock)
            x = block.decode(x, keys, values, at)
        return x

    def cache(self, batch: int, events: int) -> list[tuple[Tensor, Tensor]]:
        """An empty cache."""
        block = self.blocks[0]
        assert isinstance(block, SoftmaxBlock)
        shape = (batch, block.heads, events, block.out.in_features // block.heads)
        return [(torch.randn(shape), torch.randn(shape)) for _ in self.blocks]
