"""Is this machine ready? Versions, FBGEMM's operators, a sharded table on two ranks, cores, memory, devices.

    python -m fuxi_torchrec.doctor [--quick]

One line a finding; a line that says FAIL also says what to do. Exit code 0 if nothing failed, else 1.
"""

import argparse
import importlib.metadata
import logging
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fuxi_torchrec.machine import cores, memory_bytes

PYTHON_WANTED = (3, 11)
FBGEMM_BUILDS = ("fbgemm-gpu-cpu", "fbgemm-gpu")  # one of them; both install the module fbgemm_gpu
REINSTALL = "run `make setup` (or, outside the repository, reinstall with the extra [train] or [train-cpu])"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``advice`` is empty when nothing must be done."""

    what: str
    found: str
    advice: str = ""
    mark: str = "ok"

    @property
    def failed(self) -> bool:
        return bool(self.advice)

    def __str__(self) -> str:
        mark = "FAIL" if self.failed else self.mark
        return f"{mark:<4} {self.what:<16} {self.found}" + f" -> {self.advice}" * self.failed


def wanted_versions() -> dict[str, str]:
    """The versions this package pins with "==", by distribution name, read from its own metadata."""
    pins: dict[str, str] = {}
    for requirement in importlib.metadata.requires("fuxi_torchrec") or []:
        match = re.match(r"([\w.-]+)==([\w.]+)\s*;\s*extra\s*==\s*['\"]train", requirement)
        if match:
            pins[match[1].replace("_", "-").lower()] = match[2]
    return pins


def installed_version(distribution: str) -> str | None:
    """The installed version, None if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python() -> Iterator[Finding]:
    """The stack was verified on one Python version."""
    advice = ""
    if sys.version_info[:2] != PYTHON_WANTED:
        advice = "the stack is verified on Python {}.{}: make setup PYTHON=python{}.{}".format(*PYTHON_WANTED * 2)
    yield Finding("python", platform.python_version(), advice)


def check_versions() -> Iterator[Finding]:
    """Found and wanted, package by package."""
    wanted = wanted_versions()
    builds = [name for name in FBGEMM_BUILDS if installed_version(name)]
    if len(builds) > 1:
        advice = f"they overwrite each other: pip uninstall -y {' '.join(builds)}, then {REINSTALL}"
        yield Finding("fbgemm", " and ".join(builds), advice)
    for name in sorted(wanted):
        if name in FBGEMM_BUILDS and name not in (builds or FBGEMM_BUILDS[:1]):
            continue
        found = installed_version(name)
        if found is None:
            yield Finding(name, f"missing, {wanted[name]} wanted", REINSTALL)
        elif found.partition("+")[0] != wanted[name]:
            yield Finding(name, f"{found}, {wanted[name]} wanted", f"they work only as a set: {REINSTALL}")
        else:
            yield Finding(name, found)


def check_operators() -> Iterator[Finding]:
    """FBGEMM's library loads against this torch and computes."""
    try:
        import fbgemm_gpu  # noqa: F401
        import torch

        sums = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([2, 0, 3])).tolist()
    except Exception as error:
        yield Finding("fbgemm operator", _first_line(error), f"torch and FBGEMM do not fit each other: {REINSTALL}")
        return
    if sums == [0, 2, 2, 5]:
        yield Finding("fbgemm operator", "computes")
    else:
        yield Finding("fbgemm operator", f"cumsum of [2, 0, 3] gave {sums}", REINSTALL)


def check_sharding() -> Iterator[Finding]:
    """A row-wise sharded EmbeddingBagCollection on two gloo ranks gives the unsharded rows."""
    from fuxi_torchrec.worker_group import WorkerError, WorkerGroup

    try:
        with WorkerGroup(world_size=2, timeout_seconds=120) as group:
            largest = max(group.run(row_wise_lookup_error))
    except WorkerError as error:
        advice = "gloo or TorchRec failed; if the text speaks of an address or a connection, set GLOO_SOCKET_IFNAME=lo"
        yield Finding("two ranks", str(error).strip().splitlines()[-1], advice)
        return
    advice = "" if largest < 1e-6 else f"sharded rows differ from unsharded ones by {largest:.1e}: {REINSTALL}"
    yield Finding("two ranks", "row-wise sharded lookup over gloo is exact" if not advice else "wrong rows", advice)


