"""A day's stages, one after another: what each needs, whether it is complete, what to do when it fails."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.daily.config import DAY, DailyConfig
from pipelines.daily.gate import judge
from pipelines.daily.jobs import Job, TorchXJobs
from pipelines.daily.logs import Logs, check_names, order
from pipelines.daily.stages import WITHOUT_JOB, Stages
from pipelines.daily.state import DailyError, Day, Layout, Release, Releases, StageError, State

FAILED, REJECTED = 1, 3  # 2 is argparse's


class RejectedError(DailyError):
    """The gate keeps what is published."""


class Daily:
    """The pipeline over days, as it stands on disk."""

    def __init__(self, config: DailyConfig, jobs: TorchXJobs) -> None:
        self.config, self.jobs = config, jobs
        self.layout = Layout(Path(config.root).absolute())
        self.state, self.releases = State(self.layout.root), Releases(self.layout)
        self.stages = Stages(config, self.layout, self.releases)
        self.logs = Logs(config.logs)

    # --- which days --------------------------------------------------------------------------------------------------

    def pending(self) -> list[str]:
        """Days to do, in order: those after the last that was published or rejected, and those begun anew."""
        done = [day for day, record in self.state.days.items() if record.status in ("published", "rejected")]
        last = max([*done, *self.releases.ever()], key=order, default=None)
        first, current = self.config.logs.first_day, self.releases.current()

        def is_due(day: str) -> bool:
            status = self.state.look(day).status
            if status == "skipped" or (first is not None and order(day) < order(first)):
                return False
            if status in ("running", "failed"):  # redone after a rollback, perhaps before days that were rolled back
                return current is None or order(day) > order(current.day)
            return last is None or order(day) > order(last)

        return [day for day in self.logs.days() if is_due(day)]

    def counted(self) -> list[str]:
        """Days whose logs count, in order."""
        return [day for day in self.logs.days() if self.state.look(day).status != "skipped"]

    def days_until(self, day: str, after: str | None = None) -> list[str]:
        days = [each for each in self.counted() if order(each) <= order(day)]
        return [each for each in days if after is None or order(each) > order(after)]

    def planned(self, day: str) -> Day:
        """A day as it would begin now."""
        current = self.releases.current()
        if current is None:
            return Day()
        trains = len(self.days_until(day, current.trained)) >= self.config.train.every_days
        return Day(base=current.day, kind="train" if trains else "refresh")

    def note_published(self) -> None:
        """A pipeline that was killed just after it moved the pointer did not write down that it has."""
        for day in self.releases.ever():
            record = self.state.days.setdefault(day, Day())
            if record.status not in ("published", "skipped"):
                record.metrics = self.releases.read(day).metrics
                self.state.end(day, "publish", "finished")
                self.state.close(day, "published", record.reason or "")

    def check_due(self, day: str) -> None:
        """Refuse a day without a log, or before the one that is published; and all days if one is none."""
        check_names(self.counted())
        if day not in self.logs.days():
            raise DailyError(f"no log at {self.config.logs.path.replace(DAY, day)}")
        current = self.releases.current()
        if current is not None and order(current.day) > order(day):
            raise DailyError(f"day {current.day} is published: an older one does not replace it; see --rollback")

    # --- running them ------------------------------------------------------------------------------------------------

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
        record, begun = self.state.look(day), False
        try:
            if record.status == "published" and day not in self.releases.line():
                raise DailyError(f"it was rolled back: --rollback {day} publishes it again, --redo {day} makes it anew")
            if record.status in ("published", "rejected", "skipped"):
                print(f"day {day} is {record.status}{f': {record.reason}' if record.reason else ''}")
                return REJECTED if record.status == "rejected" else 0
            self.check_due(day)  # it may not even be a day: only from here on a failure is written down
            begun = True
            record = self._begin(day)
            print(f"day {day}: {record.kind}, from {f'day {record.base}' if record.base else 'nothing'}", flush=True)
            stages = self.stages.of(record)
            for stage in stages:
                if stage not in WITHOUT_JOB:  # a wrong setting of the last one shows before the first
                    self.jobs.request(self.stages.job(stage, day, record))
            for stage in stages:
                self._run_stage(stage, day, record)
        except RejectedError as error:
            self.state.close(day, "rejected", str(error))
            print(f"day {day}: rejected: {error}; {self._standing()}", flush=True)
            return REJECTED
        except DailyError as error:
            if begun:
                self.state.close(day, "failed", str(error))
            print(f"day {day}: {error}\n{self._standing()}", file=sys.stderr, flush=True)
            return FAILED
        return 0

    def _standing(self) -> str:
        current = self.releases.current()
        return f"day {current.day} stays published" if current else "nothing is published yet"

    def _begin(self, day: str) -> Day:
        """What the day starts from: what is published; a day on its way must have started from the same."""
        record, planned = self.state.days.setdefault(day, Day()), self.planned(day)
        if record.base != planned.base:
            if self.layout.data(day).exists() or self.layout.export(day).exists():
                raise DailyError(
                    f"it was begun from {record.base or 'nothing'}, now {planned.base or 'nothing'} is published: "
                    f"--redo {day} begins it anew"
                )
            record.stages = {}
        if not record.stages:
            record.base, record.kind = planned.base, planned.kind
        self.state.close(day, "running", None)
        return record

    def _run_stage(self, stage: str, day: str, record: Day) -> None:
        try:
            if stage == "gate":
                self._gate(day, record)
            elif stage == "publish":
                self._publish(day, record)
            else:
                self._run_job(stage, day, record)
        except StageError as error:
            self.state.end(day, stage, "failed", str(error))
            raise

    def _run_job(self, stage: str, day: str, record: Day) -> None:
        """A stage that is a job, unless it is done."""
        job, noted = self.stages.job(stage, day, record), record.stages.get(stage)
        if noted is not None and noted.status == "running" and self.jobs.wait_for_earlier(job, noted.job):
            print(f"  {stage}: the job of the pipeline before has ended", flush=True)
        if self.stages.is_complete(stage, day):
            if noted is None or noted.status != "finished":
                self.state.end(day, stage, "finished")
            print(f"  {stage}: done", flush=True)
        else:
            self._launch(job, record)
        if stage == "prepare":
            self._check_new_events(day, record)

    def _launch(self, job: Job, record: Day) -> None:
        stage, day, links = job.stage, job.day, {}
        if stage in ("prepare", "refresh"):
            days = self.days_until(day, record.base if stage == "refresh" else None)
            links = self.logs.link(days, self.layout.inputs(day))
        preempted = self.layout.run(day) / "preempted"
        for _ in range(1 + self.config.jobs.relaunches):
            noted = self.state.start(day, stage)
            preempted.unlink(missing_ok=True)  # of the launch before: this one has to write its own
            print(f"  {stage}: {self.stages.shown(job)}", flush=True)
            noted.job = self.jobs.submit(job)
            self.state.save()
            ended = self.jobs.follow(job, noted.job)
            noted.logs = ended.logs
            if not self.stages.is_complete(stage, day):
                # a worker may hold the lock a little longer; or another job, started just before a kill, has it
                self.jobs.wait_for_earlier(job, noted.job)
            if self.stages.is_complete(stage, day):
                self.state.end(day, stage, "finished")
                print(f"  {stage}: {noted.seconds:.0f} s", flush=True)
                return
            # torchrun ends with an error when it is preempted, and Slurm calls a preempted job failed
            if stage != "train" or ended.cancelled or not preempted.exists():
                break
            print(f"  {stage}: it was preempted, and saved; launching it again", flush=True)
        message = ended.message or "it ended without its output"
        for link, file in links.items():
            message = message.replace(link, file)
        raise StageError(f"{stage} failed: {message}" + (f"\nlogs: {ended.logs}" if ended.logs else ""))

    def _check_new_events(self, day: str, record: Day) -> None:
        new, wanted = self._events(day), self.config.logs.min_new_events
        if record.base is not None:
            base = self.releases.read(record.base).trained
            before, now = ({os.readlink(link) for link in self.layout.inputs(each).glob("*")} for each in (base, day))
            skipped = [each for each, other in self.state.days.items() if other.status == "skipped"]
            if before - now and before - now <= {str(file) for each in skipped for file in self.logs.files(each)}:
                print(f"  prepare: logs of the dataset of day {base} are left out now: new events are not counted")
                return
            new -= self._events(base)
        if wanted and new < wanted:
            raise StageError(
                f"the day brings {new:,} new events, fewer than logs.min_new_events = {wanted:,}: mend the log, then "
                f"--redo {day}; or --skip {day}; or logs.min_new_events=0, if earlier logs have become shorter"
            )

    def _events(self, day: str) -> int:
        return int(json.loads((self.layout.data(day) / "dataset.json").read_text())["events"])

    def _gate(self, day: str, record: Day) -> None:
        self.state.start(day, "gate")
        new = json.loads(self.stages.evaluation("evaluate", day).read_text())
        record.metrics = {key: value for key, value in new.items() if key != "baselines"}
        old = self.releases.read(record.base).metrics if record.base is not None else None
        if old is not None and self.config.gate.against == "same_data":
            old = json.loads(self.stages.evaluation("compare", day).read_text())
        publish, record.reason = judge(self.config.gate, new, old, record.base)
        self.state.end(day, "gate", "finished", record.reason)
        print(f"  gate: {record.reason}", flush=True)
        if not publish:
            raise RejectedError(record.reason)

    def _publish(self, day: str, record: Day) -> None:
        trained, metrics = day, record.metrics or {}
        if record.kind == "refresh" and record.base is not None:
            base = self.releases.read(record.base)
            trained, metrics = base.trained, base.metrics
        self.state.start(day, "publish")
        self.releases.publish(Release(day, trained, metrics, record.base))
        self.state.end(day, "publish", "finished")
        self.state.close(day, "published", record.reason or f"the model of day {trained} with new events")
        print(f"day {day}: published: {self.releases.pointer}/export", flush=True)

    # --- what people do ----------------------------------------------------------------------------------------------

    def skip(self, day: str) -> None:
        """Leave a day's log out of every later dataset."""
        if day not in self.logs.days() and day not in self.state.days:
            raise DailyError(f"there is no day {day}; there are {', '.join(self.logs.days()) or 'none'}")
        if day in self.releases.line():
            raise DailyError(f"day {day} is published: roll back to a day before it first")
        record = self.state.days.setdefault(day, Day())
        if record.status != "skipped":
            record.before_skip = (record.status, record.reason)
        self.state.close(day, "skipped", "left out by --skip")
        print(f"day {day}: skipped; later datasets leave its log out, --unskip {day} takes it in again")

    def unskip(self, day: str) -> None:
        """Take a skipped day's log in again; the day is then what it was before."""
        skipped = sorted((each for each, record in self.state.days.items() if record.status == "skipped"), key=order)
        if day not in skipped:
            raise DailyError(f"day {day} is not skipped; skipped are: {', '.join(skipped) or 'none'}")
        status, reason = self.state.days[day].before_skip or ("waiting", None)
        self.state.days[day].before_skip = None
        self.state.close(day, status, reason)
        print(f"day {day}: not skipped any more; later datasets have its log")

    def forget(self, day: str) -> None:
        """Remove what a day that is not published has made, so that it begins anew."""
        self.check_due(day)
        for stage, noted in self.state.look(day).stages.items():
            if noted.status == "running":  # a job that outlived its pipeline must not write into the new beginning
                self.jobs.wait_for_earlier(Job(day, stage, "", (), lock=self.stages.lock(stage, day)), noted.job)
        self.releases.forget(day)
        self.state.days.pop(day, None)
        self.state.save()
        for aside in self.layout.root.glob("*/.*.removed"):  # may be interrupted: nothing refers to it any more
            shutil.rmtree(aside)
