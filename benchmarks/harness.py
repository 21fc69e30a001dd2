"""What the benchmarks share: timing, the machine's own peak, child processes for memory, writing results down."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
RAW = HERE / "results"


def seconds(function: Callable[[], Any], repeats: int = 3) -> float:
    """The best of several timed calls, after one that is not timed."""
    function()
    return min(_time(function) for _ in range(repeats))


def compare(functions: Sequence[Callable[[], Any]], repeats: int = 3) -> list[float]:
    """The best time of each function, their calls taken in turn, so that a slow moment of the machine hits all."""
    for function in functions:
        function()
    rounds = [[_time(function) for function in functions] for _ in range(repeats)]
    return [min(times) for times in zip(*rounds, strict=True)]


def _time(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def sgemm_peak(size: int = 2048, repeats: int = 5) -> float:
    """FLOP/s of a large float32 matrix product, now, on this machine."""
    a = torch.randn(size, size)
    return 2 * size**3 / seconds(lambda: a @ a, repeats)


def stream_peak(size: int = 2**26, repeats: int = 5) -> float:
    """Bytes/s of adding up a float32 tensor that no cache holds, now, on this machine."""
    a = torch.randn(size)
    return a.nbytes / seconds(a.sum, repeats)


def in_child(module: str, *arguments: str) -> dict[str, Any]:
    """Run ``python -m module arguments`` and read the JSON of its last line: memory is a process's own."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def environment() -> dict[str, str]:
    """With this environment's programs first."""
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}


def resident_bytes(peak: bool = False) -> int:
    """This process's resident memory, now or at its peak since the last :func:`forget_peak`."""
    field = "VmHWM" if peak else "VmRSS"
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Start measuring the peak anew."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


@dataclass(frozen=True)
class Aim:
    """A figure that must be reached."""

    what: str
    found: float
    wanted: float
    at_most: bool = False

    @property
    def reached(self) -> bool:
        """Whether it was."""
        return self.found <= self.wanted if self.at_most else self.found >= self.wanted

    def __str__(self) -> str:
        bound = "at most" if self.at_most else "at least"
        return f"{self.what}: {self.found:.4g} ({bound} {self.wanted:g}) {'reached' if self.reached else 'MISSED'}"


def machine() -> str:
    """One line about the machine, the versions and the commit."""
    with open("/proc/cpuinfo") as file:
        names = {line.partition(":")[2].strip() for line in file if line.startswith("model name")}
    return (
        f"{', '.join(sorted(names))}, {os.cpu_count()} cores; Python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} thread(s); commit {_commit()}"
    )


def _commit() -> str:
    """Of what is measured; what benchmarks themselves write does not count as a change."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=HERE.parent, check=False).stdout

    changed = git(
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ".",
        f":!{HERE.name}/RESULTS.md",
        f":!{HERE.name}/results",
        ":!docs/results",
        ":!docs/results.md",
    )
    return (git("rev-parse", "--short", "HEAD").strip() or "unknown") + ("-dirty" if changed.strip() else "")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def publish(name: str, title: str, text: str, raw: dict[str, Any]) -> None:
    """Put a benchmark's section into RESULTS.md, in place of its last one, and its raw figures beside it."""
    RAW.mkdir(exist_ok=True)
    rows = re.compile(r"\[[^][{}]*\]")  # a list of figures is a line
    text_of_raw = rows.sub(lambda found: " ".join(found[0].split()), json.dumps(raw, indent=1))
    (RAW / f"{name}.json").write_text(text_of_raw + "\n")
    section = f"<!-- begin {name} -->\n## {title}\n\n{text.strip()}\n<!-- end {name} -->\n"
    old = RESULTS.read_text() if RESULTS.exists() else "# Results\n\nWritten by the programs in this folder.\n"
    pattern = re.compile(rf"<!-- begin {name} -->.*?<!-- end {name} -->\n", re.DOTALL)
    new = pattern.sub(lambda _: section, old) if pattern.search(old) else f"{old.rstrip()}\n\n{section}"
    RESULTS.write_text(new)


Section = Callable[[Path], tuple[str, list[Aim], Any]]  # a scratch directory to text, aims and raw figures


def run_sections(name: str, sections: dict[str, Section], wanted: Sequence[str], about: str) -> int:
    """Run sections of a benchmark, each published when it is done; 0 if all aims were reached.

    Args:
        name: of the benchmark's module.
        sections: all it has.
        wanted: which to run.
        about: how it was measured, a sentence or two.
    """
    unknown = [section for section in wanted if section not in sections]
    if unknown:
        raise SystemExit(f"no section {', '.join(unknown)}: there are {', '.join(sections)}")
    scratch, aims = Path(tempfile.mkdtemp(prefix=f"{name}-benchmark-")), list[Aim]()
    head = f"`python -m benchmarks.{name}`, float32. {machine()}. {about}".strip()
    try:
        for section in wanted:
            part, found, raw = sections[section](scratch)
            print(part, flush=True)
            text = "\n\n".join([head, part, "\n".join(f"* {aim}" for aim in found)])
            publish(f"{name}-{section}", f"{name.capitalize()}: {section}", text, raw)
            aims += found
    finally:
        shutil.rmtree(scratch)
    return conclude(aims)


def conclude(aims: Sequence[Aim]) -> int:
    """Print every aim; 0 if all were reached."""
    for aim in aims:
        print(aim)
    return 0 if all(aim.reached for aim in aims) else 1
