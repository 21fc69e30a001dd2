"""What a day's stages are: the command of each, and whether it is complete."""

import json
import shlex
from pathlib import Path

from fuxi_torchrec.artifacts import NewDirectory
from pipelines.daily.config import DailyConfig
from pipelines.daily.jobs import Job
from pipelines.daily.state import Day, Layout, Releases

OWN_EVALUATION, PUBLISHED_EVALUATION = "eval-daily.json", "eval-published.json"


class Stages:
    """The stages of days.

    Args:
        config: of the pipeline.
        layout: where they write.
        releases: what they begin from.
    """

    def __init__(self, config: DailyConfig, layout: Layout, releases: Releases) -> None:
        self.config, self.layout, self.releases = config, layout, releases

    def of(self, record: Day) -> list[str]:
        """Of a day, in order."""
        if record.kind == "refresh":
            return ["refresh", "publish"]
        compare = ["compare"] if self.config.gate.against == "same_data" and record.base is not None else []
        return ["prepare", "train", "evaluate", *compare, "gate", "export", "publish"]

    def with_jobs(self, record: Day) -> list[str]:
        """Those that are jobs."""
        return [stage for stage in self.of(record) if stage not in ("gate", "publish")]

    def job(self, stage: str, day: str, record: Day) -> Job:
        """The command of a stage."""
        config, layout, logs, lock = self.config, self.layout, self.config.logs, self.lock(stage, day)
        base = self.releases.read(record.base) if record.base is not None else None
        run = str(layout.run(day))
        columns = [f"--{name}-column={getattr(logs, f'{name}_column')}" for name in ("user", "item", "time")]
        if stage == "prepare":
            extend = [f"--extend={layout.data(base.trained)}"] if base else []
            arguments = ["events", f"--input={layout.inputs(day)}", f"--output={layout.data(day)}", *extend, *columns]
            arguments += [f"--time-unit={logs.time_unit}", *logs.arguments]
            return Job(day, stage, "pipelines.prepare", tuple(arguments), False, lock)
        if stage == "refresh":
            assert base is not None
            arguments = [f"--export={layout.export(base.day)}", f"--events={layout.inputs(day)}"]
            arguments += [f"--output={layout.export(day)}"]
            return Job(day, stage, "pipelines.refresh", tuple(arguments), False, lock)
        if stage == "train":
            warm = base if config.train.warm_start else None
            start = [f"--init-from={layout.run(warm.trained)}"] if warm else []
            settings = [*config.train.settings, *(() if warm else config.train.first_settings)]
            arguments = [f"--config={config.train.config}", f"--run-dir={run}", *start]
            arguments += [f"data.path={layout.data(day)}", *settings]
            return Job(day, stage, "pipelines.train", tuple(arguments), lock=lock)
        if stage == "export":
            arguments = [f"--run-dir={run}", f"--output={layout.export(day)}", *config.export.arguments]
            return Job(day, stage, "pipelines.export", tuple(arguments), lock=lock)
        wanted = config.evaluate
        arguments = [f"--split={wanted.split}", f"--output={self.evaluation(stage, day)}"]
        arguments += ["--filter-seen"] * wanted.filter_seen
        arguments += [f"--users={wanted.users}"] if wanted.users is not None else []
        if stage == "evaluate":
            arguments += [f"--run-dir={run}", *["--no-baselines"] * (not wanted.baselines)]
        else:
            assert stage == "compare" and base is not None
            arguments += [f"--run-dir={layout.run(base.trained)}", f"--data={layout.data(day)}"]
            arguments += ["--allow-other-data", "--no-baselines"]
        return Job(day, stage, "pipelines.evaluate", tuple(arguments))

    def lock(self, stage: str, day: str) -> Path | None:
        """What a job of a stage has locked while it writes; a measurement, which anybody may repeat, has nothing."""
        if stage == "train":
            return self.layout.run(day) / ".lock"
        outputs = {"prepare": self.layout.data, "refresh": self.layout.export, "export": self.layout.export}
        return NewDirectory(outputs[stage](day)).lock_path if stage in outputs else None

    def shown(self, job: Job) -> str:
        """A job as a command that a person would type."""
        start = f"torchx run dist.ddp -j {self.config.jobs.processes} -m {job.module} --"
        return f"{start if job.grouped else f'python -m {job.module}'} {shlex.join(job.arguments)}"

    def evaluation(self, stage: str, day: str) -> Path:
        """Where a measurement is written."""
        return self.layout.run(day) / (OWN_EVALUATION if stage == "evaluate" else PUBLISHED_EVALUATION)

    def is_complete(self, stage: str, day: str) -> bool:
        """Whether the output of a stage is there; every stage writes what is looked at here last, and whole."""
        if stage == "prepare":
            return (self.layout.data(day) / "dataset.json").exists()
        if stage == "train":
            summary = self.layout.run(day) / "summary.json"
            return summary.exists() and not json.loads(summary.read_text())["preempted"]
        if stage in ("evaluate", "compare"):
            return self._is_measured(self.evaluation(stage, day))
        return (self.layout.export(day) / "manifest.json").exists()

    def _is_measured(self, evaluation: Path) -> bool:
        """Whether there is a measurement, of what the config asks for now: another one does not compare."""
        if not evaluation.exists():
            return False
        found, wanted = json.loads(evaluation.read_text()), self.config.evaluate
        return (found.get("split"), found.get("filter_seen")) == (wanted.split, wanted.filter_seen)
