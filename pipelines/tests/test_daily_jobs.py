"""The daily pipeline's jobs, on schedulers that answer as TorchX's do."""

import dataclasses
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torchx.runner import get_runner
from torchx.schedulers.local_scheduler import SignalException

from fuxi_torchrec.strict_yaml import ConfigError
from pipelines.daily import config as daily_config
from pipelines.daily import jobs as daily_jobs
from pipelines.daily import state as daily_state
from pipelines.daily.jobs import Ended, Job
from pipelines.daily.state import DailyError, StageError


class ApiError(Exception):
    """What the client of Kubernetes raises."""

    def __init__(self, status):
        super().__init__(f"({status})")
        self.status = status


class Runner:
    """A cluster that knows some jobs, each in one state after another; ``lasting`` outlive a cancel."""

    def __init__(self, states, lasting=False):
        self.states, self.lasting, self.cancelled = states, lasting, []

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

    def cancel(self, handle):
        self.cancelled.append(handle)
        if not self.lasting:
            self.states[handle] = ["RUNNING", "RUNNING", "CANCELLED"]  # a job may save before it leaves


class Status:
    structured_error_msg, ui_url = "<NONE>", None

    def __init__(self, name):
        self.state = type("State", (), {"name": name})

    def is_terminal(self):
        return self.state.name in ("SUCCEEDED", "FAILED", "CANCELLED")


class Clock:
    """Time that passes only while the pipeline sleeps."""

    def __init__(self):
        self.now, self.sleeping = 0.0, lambda: None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.sleeping()


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(daily_jobs, "time", found)
    return found


@pytest.fixture
def cluster(clock, tmp_path):
    """Makes jobs on a scheduler."""

    def make(states, scheduler="slurm", lasting=False):
        config = daily_config.JobsConfig(poll_seconds=2.0, timeout_minutes=60.0)
        return daily_jobs.TorchXJobs(Runner(states, lasting), scheduler, config, tmp_path)

    return make


JOB = Job("0", "train", "pipelines.train", ())


def test_a_job_is_followed_to_its_end(cluster):
    jobs = cluster({"slurm://t/1": ["UNKNOWN", "PENDING", "RUNNING", "SUCCEEDED"], "slurm://t/2": ["FAILED"]})
    assert jobs.follow(JOB, "slurm://t/1") == Ended(logs="torchx log slurm://t/1")
    assert jobs.follow(JOB, "slurm://t/2") == Ended("ended as FAILED", "torchx log slurm://t/2")
    assert "does not know" in cluster({}, "kubernetes").follow(JOB, "kubernetes://t/n:3").message


def test_a_scheduler_that_does_not_answer_is_asked_again_and_a_cancelled_job_has_ended(cluster, tmp_path):
    away = subprocess.CalledProcessError(1, "sacct")
    cancelled = AssertionError("failed to translate slurm state CANCELLED by 1000 to torchx state")
    states = {"slurm://t/1": ["RUNNING", away, away, "SUCCEEDED"], "slurm://t/2": ["RUNNING", cancelled]}
    jobs = cluster({**states, "slurm://t/3": [away]})
    assert not jobs.follow(JOB, "slurm://t/1").message
    ended = jobs.follow(JOB, "slurm://t/2")
    assert ended.message == "ended as CANCELLED" and ended.cancelled
    assert not jobs.wait_for_earlier(JOB, "slurm://t/2")
    with pytest.raises(DailyError, match=r"slurm does not say how slurm://t/3 is.* to null in .*state.json"):
        jobs.follow(JOB, "slurm://t/3")


def test_a_job_that_takes_too_long_is_cancelled_and_its_end_waited_for(cluster, clock):
    jobs = cluster({"slurm://t/1": ["RUNNING"]})
    ended = jobs.follow(JOB, "slurm://t/1")
    assert ended.cancelled and "cancelled after 60 minutes" in ended.message
    assert jobs.runner.cancelled == ["slurm://t/1"] and jobs.runner.states["slurm://t/1"] == ["CANCELLED"]
    assert clock.now > 3600.0
    lasting = cluster({"slurm://t/1": ["RUNNING"]}, lasting=True)
    with pytest.raises(DailyError, match="still runs: slurm://t/1; stop it, and run again"):
        lasting.follow(JOB, "slurm://t/1")


