import importlib.metadata

import pytest

from fuxi_torchrec import doctor
from fuxi_torchrec.ops import triton


@pytest.fixture
def installed(monkeypatch):
    """Pretend versions: a dict to change; what it does not name is missing."""
    versions = dict(doctor.wanted_versions())
    del versions["fbgemm-gpu"]
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    return versions


def test_the_wanted_versions_come_from_the_package_itself():
    wanted = doctor.wanted_versions()
    assert {"torch", "torchrec", "torchx", "torchmetrics", "fbgemm-gpu", "fbgemm-gpu-cpu"} == set(wanted)
    assert wanted["torchrec"] in str(importlib.metadata.requires("fuxi_torchrec"))


def test_a_sound_set_passes(installed, capsys):
    installed["torch"] += "+cpu"
    assert doctor.main(["--quick"]) == 0
    assert "all well" in capsys.readouterr().out


def test_a_missing_package_fails_with_what_to_do_and_deeper_checks_wait(installed, capsys):
    del installed["fbgemm-gpu-cpu"]
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("FAIL")]
    assert line.startswith("FAIL fbgemm-gpu-cpu   missing, 1.8.0 wanted -> run `make setup`")
    assert sum("not checked" in line for line in lines) == 2
    assert lines[-1] == "1 problem found"


@pytest.mark.parametrize(
    ("name", "version"), [("torch", "2.12.1+cpu"), ("fbgemm-gpu-cpu", "1.9.0"), ("torchrec", "1.9.2")]
)
def test_a_clashing_version_is_named_with_the_wanted_one(installed, capsys, name, version):
    wanted = installed[name]
    installed[name] = version
    assert doctor.main(["--quick"]) == 1
    assert f"{version}, {wanted} wanted -> they work only as a set" in capsys.readouterr().out


def test_two_builds_of_fbgemm_are_a_clash(installed, capsys):
    installed["fbgemm-gpu"] = installed["fbgemm-gpu-cpu"]
    assert doctor.main(["--quick"]) == 1
    assert "they overwrite each other: pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu" in capsys.readouterr().out


def test_the_sharded_lookup_is_exact(workers):
    assert workers(2).run(doctor.row_wise_lookup_error) == [0.0, 0.0]


def test_fbgemm_computes():
    assert [finding.failed for finding in doctor.check_operators()] == [False]


def test_a_library_that_does_not_load_is_a_finding_not_a_crash(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fbgemm_gpu", None)
    (finding,) = doctor.check_operators()
    assert finding.failed
    assert "torch and FBGEMM do not fit each other" in str(finding)


OTHER = "triton is 2.0.0, the kernels were verified on 3.7.1"


@pytest.mark.parametrize(
    ("missing", "capability", "line"),
    [
        ("triton is not installed: it comes with torch's CUDA build", (8, 0), "blocks run in torch: triton is not"),
        (OTHER, (7, 5), f"blocks run in torch: {OTHER}"),
        ("", (7, 5), "blocks run in torch: cuda:0 has compute capability 7.5, the kernels need 8.0; cuda:1 has"),
        ("", (9, 0), "triton 3.7.1, for heads of up to 64 columns, positional kernels of up to 64, rows of up to 1024"),
    ],
    ids=["no triton", "another triton", "old devices", "good devices"],
)
def test_which_blocks_run_in_gpu_kernels_is_a_line(monkeypatch, missing, capability, line):
    monkeypatch.setattr(triton, "load", lambda: triton.Found(missing))
    monkeypatch.setattr(triton, "capability", lambda device: capability)
    found = doctor.gpu_kernels(2)
    assert found.startswith(line) and "\n" not in found
    assert ("other blocks run in torch" in found) == found.startswith("triton 3.7.1")
