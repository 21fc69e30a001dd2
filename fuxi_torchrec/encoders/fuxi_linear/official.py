"""Weights trained with the released FuXi-Linear code.

The released names, after ``_fuxi._attention_layers.{l}.``:

| released | here |
|---|---|
| ``_uvqk`` | columns u, q, k, v of ``in_proj`` |
| ``_channel_t.proj_v.weight``, ``_channel_p._proj_p.weight`` | its last columns, transposed |
| ``_retention._gamma`` | ``retention.decay`` |
| ``_channel_t._gamma`` (block 0 only, optional) | ``temporal.decay`` |
| ``_channel_t.alpha``, ``.beta`` (optional) | ``temporal.alpha``, ``.beta`` |
| ``_channel_p._emb``, ``._alpha``, ``._beta`` | ``positional.kernel``, ``.alpha``, ``.beta`` |
| ``_mffn.lin0``, ``lin3`` and ``lin1``, ``lin2`` | ``out_proj``, ``ffn_in`` (W_1, W_2), ``ffn_out``, transposed |

and ``_input_features_preproc._pos_emb.weight``, the table of absolute positions.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fuxi_torchrec.encoders.fuxi_linear.block import Block
from fuxi_torchrec.encoders.fuxi_linear.channels import PositionalChannel, TemporalChannel
from fuxi_torchrec.encoders.fuxi_linear.config import FuXiLinearConfig

_POSITIONS = "_input_features_preproc._pos_emb.weight"


def _block(layer: int) -> str:
    return f"_fuxi._attention_layers.{layer}."


def _get(params: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in params:
        raise ValueError(f"params has no {name!r}: not the parameters of the released model, or of another version")
    return params[name]


def infer_config(
    params: Mapping[str, Tensor], temporal_periods: tuple[int, ...], dropout: float = 0.0
) -> FuXiLinearConfig:
    """Width, depth, heads, table sizes and optional parts, from names and shapes."""
    layers = 0
    while _block(layers) + "_uvqk" in params:
        layers += 1
    uvqk, first = _get(params, _block(0) + "_uvqk"), _block(0)
    kernel = _get(params, first + "_channel_p._emb")
    scales = len(temporal_periods)
    for name, wanted in (("_channel_t._gamma", scales), ("_channel_t.alpha", 2 * scales)):
        if first + name in params and params[first + name].numel() != wanted:
            raise ValueError(
                f"temporal_periods names {scales} scales, but {first + name} has {params[first + name].numel()} values "
                f"where {wanted} are wanted"
            )
    return FuXiLinearConfig(
        dim=uvqk.shape[0],
        num_layers=layers,
        num_heads=_get(params, first + "_retention._gamma").numel(),
        # the kernel table is padded to whole chunks: rows beyond the position table are never used
        max_positions=min(_get(params, _POSITIONS).shape[0], kernel.shape[0]),
        temporal_periods=tuple(temporal_periods),
        kernel_dim=kernel.shape[1],
        ffn_dim=_get(params, first + "_mffn.lin1.weight").shape[0],
        dropout=dropout,
        preset="official",
        temporal_mix=first + "_channel_t.alpha" in params,
        learn_temporal_decay=first + "_channel_t._gamma" in params,
    )


@torch.no_grad()
def load(positions: Tensor, blocks: Sequence[Block], params: Mapping[str, Tensor]) -> None:
    """Copy the released parameters into the parts of an encoder of the inferred configuration."""
    rows = len(positions)
    _copy(positions, _get(params, _POSITIONS)[:rows], _POSITIONS)
    for layer, block in enumerate(blocks):
        prefix = _block(layer)
        assert block.retention is not None
        assert isinstance(block.temporal, TemporalChannel) and isinstance(block.positional, PositionalChannel)

        def get(name: str, prefix: str = prefix) -> Tensor:
            return _get(params, prefix + name)

        values = (get("_channel_t.proj_v.weight").T, get("_channel_p._proj_p.weight").T)
        _copy(block.in_proj, torch.cat((get("_uvqk"), *values), dim=1), prefix + "_uvqk")
        _copy(block.out_proj, get("_mffn.lin0.weight").T, prefix + "_mffn.lin0.weight")
        ffn_in = torch.cat((get("_mffn.lin3.weight").T, get("_mffn.lin1.weight").T), dim=1)
        _copy(block.ffn_in, ffn_in, prefix + "_mffn.lin1.weight and lin3")
        _copy(block.ffn_out, get("_mffn.lin2.weight").T, prefix + "_mffn.lin2.weight")
        _copy(block.retention.decay, get("_retention._gamma"), prefix + "_retention._gamma")
        kernel = get("_channel_p._emb")[:rows]
        _copy(block.positional.kernel, kernel, prefix + "_channel_p._emb")
        _copy(block.positional.alpha, get("_channel_p._alpha"), prefix + "_channel_p._alpha")
        _copy(block.positional.beta, get("_channel_p._beta"), prefix + "_channel_p._beta")
        if block.temporal.decay is not None and prefix + "_channel_t._gamma" in params:
            _copy(block.temporal.decay, get("_channel_t._gamma"), prefix + "_channel_t._gamma")
        if block.temporal.alpha is not None and block.temporal.beta is not None:
            _copy(block.temporal.alpha, get("_channel_t.alpha"), prefix + "_channel_t.alpha")
            _copy(block.temporal.beta, get("_channel_t.beta"), prefix + "_channel_t.beta")


def _copy(target: Tensor, source: Tensor, name: str) -> None:
    if target.numel() != source.numel() or (target.dim() > 1 and target.shape != source.shape):
        raise ValueError(f"{name} has shape {tuple(source.shape)} where {tuple(target.shape)} is wanted")
    target.copy_(source.reshape(target.shape))
