"""What a day's stages are: the command of each, and whether it is complete."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from fuxi_torchrec.artifacts import NewDirectory
from pipelines.daily.config import DailyConfig
from pipelines.daily.jobs import Job
from pipelines.daily.state import Day, Layout, Releases

WITHOUT_JOB = ("gate", "publish")


@dataclass(frozen=True)
class Stages:
    """The stages of days, in what order and with what arguments."""

    config: DailyConfig
    layout: Layout
    releases: Releases

    def of(self, record: Day) -> list[str]:
        if record.kind == "refresh":
            return ["refresh", "publish"]
        compare = ["compare"] if self.config.gate.against == "same_data" and record.base is not None else []
        return ["prepare", "train", "evaluate", *compare, "gate", "export", "publish"]

    def job(self, stage: str, day: str, record: Day) -> Job:
        """The command of a stage; all but the first day's begin from the release of ``record.base``."""
        config, layout, logs = self.config, self.layout, self.config.logs
        base = self.releases.read(record.base) if record.base is not None else None
        module, grouped, run = stage, stage not in ("prepare", "refresh"), f"--run-dir={layout.run(day)}"
        if stage == "prepare":
            arguments = ["events", f"--input={layout.inputs(day)}", f"--output={layout.data(day)}"]
            arguments += [f"--extend={layout.data(base.trained)}"] if base else []
            arguments += [f"--{name}-column={getattr(logs, f'{name}_column')}" for name in ("user", "item", "time")]
            arguments += [f"--time-unit={logs.time_unit}", *logs.arguments]
        elif stage == "train":
            warm = base if config.train.warm_start else None
            arguments = [f"--config={config.train.config}", run]
            arguments += [f"--init-from={layout.run(warm.trained)}"] if warm else []
            arguments += [f"data.path={layout.data(day)}", *config.train.settings]
            arguments += [] if warm else config.train.first_settings
        elif stage == "export":
            arguments = [run, f"--output={layout.export(day)}", *config.export.arguments]
        elif stage == "refresh":
            assert base is not None
            arguments = [f"--export={layout.export(base.day)}", f"--events={layout.inputs(day)}"]
            arguments += [f"--output={layout.export(day)}"]
        else:
            module, wanted = "evaluate", config.evaluate
            arguments = [f"--split={wanted.split}", f"--output={self.evaluation(stage, day)}"]
            arguments += ["--filter-seen"] * wanted.filter_seen
            arguments += [f"--users={wanted.users}"] if wanted.users is not None else []
            if stage == "compare":
                assert base is not None
                arguments += [f"--run-dir={layout.run(base.trained)}", f"--data={layout.data(day)}"]
                arguments += ["--allow-other-data", "--no-baselines"]
            else:
                arguments += [run, *["--no-baselines"] * (not wanted.baselines)]
        return Job(day, stage, f"pipelines.{module}", tuple(arguments), grouped, self.lock(stage, day))

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
        return self.layout.run(day) / ("eval-daily.json" if stage == "evaluate" else "eval-published.json")

    def is_complete(self, stage: str, day: str) -> bool:
        """Whether the output of a stage is there; every stage writes what is looked at here last, and whole."""
        if stage == "prepare":
            return (self.layout.data(day) / "dataset.json").exists()
        if stage in ("refresh", "export"):
            return (self.layout.export(day) / "manifest.json").exists()
        path = self.layout.run(day) / "summary.json" if stage == "train" else self.evaluation(stage, day)
        if not path.exists():
            return False
        found, wanted = json.loads(path.read_text()), self.config.evaluate
        if stage == "train":
            return not found["preempted"]
        # a measurement of another split does not compare
        return (found.get("split"), found.get("filter_seen")) == (wanted.split, wanted.filter_seen)
