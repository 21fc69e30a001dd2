"""Compile the native kernels: ``python -m fuxi_torchrec.ops.native.build``, or called by setup.py.

A C++17 compiler (``$CXX``, else g++ or c++) and torch's headers are needed, and nothing is fetched. One source is
compiled for each instruction set; the library picks at run time. Only the standard library is imported here: torch's
headers are found without loading torch, so that pip can build in an environment without it.
"""

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "kernels.so"
_OLDEST_TORCH = "0x020a000000000000"  # 2.10: what of the stable ABI is used
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unused-function"]
_SANITIZE = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined", "-g", "-O1"]
_X86 = {
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma"],
    "plain": [],
}


class CannotBuildError(Exception):
    """In a line, why there will be no native kernels."""


def digest() -> str:
    """Of the sources, how they are compiled and for what machine: a library of others is not used."""
    sources = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp"), HERE / "build.py"])
    parts = [platform.machine().encode(), *(path.read_bytes() for path in sources)]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def torch_directory() -> Path:
    """Where torch is installed."""
    spec = find_spec("torch")
    places = [Path(spec.origin).parent] if spec and spec.origin else []
    # in pip's build environment torch cannot be imported, but lies beside the interpreter that will use it
    places += [Path(sysconfig.get_path(name)) / "torch" for name in ("purelib", "platlib")]
    for place in places:
        if (place / "include/torch/csrc/stable/library.h").exists():
            return place
    raise CannotBuildError("torch's headers were not found: install torch first")


def compiler() -> list[str]:
    """The command of a C++ compiler."""
    for candidate in (os.environ.get("CXX"), "g++", "c++"):
        if candidate and shutil.which(shlex.split(candidate)[0]):
            return shlex.split(candidate)
    raise CannotBuildError("no C++ compiler: install g++ (Debian and Ubuntu: apt-get install g++) or name one in CXX")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        error = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
        raise CannotBuildError(f"{command[0]} failed: {error}")


def build(target: Path, sanitize: bool = False) -> None:
    """Compile into ``target``; what is there is replaced when all has worked."""
    torch, cxx = torch_directory(), compiler()
    x86 = platform.machine() in ("x86_64", "AMD64")
    sets = _X86 if x86 else {"plain": []}
    flags = [*_FLAGS, *(_SANITIZE if sanitize else [])]
    with tempfile.TemporaryDirectory() as directory:
        commands = {
            name: [
                *(str(HERE / f"{name}.cpp"), "-isystem", str(torch / "include")),
                *(f"-DTORCH_TARGET_VERSION={_OLDEST_TORCH}", f'-DSOURCES="{digest()}"'),
                *(["-DHAS_X86"] if x86 else []),
            ]
            for name in ("operators", "rows", "decode")
        }
        for name, its_flags in sets.items():
            commands[name] = [str(HERE / "kernels.cpp"), f"-DISA={name}", *its_flags]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            compiled = pool.map(
                lambda item: _run([*cxx, *flags, *item[1], "-c", "-o", f"{directory}/{item[0]}.o"]), commands.items()
            )
            list(compiled)
        linked = f"{directory}/{LIBRARY}"
        objects = [f"{directory}/{name}.o" for name in commands]
        # torch itself is loaded before the library: it is named, not carried
        _run([*cxx, *flags, "-shared", "-o", linked, *objects, f"-L{torch / 'lib'}", "-ltorch_cpu"])
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".kernels-") as aside:
                Path(shutil.copy(linked, aside)).replace(target)
        except OSError as error:
            raise CannotBuildError(f"{target} cannot be written: {error.strerror}") from None


def main() -> None:
    """Build beside the sources; say in a line how it went. Without kernels everything works: that is no failure."""
    parser = argparse.ArgumentParser(description="Compile the native CPU kernels.")
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UndefinedBehaviorSanitizer")
    parser.add_argument("--force", action="store_true", help="also if there is a library of these sources")
    parser.add_argument("--output", type=Path, help="elsewhere than beside the sources")
    arguments = parser.parse_args()
    if arguments.sanitize and arguments.output is None:
        parser.error("--sanitize needs --output: such a library is for tests alone")
    target: Path = arguments.output or HERE / LIBRARY
    again = arguments.force or arguments.sanitize
    if not again and target.exists() and digest().encode() in target.read_bytes():
        print(f"native kernels: {target.name} is up to date")
        return
    try:
        build(target, arguments.sanitize)
        print(f"native kernels: built {target.name}")
    except CannotBuildError as reason:
        print(f"native kernels: not built, torch is used instead: {reason}")


if __name__ == "__main__":
    main()
