"""FuXi-Linear on TorchRec: a linear-time, time-aware sequence encoder for recommendation.

Importing this package imports nothing else: not torch, not numpy, not TorchRec. The doctor can therefore run
where one of them is missing or broken.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
