"""Stages as TorchX jobs: made, submitted, followed, and found again after the pipeline was killed."""

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchx.runner import config as torchx_config
from torchx.schedulers.local_scheduler import SignalException
from torchx.specs import AppState, AppStatus

from fuxi_torchrec.processes import supervised
from pipelines import components
from pipelines.daily.config import JobsConfig
from pipelines.daily.state import JOB_LOCK, STATE, DailyError, StageError

LOCAL = ("local_cwd", "local")
_TAIL = 12
_PATIENCE = 10  # polls of a scheduler that does not answer, or has nothing to say


@dataclass(frozen=True)
class Job:
    """A stage of a day as a command, on a group of ranks by torchrun or as one process."""

    day: str
    stage: str
    module: str
    arguments: tuple[str, ...]
    grouped: bool = True

    def command(self, ranks: str) -> str:
        """As a person would type it."""
        start = f"torchx run dist.ddp -j {ranks} -m {self.module} --"
        return f"{start if self.grouped else f'python -m {self.module}'} {shlex.join(self.arguments)}"


@dataclass(frozen=True)
class Ended:
    """How a job ended: what it says of a failure, where its output is, whether it was stopped for good."""

    message: str = ""
    logs: str | None = None
    cancelled: bool = False


class TorchXJobs:
    """Jobs through TorchX's Runner; the logs of local ones are kept in ``jobs`` below the pipeline's root."""

    def __init__(self, runner: Any, scheduler: str, config: JobsConfig, root: Path) -> None:
        self.runner, self.scheduler, self.config, self.root = runner, scheduler, config, root

    def request(self, job: Job) -> Any:
        """What would be submitted, printable; a job that cannot be made is refused."""
        what_to_do = "see jobs.ranks, host, mounts, scheduler_options"
        with _as_stage_error(f"{job.stage}: no job for {self.scheduler} can be made", what_to_do):
            return self.runner.dryrun(self._app(job), self.scheduler, self._options())

    def _app(self, job: Job) -> Any:
        config = self.config
        common: dict[str, Any] = {name: getattr(config, name) for name in ("image", "cpu", "mem_mb", "host")}
        common |= {"module": job.module, "env": dict(config.environment)}
        common["mounts"] = [part for mount in config.mounts for part in mount.split(",")] or None
        name = f"daily-{job.stage}-{job.day}"
        if job.grouped:
            common |= {key: getattr(config, key) for key in ("gpu", "threads", "restarts")}
            app = components.group(*job.arguments, name=f"daily/{name}", j=config.ranks, **common)
        else:
            app = components.single(*job.arguments, name=name, **common)
        if self.scheduler in LOCAL:  # a cluster's job goes on without the pipeline, one here ends with it
            for role in app.roles:
                role.env["PATH"] = str(Path(sys.executable).parent)  # TorchX puts it before the rest
                role.entrypoint, *role.args = supervised([role.entrypoint, *role.args], self.root / JOB_LOCK)
        return app

    def _options(self) -> dict[str, Any]:
        """Of the scheduler: the config's, then those of .torchxconfig."""
        known = self.runner.scheduler_run_opts(self.scheduler)
        given: dict[str, Any] = {}
        for key, value in self.config.scheduler_options.items():
            if known.get(key) is None:  # TorchX would leave it out without a word
                names = ", ".join(name for name, _ in known)
                raise DailyError(f"jobs.scheduler_options: {self.scheduler} has no option {key}; it has {names}")
            given |= known.cfg_from_str(f"{key}={value}")
        if self.scheduler in LOCAL:
            given.setdefault("log_dir", str(self.root / "jobs"))
        torchx_config.apply(self.scheduler, given)
        return given

    def submit(self, job: Job) -> str:
        """Start a job; its handle."""
        request = self.request(job)
        with _as_stage_error(f"{job.stage}: {self.scheduler} did not take the job", "mend it, and run again"):
            return str(self.runner.schedule(request))

    def follow(self, handle: str) -> Ended:
        """Wait for its end; how long a job may take is for the scheduler to say."""
        while (status := self._status(handle)) is not None and not status.is_terminal():
            time.sleep(self.config.poll_seconds)
        if status is None:
            return Ended(f"{self.scheduler} does not know {handle} any more")
        place = status.ui_url.removeprefix("file://") if status.ui_url else f"torchx log {handle}"
        name = status.state.name
        message = "" if name == "SUCCEEDED" else _error(status) or _tail(Path(place)) or f"ended as {name}"
        return Ended(message, place, cancelled=name == "CANCELLED")

    def wait_for_earlier(self, handle: str) -> None:
        """Wait for a job on a cluster that an earlier pipeline started; one on this machine has ended with it."""
        polls = unknown = 0
        while (status := self._status(handle)) is not None and not status.is_terminal():
            # Slurm says it of a job without a row in its accounting; Kubernetes of one that it has not looked at yet
            unknown = unknown + 1 if status.state.name == "UNKNOWN" and handle.startswith("slurm:") else 0
            if unknown == _PATIENCE:
                return  # forgotten
            if polls == 0:
                print(f"  {handle} still runs; waiting for it", flush=True)
            polls += 1
            time.sleep(self.config.poll_seconds)

    def _status(self, handle: str) -> Any:
        """Of a job, None if there is none; a scheduler that does not answer is queried again."""
        for _ in range(_PATIENCE):
            try:
                return self.runner.status(handle)
            except SignalException:
                raise
            except Exception as error:
                if "CANCELLED by" in str(error):  # Slurm says who, and TorchX does not know such a state
                    return AppStatus(AppState.CANCELLED, msg=str(error))
                if getattr(error, "status", None) == 404:  # Kubernetes of a job that was deleted
                    return None
                problem = repr(error)
            time.sleep(self.config.poll_seconds)
        raise DailyError(
            f"{self.scheduler} does not say how {handle} is: {problem}; it may still run. Run again to go on with it; "
            f"if it surely does not run, set this job to null in {self.root / STATE} and take out its checksum first"
        )


@contextlib.contextmanager
def _as_stage_error(what: str, to_do: str) -> Iterator[None]:
    """Whatever TorchX and its schedulers raise, in words."""
    try:
        yield
    except (SignalException, DailyError):
        raise
    except Exception as error:
        raise StageError(f"{what}: {type(error).__name__}: {error}; {to_do}") from error


def _error(status: Any) -> str:
    """The error that torchrun has reported of the worker that failed first."""
    with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
        message = json.loads(status.structured_error_msg)["message"]
        return str(message["message"] if isinstance(message, dict) else message).strip()
    return ""


def _tail(directory: Path) -> str:
    """The last lines that a local job wrote to its standard error."""
    files = sorted(directory.glob("*/*/stderr.log"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_TAIL:])
