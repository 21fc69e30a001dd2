"""Make `.venv` with the verified stack and this project, editable.

    python3.11 setup_env.py [cpu|cuda]      # by default what .venv is for, else cpu
    python3.11 setup_env.py gpu-offline     # .venv-gpu: Triton on CPUs, for `make test-gpu-offline`

Versions come from pyproject.toml. Only the standard library is used, and nothing newer than Python 3.7
up to the version check, so that an old interpreter gets its message and not a syntax error.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
OURS = VENV / ".made-by-setup-env"  # written when .venv is begun, holds the variant
STAMP = VENV / ".setup-stamp"  # written when everything passed
PYTHON_WANTED = (3, 11)
VARIANTS = ("cpu", "cuda")
OFFLINE = "gpu-offline"


def stop(message: str) -> None:
    """End with a message that says what to do."""
    sys.exit("setup: " + message)


def say(message: str) -> None:
    """Report one step."""
    print("setup: " + message, flush=True)


def check_python() -> None:
    """FBGEMM and TorchRec were verified on one Python version."""
    if sys.version_info[:2] != PYTHON_WANTED:
        stop(
            "Python {}.{} is needed, this is {}.{} ({}). Install it and name it: make setup PYTHON=python{}.{}".format(
                *PYTHON_WANTED, *sys.version_info[:2], sys.executable, *PYTHON_WANTED
            )
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        stop(f"this Python lacks {error.name}. On Debian and Ubuntu: apt-get install python3.11-venv")


def stamp(variant: str) -> str:
    """A digest of everything that decides what ends up in .venv."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(repr((variant, sys.version, str(ROOT))).encode())
    return digest.hexdigest()


def variant_there() -> str:
    """What .venv is for; cpu if there is none. Who asked for cuda once need not say it again."""
    found = OURS.read_text() if OURS.exists() else ""
    return found if found in VARIANTS else "cpu"


def runs(*command: object) -> bool:
    """Whether a command runs and succeeds; its output is dropped."""
    try:
        return subprocess.run([str(c) for c in command], stdout=-3, stderr=-3, cwd=ROOT).returncode == 0
    except OSError:
        return False


def make_venv(variant: str) -> None:
    """Create .venv, or keep a sound one; one that we left half-made, or of the other variant, is made anew."""
    sound = runs(VENV_PYTHON, "-c", f"import sys, pip; assert sys.version_info[:2] == {PYTHON_WANTED}")
    if sound and OURS.exists() and OURS.read_text() == variant:
        return
    if VENV.exists():
        if not OURS.exists():
            stop(
                f"{VENV} exists and was not made by this script. Move it away or delete it, then run make setup again."
            )
        say(f"making .venv anew: it is {'for ' + OURS.read_text() if sound else 'incomplete'}")
        shutil.rmtree(VENV)
    VENV.mkdir()
    OURS.write_text(variant)
    base_python = getattr(sys, "_base_executable", sys.executable)  # not .venv's own, should it be active
    if subprocess.run([base_python, "-m", "venv", str(VENV)]).returncode:
        stop("could not make .venv; the reason stands above. Mend it and run make setup again.")


def pip_commands(variant: str, extras: "dict[str, list[str]]", cpu_torch: bool) -> "list[list[str]]":
    """What pip installs, in this order. The pinned torch comes first and is named again with everything else: asked
    for `torch>=…` alone, the resolver would fetch the newest torch with its CUDA packages, and throw it away."""
    torch = next(need for need in extras["train-base"] if need.startswith("torch=="))
    pinned = torch + "+cpu" if cpu_torch else torch
    if variant == "cuda":
        return [[torch], [torch, "--editable", ".[train,serve,dev]"]]
    # TorchRec's metadata asks for the CUDA build of FBGEMM, so it comes without its dependencies.
    torchrec = next(need for need in extras["train"] if need.startswith("torchrec=="))
    return [[pinned], [pinned, "--editable", ".[train-cpu,serve,dev]"], ["--no-deps", torchrec]]


