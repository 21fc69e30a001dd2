"""The daily pipeline with real TorchX jobs: three days, killed twice on the way, a broken day, a rollback."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import yaml
from torchx.runner import get_runner

from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.processes import GRACE_SECONDS, descendants, strike
from fuxi_torchrec.strict_yaml import load
from integration_tests.launches import all_end, marked, until
from pipelines import synthesize
from pipelines.daily.config import DailyConfig
from pipelines.daily.jobs import TorchXJobs
from pipelines.daily.loop import FAILED, Daily
from pipelines.daily.state import DailyError, Day, Evaluation

ROOT = Path(__file__).parents[1]
CONFIG = {
    "train": {
        "config": "configs/demo.yaml",
        "settings": [
            *("batch.events=1024", "batch.max_length=64", "model.dim=16", "model.num_layers=1"),
            *("model.max_positions=64", "optimizer.warmup_steps=2", "train.epochs=100", "train.max_steps=120"),
            *("validation.every_epochs=null", "checkpoint.every_steps=2", "logging.every_steps=1"),
            *("logging.tensorboard=false", "distributed.timeout_seconds=90"),
        ],
    },
    "evaluate": {"users": 60, "baselines": False},
    "gate": {"max_fall": 1.0},  # so few users say nothing of a model; what falls is tested without launches
    "export": {"arguments": ["--no-programs", "--no-index"]},
    "jobs": {"restarts": 0, "poll_seconds": 0.2},
}
LIMIT = 400  # seconds for anything that is waited for


class Pipeline:
    """The command line over logs that arrive day by day."""

    def __init__(self, directory):
        self.directory, self.root, self.file = directory, directory / "root", directory / "daily.yaml"
        self.log, self.mark = directory / "said", uuid.uuid4().hex  # of the command that ran last; of all processes
        path = f"{directory}/log/part-{{day}}.parquet"
        self.file.write_text(yaml.safe_dump({**CONFIG, "root": str(self.root), "logs": {"path": path}}))
        (directory / "log").mkdir()
        arguments = ["--users", "120", "--items", "400", "--median-length", "25", "--length-sigma", "1"]
        made = synthesize.main([*arguments, "--cuts", "0.8,0.9", "--output", str(directory / "made")])
        assert made == 0

    def log_arrives(self, *days):
        for day in days:
            os.rename(self.directory / "made" / f"part-{day}.parquet", self.directory / "log" / f"part-{day}.parquet")

    def start(self, *options):
        command = [sys.executable, "-m", "pipelines.daily", "--config", str(self.file), *options]
        with self.log.open("w") as log:
            environment = {**os.environ, "MARK": self.mark}
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def run(self, *options):
        process = self.start(*options)
        try:
            process.wait(LIMIT)
        finally:
            process.kill()
        return process.returncode, self.log.read_text()

    def wait_until(self, condition, process):
        until(condition, process, self.log, LIMIT)

    def end(self, process, number):
        """Stop the pipeline alone; nothing that it started may be left."""
        process.send_signal(number)
        process.wait(LIMIT)
        return all_end(self.mark)

    def day(self, day):
        if not (self.root / "state.json").exists():
            return {"status": "", "stages": {}}
        return json.loads((self.root / "state.json").read_text())["days"].get(day, {"status": "", "stages": {}})

    def is_running(self, day, stage):
        return self.day(day)["stages"].get(stage, {"status": ""})["status"] == "running"

    def published(self):
        return os.path.basename(os.readlink(self.root / "published"))

    def is_training(self, day):
        """Training of the day has a checkpoint, and has not ended."""
        if not (self.root / "runs" / day / "checkpoints" / "latest").exists():
            return False
        return self.is_running(day, "train")


@pytest.mark.timeout(1500)
def test_three_days_killed_twice_on_the_way_then_a_broken_one_and_a_rollback(tmp_path):
    pipeline = Pipeline(tmp_path)
    try:
        check_three_days(pipeline)
    finally:
        strike(marked(pipeline.mark))


def check_three_days(pipeline):
    root = pipeline.root

    # the machine is wanted in the middle of day one's training, and stops in the middle of day two's
    pipeline.log_arrives(0, 1)
    process = pipeline.start()
    pipeline.wait_until(lambda: pipeline.is_training("0"), process)
    below = descendants(process.pid)
    strike(below - set().union(*map(descendants, below)), signal.SIGTERM)  # what TorchX has started
    pipeline.wait_until(lambda: pipeline.is_training("1"), process)
    assert pipeline.day("0")["stages"]["train"]["attempts"] == 2, "it was launched again"
    pipeline.end(process, signal.SIGKILL)
    assert pipeline.published() == "0"
    assert "stopped" in pipeline.run("--status")[1]

    # run again: training goes on from its checkpoint; the pipeline is killed in the middle of day three's
    pipeline.log_arrives(2)
    process = pipeline.start()
    pipeline.wait_until(lambda: pipeline.is_training("2"), process)
    process.kill()
    process.wait()  # and the next one begins at once, while the job still ends
    said = pipeline.log.read_text()
    assert "day 1: train, from day 0\n  prepare: done\n" in said
    assert pipeline.published() == "1"
    stages = pipeline.day("1")["stages"]
    assert stages["prepare"]["attempts"] == 1 and stages["train"]["attempts"] == 2
    logs = Path(stages["train"]["logs"])
    assert any("resumed from step-" in file.read_text() for file in logs.rglob("stderr.log")), list(logs.rglob("*"))

    # run again: day three goes on, too; then comes a broken log
    (pipeline.directory / "log" / "part-3.parquet").write_text("no Parquet")
    code, said = pipeline.run()
    assert code == FAILED, said
    assert pipeline.day("2")["stages"]["train"]["attempts"] == 2, said
    assert pipeline.published() == "2" and pipeline.day("2")["status"] == "published"
    assert "day 3: prepare failed" in said and f"{pipeline.directory}/log/part-3.parquet: not a readable" in said
    assert "day 2 stays published" in said and pipeline.day("3")["status"] == "failed"

    # what is published is a whole export, of a model over all three logs
    bundle = Bundle.open(root / "published" / "export", verify="checksums")
    assert bundle.manifest.dataset == json.loads((root / "data" / "2" / "dataset.json").read_text())["fingerprint"]
    base = [json.loads((root / "data" / day / "dataset.json").read_text())["events"] for day in "012"]
    assert base == sorted(set(base)), "every day adds events"
    losses = [json.loads(line)["loss"] for line in (root / "runs" / "2" / "metrics.jsonl").read_text().splitlines()]
    first = [json.loads(line)["loss"] for line in (root / "runs" / "0" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == len(first) == 120 and losses[0] < first[0], "it started from the weights of the day before"

    # back to day two, and on again
    code, said = pipeline.run("--rollback")
    assert code == 0 and "day 1 is published, day 2 is not any more" in said
    assert (root / "published" / "export").resolve() == root / "exports" / "1"
    assert "rolled back" in pipeline.run("--status")[1]
    assert pipeline.run("--rollback", "2")[0] == 0
    assert pipeline.published() == "2"


@pytest.mark.timeout(900)
def test_nothing_outlives_a_pipeline_that_was_killed_and_the_next_one_goes_on(tmp_path):
    assert GRACE_SECONDS < 5
    pipeline = Pipeline(tmp_path)
    pipeline.log_arrives(0)
    moments = (
        (signal.SIGKILL, lambda: pipeline.is_running("0", "prepare")),
        (signal.SIGKILL, lambda: pipeline.is_running("0", "train")),  # torchrun starts
        (signal.SIGTERM, lambda: pipeline.is_training("0")),
        (signal.SIGKILL, lambda: pipeline.is_running("0", "evaluate")),
    )
    try:
        for number, moment in moments:
            process = pipeline.start()
            pipeline.wait_until(moment, process)
            pipeline.end(process, number)
        code, said = pipeline.run()
        assert code == 0 and pipeline.published() == "0", said
    finally:
        strike(marked(pipeline.mark))


# --- clusters: what would be submitted -------------------------------------------------------------------------------


def requests(scheduler, options, tmp_path):
    """Each stage's request to the scheduler, of a day after another."""
    settings = [
        *("root=/shared/daily", 'logs.path="/shared/logs/{day}"', "gate.against=same_data", 'jobs.ranks="2x4"'),
        *("jobs.gpu=4", "jobs.mem_mb=64000", "jobs.image=registry/fuxi:1", f"jobs.scheduler_options={options}"),
    ]
    config = load(DailyConfig, None, [*settings, "jobs.environment={EXTRA: yes please}", f"root={tmp_path}"])
    with get_runner() as runner:
        jobs = TorchXJobs(runner, scheduler, config.jobs, Path("/shared/daily"))
        made = Daily(config, jobs)
        (tmp_path / "releases" / "5").mkdir(parents=True)
        evaluation = dataclasses.asdict(Evaluation("test", False, "step-1", 1, "abc", 9))
        release = {"day": "5", "trained": "5", "evaluation": evaluation, "previous": None, "at": ""}
        (tmp_path / "releases" / "5" / "release.json").write_text(json.dumps(release))
        stages = ("prepare", "train", "evaluate", "compare", "export", "refresh")
        return {stage: str(jobs.request(made.stages.job(stage, "6", Day(base="5")))) for stage in stages}


