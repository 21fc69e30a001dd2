"""What this machine, or the container this process runs in, has to give."""

import os
from pathlib import Path

_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of control groups, second version and first


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Memory that this process may use: the machine's, or less if a control group has a limit.

    Args:
        groups, own: where the system tells of control groups, and of those of this process.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    named = own.read_text().splitlines() if own.exists() else []
    places = [groups, *(groups / line.split(":", 2)[2].lstrip("/") for line in named if line.count(":") >= 2)]
    for path in {parent / name for place in places for parent in (place, *place.parents) for name in _LIMITS}:
        if path.is_relative_to(groups) and path.is_file():
            text = path.read_text().strip()
            limits += [int(text)] if text.isdigit() else []
    return min(limits)
