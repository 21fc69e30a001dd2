"""Encoders of comparable size: the same width of rows and depth, and inner widths that make parameters equal."""

from functools import cache
from typing import Any

import torch

from fuxi_torchrec.encoders import config_class, make_encoder

WITHIN = 0.1  # as the paper compares
_STEP = 8
_HEADS = ("sasrec", "hstu", "fuxi_alpha", "fuxi_beta", "retnet", "ttt4rec")
_ROOM = 11  # positions beyond the longest history, as released; TiM4Rec needs one for the request


def parameters(kind: str, settings: dict[str, Any]) -> int:
    """Of the encoder, without what grows with the longest history.

    Left out are the tables of positions and distances, and TiM4Rec's matrices over positions, as in the paper's count.
    """
    shapes = [_shapes(kind, {**settings, "max_positions": settings["max_positions"] + more}) for more in (0, 1)]
    return sum(torch.Size(a).numel() for a, b in zip(*shapes, strict=True) if a == b)


def comparable(kind: str, dim: int, layers: int, heads: int, length: int, wanted: int) -> dict[str, Any]:
    """Settings of an encoder of about ``wanted`` parameters for histories of so many events.

    The inner width (``value_dim`` of HSTU, which has no feed-forward network, else ``ffn_dim``) is the multiple of 8
    that comes nearest.
    """
    settings: dict[str, Any] = {"dim": dim, "num_layers": layers, "max_positions": length + _ROOM}
    if kind in _HEADS:
        settings["num_heads"] = heads
    if kind in ("hstu", "fuxi_alpha"):
        settings["qk_dim"] = dim // heads
    if kind in ("fuxi_alpha", "fuxi_beta"):
        settings["value_dim"] = dim // heads
    width = "value_dim" if kind == "hstu" else "ffn_dim"
    one, two = (parameters(kind, {**settings, width: n * _STEP}) for n in (1, 2))  # they grow in proportion
    nearest = {**settings, width: _STEP * max(1, 1 + round((wanted - one) / (two - one)))}
    if abs(parameters(kind, nearest) - wanted) > WITHIN * wanted:
        raise ValueError(f"{kind}: no {width} gives {wanted:,} parameters, the nearest {parameters(kind, nearest):,}")
    return nearest


def overrides(kind: str, settings: dict[str, Any]) -> tuple[str, ...]:
    """As the command line takes them."""
    return (f"model.kind={kind}", *(f"model.{name}={_plain(value)}" for name, value in settings.items()))


def _plain(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _shapes(kind: str, settings: dict[str, Any]) -> list[tuple[int, ...]]:
    return _made(kind, tuple(sorted(settings.items())))


@cache
def _made(kind: str, settings: tuple[tuple[str, Any], ...]) -> list[tuple[int, ...]]:
    with torch.device("meta"):
        encoder = make_encoder(config_class(kind)(**dict(settings)))
    return [tuple(parameter.shape) for parameter in encoder.parameters()]
