"""A day's stages, one after another: what each needs, whether it is complete, what to do when it fails."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.events.errors import DataError
from pipelines.daily.config import DAY, DailyConfig
from pipelines.daily.jobs import Job, TorchXJobs
from pipelines.daily.logs import Logs, check_names, order
from pipelines.daily.stages import WITHOUT_JOB, Stages, judge
from pipelines.daily.state import DailyError, Day, Evaluation, Layout, Release, Releases, StageError, State

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

    def standings(self) -> dict[str, str]:
        """Every day's status, in order; what is published is known by the pointer, also after a kill."""
        line, ever = self.releases.line(), self.releases.ever()
        found = {}
        for day in sorted({*self.state.days, *ever, *self.logs.days()}, key=order):
            record = self.state.look(day)
            moved = "published" if day in line else "rolled back" if day in ever else None
            found[day] = "skipped" if record.skipped else moved or record.status
        return found

    def pending(self) -> list[str]:
        """Days to do, in order: those after the last that was published or rejected, and those begun anew."""
        standings, current, first = self.standings(), self.releases.current(), self.config.logs.first_day
        done = [day for day, status in standings.items() if status in ("published", "rolled back", "rejected")]

        def is_due(day: str) -> bool:
            if first is not None and order(day) < order(first):
                return False
            if standings[day] in ("running", "failed"):  # redone, perhaps before days that were rolled back
                return current is None or order(day) > order(current.day)
            return standings[day] == "waiting" and (not done or order(day) > order(done[-1]))

        return [day for day in self.logs.days() if is_due(day)]

    def days_until(self, day: str, after: str | None = None) -> list[str]:
        """Days whose logs count, in order."""
        days = [each for each in self.logs.days() if not self.state.look(each).skipped and order(each) <= order(day)]
        return [each for each in days if after is None or order(each) > order(after)]

    def planned(self, day: str) -> Day:
        """A day as it would begin now."""
        current = self.releases.current()
        if current is None:
            return Day()
        trains = len(self.days_until(day, current.trained)) >= self.config.train.every_days
        return Day(base=current.day, kind="train" if trains else "refresh")

    def check_names(self) -> None:
        """Refuse to do anything as long as something that is no day lies among the logs."""
        check_names([day for day in self.logs.days() if not self.state.look(day).skipped])

    def check_due(self, day: str) -> None:
        """Refuse a day without a log, or before the one that is published."""
        self.check_names()
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
        begun = False
        try:
            status = self.standings().get(day)
            if status == "rolled back":
                raise DailyError(f"it was rolled back: --rollback {day} publishes it again, --redo {day} makes it anew")
            if status in ("published", "rejected", "skipped"):
                print(f"day {day} is {status}: {self.state.look(day).reason or 'nothing to do'}")
                return REJECTED if status == "rejected" else 0
            self.check_due(day)  # it may not even be a day: only from here on a failure is written down
            begun = True
            record = self._begin(day)
            stages = self.stages.of(record)
            for stage in stages:
                if stage not in WITHOUT_JOB:  # a wrong setting of the last one shows before the first
                    self.jobs.request(self.stages.job(stage, day, record))
            in_this_process = {"gate": self._gate, "publish": self._publish}
            for stage in stages:
                try:
                    in_this_process[stage](day, record) if stage in WITHOUT_JOB else self._run_job(stage, day, record)
                except StageError as error:
                    self.state.end(day, stage, "failed", str(error))
                    raise
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
            if self.layout.of("data", day).exists() or self.layout.of("exports", day).exists():
                raise DailyError(
                    f"it was begun from {record.base or 'nothing'}, now {planned.base or 'nothing'} is published: "
                    f"--redo {day} begins it anew"
                )
            record.stages = {}
        if not record.stages:
            record.base, record.kind = planned.base, planned.kind
        self.state.close(day, "running", None)
        print(f"day {day}: {record.kind}, from {f'day {record.base}' if record.base else 'nothing'}", flush=True)
        return record

    def _run_job(self, stage: str, day: str, record: Day) -> None:
        """A stage that is a job, unless it is done."""
        job, noted = self.stages.job(stage, day, record), record.stages.get(stage)
        if noted is not None and noted.status == "running" and noted.job is not None:
            self.jobs.wait_for_earlier(noted.job)
        if not self.stages.is_complete(stage, day):
            self._launch(job, record)
        else:
            if noted is None or noted.status != "finished":
                self.state.end(day, stage, "finished")
            print(f"  {stage}: done", flush=True)
        if stage == "prepare":
            self._check_new_events(day, record)

    def _launch(self, job: Job, record: Day) -> None:
        stage, day, links = job.stage, job.day, {}
        if stage in ("prepare", "refresh"):
            days = self.days_until(day, record.base if stage == "refresh" else None)
            links = self.logs.link(days, self.layout.of("inputs", day))
        preempted = self.layout.of("runs", day) / "preempted"
        for _ in range(1 + self.config.jobs.relaunches):
            noted = self.state.start(day, stage)
            preempted.unlink(missing_ok=True)  # of the launch before: this one has to write its own
            print(f"  {stage}: {job.command(self.config.jobs.ranks)}", flush=True)
            noted.job = self.jobs.submit(job)
            self.state.save()
            ended = self.jobs.follow(noted.job)
            noted.logs = ended.logs
            if self.stages.is_complete(stage, day):
                self.state.end(day, stage, "finished")
                print(f"  {stage}: {noted.took()}", flush=True)
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
            skipped = [each for each, other in self.state.days.items() if other.skipped]
            left_out = {str(file) for each in skipped for file in self.logs.files(each)}
            if left_out.intersection(os.readlink(link) for link in self.layout.of("inputs", base).glob("*")):
                print(f"  prepare: logs of the dataset of day {base} are left out now: new events are not counted")
                return
            new -= self._events(base)
        if wanted and new < wanted:
            raise StageError(
                f"the day brings {new:,} new events, fewer than logs.min_new_events = {wanted:,}: mend the log, then "
                f"--redo {day}; or --skip {day}; or logs.min_new_events=0, if earlier logs have become shorter"
            )

    def _events(self, day: str) -> int:
        try:
            return Dataset.open(self.layout.of("data", day)).info.events
        except DataError as error:
            raise StageError(str(error)) from None

    def _gate(self, day: str, record: Day) -> None:
        self.state.start(day, "gate")
        record.evaluation = Evaluation.read(self.stages.evaluation("evaluate", day))
        old = self.releases.read(record.base).evaluation if record.base is not None else None
        if old is not None and self.config.gate.against == "same_data":
            old = Evaluation.read(self.stages.evaluation("compare", day))
        publish, record.reason = judge(self.config.gate, record.evaluation, old, record.base)
        self.state.end(day, "gate", "finished", record.reason)
        print(f"  gate: {record.reason}", flush=True)
        if not publish:
            raise RejectedError(record.reason)

    def _publish(self, day: str, record: Day) -> None:
        trained, evaluation = day, record.evaluation
        if record.kind == "refresh" and record.base is not None:
            base = self.releases.read(record.base)
            trained, evaluation = base.trained, base.evaluation
        assert evaluation is not None  # of the gate
        self.state.start(day, "publish")
        self.releases.publish(Release(day, trained, evaluation, record.base))
        self.state.end(day, "publish", "finished")
        self.state.close(day, "published", record.reason or f"the model of day {trained} with new events")
        print(f"day {day}: published: {self.releases.pointer}/export", flush=True)

    # --- what people do ----------------------------------------------------------------------------------------------

    def skip(self, day: str, skipped: bool = True) -> None:
        """Leave a day's log out of every later dataset, or take it in again; the day is then what it was before."""
        standings = self.standings()
        if day not in standings:
            raise DailyError(f"there is no day {day}; there are {', '.join(standings) or 'none'}")
        if skipped and standings[day] == "published":
            raise DailyError(f"day {day} is published: roll back to a day before it first")
        if not skipped and standings[day] != "skipped":
            known = [each for each, status in standings.items() if status == "skipped"]
            raise DailyError(f"day {day} is not skipped; skipped are: {', '.join(known) or 'none'}")
        self.state.days.setdefault(day, Day()).skipped = skipped
        self.state.save()
        undo = f"leave its log out, --unskip {day} takes it in again" if skipped else "have its log again"
        print(f"day {day}: later datasets {undo}")

    def forget(self, day: str) -> None:
        """Remove what a day that is not published has made, so that it begins anew."""
        self.check_due(day)
        for noted in self.state.look(day).stages.values():
            if noted.status == "running" and noted.job is not None:  # it must not write into the new beginning
                self.jobs.wait_for_earlier(noted.job)
        self.releases.forget(day)
        self.state.days.pop(day, None)
        self.state.save()
        for aside in self.layout.root.glob("*/.*.removed"):  # may be interrupted: nothing refers to it any more
            shutil.rmtree(aside)
