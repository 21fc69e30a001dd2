"""Real TorchX launches of a tiny job, and dry runs for clusters."""

import configparser
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torchx.util.types import to_dict

from pipelines import components

ROOT = Path(__file__).parents[1]
JOB = "integration_tests.hello_group"


def torchx(*arguments, timeout=110):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["torchx", "run", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, timeout=timeout, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def logs_of(output):
    """The kept log directory of a launch, from the handle that torchx prints."""
    (handle,) = [line for line in output.splitlines() if line.startswith("local_cwd://")]
    return ROOT / "runs" / "torchx" / "torchx" / handle.rpartition("/")[2]


def test_plain_dist_ddp_runs_from_the_root_with_kept_logs_and_one_thread():
    done = torchx("dist.ddp", "-j", "1x2", "-m", JOB, "--", "seed=5")
    assert done.returncode == 0, done.stdout
    assert "hello from 2 processes of 1 threads, sum 3, seed 5" in done.stdout
    assert any("hello from 2" in log.read_text() for log in logs_of(done.stdout).rglob("*.log"))


def test_a_failing_worker_gives_exit_code_1_and_its_own_error_first():
    done = torchx("dist.ddp", "-j", "1x2", "--env", "OMP_NUM_THREADS=1", "-m", JOB, "--", "--fail", "1")
    assert done.returncode == 1
    assert "ValueError: rank 1 was told to fail" in done.stdout
    assert "PeerError: the check failed on 1 of 2 ranks: rank 1: ValueError" in done.stdout
    root_cause = done.stdout[done.stdout.index("Root Cause") :]
    assert "rank      : 1 " in root_cause
    assert "ValueError: rank 1 was told to fail" in root_cause


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("train", ["--run-dir", "{}", "model.dmi=3"], "unknown key model.dmi; did you mean model.dim?"),
        ("train", ["--run-dir", "{}/run", "data.path={}/none"], "none: no dataset here"),
        ("evaluate", ["--run-dir", "{}"], "no run here: config.yaml is missing"),
        ("export", ["--run-dirr", "{}"], "the following arguments are required: --run-dir, --output"),
    ],
)
def test_what_a_restart_cannot_mend_ends_the_job_at_once_with_one_message(module, arguments, message, tmp_path):
    wanted = [each.format(tmp_path, tmp_path) for each in arguments]
    done = torchx("dist.ddp", "-j", "1x2", "-m", f"pipelines.{module}", "--", *wanted)
    assert done.returncode == 1
    assert f"[0]:{module}: " in done.stdout and done.stdout.count(message) == 1, done.stdout
    assert "Traceback" not in done.stdout
    assert sum(bool(line.strip()) for line in done.stdout.splitlines()) < 15, done.stdout


def test_the_component_runs_two_nodes_on_one_host(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("seed: 8\n")
    component = [
        "pipelines/components.py:train",
        "--module",
        JOB,
        "-j",
        "2x1",
        "--config",
        config,
        "--run_dir",
        tmp_path,
    ]
    done = torchx(*component, "distributed.timeout_seconds=60")
    assert done.returncode == 0, done.stdout
    assert "hello from 2 processes of 1 threads, sum 3, seed 8" in done.stdout


def test_the_component_and_the_config_file_give_workers_the_same_settings():
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".torchxconfig")
    plain = to_dict(parser["component:dist.ddp"]["env"])
    (role,) = components.train(config="c", run_dir="r").roles
    assert plain.items() <= role.env.items()


COMPONENT = [
    *("pipelines/components.py:train", "--config", "configs/a.yaml", "--run_dir", "/shared/run"),
    *("-j", "2x4", "--gpu", "4", "--mem_mb", "64000", "--image", "registry/fuxi:1", "train.max_steps=5"),
]
COMMAND = "-m pipelines.train --config configs/a.yaml --run-dir /shared/run train.max_steps=5"


def dry_run(*scheduler):
    done = torchx("--dryrun", "--workspace", "", *scheduler, *COMPONENT)
    assert done.returncode == 0, done.stdout
    return done.stdout.partition("=== SCHEDULER REQUEST ===")[2]


def test_a_slurm_dry_run_prints_a_complete_job():
    script = dry_run("-s", "slurm", "-cfg", "partition=debug")
    assert script.count("--partition=debug --ntasks-per-node=1 --cpus-per-task=2 --mem=64000 --gpus-per-task=4") == 2
    assert script.count(COMMAND) == 2
    assert script.count("PET_MAX_RESTARTS=3") == 2
    assert "--nnodes 2 --nproc_per_node 4" in script


def test_a_kubernetes_dry_run_prints_a_complete_job():
    job = yaml.safe_load(dry_run("-s", "kubernetes", "-cfg", "queue=default,namespace=train"))
    assert job["kind"] == "Job"
    assert len(job["spec"]["tasks"]) == 2
    for task in job["spec"]["tasks"]:
        (container,) = task["template"]["spec"]["containers"]
        assert container["image"] == "registry/fuxi:1"
        assert COMMAND in container["command"][-1]
        assert {"name": "PET_MAX_RESTARTS", "value": "3"} in container["env"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"


def documented(scheduler):
    """The command in docs/operations.md for a scheduler."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"torchx run -s {scheduler} ")]
    return shlex.split(line)[2:]


def test_the_documented_slurm_command_makes_a_job_that_is_requeued():
    done = torchx("--dryrun", *documented("slurm"))
    assert done.returncode == 0, done.stdout
    assert "TORCHX_MAX_RETRIES=5" in done.stdout
    assert "--nnodes 2 --nproc_per_node 8" in done.stdout
    assert "--run-dir /shared/runs/long" in done.stdout


def test_the_documented_kubernetes_command_makes_a_job_with_shared_storage():
    done = torchx("--dryrun", *documented("kubernetes"))
    assert done.returncode == 0, done.stdout
    job = yaml.safe_load(done.stdout.partition("=== SCHEDULER REQUEST ===")[2])
    for task in job["spec"]["tasks"]:
        (container,) = task["template"]["spec"]["containers"]
        assert "/shared" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_a_missing_argument_of_the_component_is_named():
    done = torchx("--dryrun", "pipelines/components.py:train", "--config", "configs/a.yaml")
    assert done.returncode != 0
    assert "--run_dir" in done.stdout
