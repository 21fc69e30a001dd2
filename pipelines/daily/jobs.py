"""Stages as TorchX jobs: made, submitted, followed, and found again after the pipeline was killed."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchx.runner import config as torchx_config
from torchx.schedulers.local_scheduler import SignalException
from torchx.specs import AppState, AppStatus

from fuxi_torchrec.artifacts import is_locked
from pipelines import components
from pipelines.daily.config import JobsConfig
from pipelines.daily.state import STATE, DailyError, StageError

LOCAL = ("local_cwd", "local")
_TAIL = 12
_PATIENCE = 10  # polls of a scheduler that does not answer, or has nothing to say
_GRACE_SECONDS = 120.0  # for a cancelled job to save and leave


@dataclass(frozen=True)
class Job:
    """A stage of a day as a command, on a group of ranks by torchrun or as one process.

    ``lock`` is a file that the job locks while it works, where it has an output that only one may write.
    """

    day: str
    stage: str
    module: str
    arguments: tuple[str, ...]
    grouped: bool = True
    lock: Path | None = None


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
        what_to_do = "see jobs.processes, host, mounts, scheduler_options"
        with _as_stage_error(f"{job.stage}: no job for {self.scheduler} can be made", what_to_do):
            return self.runner.dryrun(self._app(job), self.scheduler, self._options())

    def _app(self, job: Job) -> Any:
        config = self.config
        env = dict(config.environment)
        if self.scheduler in LOCAL:
            env["PATH"] = str(Path(sys.executable).parent)  # TorchX puts it before the rest
        common: dict[str, Any] = {name: getattr(config, name) for name in ("image", "cpu", "mem_mb", "host")}
        common |= {"module": job.module, "env": env}
        common["mounts"] = [part for mount in config.mounts for part in mount.split(",")] or None
        name = f"daily-{job.stage}-{job.day}"
        if not job.grouped:
            return components.single(*job.arguments, name=name, **common)
        common |= {key: getattr(config, key) for key in ("gpu", "threads", "restarts")}
        return components.group(*job.arguments, name=f"daily/{name}", j=config.processes, **common)

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

    def follow(self, job: Job, handle: str) -> Ended:
        """Wait for its end; cancelled if it takes too long."""
        return self._poll(lambda: self._ended(handle), self.config.timeout_minutes * 60) or self._cancel(job, handle)

    def _ended(self, handle: str) -> Ended | None:
        status = self._status(handle)
        if status is None:
            return Ended(f"{self.scheduler} does not know {handle} any more")
        if not status.is_terminal():
            return None
        place = status.ui_url.removeprefix("file://") if status.ui_url else f"torchx log {handle}"
        name = status.state.name
        message = "" if name == "SUCCEEDED" else _error(status) or _tail(Path(place)) or f"ended as {name}"
        return Ended(message, place, cancelled=name == "CANCELLED")

    def _cancel(self, job: Job, handle: str) -> Ended:
        """Stop a job that takes too long; workers outlive torchrun for a while, and nothing may begin beside them."""
        late = f"cancelled after {self.config.timeout_minutes:g} minutes (jobs.timeout_minutes)"
        try:
            self.runner.cancel(handle)
        except SignalException:
            raise
        except Exception as error:
            late = f"{late}, but {self.scheduler} says {error!r}"
        if self._poll(lambda: not self._alive(job, handle), _GRACE_SECONDS):
            return Ended(late, cancelled=True)
        raise DailyError(f"{job.stage} was {late} and still runs: {self._alive(job, handle)}; stop it, and run again")

    def wait_for_earlier(self, job: Job, handle: str | None) -> bool:
        """Wait for a job that an earlier pipeline started, on this machine or a cluster; whether there was one."""
        alive = self._alive(job, handle)
        if not alive:
            return False
        print(f"  {job.stage} of day {job.day} still runs: {alive}; waiting for it", flush=True)
        if not self._poll(lambda: not self._alive(job, handle), self.config.timeout_minutes * 60):
            raise DailyError(
                f"day {job.day}: {job.stage} of an earlier pipeline still runs after "
                f"{self.config.timeout_minutes:g} minutes: {alive}; stop it, and run again"
            )
        return True

    def _alive(self, job: Job, handle: str | None) -> str:
        """What of a job still runs, in words; nothing if nothing does. Another pipeline's local one has a lock."""
        status = self._status(handle) if handle is not None else None
        for _ in range(_PATIENCE):
            # Slurm says it of a job without a row in its accounting; Kubernetes of one that it has not looked at yet.
            if status is None or status.state.name != "UNKNOWN" or not str(handle).startswith("slurm:"):
                break
            time.sleep(self.config.poll_seconds)
            status = self._status(str(handle))
        else:
            status = None  # forgotten
        if status is not None and not status.is_terminal():
            return str(handle)
        return f"{job.lock} is locked" if job.lock is not None and is_locked(job.lock) else ""

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
            f"if it surely does not run, set this job to null in {self.root / STATE} first"
        )

    def _poll(self, look: Callable[[], Any], seconds: float) -> Any:
        """What is looked for as soon as it is there; None when the time is up."""
        deadline = time.monotonic() + seconds
        while not (found := look()):
            if time.monotonic() > deadline:
                return None
            time.sleep(self.config.poll_seconds)
        return found


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
