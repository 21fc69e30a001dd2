"""What the wheel holds and promises."""

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "project"  # builds leave files behind
    tracked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(tracked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)  # the kernels are compiled
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_it_holds_the_package_and_its_types_and_nothing_else(wheel):
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert "fuxi_torchrec/py.typed" in names
    assert "fuxi_torchrec/ops/__init__.py" in names
    assert {name.split("/")[0] for name in names} == {"fuxi_torchrec"}
    assert not [name for name in names if "/tests/" in name]


def test_it_registers_no_entry_points(wheel):
    assert not [name for name in wheel.namelist() if name.endswith("entry_points.txt")]


def test_it_needs_torch_alone_and_offers_the_rest_as_extras(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(name))
    needs = metadata.get_all("Requires-Dist")
    assert [need for need in needs if "extra ==" not in need] == ["torch>=2.13"]
    assert {"train", "train-cpu", "serve", "dev"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_version_is_said_once_and_the_same(wheel):
    import fuxi_torchrec

    assert f"fuxi_torchrec-{fuxi_torchrec.__version__}.dist-info/METADATA" in wheel.namelist()
