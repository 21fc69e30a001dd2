"""Stages as TorchX jobs: made, submitted, followed, and found again after the pipeline was killed."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuxi_torchrec.artifacts import is_locked
from pipelines import components
from pipelines.daily.config import JobsConfig
from pipelines.daily.state import STATE, DailyError, Layout, StageError

LOCAL = ("local_cwd", "local")
_TAIL = 12
_PATIENCE = 10  # polls of a scheduler that does not answer, or has nothing to say
_GRACE_SECONDS = 120.0  # for a cancelled job to save and leave


@dataclass(frozen=True)
class Job:
    """A stage of a day as a command.

    Attributes:
        grouped: on a group of ranks by torchrun; else one process.
        lock: a file that the job holds a lock on while it works, where it has an output that only one may write.
    """

    day: str
    stage: str
    module: str
    arguments: tuple[str, ...]
    grouped: bool = True
    lock: Path | None = None


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        message: what it says of its failure.
        logs: where its output is.
        cancelled: it was stopped for good, by this pipeline or by a person.
    """

    succeeded: bool
    message: str = ""
    logs: str | None = None
    cancelled: bool = False


class TorchXJobs:
    """Jobs through TorchX's Runner.

    Args:
        runner: of ``torchx.runner.get_runner``.
        scheduler: local_cwd, slurm, kubernetes, ...
        config: how jobs run.
        root: of the pipeline; logs of local jobs are kept in its ``jobs``.
    """

    def __init__(self, runner: Any, scheduler: str, config: JobsConfig, root: Path) -> None:
        self.runner, self.scheduler, self.config, self.root = runner, scheduler, config, root

    # --- what is submitted -------------------------------------------------------------------------------------------

    def app(self, job: Job) -> Any:
        """The AppDef."""
        config, name = self.config, f"{job.stage}-{job.day}"
        env = dict(config.environment)
        if self.scheduler in LOCAL:
            env["PATH"] = str(Path(sys.executable).parent)  # TorchX puts it before the rest
        common: dict[str, Any] = {
            "module": job.module,
            "image": config.image,
            "cpu": config.cpu,
            "mem_mb": config.mem_mb,
            "host": config.host,
            "env": env,
            "mounts": [part for mount in config.mounts for part in mount.split(",")] or None,
        }
        if not job.grouped:
            return components.single(*job.arguments, name=f"daily-{name}", **common)
        return components.group(
            *job.arguments,
            name=f"daily/daily-{name}",
            j=config.processes,
            gpu=config.gpu,
            threads=config.threads,
            restarts=config.restarts,
            **common,
        )

    def options(self) -> dict[str, Any]:
        """Of the scheduler: the config's, then those of .torchxconfig."""
        from torchx.runner import config as torchx_config

        known = self.runner.scheduler_run_opts(self.scheduler)
        given: dict[str, Any] = {}
        for key, value in self.config.scheduler_options.items():
            if known.get(key) is None:  # TorchX would leave it out without a word
                names = ", ".join(name for name, _ in known)
                raise DailyError(f"jobs.scheduler_options: {self.scheduler} has no option {key}; it has {names}")
            given |= known.cfg_from_str(f"{key}={value}")
        if self.scheduler in LOCAL:
            given.setdefault("log_dir", str(Layout(self.root).jobs))
        torchx_config.apply(self.scheduler, given)
        return dict(given)

    def request(self, job: Job) -> Any:
        """What would be submitted; printable."""
        with _as_stage_error(
            f"{job.stage}: no job for {self.scheduler} can be made",
            "see jobs.processes, host, mounts, scheduler_options",
        ):
            return self.runner.dryrun(self.app(job), self.scheduler, self.options())

    def check(self, job: Job) -> None:
        """Refuse a job that could not be submitted."""
        self.request(job)

    # --- running -----------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> str:
        """Start a job; its handle."""
        request = self.request(job)
        with _as_stage_error(f"{job.stage}: {self.scheduler} did not take the job", "mend it, and run again"):
            return str(self.runner.schedule(request))

    def follow(self, job: Job, handle: str) -> Ended:
        """Wait for its end; cancelled if it takes too long."""
        for _ in self._ticks():
            status = self._status(handle)
            if status is None:
                return Ended(False, f"{self.scheduler} does not know {handle} any more")
            if status.is_terminal():
                return self._ended(handle, status)
        return self._cancel(job, handle)

    def _cancel(self, job: Job, handle: str) -> Ended:
        """Stop a job that takes too long; workers outlive torchrun for a while, and nothing may begin beside them."""
        from torchx.schedulers.local_scheduler import SignalException

        late = f"cancelled after {self.config.timeout_minutes:g} minutes (jobs.timeout_minutes)"
        try:
            self.runner.cancel(handle)
        except SignalException:
            raise
        except Exception as error:
            late = f"{late}, but {self.scheduler} says {error!r}"
        for _ in self._ticks(_GRACE_SECONDS):
            alive = self._alive(job, handle)
            if not alive:
                return Ended(False, late, cancelled=True)
        raise DailyError(f"{job.stage} was {late} and still runs: {alive}; stop it, and run again")

    def wait_for_earlier(self, job: Job, handle: str | None) -> bool:
        """Wait for a job that an earlier pipeline started, on this machine or a cluster; whether there was one."""
        found, told = False, False
        for _ in self._ticks():
            alive = self._alive(job, handle)
            if not alive:
                return found
            found = True
            if not told:
                print(f"  {job.stage} of day {job.day} still runs: {alive}; waiting for it", flush=True)
                told = True
        raise DailyError(
            f"day {job.day}: {job.stage} of an earlier pipeline still runs after {self.config.timeout_minutes:g} "
            f"minutes: {alive}; stop it, and run again"
        )

    def _alive(self, job: Job, handle: str | None) -> str:
        """What of a job still runs, in words; nothing if nothing does. Another pipeline's local one has a lock."""
        status = self._status_if_known(handle) if handle is not None else None
        if status is not None and not status.is_terminal():
            return str(handle)
        return f"{job.lock} is locked" if job.lock is not None and is_locked(job.lock) else ""

    def _status_if_known(self, handle: str) -> Any:
        """Of a job submitted long ago; None if the scheduler has forgotten it."""
        for _ in range(_PATIENCE):
            status = self._status(handle)
            # Slurm says it of a job without a row in its accounting; Kubernetes of one that it has not looked at yet.
            if status is None or status.state.name != "UNKNOWN" or not handle.startswith("slurm:"):
                return status
            time.sleep(self.config.poll_seconds)
        return None

    def _status(self, handle: str) -> Any:
        """Of a job, None if there is none; a scheduler that does not answer is asked again."""
        from torchx.schedulers.local_scheduler import SignalException
        from torchx.specs import AppState, AppStatus

        asked = 0
        while True:
            try:
                return self.runner.status(handle)
            except SignalException:
                raise
            except Exception as error:
                if "CANCELLED by" in str(error):  # Slurm says who, and TorchX does not know such a state
                    return AppStatus(AppState.CANCELLED, msg=str(error))
                if getattr(error, "status", None) == 404:  # Kubernetes of a job that was deleted
                    return None
                asked += 1
                if asked == _PATIENCE:
                    raise DailyError(
                        f"{self.scheduler} does not say how {handle} is: {error!r}; it may still run. Run again to go "
                        f"on with it; if it surely does not run, set this job to null in {self.root / STATE} first"
                    ) from error
            time.sleep(self.config.poll_seconds)

    def _ticks(self, seconds: float | None = None) -> Iterator[None]:
        """Until the time is up, by default a job's."""
        deadline = time.monotonic() + (self.config.timeout_minutes * 60 if seconds is None else seconds)
        while True:
            yield
            if time.monotonic() > deadline:
                return
            time.sleep(self.config.poll_seconds)

    def _ended(self, handle: str, status: Any) -> Ended:
        place = status.ui_url.removeprefix("file://") if status.ui_url else f"torchx log {handle}"
        if status.state.name == "SUCCEEDED":
            return Ended(True, logs=place)
        message = _error(status) or tail(Path(place)) or f"ended as {status.state.name}"
        return Ended(False, message, place, cancelled=status.state.name == "CANCELLED")


@contextlib.contextmanager
def _as_stage_error(what: str, to_do: str) -> Iterator[None]:
    """Whatever TorchX and its schedulers raise, in words."""
    from torchx.schedulers.local_scheduler import SignalException

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
        text = message["message"] if isinstance(message, dict) else message
        return str(text).strip()
    return ""


def tail(directory: Path) -> str:
    """The last lines that a local job wrote to its standard error."""
    files = sorted(directory.glob("*/*/stderr.log")) if directory.is_dir() else []
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_TAIL:])
