"""The library of C++ kernels: found, loaded once, and its operators known to torch.

It is built by ``make setup`` or ``pip install`` (see :mod:`.build`), never when imported. One that is missing, of other
sources, or that this machine or this torch cannot load gives a reason in a line, and torch is used.
"""

import threading
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from fuxi_torchrec.ops.native.build import HERE, LIBRARY, digest

_BUILD = "python -m fuxi_torchrec.ops.native.build"
_loading = threading.Lock()
_loaded: Path | None = None  # a process has the operators of one library


class Found(NamedTuple):
    """What this machine has.

    Attributes:
        missing: why there are no kernels; empty if there are.
        instruction_sets: those that the kernels were compiled for and the machine has, the fastest first.
        onednn: whether torch has oneDNN and the CPU AVX-512 that MKL leaves unused, as those not made by Intel.
    """

    missing: str
    instruction_sets: tuple[str, ...] = ()
    onednn: bool = False


def load(path: Path = HERE / LIBRARY) -> Found:
    """Load the library, once."""
    with _loading:
        return _load(path.resolve())


@cache
def _load(path: Path) -> Found:
    global _loaded
    if not path.exists():
        return Found(f"{path.name} was not built: run make setup, or {_BUILD}")
    if digest().encode() not in path.read_bytes():
        return Found(f"{path.name} was built from other sources: run make setup, or {_BUILD}")
    if _loaded is not None:
        return Found(f"{path} cannot be loaded beside {_loaded}: choose one before the first encoder is made")
    try:
        torch.ops.load_library(path)
        torch.ops.fuxi_torchrec.sources()
    except (OSError, RuntimeError, AttributeError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return Found(f"{path.name} cannot be loaded ({why}): run {_BUILD} --force")
    _loaded = path
    from fuxi_torchrec.ops.native import block, decode, rows

    for operators in (block, decode, rows):
        operators.register()
    sets = tuple(torch.ops.fuxi_torchrec.instruction_sets("").split())
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return Found("", sets, has_onednn and torch.ops.fuxi_torchrec.prefers_onednn())


def choose(instruction_set: str) -> None:
    """Use the kernels of one instruction set; the fastest if empty."""
    torch.ops.fuxi_torchrec.instruction_sets(instruction_set)