def row_wise_lookup_error() -> float:
    """On each rank: the largest difference between a row-wise sharded lookup and plain indexing."""
    logging.disable(logging.WARNING)  # TorchRec's remarks would hide the report
    warnings.simplefilter("ignore")
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rows = torch.arange(40.0).reshape(10, 4)
    tables = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"])]
    )
    plan = construct_module_sharding_plan(
        tables,
        per_param_sharding={"t": row_wise()},
        sharder=EmbeddingBagCollectionSharder(),
        local_size=size,
        world_size=size,
        device_type="cpu",
    )
    model = DistributedModelParallel(tables, device=torch.device("cpu"), plan=ShardingPlan({"": plan}))
    model.load_state_dict({"embedding_bags.t.weight": rows})
    ids = torch.tensor([(3 * i + rank) % 10 for i in range(5)])
    features = KeyedJaggedTensor.from_lengths_sync(["f"], ids, torch.ones(5, dtype=torch.int64))
    found = model(features).wait()["f"].detach()
    return float((found - rows[ids]).abs().max())


def check_machine() -> Iterator[Finding]:
    """Cores, memory and devices this process may use."""
    memory = memory_bytes() / 2**30
    yield Finding("machine", f"{cores()} cores, {memory:.0f} GiB of memory, {platform.machine()}")
    try:
        import torch
    except Exception as error:
        yield Finding("torch", _first_line(error), REINSTALL)
        return
    if torch.version.cuda is None:
        yield Finding("devices", "CPU only: this torch is a CPU build")
    elif not torch.cuda.is_available():
        yield Finding("devices", f"CPU only: torch is built for CUDA {torch.version.cuda}, no usable device found")
    else:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding(
            "devices",
            f"{', '.join(names)}; CUDA {torch.version.cuda} (fuxi_torchrec was never run on a GPU: docs/gpu.md)",
        )
    from fuxi_torchrec.ops import backends

    kernels = backends.found()
    if kernels.missing:
        yield Finding("backends", f"torch; no native CPU kernels: {kernels.missing}")
    else:
        products = "; products by oneDNN" if kernels.onednn else ""
        yield Finding("backends", f"torch, native CPU kernels ({kernels.instruction_sets[0]}){products}")
    if torch.cuda.is_available():
        yield Finding("gpu kernels", gpu_kernels(torch.cuda.device_count()))


def gpu_kernels(devices: int) -> str:
    """Whether blocks run in Triton kernels on this many CUDA devices, and which blocks."""
    import torch

    from fuxi_torchrec.ops import triton

    reasons = [triton.load().missing] if triton.load().missing else []
    reasons = reasons or [why for n in range(devices) if (why := triton.unfit(torch.device("cuda", n)))]
    if reasons:
        return f"blocks run in torch: {'; '.join(reasons)}"
    return f"triton {triton.VERIFIED}, for {triton.COVERED}; other blocks run in torch"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def examine(quick: bool = False) -> Iterator[Finding]:
    """All findings in order; what needs a sound stack is left out once something failed."""
    deep_checks: list[Callable[[], Iterator[Finding]]] = [] if quick else [check_operators, check_sharding]
    failed = False
    for finding in (*check_python(), *check_versions()):
        failed |= finding.failed
        yield finding
    if not quick:
        yield from check_machine()
    for check in deep_checks:
        if failed:
            yield Finding(check.__name__.removeprefix("check_"), "not checked: mend the lines above first", mark="--")
            continue
        for finding in check():
            failed |= finding.failed
            yield finding


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m fuxi_torchrec.doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="versions only, without importing anything")
    failures = 0
    for finding in examine(parser.parse_args(arguments).quick):
        print(finding, flush=True)
        failures += finding.failed
    print(f"{failures} problem{'s' * (failures != 1)} found" if failures else "all well")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
