"""The production loop: a day's log to a published export, each stage a TorchX job.

    python -m pipelines.daily --config configs/daily.yaml [--scheduler local_cwd|slurm|kubernetes] [key=value ...]

prepare --extend, train --init-from, evaluate, gate, export, publish. A pipeline that failed or was killed goes on at
the stage where it stopped. Exit codes: 0 published or nothing to do, 1 a stage failed, 3 the gate rejected the day.
"""

import argparse
import dataclasses
import glob
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuxi_torchrec.logging import setup_logging
from fuxi_torchrec.strict_yaml import ConfigError
from pipelines import daily_config
from pipelines.daily_config import DAY, DailyConfig, GateConfig, LogsConfig
from pipelines.daily_jobs import LOCAL, Ended, Job, Jobs, TorchXJobs
from pipelines.daily_state import DailyError, Day, Layout, Release, Releases, State, is_locked, locked

FAILED, REJECTED = 1, 3  # 2 is argparse's
SUFFIXES = (".parquet", ".csv", ".csv.gz", ".tsv")
OWN_EVALUATION, PUBLISHED_EVALUATION = "eval-daily.json", "eval-published.json"


class StageError(DailyError):
    """A stage that did not give what it should."""


# --- logs ------------------------------------------------------------------------------------------------------------


def order(day: str) -> tuple[tuple[int, int, str], ...]:
    """How days follow each other: numbers inside their names by value.

    Example:
        >>> sorted(["2024-05-10", "2024-05-9", "2024-05-01"], key=order)
        ['2024-05-01', '2024-05-9', '2024-05-10']
    """
    parts = [part for part in re.split(r"(\d+)", day) if part]
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


class Logs:
    """The days there are logs of.

    Args:
        config: where they are.
    """

    def __init__(self, config: LogsConfig) -> None:
        self.config = config

    def days(self) -> list[str]:
        """In order."""
        head, tail = self.config.path.split(DAY)
        last = tail.partition("/")[0]
        pattern = re.compile(re.escape(os.path.basename(head)) + "(.+)" + re.escape(last))
        found = set()
        for path in glob.glob(f"{glob.escape(head)}*{glob.escape(last)}"):
            match = pattern.fullmatch(os.path.basename(path))
            if match is not None and self.files(match[1]):
                found.add(match[1])
        return sorted(found, key=order)

    def files(self, day: str) -> list[Path]:
        """Of one day, in order."""
        head, tail = self.config.path.split(DAY)
        path = Path(head + day + tail)
        if path.is_dir():
            found = [each for each in path.rglob("*") if each.name.endswith(SUFFIXES)]
        elif path.exists():
            found = [path]
        else:
            found = [Path(each) for each in glob.glob(glob.escape(head + day) + tail, recursive=True)]
        return sorted(each.absolute() for each in found if each.is_file())

    def link(self, days: Sequence[str], into: Path) -> dict[str, str]:
        """A directory of links to the logs of some days, in their order; what each link stands for."""
        aside = into.with_name(f".{into.name}.new")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        meaning = {}
        for number, day in enumerate(days):
            for part, file in enumerate(self.files(day)):
                name = f"{number:05d}-{part:05d}-{file.name}"
                (aside / name).symlink_to(file)
                meaning[str(into / name)] = str(file)
        shutil.rmtree(into, ignore_errors=True)
        os.rename(aside, into)
        return meaning


# --- the gate --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Whether a day's model is published, and why."""

    publish: bool
    reason: str


def judge(
    config: GateConfig, new: Mapping[str, Any], old: Mapping[str, Any] | None, published: str | None = None
) -> Verdict:
    """Compare a model with the published one.

    Args:
        config: how far it may fall.
        new: its evaluation.
        old: the published one's; None if nothing is published.
        published: the published day, for the message.
    """
    value = metric_of(config, new)
    name = f"{config.metric} (asked at the {config.request_time} time)".replace("last time", "last event's time")
    name = name.replace("target time", "target's time")
    if config.floor is not None and not value >= config.floor:
        return Verdict(False, f"{name} is {value:.4f}, below the floor {config.floor:g}")
    if old is None:
        return Verdict(value == value, f"{name} is {value:.4f}, nothing was published before")
    for key in ("split", "filter_seen"):
        if new.get(key) != old.get(key):
            raise StageError(
                f"day {published} was measured with {key} = {old.get(key)}, this one with {new.get(key)}: they do not "
                "compare. Put the setting back, or compare on the same data: gate.against=same_data"
            )
    before = metric_of(config, old)
    change = (value - before) / before if before else 0.0
    text = f"{name} is {value:.4f}, {before:.4f} for day {published}: {change:+.1%}"
    if not value >= before * (1.0 - config.max_fall):
        return Verdict(False, f"{text}; it may fall by {config.max_fall:.1%}")
    return Verdict(True, text)


