"""What a day's stages are: the command of each, whether it is complete, and what the gate lets pass."""

from dataclasses import dataclass
from pathlib import Path

from fuxi_torchrec.schema import read_json
from pipelines.daily.config import DailyConfig, GateConfig
from pipelines.daily.jobs import Job
from pipelines.daily.state import Day, Evaluation, Layout, Releases, StageError

WITHOUT_JOB = ("gate", "publish")
_TIMES = {"last": "the last event's time", "target": "the target's time"}


@dataclass(frozen=True)
class _Summary:
    """What is read of a run's summary.json."""

    preempted: bool


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
        config, of, logs = self.config, self.layout.of, self.config.logs
        base = self.releases.read(record.base) if record.base is not None else None
        module, run, export = stage, f"--run-dir={of('runs', day)}", f"--output={of('exports', day)}"
        if stage == "prepare":
            arguments = ["events", f"--input={of('inputs', day)}", f"--output={of('data', day)}"]
            arguments += [f"--extend={of('data', base.trained)}"] if base else []
            arguments += [f"--{name}-column={getattr(logs, f'{name}_column')}" for name in ("user", "item", "time")]
            arguments += [f"--time-unit={logs.time_unit}", *logs.arguments]
        elif stage == "train":
            warm = base if config.train.warm_start else None
            arguments = [f"--config={config.train.config}", run]
            arguments += [f"--init-from={of('runs', warm.trained)}"] if warm else []
            arguments += [f"data.path={of('data', day)}", *config.train.settings]
            arguments += [] if warm else config.train.first_settings
        elif stage == "export":
            arguments = [run, export, *config.export.arguments]
        elif stage == "refresh":
            assert base is not None
            arguments = [f"--export={of('exports', base.day)}", f"--events={of('inputs', day)}", export]
        else:
            module, wanted = "evaluate", config.evaluate
            arguments = [f"--split={wanted.split}", f"--output={self.evaluation(stage, day)}"]
            arguments += ["--filter-seen"] * wanted.filter_seen
            arguments += [f"--users={wanted.users}"] if wanted.users is not None else []
            if stage == "compare":
                assert base is not None
                arguments += [f"--run-dir={of('runs', base.trained)}", f"--data={of('data', day)}"]
                arguments += ["--allow-other-data", "--no-baselines"]
            else:
                arguments += [run, *["--no-baselines"] * (not wanted.baselines)]
        return Job(day, stage, f"pipelines.{module}", tuple(arguments), grouped=stage not in ("prepare", "refresh"))

    def evaluation(self, stage: str, day: str) -> Path:
        return self.layout.of("runs", day) / ("eval-daily.json" if stage == "evaluate" else "eval-published.json")

    def is_complete(self, stage: str, day: str) -> bool:
        """Whether the output of a stage is there; every stage writes what is looked at here last, and whole."""
        if stage == "prepare":
            return (self.layout.of("data", day) / "dataset.json").exists()
        if stage in ("refresh", "export"):
            return (self.layout.of("exports", day) / "manifest.json").exists()
        path = self.layout.of("runs", day) / "summary.json" if stage == "train" else self.evaluation(stage, day)
        if not path.exists():
            return False
        if stage == "train":
            return not read_json(_Summary, path.read_bytes(), path, StageError, f"--redo {day}").preempted
        found, wanted = Evaluation.read(path), self.config.evaluate
        # a measurement of another split does not compare
        return (found.split, found.filter_seen) == (wanted.split, wanted.filter_seen)


def judge(config: GateConfig, new: Evaluation, old: Evaluation | None, published: str | None) -> tuple[bool, str]:
    """Whether a model is published, and why, by its evaluation and that of the published day, if there is one."""
    value = _metric(config, new)
    text = f"{config.metric} (queried at {_TIMES[config.request_time]}) is {value:.4f}"
    if config.floor is not None and not value >= config.floor:
        return False, f"{text}, below the floor {config.floor:g}"
    if old is None:
        return value == value, f"{text}, nothing was published before"
    for key in ("split", "filter_seen"):
        mine, other = getattr(new, key), getattr(old, key)
        if mine != other:
            raise StageError(
                f"day {published} was measured with {key} = {other}, this one with {mine}: they do not compare. Put "
                f"evaluate.{key} back, or compare on the same data (gate.against=same_data), and run again"
            )
    before = _metric(config, old)
    change = (value - before) / before if before else 0.0
    text = f"{text}, {before:.4f} for day {published}: {change:+.1%}"
    if not value >= before * (1.0 - config.max_fall):
        return False, f"{text}; it may fall by {config.max_fall:.1%}"
    return True, text


def _metric(config: GateConfig, evaluation: Evaluation) -> float:
    found = getattr(evaluation, config.request_time)
    if config.metric not in found:
        known = ", ".join(key for key in found if "@" in key or key == "mrr")
        raise StageError(
            f"the evaluation has no {config.metric} for request time {config.request_time}: set gate.metric to one of "
            f"{known or 'another request time'}"
        )
    return float(found[config.metric])
