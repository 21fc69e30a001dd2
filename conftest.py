"""Fixtures for all tests."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from fuxi_torchrec.ops import backends
from fuxi_torchrec.worker_group import WorkerGroup

# what imports triton is collected where triton is: docs/gpu.md
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*/ops/triton/kernels/*", "*/ops/triton/[co]*s.py"]

# a busy machine is no failure
settings.register_profile("any_speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_speed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--kernels``: a library of native kernels."""
    parser.addoption("--kernels", type=Path, help="native kernels other than those that are built: make test-native")


def pytest_configure(config: pytest.Config) -> None:
    """Load it before any test asks which backends there are."""
    if path := config.getoption("--kernels"):
        backends.load(path)


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], WorkerGroup]]:
    """``workers(2).run(function, ...)``: one group of processes per world size, shared by all tests of a run."""
    groups: dict[int, WorkerGroup] = {}

    def group(world_size: int) -> WorkerGroup:
        if world_size not in groups:
            groups[world_size] = WorkerGroup(world_size, timeout_seconds=90)
        return groups[world_size]

    yield group
    for each in groups.values():
        each.close()
