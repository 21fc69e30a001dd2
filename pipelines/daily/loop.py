"""A day's stages, one after another: what each needs, whether it is complete, what to do when it fails."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pipelines.daily.config import DAY, DailyConfig
from pipelines.daily.gate import Verdict, judge, without_details
from pipelines.daily.jobs import Job, TorchXJobs
from pipelines.daily.logs import Logs, check_names, order
from pipelines.daily.stages import Stages
from pipelines.daily.state import DailyError, Day, DayStatus, Layout, Release, Releases, StageError, State

FAILED, REJECTED = 1, 3  # 2 is argparse's


class Daily:
    """The pipeline over days.

    Args:
        config: of the pipeline.
        jobs: what runs them; None to look only.
    """

    def __init__(self, config: DailyConfig, jobs: TorchXJobs | None = None) -> None:
        self.config, self._jobs = config, jobs
        self.layout = Layout(Path(config.root).absolute())
        self.state, self.releases = State(self.layout.root), Releases(self.layout)
        self.stages = Stages(config, self.layout, self.releases)
        self.logs = Logs(config.logs)

    @property
    def jobs(self) -> TorchXJobs:
        """What runs them."""
        assert self._jobs is not None, "made to look only"
        return self._jobs

    # --- which days --------------------------------------------------------------------------------------------------

    def pending(self) -> list[str]:
        """Days to do, in order: those after the last that was published or rejected, and those begun anew."""
        done = [day for day, record in self.state.days.items() if record.status in ("published", "rejected")]
        last = max([*done, *self.releases.ever()], key=order, default=None)
        first, current = self.config.logs.first_day, self.releases.current()

        def is_due(day: str) -> bool:
            status = self._record(day).status
            if status == "skipped" or (first is not None and order(day) < order(first)):
                return False
            if status in ("running", "failed"):  # redone after a rollback, perhaps before days that were rolled back
                return current is None or order(day) > order(current.day)
            return last is None or order(day) > order(last)

        return [day for day in self.logs.days() if is_due(day)]

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
        if record.status == "published" and day not in self.releases.line():
            print(
                f"day {day} was rolled back: --rollback {day} publishes it again, --redo {day} makes it anew\n"
                f"{self._standing()}",
                file=sys.stderr,
                flush=True,
            )
            return FAILED
        if record.status in ("published", "rejected", "skipped"):
            print(f"day {day} is {record.status}{f': {record.reason}' if record.reason else ''}")
            return REJECTED if record.status == "rejected" else 0
        try:
            self._check_due(day)
        except DailyError as error:  # nothing is written down: it may not even be a day
            print(f"day {day}: {error}\n{self._standing()}", file=sys.stderr, flush=True)
            return FAILED
        try:
            record = self._begin(day)
            print(f"day {day}: {record.kind}, from {f'day {record.base}' if record.base else 'nothing'}", flush=True)
            for stage in self.stages.with_jobs(record):  # a wrong setting of the last one shows before the first
                self.jobs.check(self.stages.job(stage, day, record))
            for stage in self.stages.of(record):
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

    def _check_due(self, day: str) -> None:
        """Refuse a day without a log, or before the one that is published; and all days if one is none."""
        self.check_names()
        if day not in self.logs.days():
            raise DailyError(f"no log at {self.config.logs.path.replace(DAY, day)}")
        current = self.releases.current()
        if current is not None and order(current.day) > order(day):
            raise DailyError(f"day {current.day} is published: an older one does not replace it; see --rollback")

    def check_names(self) -> None:
        """Refuse to go on while something beside the logs looks like a day."""
        check_names([day for day in self.logs.days() if self._record(day).status != "skipped"])

    def _begin(self, day: str) -> Day:
        """What the day starts from: what is published; a day on its way must have started from the same."""
        current = self.releases.current()
        record = self.state.day(day)
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

    def _kind(self, day: str, current: Release | None) -> Literal["train", "refresh"]:
        if current is None:
            return "train"
        return "train" if len(self.days_until(day, current.trained)) >= self.config.train.every_days else "refresh"

    def _run_job(self, stage: str, day: str, record: Day) -> None:
        """A stage that is a job, unless it is done."""
        job, noted = self.stages.job(stage, day, record), record.stage(stage)
        if noted.status == "running" and self.jobs.wait_for_earlier(job, noted.job):
            print(f"  {stage}: the job of the pipeline before has ended", flush=True)
        if self.stages.is_complete(stage, day):
            if noted.status != "finished":
                self.state.end(day, stage, "finished")
            print(f"  {stage}: done", flush=True)
            self._check(stage, day, record)
            return
        for _ in range(1 + self.config.jobs.relaunches):
            meaning = self._inputs(stage, day, record)
            noted = self.state.start(day, stage)
            self._preempted(day).unlink(missing_ok=True)  # of the launch before: this one has to write its own
            print(f"  {stage}: {self.stages.shown(job)}", flush=True)
            try:
                noted.job = self.jobs.submit(job)
            except DailyError as error:
                self.state.end(day, stage, "failed", str(error))
                raise
            self.state.save()
            ended = self.jobs.follow(job, noted.job)
            noted.logs = ended.logs
            # torchrun ends with an error when it is asked to leave, and Slurm calls a preempted job failed
            left_early = stage == "train" and not ended.cancelled and self._preempted(day).exists()
            if self.stages.is_complete(stage, day):
                break
            # a worker may hold the lock a little longer; or another job, started just before a kill, has it
            self.jobs.wait_for_earlier(job, noted.job)
            if self.stages.is_complete(stage, day) or not left_early:
                break
            print(f"  {stage}: it was asked to leave, and saved; launching it again", flush=True)
        if not self.stages.is_complete(stage, day):
            message = ended.message or "it ended without its output"
            for link, file in meaning.items():
                message = message.replace(link, file)
            self.state.end(day, stage, "failed", message)
            where = f"\nlogs: {ended.logs}" if ended.logs else ""
            raise StageError(f"{stage} failed: {message}{where}")
        self.state.end(day, stage, "finished")
        print(f"  {stage}: {noted.seconds:.0f} s", flush=True)
        self._check(stage, day, record)

    def _preempted(self, day: str) -> Path:
        return self.layout.run(day) / "preempted"

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
        new, wanted = _events(self.layout.data(day)), self.config.logs.min_new_events
        if record.base is not None:
            base = self.releases.read(record.base).trained
            if self._left_out_since(base, day):
                print(f"  {stage}: logs of the dataset of day {base} are left out now: new events are not counted")
                return
            new -= _events(self.layout.data(base))
        if wanted and new < wanted:
            message = (
                f"the day brings {new:,} new events, fewer than logs.min_new_events = {wanted:,}: mend the log, then "
                f"--redo {day}; or --skip {day}; or logs.min_new_events=0, if earlier logs have become shorter"
            )
            self.state.end(day, stage, "failed", message)
            raise StageError(message)

    def _left_out_since(self, base: str, day: str) -> bool:
        """Whether a day's dataset lacks logs that an earlier one had, because their days were skipped in between."""
        before, now = ({os.readlink(link) for link in self.layout.inputs(each).glob("*")} for each in (base, day))
        skipped = (each for each, record in self.state.days.items() if record.status == "skipped")
        gone = before - now
        return bool(gone) and gone <= {str(file) for each in skipped for file in self.logs.files(each)}

    def _gate(self, day: str, record: Day) -> Verdict:
        self.state.start(day, "gate")
        try:
            new = without_details(json.loads(self.stages.evaluation("evaluate", day).read_text()))
            old = None
            if record.base is not None:
                old = self.releases.read(record.base).metrics
                if self.config.gate.against == "same_data":
                    old = json.loads(self.stages.evaluation("compare", day).read_text())
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

    def _close(self, day: str, status: DayStatus, reason: str) -> None:
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
        record = self.state.day(day)
        if record.status != "skipped":
            record.before_skip = (record.status, record.reason)
        self._close(day, "skipped", "left out by --skip")
        print(f"day {day}: skipped; later datasets leave its log out, --unskip {day} takes it in again")

    def unskip(self, day: str) -> None:
        """Take a skipped day's log in again; the day is then what it was before."""
        if self._record(day).status != "skipped":
            skipped = [each for each, record in self.state.days.items() if record.status == "skipped"]
            raise DailyError(
                f"day {day} is not skipped; skipped are: {', '.join(sorted(skipped, key=order)) or 'none'}"
            )
        record = self.state.day(day)
        record.status, record.reason = record.before_skip or ("waiting", None)
        record.before_skip = None
        self.state.save()
        print(f"day {day}: not skipped any more; later datasets have its log")

    def forget(self, day: str) -> None:
        """Remove what a day that is not published has made, so that it begins anew."""
        self._check_due(day)
        for stage, noted in self._record(day).stages.items():
            if noted.status == "running":  # a job that outlived its pipeline must not write into the new beginning
                self.jobs.wait_for_earlier(Job(day, stage, "", (), lock=self.stages.lock(stage, day)), noted.job)
        self.releases.forget(day)
        self.state.days.pop(day, None)
        self.state.save()
        self.layout.remove_aside(day)  # takes long, and may be interrupted: nothing refers to it any more


def _events(dataset: Path) -> int:
    return int(json.loads((dataset / "dataset.json").read_text())["events"])
