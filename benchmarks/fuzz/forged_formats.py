"""Files whose checksums are right and whose contents are not what this package wrote: prepared by somebody."""

import dataclasses
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.fuzz import mutations, outcomes
from benchmarks.fuzz.mutations import Mutation
from benchmarks.fuzz.outcomes import CORRECT, SILENT, Outcome
from benchmarks.fuzz.training_formats import STEP, resume
from fuxi_torchrec.artifacts import crc32_of
from fuxi_torchrec.training.checkpoint.info import read_info

MARKER = "code-ran"  # a directory that hostile pickles make
_HOSTILE = 0.2  # share of the cases


class _Runs:
    """Its pickle calls a function when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def hostile(place: Path, random: Random) -> Mutation:
    """A pickle that makes the marker."""
    marker = str(place / MARKER)
    calls = [
        _Runs(os.mkdir, marker),
        _Runs(os.system, f"mkdir {marker}"),
        _Runs(subprocess.check_call, ["mkdir", marker]),
        _Runs(exec, f"import os; os.mkdir({marker!r})"),
        _Runs(eval, f"__import__('os').mkdir({marker!r})"),
        _Runs(Path.mkdir, Path(marker)),
    ]
    number, protocol = random.randrange(len(calls)), random.randrange(pickle.HIGHEST_PROTOCOL + 1)
    return Mutation(f"hostile pickle {number}, protocol {protocol}", pickle.dumps(calls[number], protocol))


@dataclass(frozen=True)
class ForgedMetadata:
    """A checkpoint's ``.metadata``, a pickle, changed together with its checksum.

    What it says may be another checkpoint, so that any answer is one; but no code of its own may run.
    """

    name: str = "checkpoint-forged"

    def answers(self, fixtures: Path, place: Path) -> Any:
        """There is nothing to compare with."""
        shutil.copytree(fixtures / "run", place)
        return len(resume(place, fixtures))

    def draw(self, fixtures: Path, random: Random, place: Path = Path("/nonexistent")) -> tuple[str, Mutation]:
        """What the file becomes."""
        data = (fixtures / "run" / STEP / ".metadata").read_bytes()
        return f"{STEP}/.metadata", hostile(place, random) if random.random() < _HOSTILE else mutations.damage(
            data, random
        )

    def run(self, fixtures: Path, place: Path, random: Random, wanted: Any) -> Outcome:
        """Forge a copy, resume it, and look whether code ran."""
        shutil.copytree(fixtures / "run", place)
        target, mutation = self.draw(fixtures, random, place)
        file, step, damage = place / target, place / STEP, f"{target}: {mutation.what}"
        file.write_bytes(mutation.data)
        info = read_info(step)
        files = {**info.files, file.name: (file.stat().st_size, crc32_of(file))}
        dataclasses.replace(info, files=files).write(step)
        try:
            resume(place, fixtures)
            outcome = Outcome(CORRECT, damage)
        except BaseException as error:
            outcome = outcomes.of_error(error, damage, place, ())
        return Outcome(SILENT, damage, "code of the file ran") if (place / MARKER).exists() else outcome


FORMATS = [ForgedMetadata()]
