"""FuXi-Linear on TorchRec: a linear-time, time-aware sequence encoder for recommendation.

Every name is loaded when first used: importing the package imports nothing else, so that the doctor can run where torch
is missing or broken. The encoder's names need torch alone; ``prepare``, ``refresh``, ``Recommender`` and ``Bundle`` no
TorchRec.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuxi_torchrec.api import evaluate as evaluate
    from fuxi_torchrec.api import export as export
    from fuxi_torchrec.api import prepare as prepare
    from fuxi_torchrec.api import train as train
    from fuxi_torchrec.config import Config as Config
    from fuxi_torchrec.config import load_config as load_config
    from fuxi_torchrec.data.prepare import PrepareOptions as PrepareOptions
    from fuxi_torchrec.encoders.fuxi_linear.config import FuXiLinearConfig as FuXiLinearConfig
    from fuxi_torchrec.encoders.fuxi_linear.config import geometric_periods as geometric_periods
    from fuxi_torchrec.encoders.fuxi_linear.encoder import FuXiLinearEncoder as FuXiLinearEncoder
    from fuxi_torchrec.encoders.registry import make_encoder as make_encoder
    from fuxi_torchrec.encoders.state import EncoderState as EncoderState
    from fuxi_torchrec.evaluation.options import EvaluateOptions as EvaluateOptions
    from fuxi_torchrec.export.bundle import Bundle as Bundle
    from fuxi_torchrec.export.options import ExportOptions as ExportOptions
    from fuxi_torchrec.serving.recommender import Recommender as Recommender
    from fuxi_torchrec.serving.refresh.refresh import refresh as refresh

__version__ = "0.1.0"

_HOME = {
    "Bundle": "export.bundle",
    "Config": "config",
    "EncoderState": "encoders.state",
    "EvaluateOptions": "evaluation.options",
    "ExportOptions": "export.options",
    "FuXiLinearConfig": "encoders.fuxi_linear.config",
    "FuXiLinearEncoder": "encoders.fuxi_linear.encoder",
    "PrepareOptions": "data.prepare",
    "Recommender": "serving.recommender",
    "evaluate": "api",
    "export": "api",
    "geometric_periods": "encoders.fuxi_linear.config",
    "load_config": "config",
    "make_encoder": "encoders.registry",
    "prepare": "api",
    "refresh": "serving.refresh.refresh",
    "train": "api",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """``export`` stays the function when the folder of that name is imported, which sets it to the folder's module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "export":
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
