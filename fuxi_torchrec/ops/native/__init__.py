"""The library of C++ kernels: found, loaded once, and its operators known to torch.

It is built by ``make setup`` or ``pip install`` (see :mod:`.build`), never when imported. One that is missing, of other
sources, or that this machine or this torch cannot load gives a reason in a line, and torch is used.
"""

from functools import cache
from pathlib import Path

import torch

from fuxi_torchrec.ops.native.build import HERE, LIBRARY, digest

_REBUILD = "run make setup, or python -m fuxi_torchrec.ops.native.build"


def load(path: Path = HERE / LIBRARY) -> str:
    """Load the library, once; why that is impossible, or nothing."""
    return _load(path)


@cache
def _load(path: Path) -> str:
    if not path.exists():
        return f"{path.name} was not built: {_REBUILD}"
    try:
        torch.ops.load_library(path)
        built_from = torch.ops.fuxi_torchrec.sources()
    except (OSError, RuntimeError, AttributeError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"{path.name} cannot be loaded ({why}): {_REBUILD}"
    if built_from != digest():
        return f"{path.name} was built from other sources: {_REBUILD}"
    from fuxi_torchrec.ops.native import block

    block.register()
    return ""


_ready: bool | None = None


def ready() -> bool:
    """Whether the operators can be called."""
    global _ready
    if _ready is None:
        _ready = not load()
    return _ready


def instruction_sets() -> list[str]:
    """Those that the kernels were compiled for and this machine has, the fastest first; empty without kernels."""
    return str(torch.ops.fuxi_torchrec.instruction_sets(_chosen)).split() if ready() else []


_chosen = ""


def choose(instruction_set: str) -> None:
    """Use the kernels of one instruction set; the fastest if empty."""
    global _chosen
    torch.ops.fuxi_torchrec.instruction_sets(instruction_set)
    _chosen = instruction_set
