"""Are mistakes in the GPU path found? Each one is made in a copy of the sources, and the offline tests are run on it.

    python -m benchmarks.gpu_mutations [--only WORD] [--write]      # in the environment of `make test-gpu-offline`

Exit code 1 if a mistake passes all tests, or if the sources as they are do not. Some minutes an idle core.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness
from fuxi_torchrec.ops import triton

ROOT = Path(__file__).parents[1]
LOST = "**not found**"
FOLDERS, FILES = ("fuxi_torchrec", "benchmarks"), ("conftest.py", "pyproject.toml")
TESTS = {
    "interpreter": "fuxi_torchrec/ops/triton/tests/test_interpreter.py",
    "pretend_device": "fuxi_torchrec/ops/triton/tests/test_pretend_device.py",
    "compile": "fuxi_torchrec/encoders/tests/test_compile.py",
}


class Mistake(NamedTuple):
    """``old`` text of a file of the package, which stands there once, becomes ``new``; ``found_by`` is run first."""

    what: str
    file: str
    old: str
    new: str
    found_by: str


MISTAKES = [Mistake(**each) for each in tomllib.loads((ROOT / "benchmarks/gpu_mistakes.toml").read_text())["mistake"]]


def make(mistake: Mistake | None, into: Path) -> None:
    """A copy of what the tests need, with a mistake in it."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, into / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in FILES:
        shutil.copy(ROOT / name, into / name)
    if mistake is not None:
        file = into / "fuxi_torchrec" / mistake.file
        file.write_text(mistaken(mistake, file.read_text()))


def mistaken(mistake: Mistake, text: str) -> str:
    """The text with the mistake; an error if its place is not there, or not the only one."""
    if text.count(mistake.old) != 1:
        raise ValueError(f"{mistake.what}: {mistake.old!r} stands {text.count(mistake.old)} times in {mistake.file}")
    return text.replace(mistake.old, mistake.new)


def failing(mistake: Mistake | None) -> str:
    """The first test that fails; empty if none does."""
    order = [TESTS[name] for name in sorted(TESTS, key=lambda name: mistake is None or name != mistake.found_by)]
    with tempfile.TemporaryDirectory() as place:
        make(mistake, Path(place))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *order]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": place}
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) \S*/(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode != 1 or found is None:
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the mistakes, print which test finds each, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_mutations", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mistakes with this word alone")
    parser.add_argument("--write", action="store_true", help="the table into RESULTS.md")
    options = parser.parse_args(arguments)
    if missing := triton.load().missing:
        parser.error(missing)
    rows, passed = [], []
    for mistake in (None, *(m for m in MISTAKES if options.only in m.what)):
        found = failing(mistake)
        if mistake is None:
            if found:
                parser.error(f"{found} fails without any mistake")
            continue
        print(f"{mistake.what}: {found or 'NOT FOUND'}", flush=True)
        rows.append([mistake.what, mistake.file, found or LOST])
        passed += [] if found else [mistake.what]
        if options.write:
            write(rows)
    print(f"{len(rows)} mistakes, {len(passed)} not found")
    return int(bool(passed))


def write(rows: Sequence[Sequence[str]]) -> None:
    """The table into RESULTS.md."""
    every = _with_earlier(rows)
    harness.publish("gpu_mutations", "GPU kernels: mistakes", _page(every), {"mistakes": every})


def _with_earlier(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Every mistake's row: those of a run of some of them take the place of their earlier ones."""
    file = harness.RAW / "gpu_mutations.json"
    earlier = json.loads(file.read_text())["mistakes"] if file.exists() else []
    known = {row[0]: row for row in (*earlier, *rows)}
    return [known[mistake.what] for mistake in MISTAKES if mistake.what in known]


def _page(rows: Sequence[Sequence[str]]) -> str:
    passed = sum(row[2] == LOST for row in rows)
    return (
        f"`python -m benchmarks.gpu_mutations --write`: {len(rows)} of {len(MISTAKES)} mistakes, one at a time, in a "
        f"copy of the sources; {len(rows) - passed} are found by the tests of `make test-gpu-offline`, in Triton's "
        "interpreter and on the pretend device. The test is the first that fails, the likeliest file first.\n\n"
        f"{harness.table(['mistake', 'in', 'found by'], rows)}"
    )


if __name__ == "__main__":
    sys.exit(main())