def test_a_cancelled_job_has_ended_when_its_lock_is_free(cluster, clock, tmp_path):
    file = tmp_path / ".lock"
    job = dataclasses.replace(JOB, lock=file)
    jobs = cluster({"local_cwd://t/1": ["RUNNING"]}, "local_cwd")
    held = daily_state.locked(file, "the run")
    held.__enter__()  # a worker in a session of its own, which TorchX does not kill
    looks = []

    def sleeping():
        looks.append(bool(jobs.runner.cancelled))
        if looks.count(True) == 3:
            held.__exit__(None, None, None)

    clock.sleeping = sleeping
    assert jobs.follow(job, "local_cwd://t/1").cancelled
    assert looks.count(True) == 3


def test_a_cluster_job_of_an_earlier_pipeline_is_waited_for(cluster):
    jobs = cluster({"slurm://t/1": ["RUNNING", "UNKNOWN", "RUNNING", "FAILED"]})
    assert jobs.wait_for_earlier(JOB, "slurm://t/1")
    assert not jobs.wait_for_earlier(JOB, "slurm://t/1")
    with pytest.raises(DailyError, match="still runs after 60 minutes: slurm://t/1; stop it"):
        cluster({"slurm://t/1": ["RUNNING"]}).wait_for_earlier(JOB, "slurm://t/1")


def test_a_cluster_job_that_does_not_exist_any_more_holds_nothing_up(cluster):
    assert not cluster({}).wait_for_earlier(JOB, "slurm://t/9")
    assert not cluster({}, "kubernetes").wait_for_earlier(JOB, "kubernetes://t/n:9")
    with pytest.raises(DailyError, match="still runs"):  # made, and not looked at yet
        cluster({"kubernetes://t/n:1": ["UNKNOWN"]}, "kubernetes").wait_for_earlier(JOB, "kubernetes://t/n:1")
    with pytest.raises(DailyError, match=r"ApiError.*403"):
        cluster({"kubernetes://t/n:1": [ApiError(403)]}, "kubernetes").wait_for_earlier(JOB, "kubernetes://t/n:1")


def test_a_local_job_of_an_earlier_pipeline_is_found_by_its_lock(tmp_path):
    lock = tmp_path / ".data.lock"
    code = (
        f"import fcntl, time; file = open({str(lock)!r}, 'a'); fcntl.flock(file, 2); print(flush=True); time.sleep(1)"
    )
    job = dataclasses.replace(JOB, lock=lock)
    with get_runner() as runner:
        config = daily_config.JobsConfig(poll_seconds=0.1)
        jobs = daily_jobs.TorchXJobs(runner, "local_cwd", config, tmp_path)
        handle = "local_cwd://torchx/train-0-abc"  # of another process: this runner knows nothing of it
        assert not jobs.wait_for_earlier(job, handle)
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            assert jobs.wait_for_earlier(job, handle) and process.wait() == 0
        assert not jobs.wait_for_earlier(job, None)


# --- before they run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"host": "no_such_machine"}, {"mounts": ("src=/host",)}, {"mounts": ("type=tape,src=/a,dst=/b",)}]
)
def test_a_job_that_cannot_be_made_is_refused_in_words(tmp_path, settings):
    with get_runner() as runner:
        jobs = daily_jobs.TorchXJobs(runner, "local_cwd", daily_config.JobsConfig(**settings), tmp_path)
        with pytest.raises(StageError, match=r"train: no job for local_cwd can be made: .*see jobs.processes, host"):
            jobs.request(JOB)
        daily_jobs.TorchXJobs(runner, "local_cwd", daily_config.JobsConfig(), tmp_path).request(JOB)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("processes", ["2x", "x2", "two", "1x2x3", ""])
def test_a_number_of_processes_that_is_none_is_refused(processes):
    with pytest.raises(ConfigError, match=r"jobs.*processes is nodes x ranks per node"):
        daily_config.load(None, [f'jobs.processes="{processes}"'])


def test_what_a_scheduler_raises_when_it_is_given_a_job_is_a_failed_stage(tmp_path):
    jobs = daily_jobs.TorchXJobs(None, "slurm", daily_config.JobsConfig(), tmp_path)
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
