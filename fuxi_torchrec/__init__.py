"""FuXi-Linear on TorchRec: a linear-time, time-aware sequence encoder for recommendation.

The encoder's names are loaded when first used and need torch alone. Importing the package itself imports nothing else,
so that the doctor can run where torch is missing or broken.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuxi_torchrec.encoders.fuxi_linear.config import FuXiLinearConfig, geometric_periods
    from fuxi_torchrec.encoders.fuxi_linear.encoder import FuXiLinearEncoder
    from fuxi_torchrec.encoders.registry import make_encoder
    from fuxi_torchrec.encoders.state import EncoderState

__version__ = "0.1.0"

_HOME = {
    "EncoderState": "fuxi_torchrec.encoders.state",
    "FuXiLinearConfig": "fuxi_torchrec.encoders.fuxi_linear.config",
    "FuXiLinearEncoder": "fuxi_torchrec.encoders.fuxi_linear.encoder",
    "geometric_periods": "fuxi_torchrec.encoders.fuxi_linear.config",
    "make_encoder": "fuxi_torchrec.encoders.registry",
}

__all__ = ["EncoderState", "FuXiLinearConfig", "FuXiLinearEncoder", "__version__", "geometric_periods", "make_encoder"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
