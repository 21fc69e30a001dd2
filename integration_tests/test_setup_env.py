"""setup_env.py on machines where something is wrong, each in a directory of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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