def offers_cpu_torch(extras: "dict[str, list[str]]") -> bool:
    """Whether an index or link within reach has torch's CPU build (the public index has the CUDA build on Linux)."""
    torch = next(need for need in extras["train-base"] if need.startswith("torch=="))
    return runs(VENV_PYTHON, "-m", "pip", "install", "--dry-run", "--no-deps", torch + "+cpu")


def install(variant: str) -> None:
    """The verified stack, then this project on top of it; pip's own variables reach it through the environment."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for arguments in pip_commands(variant, extras, variant == "cpu" and offers_cpu_torch(extras)):
        command = [str(VENV_PYTHON), "-m", "pip", "install", "--no-warn-conflicts", *arguments]
        if subprocess.run(command, cwd=ROOT).returncode:
            stop(
                "pip could not install the stack; its own message stands above. If no index is in reach, set "
                "PIP_INDEX_URL or PIP_FIND_LINKS to one that holds the packages. Then run make setup again: it goes "
                "on where it stopped."
            )


def make_offline() -> None:
    """.venv-gpu, of torch's CPU build where one is offered, and Triton."""
    import tomllib

    venv, wanted = ROOT / ".venv-gpu", stamp(OFFLINE)
    stamped, python = venv / ".setup-stamp", venv / "bin" / "python"
    if stamped.exists() and stamped.read_text() == wanted and runs(python, "-c", "import torch, triton"):
        say(f"up to date ({OFFLINE})")
        return
    say("installing Triton and torch into .venv-gpu")
    base_python = getattr(sys, "_base_executable", sys.executable)
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][OFFLINE]
    torch, *others = needs
    if subprocess.run([base_python, "-m", "venv", "--clear", str(venv)]).returncode:
        stop("could not make .venv-gpu; the reason stands above.")
    install = [str(python), "-m", "pip", "install", "--quiet"]
    cpu = runs(*install, "--dry-run", "--no-deps", torch + "+cpu")
    if subprocess.run([*install, torch + "+cpu" if cpu else torch, *others]).returncode:
        stop("pip could not install it; its own message stands above. PIP_INDEX_URL and PIP_FIND_LINKS reach pip.")
    stamped.write_text(wanted)


def build_kernels() -> None:
    """The native kernels, where a compiler is; without one everything works in torch, and a line says so."""
    subprocess.run([str(VENV_PYTHON), str(ROOT / "fuxi_torchrec" / "ops" / "native" / "build.py")], cwd=ROOT)


def say_torch_build() -> None:
    """Say whether the index gave a CPU or a CUDA build of torch."""
    code = (
        "import torch; print(torch.__version__, 'for CUDA ' + torch.version.cuda if torch.version.cuda else 'for CPU')"
    )
    say(
        "torch "
        + subprocess.run([str(VENV_PYTHON), "-c", code], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    )


def main() -> None:
    """Check, make, install, examine."""
    if sys.argv[1:] == [OFFLINE]:
        check_python()
        os.environ.pop("PYTHONPATH", None)
        make_offline()
        return
    variant = sys.argv[1] if len(sys.argv) > 1 else variant_there()
    if len(sys.argv) > 2 or variant not in VARIANTS:
        stop("VARIANT must be one of {}, not {!r}".format(", ".join(VARIANTS), " ".join(sys.argv[1:])))
    check_python()
    os.environ.pop("PYTHONPATH", None)  # .venv alone decides what is imported
    wanted = stamp(variant)
    doctor = [str(VENV_PYTHON), "-m", "fuxi_torchrec.doctor"]
    if STAMP.exists() and STAMP.read_text() == wanted and runs(*doctor, "--quick"):
        build_kernels()
        say(f"up to date ({variant})")
        return
    say(f"installing the {variant} stack into .venv; this takes a few minutes the first time")
    make_venv(variant)
    STAMP.unlink(missing_ok=True)
    install(variant)
    say_torch_build()
    build_kernels()
    if subprocess.run(doctor, cwd=ROOT).returncode:
        stop("installed, but the doctor found a problem; its lines above say what to do.")
    STAMP.write_text(wanted)
    say("done. Next: source .venv/bin/activate")


if __name__ == "__main__":
    main()
