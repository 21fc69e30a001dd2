"""The daily pipeline's jobs, on schedulers that answer as TorchX's do."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torchx.runner import get_runner
from torchx.schedulers.local_scheduler import SignalException

from fuxi_torchrec import strict_yaml
from fuxi_torchrec.strict_yaml import ConfigError
from pipelines.daily import jobs as daily_jobs
from pipelines.daily.config import DailyConfig, JobsConfig
from pipelines.daily.jobs import Ended, Job
from pipelines.daily.state import JOB_LOCK, DailyError, StageError


class ApiError(Exception):
    """What the client of Kubernetes raises."""

    def __init__(self, status):
        super().__init__(f"({status})")
        self.status = status


class Runner:
    """A cluster that knows some jobs, each in one state after another."""

    def __init__(self, states):
        self.states = states

    def status(self, handle):
        states = self.states.get(handle)
        if not states:  # deleted: what TorchX's describe does then
            if handle.startswith("kubernetes:"):
                raise ApiError(404)
            return Status("UNKNOWN") if handle.startswith("slurm:") else None
        state = states.pop(0) if len(states) > 1 else states[0]
        if isinstance(state, Exception):
            raise state
        return Status(state)


class Status:
    structured_error_msg, ui_url = "<NONE>", None

    def __init__(self, name):
        self.state = type("State", (), {"name": name})

    def is_terminal(self):
        return self.state.name in ("SUCCEEDED", "FAILED", "CANCELLED")


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """Makes jobs on a scheduler, where waiting takes no time."""
    monkeypatch.setattr(daily_jobs, "time", SimpleNamespace(sleep=lambda seconds: None))

    def make(states, scheduler="slurm"):
        return daily_jobs.TorchXJobs(Runner(states), scheduler, JobsConfig(), tmp_path)

    return make


JOB = Job("0", "train", "pipelines.train", ())


def test_a_job_is_followed_to_its_end(cluster):
    jobs = cluster({"slurm://t/1": ["UNKNOWN", "PENDING", "RUNNING", "SUCCEEDED"], "slurm://t/2": ["FAILED"]})
    assert jobs.follow("slurm://t/1") == Ended(logs="torchx log slurm://t/1")
    assert jobs.follow("slurm://t/2") == Ended("ended as FAILED", "torchx log slurm://t/2")
    assert "does not know" in cluster({}, "kubernetes").follow("kubernetes://t/n:3").message


def test_a_scheduler_that_does_not_answer_is_asked_again_and_a_cancelled_job_has_ended(cluster, tmp_path):
    away = subprocess.CalledProcessError(1, "sacct")
    cancelled = AssertionError("failed to translate slurm state CANCELLED by 1000 to torchx state")
    states = {"slurm://t/1": ["RUNNING", away, away, "SUCCEEDED"], "slurm://t/2": ["RUNNING", cancelled]}
    jobs = cluster({**states, "slurm://t/3": [away]})
    assert not jobs.follow("slurm://t/1").message
    ended = jobs.follow("slurm://t/2")
    assert ended.message == "ended as CANCELLED" and ended.cancelled
    jobs.wait_for_earlier("slurm://t/2")
    with pytest.raises(DailyError, match=r"slurm does not say how slurm://t/3 is.* to null in .*state.json"):
        jobs.follow("slurm://t/3")


def test_a_cluster_job_of_an_earlier_pipeline_is_waited_for(cluster, capsys):
    jobs = cluster({"slurm://t/1": ["RUNNING", "UNKNOWN", "RUNNING", "FAILED"]})
    jobs.wait_for_earlier("slurm://t/1")
    assert jobs.runner.states["slurm://t/1"] == ["FAILED"] and "slurm://t/1 still runs" in capsys.readouterr().out
    jobs.wait_for_earlier("slurm://t/1")
    assert capsys.readouterr().out == ""
    queued = cluster({"kubernetes://t/n:1": ["UNKNOWN"] * 99 + ["SUCCEEDED"]}, "kubernetes")
    queued.wait_for_earlier("kubernetes://t/n:1")  # made, and not looked at yet
    assert queued.runner.states["kubernetes://t/n:1"] == ["SUCCEEDED"]


def test_a_cluster_job_that_does_not_exist_any_more_holds_nothing_up(cluster):
    cluster({}).wait_for_earlier("slurm://t/9")
    cluster({}, "kubernetes").wait_for_earlier("kubernetes://t/n:9")
    with pytest.raises(DailyError, match=r"ApiError.*403"):
        cluster({"kubernetes://t/n:1": [ApiError(403)]}, "kubernetes").wait_for_earlier("kubernetes://t/n:1")


def test_a_job_on_this_machine_ends_with_the_pipeline_and_one_of_a_cluster_does_not(tmp_path):
    with get_runner() as runner:
        for job in (JOB, Job("0", "prepare", "pipelines.prepare", (), grouped=False)):
            here = daily_jobs.TorchXJobs(runner, "local_cwd", JobsConfig(), tmp_path)._app(job).roles[0]
            there = daily_jobs.TorchXJobs(runner, "slurm", JobsConfig(), tmp_path)._app(job).roles[0]
            assert here.entrypoint == sys.executable and str(tmp_path / JOB_LOCK) in here.args
            assert there.entrypoint in ("bash", "python") and there.entrypoint in here.args
        jobs = daily_jobs.TorchXJobs(runner, "local_cwd", JobsConfig(), tmp_path)
        jobs.wait_for_earlier("local_cwd://torchx/train-0-abc")  # of another process, which is gone


# --- before they run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"host": "no_such_machine"}, {"mounts": ("src=/host",)}, {"mounts": ("type=tape,src=/a,dst=/b",)}]
)
def test_a_job_that_cannot_be_made_is_refused_in_words(tmp_path, settings):
    with get_runner() as runner:
        jobs = daily_jobs.TorchXJobs(runner, "local_cwd", JobsConfig(**settings), tmp_path)
        with pytest.raises(StageError, match=r"train: no job for local_cwd can be made: .*see jobs.ranks, host"):
            jobs.request(JOB)
        daily_jobs.TorchXJobs(runner, "local_cwd", JobsConfig(), tmp_path).request(JOB)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("ranks", ["2x", "x2", "two", "1x2x3", ""])
def test_ranks_that_are_none_are_refused(ranks):
    with pytest.raises(ConfigError, match=r"jobs.*ranks is nodes x ranks per node"):
        strict_yaml.load(DailyConfig, None, [f'jobs.ranks="{ranks}"'])


def test_what_a_scheduler_raises_when_it_is_given_a_job_is_a_failed_stage(tmp_path):
    jobs = daily_jobs.TorchXJobs(None, "slurm", JobsConfig(), tmp_path)
    jobs.request = lambda job: job

    def schedule(error):
        def raising(request):
            raise error

        jobs.runner = SimpleNamespace(schedule=raising)
        return jobs.submit(JOB)

    for error in (FileNotFoundError(2, "No such file", "sbatch"), subprocess.CalledProcessError(1, ["sbatch"])):
        with pytest.raises(StageError, match=r"train: slurm did not take the job: .*sbatch"):
            schedule(error)
    with pytest.raises(SignalException):
        schedule(SignalException("stop", signal.SIGTERM))
