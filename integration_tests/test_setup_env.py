"""setup_env.py on machines where something is wrong, each in a directory of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import setup_env

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TORCH = next(need for need in EXTRAS["train-base"] if need.startswith("torch=="))


@pytest.fixture
def project(tmp_path):
    for name in ("pyproject.toml", "setup_env.py"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def setup(project, *arguments, pretend="", **environment):
    """Run the script; ``pretend`` is Python that runs before it."""
    run = "runpy.run_path('setup_env.py', run_name='__main__')"
    code = f"import sys, runpy; sys.argv = ['setup_env.py', *{list(arguments)!r}]\n{pretend}\n{run}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )
    return done.returncode, done.stdout + done.stderr


def test_another_python_is_told_which_one_is_needed(project):
    status, said = setup(project, pretend="sys.version_info = (3, 9, 2, 'final', 0)")
    assert status == 1
    assert "setup: Python 3.11 is needed, this is 3.9" in said
    assert "make setup PYTHON=python3.11" in said


def test_a_python_without_venv_is_told_what_to_install(project):
    status, said = setup(project, pretend="sys.modules['ensurepip'] = None")
    assert status == 1
    assert "apt-get install python3.11-venv" in said


def test_an_unknown_variant_is_named(project):
    status, said = setup(project, "tpu")
    assert status == 1
    assert "VARIANT must be one of cpu, cuda, not 'tpu'" in said


@pytest.mark.parametrize(
    ("there", "given", "installed"),
    [(None, [], "cpu"), ("cuda", [], "cuda"), ("cpu", [], "cpu"), ("", [], "cpu"), ("cuda", ["cpu"], "cpu")],
)
def test_an_environment_keeps_its_variant_unless_another_is_asked_for(project, there, given, installed):
    if there is not None:
        (project / ".venv").mkdir()
        (project / ".venv" / ".made-by-setup-env").write_text(there)
    only_say = "import subprocess; subprocess.run = lambda *_, **__: sys.exit('here it would begin')"
    _, said = setup(project, *given, pretend=only_say)
    assert said == f"setup: installing the {installed} stack into .venv; this takes a few minutes the first time\n" + (
        "here it would begin\n"
    )


def test_make_leaves_the_variant_to_the_environment_that_is_there():
    # as on a command line, also where the tests themselves are run by make
    ours = ("VARIANT", "MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    for target in ("setup", "lint"):
        for given, passed in (([], ""), (["VARIANT=cuda"], "cuda")):
            command = ["make", "--dry-run", target, "PYTHON=python3.11", *given]
            said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
            assert said.splitlines()[0].rstrip() == f'"python3.11" setup_env.py {passed}'.rstrip()


def test_somebody_elses_venv_is_left_alone(project):
    (project / ".venv").mkdir()
    (project / ".venv" / "precious").write_text("keep")
    status, said = setup(project)
    assert status == 1
    assert "was not made by this script. Move it away or delete it" in said
    assert (project / ".venv" / "precious").read_text() == "keep"


def test_a_half_made_venv_is_made_anew_and_an_index_out_of_reach_is_explained(project, tmp_path_factory):
    (project / ".venv").mkdir()
    (project / ".venv" / ".made-by-setup-env").write_text("cpu")
    (project / ".venv" / "rubbish").write_text("")
    empty = str(tmp_path_factory.mktemp("empty"))
    status, said = setup(project, PIP_NO_INDEX="1", PIP_FIND_LINKS=empty, PIP_CONFIG_FILE=os.devnull)
    assert status == 1
    assert "making .venv anew: it is incomplete" in said
    assert "pip could not install the stack" in said
    assert "set PIP_INDEX_URL" in said
    assert not (project / ".venv" / "rubbish").exists()
    assert not (project / ".venv" / ".setup-stamp").exists()


# --- what pip is asked for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", setup_env.VARIANTS)
@pytest.mark.parametrize("cpu_torch", [False, True])
def test_the_pinned_torch_comes_first_and_is_named_wherever_something_needs_it(variant, cpu_torch):
    first, *others = setup_env.pip_commands(variant, EXTRAS, cpu_torch)
    assert first == [TORCH + ("+cpu" if cpu_torch and variant == "cpu" else "")]
    for command in others:
        assert command[0] in (first[0], "--no-deps"), command
    assert ("--no-deps" in others[-1]) == (variant == "cpu"), "TorchRec asks for the CUDA build of FBGEMM"


def dry_run(log, arguments):
    """What pip would install in an empty environment, by name; and the packages that it fetched on its way."""
    report = log.with_suffix(".json")
    options = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(report), "--log", str(log)]
    command = [sys.executable, "-m", "pip", "install", *options, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())["install"]
    fetched = re.findall(r"(?:Downloading|Using cached|Processing) \S*?([^/\s]+)\.(?:whl|tar\.gz)", log.read_text())
    return {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in found}, fetched


@pytest.mark.timeout(700)
def test_a_dry_run_of_the_cpu_set_up_considers_the_pinned_torch_and_no_cuda_package(tmp_path):
    probe = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", TORCH + "+cpu"]
    reached = subprocess.run(probe, capture_output=True, text=True, timeout=200, check=False)
    if reached.returncode:
        pytest.skip(f"no package index in reach has {TORCH}+cpu: {reached.stderr.strip().splitlines()[-1:]}")
    wanted, considered = TORCH.removeprefix("torch==") + "+cpu", set()
    for number, arguments in enumerate(setup_env.pip_commands("cpu", EXTRAS, cpu_torch=True)):
        found, fetched = dry_run(tmp_path / f"{number}.log", arguments)
        assert found.get("torch", wanted) == wanted
        names = [*found, *fetched]  # what the resolver fetched counts, whether it is installed in the end or not
        assert not [name for name in names if name.startswith(("nvidia", "triton"))], names
        considered |= {name.split("-")[1].replace("%2B", "+") for name in fetched if name.startswith("torch-")}
    assert considered == {wanted}
