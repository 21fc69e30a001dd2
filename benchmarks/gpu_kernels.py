"""The Triton kernels compiled for GPUs that are not here: registers, shared memory, spills, occupancy.

    python -m benchmarks.gpu_kernels [--quick] [--write]        # in the environment of `make test-gpu-offline`

Every launch of a forward and backward pass, of states alone and of one-event steps is recorded at the shapes of our
configurations, and compiled ahead of time by Triton's own ptxas: no device or driver is needed. Exit code 1 for a
spill, for shared memory beyond the device's, for registers that leave fewer than 8 warps to a multiprocessor.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import harness
from fuxi_torchrec.ops import triton as kernels

# dim, heads, scales, kernel width: gitlog and the demo; the published settings of KuaiRand and of MovieLens; wide heads
SHAPES = [(64, 2, 8, 32), (128, 4, 8, 32), (256, 8, 8, 32), (256, 4, 8, 64)]
MAIN = [80, 90]
OTHERS = [86, 89, 100]
WARPS_WANTED = 8  # of a multiprocessor, at least, that registers and shared memory leave room for


class Device(NamedTuple):
    """Of a multiprocessor: registers, bytes of shared memory, those of one program, warps."""

    registers: int
    shared: int
    program_shared: int
    warps: int


DEVICES = {
    80: Device(65536, 164 * 1024, 163 * 1024, 64),
    86: Device(65536, 100 * 1024, 99 * 1024, 48),
    89: Device(65536, 100 * 1024, 99 * 1024, 48),
    90: Device(65536, 228 * 1024, 227 * 1024, 64),
    100: Device(65536, 228 * 1024, 227 * 1024, 64),
}


@dataclass(frozen=True)
class Launch:
    """A kernel as it is launched: types of its arguments, in order, and its compile-time constants."""

    module: str
    name: str
    types: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int


@dataclass(frozen=True)
class Compiled:
    """What ptxas made of it."""

    launch: Launch
    capability: int
    registers: int
    shared: int
    spilled: int

    @property
    def warps(self) -> int:
        """Of a multiprocessor, at the same time."""
        device, mine = DEVICES[self.capability], self.launch.warps
        per_warp = -(-self.registers * 32 // 256) * 256
        programs = min(device.registers // (per_warp * mine), device.warps // mine)
        if self.shared:
            programs = min(programs, device.shared // (self.shared + 1024))
        return programs * mine

    @property
    def wrong(self) -> str:
        device = DEVICES[self.capability]
        if self.spilled:
            return f"spills {self.spilled} bytes"
        if self.shared > device.program_shared:
            return f"needs {self.shared} bytes of shared memory, there are {device.program_shared}"
        return "" if self.warps >= WARPS_WANTED else f"leaves {self.warps} warps, {WARPS_WANTED} are wanted"


_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def inputs(shape: kernels.Shape, dtype: torch.dtype, events: int = 18_690, users: int = 24) -> list[Tensor]:
    """Of a block, without numbers: layout, times, parameters; the projection first."""
    dim, heads, scales, kernel = shape
    new = lambda *size, dtype=torch.float32: torch.empty(*size, dtype=dtype, device="meta")  # noqa: E731
    wide, narrow = events // 32 + users, events // 16 + users
    return [
        new(events, 8 * dim, dtype=dtype),
        *(new(2, wide, dtype=torch.int32), new(users + 1, dtype=torch.int32)),
        *(new(2, narrow, dtype=torch.int32), new(users + 1, dtype=torch.int32)),
        *(new(events, dtype=torch.int64), new(events, dtype=torch.int64)),
        *(new(events, scales, 2), new(events, 2 * scales, 2), new(events, dtype=torch.int64)),
        *(new(heads), new(scales), new(2 * scales), new(2 * scales), new(1024, kernel), new(()), new(())),
    ]


def launches(shape: kernels.Shape, official: bool, dtype: torch.dtype = torch.float32) -> list[Launch]:
    """All that the operators launch for a shape."""
    from fuxi_torchrec.ops.triton import launch, operators

    found: dict[Launch, None] = {}

    def record(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        types = tuple(_TYPES[a.dtype] if isinstance(a, Tensor) else f"i32:{a % 16 == 0}" for a in arguments)
        constants = tuple((name, value) for name, value in options.items() if name not in ("num_warps", "num_stages"))
        module, name = kernel.fn.__module__, kernel.fn.__name__
        found[Launch(module, name, types, constants, options["num_warps"])] = None

    before, launch.run = launch.run, record
    try:
        block, users = inputs(shape, dtype), 24
        dim, heads, scales, kernel = shape
        states = [
            torch.empty(users, heads, dim // heads, dim // heads, device="meta"),
            torch.empty(users, 2 * scales, 2, dim // 2 // scales, dtype=torch.float64, device="meta"),
            torch.empty(users, kernel, dim, device="meta"),
        ]
        for given in ([None] * 3, states):
            gated, *kept = operators.IMPLEMENTATIONS["triton_block"](*block, *given, official, True, True)
            after = [None] * 3 if given[0] is None else states
            operators.IMPLEMENTATIONS["triton_block_backward"](gated, *after, *kept[:4], *block, *given, official)
        one = block[0][:users], block[5][:users], block[6][:users]
        for store in (False, True):
            operators.IMPLEMENTATIONS["triton_step"](*one, *block[7:], *states, official, store)
        rows = torch.empty(18_690, dim, device="meta")
        for layer in (False, True):
            operators.IMPLEMENTATIONS["triton_norm"](rows, layer)
            operators.IMPLEMENTATIONS["triton_norm_backward"](rows, rows, layer)
    finally:
        launch.run = before
    return list(found)


def compiled(launch: Launch, capability: int) -> Compiled:
    """Compile it, and ask what it needs."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(launch.module), launch.name)
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for number, (name, kind) in enumerate(zip(kernel.arg_names, launch.types, strict=False)):
        signature[name] = kind.partition(":")[0]
        if kind.startswith("*") or kind.endswith("True"):
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, dict(launch.constants), attributes)
    made = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": launch.warps, "num_stages": 1})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return Compiled(launch, capability, usage["REG"], made.metadata.shared, usage["STACK"] + usage["LOCAL"])