def metric_of(config: GateConfig, evaluation: Mapping[str, Any]) -> float:
    """The number that decides."""
    try:
        return float(evaluation[config.request_time][config.metric])
    except KeyError:
        there = evaluation.get(config.request_time, {})
        raise StageError(
            f"the evaluation has no {config.metric} for request time {config.request_time}: set gate.metric to one of "
            f"{', '.join(key for key in there if '@' in key or key == 'mrr') or 'another request time'}"
        ) from None


def without_details(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation as it is kept: no baselines, no buckets."""
    kept = {key: value for key, value in evaluation.items() if key != "baselines"}
    for name in ("last", "target"):
        if name in kept:
            kept[name] = {key: value for key, value in kept[name].items() if key != "by_history_length"}
    return kept


# --- the stages ------------------------------------------------------------------------------------------------------


class Daily:
    """The pipeline over days.

    Args:
        config: of the pipeline.
        jobs: what runs them.
    """

    def __init__(self, config: DailyConfig, jobs: Jobs) -> None:
        self.config, self.jobs = config, jobs
        self.layout = Layout(Path(config.root).absolute())
        self.state, self.releases = State(self.layout.root), Releases(self.layout)
        self.logs = Logs(config.logs)

    # --- which days --------------------------------------------------------------------------------------------------

    def pending(self) -> list[str]:
        """Days to do, in order: those after the last that was published or rejected."""
        done = [day for day, record in self.state.days.items() if record.status in ("published", "rejected")]
        last = max([*done, *self.releases.ever()], key=order, default=None)
        first = self.config.logs.first_day
        return [
            day
            for day in self.logs.days()
            if (first is None or order(day) >= order(first))
            and (last is None or order(day) > order(last))
            and self._record(day).status != "skipped"
        ]

    def note_published(self) -> None:
        """A pipeline that was killed just after it moved the pointer did not write down that it has."""
        for day in self.releases.ever():
            record = self.state.day(day)
            if record.status not in ("published", "skipped"):
                record.metrics = self.releases.read(day).metrics
                self.state.end(day, "publish", "finished")
                self._close(day, "published", record.reason or "")

    def _record(self, day: str) -> Day:
        """Of a day, without making one."""
        return self.state.days.get(day, Day())

    def days_until(self, day: str, after: str | None = None) -> list[str]:
        """Days whose logs count, up to this one."""
        return [
            each
            for each in self.logs.days()
            if order(each) <= order(day)
            and (after is None or order(each) > order(after))
            and self._record(each).status != "skipped"
        ]

    def run(self, days: Sequence[str]) -> int:
        """Days one after another, until one fails; the exit code of the last."""
        code = 0
        for day in days:
            code = self.run_day(day)
            if code == FAILED:
                break
        return code

    def run_day(self, day: str) -> int:
        """One day, from where it stopped; the exit code."""
        record = self._record(day)
        if record.status in ("published", "rejected", "skipped"):
            print(f"day {day} is {record.status}{f': {record.reason}' if record.reason else ''}")
            return REJECTED if record.status == "rejected" else 0
        try:
            record = self._begin(day)
            print(f"day {day}: {record.kind}, from {f'day {record.base}' if record.base else 'nothing'}", flush=True)
            for stage in self.stages(record):
                if stage == "gate":
                    verdict = self._gate(day, record)
                    if not verdict.publish:
                        self._close(day, "rejected", verdict.reason)
                        print(f"day {day}: rejected: {verdict.reason}; {self._standing()}", flush=True)
                        return REJECTED
                elif stage == "publish":
                    self._publish(day, record)
                else:
                    self._run_job(stage, day, record)
        except DailyError as error:
            self._close(day, "failed", str(error))
            print(f"day {day}: {error}\n{self._standing()}", file=sys.stderr, flush=True)
            return FAILED
        return 0

    def _begin(self, day: str) -> Day:
        """What the day starts from: what is published; a day on its way must have started from the same."""
        if not self.logs.files(day):
            raise DailyError(f"no log at {self.config.logs.path.replace(DAY, day)}")
        current = self.releases.current()
        record = self.state.day(day)
        if current is not None and order(current.day) > order(day):
            raise DailyError(f"day {current.day} is published: an older one does not replace it; see --rollback")
        base = current.day if current is not None else None
        if base != record.base:
            if self.layout.data(day).exists() or self.layout.export(day).exists():
                raise DailyError(
                    f"it was begun from {record.base or 'nothing'}, now {base or 'nothing'} is published: --redo {day} "
                    "begins it anew"
                )
            record.base, record.stages = base, {}
        if not record.stages:
            record.kind = self._kind(day, current)
        record.status, record.reason = "running", None
        self.state.save()
        return record

    def _kind(self, day: str, current: Release | None) -> Any:
        if current is None:
            return "train"
        return "train" if len(self.days_until(day, current.trained)) >= self.config.train.every_days else "refresh"

    def stages(self, record: Day) -> list[str]:
        """Of a day, in order."""
        if record.kind == "refresh":
            return ["refresh", "publish"]
        compare = ["compare"] if self.config.gate.against == "same_data" and record.base is not None else []
        return ["prepare", "train", "evaluate", *compare, "gate", "export", "publish"]

    def job(self, stage: str, day: str, record: Day) -> Job:
        """The command of a stage."""
        config, layout, logs = self.config, self.layout, self.config.logs
        base = self.releases.read(record.base) if record.base is not None else None
        run = str(layout.run(day))
        columns = [f"--{name}-column={getattr(logs, f'{name}_column')}" for name in ("user", "item", "time")]
        if stage == "prepare":
            extend = [f"--extend={layout.data(base.trained)}"] if base else []
            arguments = ["events", f"--input={layout.inputs(day)}", f"--output={layout.data(day)}", *extend, *columns]
            arguments += [f"--time-unit={logs.time_unit}", *logs.arguments]
            return Job(day, stage, "pipelines.prepare", tuple(arguments), grouped=False)
        if stage == "refresh":
            assert base is not None
            arguments = [f"--export={layout.export(base.day)}", f"--events={layout.inputs(day)}"]
            arguments += [f"--output={layout.export(day)}", *columns]
            return Job(day, stage, "pipelines.refresh", tuple(arguments), grouped=False)
        if stage == "train":
            warm = base if config.train.warm_start else None
            start = [f"--init-from={layout.run(warm.trained)}"] if warm else []
            settings = [*config.train.settings, *(() if warm else config.train.first_settings)]
            arguments = [f"--config={config.train.config}", f"--run-dir={run}", *start]
            arguments += [f"data.path={layout.data(day)}", *settings]
            return Job(day, stage, "pipelines.train", tuple(arguments), lock=str(layout.run(day) / ".lock"))
        if stage == "export":
            arguments = [f"--run-dir={run}", f"--output={layout.export(day)}", *config.export.arguments]
            return Job(day, stage, "pipelines.export", tuple(arguments))
        wanted = config.evaluate
        arguments = [f"--split={wanted.split}", f"--output={self._evaluation(stage, day)}"]
        arguments += ["--filter-seen"] * wanted.filter_seen
        arguments += [f"--users={wanted.users}"] if wanted.users is not None else []
        if stage == "evaluate":
            arguments += [f"--run-dir={run}", *["--no-baselines"] * (not wanted.baselines)]
        else:
            assert stage == "compare" and base is not None
            arguments += [f"--run-dir={layout.run(base.trained)}", f"--data={layout.data(day)}"]
            arguments += ["--allow-other-data", "--no-baselines"]
        return Job(day, stage, "pipelines.evaluate", tuple(arguments))

    def shown(self, job: Job) -> str:
        """A job as a command that a person would type."""
        start = f"torchx run dist.ddp -j {self.config.jobs.processes} -m {job.module} --"
        return f"{start if job.grouped else f'python -m {job.module}'} {shlex.join(job.arguments)}"

    def _evaluation(self, stage: str, day: str) -> Path:
        return self.layout.run(day) / (OWN_EVALUATION if stage == "evaluate" else PUBLISHED_EVALUATION)

    def is_complete(self, stage: str, day: str) -> bool:
        """Whether the output of a stage is there; every stage writes what is looked at here last, and whole."""
        if stage == "prepare":
            return (self.layout.data(day) / "dataset.json").exists()
        if stage == "train":
            summary = self.layout.run(day) / "summary.json"
            return summary.exists() and not json.loads(summary.read_text())["preempted"]
        if stage in ("evaluate", "compare"):
            return self._evaluation(stage, day).exists()
        return (self.layout.export(day) / "manifest.json").exists()

    def _run_job(self, stage: str, day: str, record: Day) -> None:
        """A stage that is a job, unless it is done."""
        job, noted = self.job(stage, day, record), record.stage(stage)
        if noted.status == "running" and self.jobs.wait_for_earlier(job, noted.job):
            print(f"  {stage}: the job of the pipeline before has ended", flush=True)
        if self.is_complete(stage, day):
            if noted.status != "finished":
                self.state.end(day, stage, "finished")
            print(f"  {stage}: done", flush=True)
            self._check(stage, day, record)
            return
        for _ in range(1 + self.config.jobs.relaunches):
            meaning = self._inputs(stage, day, record)
            noted = self.state.start(day, stage)
            print(f"  {stage}: {self.shown(job)}", flush=True)
            noted.job = self.jobs.submit(job)
            self.state.save()
            ended = self.jobs.follow(job, noted.job)
            noted.logs = ended.logs
            if self.is_complete(stage, day) or not self._left_early(stage, day, ended):
                break
            print(f"  {stage}: it was asked to leave, and saved; launching it again", flush=True)
        if not self.is_complete(stage, day):
            message = ended.message or "it ended without its output"
            for link, file in meaning.items():
                message = message.replace(link, file)
            self.state.end(day, stage, "failed", message)
            where = f"\nlogs: {ended.logs}" if ended.logs else ""
            raise StageError(f"{stage} failed: {message}{where}")
        self.state.end(day, stage, "finished")
        print(f"  {stage}: {noted.seconds:.0f} s", flush=True)
        self._check(stage, day, record)

    def _left_early(self, stage: str, day: str, ended: Ended) -> bool:
        return stage == "train" and ended.succeeded and (self.layout.run(day) / "preempted").exists()

    def _inputs(self, stage: str, day: str, record: Day) -> dict[str, str]:
        """The logs that a stage reads, as one directory."""
        if stage not in ("prepare", "refresh"):
            return {}
        days = self.days_until(day, record.base if stage == "refresh" else None)
        return self.logs.link(days, self.layout.inputs(day))

    def _check(self, stage: str, day: str, record: Day) -> None:
        """What a finished dataset must fulfil."""
        if stage != "prepare":
            return
        events = _events(self.layout.data(day))
        base = self.releases.read(record.base).trained if record.base is not None else None
        new = events - (_events(self.layout.data(base)) if base is not None else 0)
        if new < self.config.logs.min_new_events:
            message = (
                f"the day brings {new:,} new events, fewer than logs.min_new_events = "
                f"{self.config.logs.min_new_events:,}: mend the log, then --redo {day}; or --skip {day}"
            )
            self.state.end(day, stage, "failed", message)
            raise StageError(message)

    def _gate(self, day: str, record: Day) -> Verdict:
        self.state.start(day, "gate")
        try:
            new = without_details(json.loads(self._evaluation("evaluate", day).read_text()))
            old = None
            if record.base is not None:
                old = self.releases.read(record.base).metrics
                if self.config.gate.against == "same_data":
                    old = json.loads(self._evaluation("compare", day).read_text())
            record.metrics = new
            verdict = judge(self.config.gate, new, old, record.base)
        except StageError as error:
            self.state.end(day, "gate", "failed", str(error))
            raise
        record.reason = verdict.reason
        self.state.end(day, "gate", "finished", verdict.reason)
        print(f"  gate: {verdict.reason}", flush=True)
        return verdict

    def _publish(self, day: str, record: Day) -> None:
        base = self.releases.read(record.base) if record.base is not None else None
        release = Release(day, day, record.metrics or {}, record.base)
        if record.kind == "refresh":
            assert base is not None
            release = dataclasses.replace(release, trained=base.trained, metrics=base.metrics)
        self.state.start(day, "publish")
        try:
            self.releases.publish(release)
        except DailyError as error:
            self.state.end(day, "publish", "failed", str(error))
            raise
        self.state.end(day, "publish", "finished")
        reason = record.reason or f"the model of day {release.trained} with new events"
        self._close(day, "published", reason)
        print(f"day {day}: published: {self.releases.pointer}/export", flush=True)

    def _close(self, day: str, status: Any, reason: str) -> None:
        record = self.state.day(day)
        record.status, record.reason = status, reason
        self.state.save()

    def _standing(self) -> str:
        current = self.releases.current()
        return f"day {current.day} stays published" if current else "nothing is published yet"

    # --- what people do ----------------------------------------------------------------------------------------------

    def skip(self, day: str) -> None:
        """Leave a day's log out of every later dataset."""
        if day not in self.logs.days() and day not in self.state.days:
            raise DailyError(f"there is no day {day}; there are {', '.join(self.logs.days()) or 'none'}")
        if day in self.releases.line():
            raise DailyError(f"day {day} is published: roll back to a day before it first")
        self._close(day, "skipped", "left out by --skip")
        print(f"day {day}: skipped; later datasets leave its log out")

    def forget(self, day: str) -> None:
        """Remove what a day that is not published has made, so that it begins anew."""
        self.releases.forget(day)
        self.layout.clear(day)
        self.state.days.pop(day, None)
        self.state.save()


def _events(dataset: Path) -> int:
    return int(json.loads((dataset / "dataset.json").read_text())["events"])


# --- for people ------------------------------------------------------------------------------------------------------

STAGES = ("prepare", "train", "evaluate", "compare", "gate", "refresh", "export", "publish")


def status(config: DailyConfig) -> str:
    """Every day with its stages, as a table."""
    daily = Daily(config, _NoJobs())
    current, line, ever = daily.releases.current(), daily.releases.line(), daily.releases.ever()
    running = is_locked(daily.layout.lock)
    days = sorted({*daily.state.days, *ever, *daily.pending()}, key=order)
    if not days:
        return f"{daily.layout.root}: no day yet, and no log at {config.logs.path}"
    used = [stage for stage in STAGES if any(stage in daily._record(day).stages for day in days)]
    rows = [["", "day", "state", "from", *used, config.gate.metric]]
    notes = []
    for day in days:
        record = daily._record(day)
        state: str = record.status
        if (day in ever or state == "published") and day not in line:
            state = "rolled back"
        elif state == "running" and not running:
            state = "stopped"
        cells = [_cell(record, stage, running) for stage in used]
        value = (record.metrics or {}).get(config.gate.request_time, {}).get(config.gate.metric)
        mark = "*" if current is not None and current.day == day else ""
        rows.append([mark, day, state, record.base or "-", *cells, "-" if value is None else f"{value:.4f}"])
        if record.reason and record.status != "published":
            notes.append(f"{day}: {record.reason}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    standing = f"* published: {daily.releases.pointer} -> day {current.day}" if current else "nothing is published yet"
    return "\n".join([*lines, "", standing, *notes])


def _cell(record: Day, stage: str, running: bool) -> str:
    found = record.stages.get(stage)
    if found is None or found.status == "waiting":
        return "-"
    if found.status == "finished":
        return f"{found.seconds:.0f} s" if found.seconds is not None else "done"
    return "stopped" if found.status == "running" and not running else found.status


class _NoJobs:
    """Where nothing is to be run."""

    def submit(self, job: Job) -> str:
        raise AssertionError

    def follow(self, job: Job, handle: str) -> Ended:
        raise AssertionError

    def wait_for_earlier(self, job: Job, handle: str | None) -> bool:
        raise AssertionError


def dry_run(daily: Daily, jobs: TorchXJobs, day: str) -> None:
    """Show every stage's job, and submit none."""
    current, record = daily.releases.current(), daily._record(day)
    if not record.stages:
        record = Day(base=current.day if current else None, kind=daily._kind(day, current))
    for stage in daily.stages(record):
        if stage in ("gate", "publish"):
            print(f"{stage}: in this process")
            continue
        job = daily.job(stage, day, record)
        print(f"{stage}: {daily.shown(job)}")
        if jobs.scheduler not in LOCAL:
            print(jobs.request(job))


# --- the command line ------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m pipelines.daily",
        description="The production loop: a day's log to a published export, each stage a TorchX job.",
        epilog="exit codes: 0 published or nothing to do, 1 a stage failed, 3 the gate rejected the day",
    )
    found.add_argument("--config", required=True, help="YAML file; python -m pipelines.daily_config lists the keys")
    found.add_argument("--scheduler", default="local_cwd", help="local_cwd (default), slurm, kubernetes, ...")
    what = found.add_mutually_exclusive_group()
    what.add_argument("--day", metavar="DAY", help="this day only; by default all that have a log and are not done")
    what.add_argument("--status", action="store_true", help="show every day, and do nothing")
    what.add_argument("--rollback", nargs="?", const="", metavar="DAY", help="publish DAY again, or what was before")
    what.add_argument("--skip", metavar="DAY", help="leave a day's log out of all later datasets")
    what.add_argument("--redo", metavar="DAY", help="remove what a day that is not published has made, and run it")
    found.add_argument("--dryrun", action="store_true", help="show the jobs of the next day, and submit none")
    found.add_argument("overrides", nargs="*", metavar="key=value", help="settings that come before the config's")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is due; see ``parser`` for the exit codes."""
    options = parser().parse_args(arguments)
    setup_logging("warning")
    try:
        config = daily_config.load(options.config, options.overrides)
        if options.status:
            print(status(config))
            return 0
        if options.rollback is not None:
            old, new = Releases(Layout(Path(config.root).absolute())).roll_back(options.rollback or None)
            print(f"day {new} is published, day {old} is not any more")
            return 0
        return _run(config, options)
    except (ConfigError, DailyError) as error:
        print(error, file=sys.stderr)
        return FAILED


def _run(config: DailyConfig, options: argparse.Namespace) -> int:
    from torchx.runner import get_runner
    from torchx.schedulers.local_scheduler import SignalException

    check_training(config, local=options.scheduler in LOCAL)
    root = Path(config.root).absolute()
    try:
        with get_runner() as runner:
            if options.scheduler not in runner.scheduler_backends():
                raise DailyError(f"--scheduler {options.scheduler}: one of {', '.join(runner.scheduler_backends())}")
            jobs = TorchXJobs(runner, options.scheduler, config.jobs, root)
            if options.dryrun:
                daily = Daily(config, jobs)
                days = [options.day or options.redo] if options.day or options.redo else daily.pending()
                if not days:
                    print("nothing to do")
                for day in days[:1]:
                    dry_run(daily, jobs, day)
                return 0
            with locked(root / ".lock", "the pipeline"):
                return _run_days(Daily(config, jobs), options)
    except (KeyboardInterrupt, SignalException) as error:
        number = int(getattr(error, "sigval", 2))
        print("stopped; run again to continue where it was", file=sys.stderr)
        return 128 + number


def _run_days(daily: Daily, options: argparse.Namespace) -> int:
    daily.note_published()
    if options.skip is not None:
        daily.skip(options.skip)
        return 0
    if options.redo is not None:
        daily.forget(options.redo)
        return daily.run([options.redo])
    days = [options.day] if options.day is not None else daily.pending()
    if not days:
        current = daily.releases.current()
        print(f"nothing to do: {f'day {current.day} is published' if current else 'there is no log yet'}")
    return daily.run(days)


def check_training(config: DailyConfig, local: bool) -> None:
    """Refuse a training config that would fail hours later; on a cluster it may exist in the image only."""
    if not local and not Path(config.train.config).exists():
        return
    from fuxi_torchrec.config import load_config

    experiment = load_config(config.train.config, [*config.train.settings, *config.train.first_settings])
    if experiment.data.time_unit != config.logs.time_unit:
        raise DailyError(
            f"{config.train.config}: data.time_unit = {experiment.data.time_unit}, but logs.time_unit = "
            f"{config.logs.time_unit}: the log has one unit"
        )


if __name__ == "__main__":
    sys.exit(main())
