"""Weights trained with the released code of the comparison encoders."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fuxi_torchrec.encoders.base import check_positive

POSITIONS = "_input_features_preproc._pos_emb.weight"

Names = Mapping[str, str | tuple[str, ...]]


class ReleasedLayer:
    """Released parameters of one layer, by their names in it."""

    def __init__(self, prefixes: tuple[str, ...], params: Mapping[str, Tensor]) -> None:
        self.prefix = prefixes[0]
        self.params = {
            name.removeprefix(prefix): value
            for prefix in prefixes
            for name, value in params.items()
            if name.startswith(prefix)
        }

    def __contains__(self, name: str) -> bool:
        return name in self.params

    def __getitem__(self, name: str) -> Tensor:
        self.require(name)
        return self.params[name]

    def require(self, name: str) -> None:
        """Refuse a layer that does not have a parameter."""
        if name not in self.params:
            raise ValueError(
                f"params has no {self.prefix + name!r}: not the parameters of this model, or of another version"
            )

    def per_head(self, num_heads: int, **widths: int) -> dict[str, int]:
        """Widths of all heads together, as those of one."""
        check_positive("num_heads", num_heads)
        for name, width in widths.items():
            if width < 1 or width % num_heads:
                raise ValueError(f"{self.prefix}: {name} of all heads is {width}, not a multiple of {num_heads} heads")
        return {name: width // num_heads for name, width in widths.items()}

    @torch.no_grad()
    def copy_to(self, block: nn.Module, names: Names) -> None:
        """Into a block's parameters; every one of both sides must have its counterpart."""
        own, used = dict(block.named_parameters()), set[str]()
        for name, parameter in own.items():
            given = names[name]
            sources = (given,) if isinstance(given, str) else given
            value = torch.cat([self[source] for source in sources])
            if value.squeeze().shape != parameter.squeeze().shape:
                told = " and ".join(self.prefix + source for source in sources)
                raise ValueError(f"{told}: shape {tuple(value.shape)} where {tuple(parameter.shape)} is wanted")
            parameter.copy_(value.reshape(parameter.shape))
            used.update(sources)
        if extra := sorted(self.params.keys() - used):
            raise ValueError(f"params has {self.prefix + extra[0]!r}, which this model does not have")


def released_layers(params: Mapping[str, Tensor], prefixes: str | tuple[str, ...]) -> list[ReleasedLayer]:
    """The layers, in their order; a layer may have parameters below several prefixes."""
    prefixes = (prefixes,) if isinstance(prefixes, str) else prefixes
    numbers = {name.removeprefix(prefixes[0]).partition(".")[0] for name in params if name.startswith(prefixes[0])}
    if not numbers or POSITIONS not in params:
        missing = POSITIONS if numbers else f"{prefixes[0]}0."
        raise ValueError(f"params has no {missing!r}: not the parameters of this model, or of another version")
    return [ReleasedLayer(tuple(f"{p}{number}." for p in prefixes), params) for number in range(len(numbers))]


def linear_names(**modules: str) -> dict[str, str]:
    """Names of weight and bias, ours to the released ones."""
    return {f"{ours}.{part}": f"{released}.{part}" for ours, released in modules.items() for part in ("weight", "bias")}
