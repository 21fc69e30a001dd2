"""How a case can end, and how that is told."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

REFUSED, CORRECT, UNCLEAR, SILENT, CRASHED, HUNG = "refused", "correct", "unclear", "silent", "crashed", "hung"
OUTCOMES = (REFUSED, CORRECT, UNCLEAR, SILENT, CRASHED, HUNG)
GOOD = (REFUSED, CORRECT)
TOLERANCE = 1e-5  # of float answers: a damaged state is encoded again, in another order of additions


@dataclass(frozen=True)
class Outcome:
    """How a case ended, with the damage and the message."""

    kind: str
    damage: str
    message: str = ""


def of_error(error: BaseException, damage: str, place: Path, words: Iterable[str]) -> Outcome:
    """Refused clearly if the error is one of ours and names a path below ``place``, or one of the words."""
    message = f"{type(error).__name__}: {error}"
    ours = type(error).__module__.startswith(("fuxi_torchrec", "pipelines"))
    named = f"{place}/" in message or any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message) for word in words)
    return Outcome(REFUSED if ours and named else UNCLEAR, damage, message[:2000])


def of_answers(answers: Any, wanted: Any, damage: str) -> Outcome:
    """Correct if they are those of the untouched original."""
    found = difference(answers, wanted)
    return Outcome(CORRECT, damage) if found is None else Outcome(SILENT, damage, found)


def difference(found: Any, wanted: Any, where: str = "answers") -> str | None:
    """Where two answers differ; None if they are the same, floats to a tolerance."""
    if isinstance(wanted, torch.Tensor) or dataclasses.is_dataclass(wanted):
        found, wanted = _plain(found), _plain(wanted)
    if isinstance(wanted, np.ndarray):
        return None if _equal_arrays(found, wanted) else f"{where} differs: {_short(found)} for {_short(wanted)}"
    if isinstance(wanted, dict) and isinstance(found, dict):
        if found.keys() != wanted.keys():
            return f"{where} has other keys: {sorted(map(str, found.keys() ^ wanted.keys()))[:5]}"
        pairs: Iterable[tuple[Any, Any, Any]] = ((name, found[name], wanted[name]) for name in wanted)
    elif isinstance(wanted, Sequence) and not isinstance(wanted, str | bytes) and isinstance(found, Sequence):
        if len(found) != len(wanted):
            return f"{where} has {len(found)} entries for {len(wanted)}"
        pairs = ((number, *pair) for number, pair in enumerate(zip(found, wanted, strict=True)))
    elif isinstance(wanted, float) and isinstance(found, float):
        close = math.isclose(found, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return None if close or (found != found and wanted != wanted) else f"{where} is {found!r} for {wanted!r}"
    else:
        return None if found == wanted else f"{where} is {_short(found)} for {_short(wanted)}"
    return next((told for name, a, b in pairs if (told := difference(a, b, f"{where}.{name}"))), None)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    return vars(value) if dataclasses.is_dataclass(value) else value


def _equal_arrays(found: Any, wanted: Any) -> bool:
    if not isinstance(found, np.ndarray) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if wanted.dtype.kind == "f":
        return bool(np.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))
    return bool(np.array_equal(found, wanted))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"