def cases(quick: bool) -> Iterator[tuple[tuple[int, int, int, int], Launch, int]]:
    """Which launches are compiled for which devices; a quick look is for two shapes and the main devices."""
    seen = set()
    for number, shape in enumerate(SHAPES[1:3] if quick else SHAPES):
        for official in (False, True):
            for launch in launches(kernels.Shape(*shape), official):
                for capability in MAIN if quick or number != 1 else [*MAIN, *OTHERS]:
                    if (launch, capability) not in seen:
                        seen.add((launch, capability))
                        yield shape, launch, capability


def _one(case: tuple[Any, Launch, int]) -> Compiled:
    return compiled(case[1], case[2])


def measure(quick: bool, workers: int = 2) -> list[tuple[tuple[int, int, int, int], Compiled]]:
    """Everything compiled."""
    every = list(cases(quick))
    with ProcessPoolExecutor(workers) as pool:
        return list(zip([shape for shape, *_ in every], pool.map(_one, every, chunksize=4), strict=True))


def table(found: Sequence[tuple[tuple[int, int, int, int], Compiled]]) -> str:
    """By kernel and device: how many compilations, and the worst of each."""
    rows: dict[tuple[str, int], list[Compiled]] = {}
    for _, each in found:
        name = f"{each.launch.module.rpartition('.')[2]}.{each.launch.name}".replace("scan.scan", "scan")
        rows.setdefault((name, each.capability), []).append(each)
    lines = [
        [
            *(name, f"sm_{capability}", str(len(each)), str(each[0].launch.warps)),
            *(str(max(e.registers for e in each)), str(max(e.shared for e in each))),
            *(str(max(e.spilled for e in each)), f"{min(e.warps for e in each)} of {DEVICES[capability].warps}"),
        ]
        for (name, capability), each in sorted(rows.items())
    ]
    titles = ["kernel", "device", "compiled", "warps", "registers", "shared, B", "spilled, B", "warps at once"]
    return harness.table(titles, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print, and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two shapes, sm_80 and sm_90")
    parser.add_argument("--write", action="store_true", help="the table into RESULTS.md")
    options = parser.parse_args(arguments)
    if missing := kernels.load().missing:
        parser.error(missing)
    found = measure(options.quick)
    print(table(found))
    wrong = [f"{shape} {each.launch.name} sm_{each.capability}: {each.wrong}" for shape, each in found if each.wrong]
    print(f"\n{len(found)} compilations, {len(wrong)} wrong", *wrong, sep="\n")
    if options.write:
        raw = [[*shape, each.launch.name, each.capability, each.registers, each.shared] for shape, each in found]
        harness.publish("gpu_kernels", "GPU kernels, compiled", _page(found), {"compiled": raw})
    return int(bool(wrong))


def _page(found: Sequence[tuple[tuple[int, int, int, int], Compiled]]) -> str:
    shapes = ", ".join(f"d={d} H={h} H_t={s} d_p={k}" for d, h, s, k in SHAPES)
    return (
        f"`python -m benchmarks.gpu_kernels --write`: {len(found)} compilations by triton {kernels.VERIFIED} and its "
        f"ptxas, ahead of time, of every launch of both presets at {shapes} (sm_86, sm_89 and sm_100: the second shape "
        'alone). Nothing was run. Each row has the worst of its compilations; "warps at once" is what registers and '
        f"shared memory leave room for.\n\n{table(found)}"
    )


if __name__ == "__main__":
    sys.exit(main())