def test_a_dry_run_for_slurm_shows_complete_jobs(tmp_path):
    made = requests("slurm", "{partition: debug}", tmp_path)
    assert "python -m pipelines.prepare events" in made["prepare"] and "--ntasks-per-node=1" in made["prepare"]
    for stage, module in (("train", "train"), ("evaluate", "evaluate"), ("compare", "evaluate"), ("export", "export")):
        script = made[stage]
        assert (
            script.count("--partition=debug --ntasks-per-node=1 --cpus-per-task=2 --mem=64000 --gpus-per-task=4") == 2
        )
        assert script.count(f"-m pipelines.{module} ") == 2 and "--nnodes 2 --nproc_per_node 4" in script
        assert script.count("PET_MAX_RESTARTS=3") == script.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == 2
    assert f"--init-from={tmp_path}/runs/5" in made["train"] and f"--extend={tmp_path}/data/5" in made["prepare"]


def test_a_dry_run_for_kubernetes_shows_complete_jobs(tmp_path):
    made = requests("kubernetes", "{queue: default, namespace: train}", tmp_path)
    job = yaml.safe_load(made["train"])
    assert len(job["spec"]["tasks"]) == 2
    for task in job["spec"]["tasks"]:
        (container,) = task["template"]["spec"]["containers"]
        assert container["image"] == "registry/fuxi:1"
        assert "-m pipelines.train --config=configs/demo.yaml" in container["command"][-1]
        assert {"name": "EXTRA", "value": "yes please"} in container["env"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    (task,) = yaml.safe_load(made["prepare"])["spec"]["tasks"]
    (container,) = task["template"]["spec"]["containers"]
    assert container["command"][:4] == ["python", "-m", "pipelines.prepare", "events"]


def test_an_option_that_the_scheduler_does_not_have_is_named(tmp_path):
    with pytest.raises(DailyError, match=r"slurm has no option partitoin; it has .*partition"):
        requests("slurm", "{partitoin: debug}", tmp_path)
