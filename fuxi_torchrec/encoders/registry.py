"""Encoders by their kind, the word in ``model: {kind: ...}``, in checkpoints and in exports.

A kind is a name below, or ``package.module:Class`` of any importable :class:`SequenceEncoder`: an encoder of your own
is trained, evaluated, exported and served without a line here. Its configuration's ``kind`` is that path, so that
every rank and every later program finds the class again. A module runs when it is imported, so a file from elsewhere
never makes anybody import one (:func:`only_imported`): your own code, configuration or ``--encoder`` does.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from fuxi_torchrec.encoders.base import EncoderConfig, SequenceEncoder

DEFAULT_KIND = "fuxi_linear"
_HERE = "fuxi_torchrec.encoders."
_KINDS = {
    "fuxi_linear": _HERE + "fuxi_linear.encoder:FuXiLinearEncoder",
    "sasrec": _HERE + "sasrec:SASRecEncoder",
    "hstu": _HERE + "hstu:HSTUEncoder",
    "fuxi_alpha": _HERE + "fuxi_alpha:FuXiAlphaEncoder",
    "fuxi_beta": _HERE + "fuxi_beta:FuXiBetaEncoder",
    "retnet": _HERE + "retnet:RetNetEncoder",
    "mamba4rec": _HERE + "mamba4rec:Mamba4RecEncoder",
    "recblr": _HERE + "recblr:RecBLREncoder",
    "ttt4rec": _HERE + "ttt4rec:TTT4RecEncoder",
    "tim4rec": _HERE + "tim4rec:TiM4RecEncoder",
}
_may_import = ContextVar("may_import", default=True)


def kinds() -> list[str]:
    """The kinds that have a name.

    Example:
        >>> kinds()[:3]
        ['fuxi_linear', 'sasrec', 'hstu']
    """
    return list(_KINDS)


@contextmanager
def only_imported() -> Iterator[None]:
    """Inside, an encoder's module is not imported: for what run directories, checkpoints and exports name."""
    before = _may_import.set(False)
    try:
        yield
    finally:
        _may_import.reset(before)


def encoder_class(kind: str) -> type[SequenceEncoder]:
    """The class of a kind, imported when first used.

    Example:
        >>> encoder_class("fuxi_linaer")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: unknown encoder 'fuxi_linaer': known are fuxi_linear, ..., and package.module:Class of your own
    """
    module, separator, name = _KINDS.get(kind, kind).partition(":")
    if not separator:
        known = ", ".join(_KINDS)
        raise ValueError(f"unknown encoder {kind!r}: known are {known}, and package.module:Class of your own")
    if kind not in _KINDS and module not in sys.modules and not _may_import.get():
        raise ValueError(
            f"the encoder {kind!r} is code outside of this package, which is not run because a file names it: if you "
            f"trust it, give --encoder {kind}, or import {module} before"
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"the encoder {kind!r} cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, SequenceEncoder) and hasattr(found, "config_class")):
        raise ValueError(f"{kind!r} is no SequenceEncoder with a config_class")
    return found


def config_class(kind: str) -> type[EncoderConfig]:
    """The dataclass of a kind's settings."""
    return encoder_class(kind).config_class


def config_from(plain: Mapping[str, Any]) -> EncoderConfig:
    """A configuration from its plain form, ``kind`` included, as checkpoints and exports hold it."""
    return config_class(plain["kind"])(**plain)


def make_encoder(config: EncoderConfig) -> SequenceEncoder:
    """A new encoder of a configuration.

    Example:
        >>> make_encoder(config_class("fuxi_linear")(dim=16, num_layers=1)).config.dim
        16
    """
    found = encoder_class(config.kind)
    if not isinstance(config, found.config_class):
        raise ValueError(f"kind {config.kind!r} takes a {found.config_class.__name__}, not a {type(config).__name__}")
    return found(config)


def from_official(kind: str, params: Mapping[str, Tensor], **unknown: Any) -> SequenceEncoder:
    """An encoder with weights trained with the released code of its kind.

    ``params`` has the released model's parameters by their names there, ``unknown`` is what names and shapes cannot
    tell; for fuxi_linear ``temporal_periods``.
    """
    return encoder_class(kind).from_official(params, **unknown)
