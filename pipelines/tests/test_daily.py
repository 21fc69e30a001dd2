"""The daily pipeline without launches: stages run in this process, or only write what the real ones would."""

import dataclasses
import errno
import functools
import importlib
import json
import os
import shutil
import tempfile
import threading
from types import SimpleNamespace

import pytest
from torchx.runner import get_runner

from fuxi_torchrec import strict_yaml
from fuxi_torchrec.artifacts import is_locked
from fuxi_torchrec.data.dataset import INFO, Dataset
from fuxi_torchrec.data.prepare import prepare_synthetic
from fuxi_torchrec.data.synthetic import SyntheticConfig
from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.strict_yaml import ConfigError
from pipelines import synthesize
from pipelines.daily import jobs as daily_jobs
from pipelines.daily import loop as daily_loop
from pipelines.daily import state as daily_state
from pipelines.daily.__main__ import check_training, main
from pipelines.daily.config import DailyConfig, GateConfig, LogsConfig
from pipelines.daily.jobs import Ended
from pipelines.daily.logs import Logs
from pipelines.daily.loop import FAILED, REJECTED, Daily
from pipelines.daily.stages import judge
from pipelines.daily.state import DailyError, Day, Evaluation, Layout, Release, Releases, StageError, State
from pipelines.daily.status import dry_run, status


class KilledError(BaseException):
    """The pipeline is killed here."""


class FakeJobs:
    """Does at once what a job would do.

    values: ndcg@10 of each day's model. broken: (stage, day) that fail. killed: (stage, day) at which the pipeline
    dies, before the job has done anything, or after it. preemptions: of training; cancelled: it was, for good.
    """

    def __init__(self, values, broken=(), killed_before=(), killed_after=(), preemptions=0, cancelled=False):
        self.values, self.broken = values, set(broken)
        self.killed_before, self.killed_after = set(killed_before), set(killed_after)
        self.preemptions, self.cancelled = preemptions, cancelled
        self.submitted, self.waited, self.jobs = [], [], {}
        self.unmakeable = self.unsubmittable = None

    def request(self, job):
        if job.stage == self.unmakeable:
            raise StageError(f"{job.stage}: no job can be made")

    def submit(self, job):
        if job.stage == self.unsubmittable:
            raise StageError(f"{job.stage}: sbatch is missing")
        self.submitted.append((job.stage, job.day))
        self.jobs[job.stage, job.day] = job
        return f"fake://{job.stage}-{job.day}"

    def wait_for_earlier(self, handle):
        self.waited.append(handle)

    def follow(self, handle):
        key = tuple(handle.removeprefix("fake://").split("-"))
        job = self.jobs[key]
        if key in self.killed_before:
            self.killed_before.remove(key)
            raise KilledError
        if key in self.broken:
            return Ended(f"{job.stage} says why, in {options(job).get('--input', '')}/00000-00000-part-0.parquet")
        if job.stage == "train" and self.preemptions:
            self.preemptions -= 1
            run = options(job)["--run-dir"]
            os.makedirs(run, exist_ok=True)
            write(f"{run}/preempted", {})
            write(f"{run}/summary.json", {"preempted": True})
            return Ended("SignalException", cancelled=self.cancelled)  # torchrun's exit code is 1 then
        self.work(job)
        if key in self.killed_after:
            self.killed_after.remove(key)
            raise KilledError
        return Ended(logs="/logs")

    def work(self, job):
        given = options(job)
        if job.stage == "prepare":
            os.makedirs(given["--output"])
            events = sum(os.path.getsize(entry.path) for entry in os.scandir(given["--input"]))
            describe(given["--output"], events)
        elif job.stage == "train":
            os.makedirs(given["--run-dir"], exist_ok=True)
            write(f"{given['--run-dir']}/summary.json", {"preempted": False})
        elif job.stage in ("evaluate", "compare"):
            value = self.values["compare" if job.stage == "compare" else job.day]
            found = evaluation(value, split=given["--split"], filter_seen="--filter-seen" in job.arguments)
            write(given["--output"], dataclasses.asdict(found) | {"baselines": {"popular": {}}})
        else:
            os.makedirs(given["--output"])
            write(f"{given['--output']}/manifest.json", {})


class RealJobs(FakeJobs):
    """Runs the stages themselves, in this process."""

    def work(self, job):
        importlib.import_module(job.module).main(list(job.arguments))


def options(job):
    return dict(each.split("=", 1) for each in job.arguments if each.startswith("--") and "=" in each)


def write(path, content):
    with open(path, "w") as file:
        json.dump(content, file)


@functools.cache
def small_dataset():
    """What the description of a dataset says."""
    with tempfile.TemporaryDirectory() as directory:
        prepare_synthetic(SyntheticConfig(10, 0, 50, 2, median_length=5, length_sigma=1.0), f"{directory}/data")
        return Dataset.open(f"{directory}/data").info


def describe(directory, events):
    """Write the description of a dataset with so many events."""
    info = small_dataset()
    files = (dataclasses.replace(info.files[0], users=info.users, events=events),)
    text = dataclasses.replace(info, events=events, files=files).to_json()
    with open(f"{directory}/{INFO}", "w") as file:
        file.write(text)


def evaluation(value, split="test", filter_seen=False):
    metrics = {"ndcg@10": value, "hr@10": 0.5, "mrr": 0.1, "by_history_length": {}}
    return Evaluation(split, filter_seen, "step-1", 1, "abc", 9, metrics, metrics)


@pytest.fixture
def pipeline(tmp_path):
    """Makes a pipeline as a new process would: from what is on disk."""

    def make(jobs, days=3, settings=()):
        (tmp_path / "logs").mkdir(exist_ok=True)
        for day in range(days):
            (tmp_path / "logs" / f"part-{day}.parquet").write_text("event")
        given = [f"root={tmp_path / 'root'}", f'logs.path="{tmp_path}/logs/part-{{day}}.parquet"', *settings]
        return Daily(strict_yaml.load(DailyConfig, None, given), jobs)

    return make


def run(made):
    return made.run(made.pending())


def statuses(made):
    return {day: found for day, found in made.standings().items() if found != "waiting"}


STAGES = ["prepare", "train", "evaluate", "export"]


REAL = [
    "train.settings=[batch.events=512, batch.max_length=32, model.dim=16, model.num_layers=1, model.max_positions=32, "
    "optimizer.warmup_steps=1, train.epochs=1, train.max_steps=2, validation.every_epochs=null, "
    "logging.tensorboard=false]",
    "evaluate.baselines=false",
    "gate={against: same_data, max_fall: 1.0}",
    "export.arguments=[--no-programs, --no-index]",
]


# --- days and stages -------------------------------------------------------------------------------------------------


def test_days_run_in_order_each_from_the_one_before(pipeline):
    jobs = FakeJobs({"0": 0.1, "1": 0.11, "2": 0.12})
    made = pipeline(jobs)
    assert run(made) == 0
    assert jobs.submitted == [(stage, day) for day in "012" for stage in STAGES]
    assert made.releases.line() == ["2", "1", "0"]
    root = made.layout.root
    assert "--extend" not in options(jobs.jobs["prepare", "0"])
    assert options(jobs.jobs["prepare", "2"])["--extend"] == f"{root}/data/1"
    assert "--init-from" not in options(jobs.jobs["train", "0"])
    assert options(jobs.jobs["train", "2"])["--init-from"] == f"{root}/runs/1"
    assert f"data.path={root}/data/2" in jobs.jobs["train", "2"].arguments
    assert (root / "published" / "export" / "manifest.json").resolve() == root / "exports" / "2" / "manifest.json"
    assert len(list(made.layout.of("inputs", "2").iterdir())) == 3
    assert run(pipeline(jobs)) == 0 and len(jobs.submitted) == 12, "nothing is left to do"


def test_real_stages_train_a_model_refresh_its_export_and_train_the_next(pipeline, tmp_path):
    log = ["--users", "40", "--items", "400", "--median-length", "12", "--cuts", "0.8,0.9"]
    assert synthesize.main([*log, "--output", str(tmp_path / "logs")]) == 0
    jobs = RealJobs({}, killed_before=[("evaluate", "2")], killed_after=[("train", "2")])
    for _ in range(2):
        with pytest.raises(KilledError):
            run(pipeline(jobs, 0, [*REAL, "train.every_days=2"]))
    (tmp_path / "logs" / "part-3.parquet").write_text("no Parquet")
    made = pipeline(jobs, 0, REAL)
    assert run(made) == FAILED and made.state.days["3"].status == "failed"
    assert jobs.submitted == [
        *((stage, "0") for stage in STAGES),
        ("refresh", "1"),
        *((stage, "2") for stage in ("prepare", "train", "evaluate", "evaluate", "compare", "export")),
        ("prepare", "3"),
    ]
    assert made.releases.line() == ["2", "1", "0"]
    assert options(jobs.jobs["refresh", "1"])["--export"] == str(made.layout.of("exports", "0"))
    assert [os.path.basename(os.readlink(e)) for e in made.layout.of("inputs", "1").iterdir()] == ["part-1.parquet"]
    refreshed, root = made.releases.read("1"), made.layout.root
    assert refreshed.trained == "0" and refreshed.evaluation == made.releases.read("0").evaluation
    assert (root / "releases" / "1" / "run").resolve() == made.layout.of("runs", "0")
    assert options(jobs.jobs["train", "2"])["--init-from"] == str(made.layout.of("runs", "0"))
    assert (root / "published" / "export").resolve() == made.layout.of("exports", "2")
    bundles = [Bundle.open(made.layout.of("exports", day), verify="checksums") for day in "012"]
    times = [bundle.manifest.as_of for bundle in bundles]
    assert times == sorted(set(times)), "every day's export has later events"
    recorded = json.loads((made.layout.of("runs", "2") / "eval-daily.json").read_text())["last"]["ndcg@10"]
    assert made.releases.read("2").evaluation.last["ndcg@10"] == recorded
    assert f"{recorded:.4f}" in status(made)


def test_the_first_settings_are_for_runs_that_start_from_nothing(pipeline):
    jobs = FakeJobs({"0": 0.1, "1": 0.1})
    run(pipeline(jobs, 2, ["train.settings=[a=1]", "train.first_settings=[b=2]"]))
    assert jobs.jobs["train", "0"].arguments[-2:] == ("a=1", "b=2")
    assert jobs.jobs["train", "1"].arguments[-1] == "a=1"
    cold = FakeJobs({"2": 0.1})
    run(pipeline(cold, 3, ["train.first_settings=[b=2]", "train.warm_start=false"]))
    assert cold.jobs["train", "2"].arguments[-1] == "b=2" and "--init-from" not in options(cold.jobs["train", "2"])
    assert "--extend" in options(cold.jobs["prepare", "2"]), "items keep their indices"


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_pipeline_goes_on_at_the_stage_where_it_stopped(pipeline, stage):
    jobs = FakeJobs({"0": 0.1, "1": 0.1}, killed_after=[(stage, "0")], killed_before=[(stage, "1")])
    for _ in range(2):
        with pytest.raises(KilledError):
            run(pipeline(jobs, 2))
    made = pipeline(jobs, 2)
    assert made.state.days["1"].stages[stage].status == "running"
    assert run(made) == 0 and made.releases.line() == ["1", "0"]
    before = STAGES.index(stage)
    assert (
        jobs.submitted
        == [
            *((each, "0") for each in STAGES),  # a stage that finished just before the kill is not repeated
            *((each, "1") for each in [*STAGES[: before + 1], *STAGES[before:]]),
        ]
    )
    assert jobs.waited == [f"fake://{stage}-{day}" for day in "01"], "before another is started"
    assert made.state.days["0"].stages[stage].status == "finished"
    assert made.state.days["1"].stages[stage].attempts == 2


@pytest.mark.parametrize(
    ("step", "done", "rolled_back"),
    [("_write", False, False), ("_write", True, False), ("_point_to", True, False), ("_point_to", True, True)],
)
def test_a_kill_while_publishing_leaves_the_old_or_the_new_day(pipeline, monkeypatch, step, done, rolled_back):
    jobs = FakeJobs({"0": 0.1, "1": 0.1})
    assert run(pipeline(jobs, 1)) == 0
    original = getattr(Releases, step)

    def killed(self, argument):
        if done:
            original(self, argument)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Releases, step, killed)
        with pytest.raises(KilledError):
            run(pipeline(jobs, 2))
    assert pipeline(jobs, 2).releases.current().day == ("1" if step == "_point_to" else "0")
    if rolled_back:
        pipeline(jobs, 2).releases.roll_back(None)
        made = pipeline(jobs, 2)
        assert made.pending() == [] and made.releases.current().day == "0", "it is not published again"
        return
    made = pipeline(jobs, 2)
    assert run(made) == 0
    assert made.releases.line() == ["1", "0"] and statuses(made) == {"0": "published", "1": "published"}
    assert "0.1000" in status(made).splitlines()[2]
    assert len(jobs.submitted) == 8


def test_preempted_training_is_launched_again(pipeline):
    jobs = FakeJobs({"0": 0.1}, preemptions=2)
    made = pipeline(jobs, 1)
    assert run(made) == 0
    assert made.state.days["0"].stages["train"].attempts == 3
    jobs = FakeJobs({"1": 0.1}, preemptions=9)
    assert run(pipeline(jobs, 2)) == FAILED
    assert jobs.submitted.count(("train", "1")) == 4, "jobs.relaunches bounds it"


def test_training_that_was_cancelled_or_fails_after_a_preemption_is_not_launched_again(pipeline):
    jobs = FakeJobs({"0": 0.1}, preemptions=1, cancelled=True)
    assert run(pipeline(jobs, 1)) == FAILED
    jobs.broken = {("train", "0")}
    made = pipeline(jobs, 1)
    assert run(made) == FAILED and "train says why" in made.state.days["0"].reason
    assert jobs.submitted.count(("train", "0")) == 2, "what the launch before has left behind does not count"


def test_without_the_state_file_published_days_are_known_and_a_day_on_its_way_is_done_again(pipeline, capsys):
    jobs = FakeJobs({"0": 0.1, "1": 0.1}, killed_before=[("evaluate", "1")])
    with pytest.raises(KilledError):
        run(pipeline(jobs, 2))
    pipeline(jobs, 2).state.path.unlink()
    made = pipeline(jobs, 2)
    assert made.pending() == ["1"] and statuses(made) == {"0": "published"}
    assert run(made) == FAILED and "--redo 1" in capsys.readouterr().err
    made.forget("1")
    assert run(made) == 0


# --- days that are not published -------------------------------------------------------------------------------------


def test_a_day_with_broken_data_fails_and_the_published_one_stands(pipeline, capsys):
    jobs = FakeJobs({"0": 0.1, "1": 0.1, "2": 0.1}, broken=[("prepare", "1")])
    made = pipeline(jobs)
    assert run(made) == FAILED
    assert statuses(made) == {"0": "published", "1": "failed"}, "later days do not run over a failed one"
    said = capsys.readouterr().err
    assert "day 1: prepare failed: prepare says why" in said and "day 0 stays published" in said
    assert "logs/part-0.parquet" in said, "the log is named, not the link to it"
    jobs.broken.clear()
    made = pipeline(jobs)
    assert run(made) == 0 and made.releases.line() == ["2", "1", "0"], "mended, it goes on"


def test_a_job_that_cannot_be_made_fails_the_day_at_once_and_one_not_taken_its_stage(pipeline, capsys):
    jobs = FakeJobs({"0": 0.1})
    jobs.unmakeable = "export"
    assert run(pipeline(jobs, 1)) == FAILED and not jobs.submitted
    assert "day 0: export: no job can be made" in capsys.readouterr().err
    jobs.unmakeable, jobs.unsubmittable = None, "train"
    assert run(pipeline(jobs, 1)) == FAILED and "sbatch is missing" in capsys.readouterr().err
    noted = pipeline(jobs, 1).state.days["0"].stages["train"]
    assert (noted.status, noted.message) == ("failed", "train: sbatch is missing")
    jobs.unsubmittable = None
    assert run(pipeline(jobs, 1)) == 0 and not jobs.waited


def test_a_skipped_day_is_left_out_of_later_datasets(pipeline):
    jobs = FakeJobs({"0": 0.1, "2": 0.1}, broken=[("prepare", "1")])
    made = pipeline(jobs)
    assert run(made) == FAILED
    made.skip("1")
    assert run(made) == 0
    assert made.releases.line() == ["2", "0"]
    read = [os.path.basename(os.readlink(each)) for each in sorted(made.layout.of("inputs", "2").iterdir())]
    assert read == ["part-0.parquet", "part-2.parquet"]
    with pytest.raises(DailyError, match="day 2 is published"):
        made.skip("2")
    with pytest.raises(DailyError, match="no day 7; there are 0, 1, 2"):
        made.skip("7")


def test_a_skipped_day_is_taken_in_again(pipeline):
    jobs = FakeJobs({"0": 0.1, "1": 0.01, "2": 0.1, "3": 0.1})
    made = pipeline(jobs)
    with pytest.raises(DailyError, match="day 1 is not skipped; skipped are: none"):
        made.skip("1", skipped=False)
    assert made.run(["0", "1"]) == REJECTED
    made.skip("1")
    made.skip("1")
    made.skip("2")
    assert made.pending() == []
    made = pipeline(jobs)
    made.skip("2", skipped=False)
    assert made.pending() == ["2"] and run(made) == 0, "a day that was never run is to do"
    made = pipeline(jobs, 4)
    made.skip("1", skipped=False)
    assert statuses(made)["1"] == "rejected" and "-90.0%" in made.state.days["1"].reason
    assert run(made) == 0 and made.releases.line() == ["3", "2", "0"], "the published day is later: its log counts"
    assert len(list(made.layout.of("inputs", "2").iterdir())) == 2
    assert len(list(made.layout.of("inputs", "3").iterdir())) == 4


def test_a_day_without_new_events_fails(pipeline, tmp_path):
    made = pipeline(FakeJobs({"0": 0.1}), 1)
    assert run(made) == 0
    (tmp_path / "logs" / "part-1.parquet").write_text("")
    jobs = FakeJobs({"1": 0.1})
    made = pipeline(jobs, 1)
    assert run(made) == FAILED
    assert "0 new events, fewer than logs.min_new_events = 1" in made.state.days["1"].reason
    assert jobs.submitted == [("prepare", "1")]
    assert run(pipeline(jobs, 1)) == FAILED, "it does not go on as if nothing were wrong"
    allowed = pipeline(jobs, 1, ["logs.min_new_events=0"])
    assert run(allowed) == 0 and allowed.releases.line() == ["1", "0"]
    allowed.releases.roll_back(None)
    (tmp_path / "logs" / "part-1.parquet").write_text("event")
    made = pipeline(jobs, 1)
    made.forget("1")
    assert made.run(["1"]) == 0


def test_a_rejected_day_that_is_skipped_later_does_not_stop_the_days_after_it(pipeline, tmp_path, capsys):
    made = pipeline(FakeJobs({"0": 0.1, "1": 0.05, "2": 0.1}))
    (tmp_path / "logs" / "part-1.parquet").write_text("a day with many events")
    assert run(made) == 0 and made.releases.line() == ["2", "0"], "day 2 has the log of day 1"
    made.skip("1")
    made = pipeline(FakeJobs({"3": 0.1}), 4)
    assert run(made) == 0 and made.releases.line() == ["3", "2", "0"]
    assert "new events are not counted" in capsys.readouterr().out
    (tmp_path / "logs" / "part-0.parquet").unlink()  # not by --skip
    (tmp_path / "logs" / "part-2.parquet").unlink()
    (tmp_path / "logs" / "part-4.parquet").write_text("event")
    made = pipeline(FakeJobs({"4": 0.1}), 0)
    assert run(made) == FAILED and "new events, fewer than" in made.state.days["4"].reason


def test_a_worse_day_is_rejected_and_the_next_starts_from_the_published_one(pipeline):
    jobs = FakeJobs({"0": 0.1, "1": 0.05, "2": 0.1})
    made = pipeline(jobs, 2)
    assert run(made) == REJECTED
    assert ("export", "1") not in jobs.submitted and made.releases.line() == ["0"]
    assert "0.0500, 0.1000 for day 0: -50.0%" in made.state.days["1"].reason
    assert made.run_day("1") == REJECTED, "asked again it says so"
    made = pipeline(jobs, 3)
    assert run(made) == 0
    assert statuses(made) == {"0": "published", "1": "rejected", "2": "published"}
    assert options(jobs.jobs["train", "2"])["--init-from"].endswith("runs/0")
    assert options(jobs.jobs["prepare", "2"])["--extend"].endswith("data/0")
    assert made.releases.line() == ["2", "0"]


def test_on_the_same_data_the_published_model_is_measured_anew(pipeline):
    jobs = FakeJobs({"0": 0.3, "1": 0.1, "compare": 0.09})
    made = pipeline(jobs, 2, ["gate.against=same_data"])
    assert run(made) == 0, "0.1 is worse than yesterday's 0.3, but not on the same data"
    given = options(jobs.jobs["compare", "1"])
    assert given["--run-dir"].endswith("runs/0") and given["--data"].endswith("data/1")
    assert ("compare", "0") not in jobs.submitted
    jobs = FakeJobs({"2": 0.1, "compare": 0.2})
    assert run(pipeline(jobs, 3, ["gate.against=same_data"])) == REJECTED


def test_a_day_without_a_log_or_before_the_published_one_is_refused(pipeline, capsys):
    made = pipeline(FakeJobs({"0": 0.1, "1": 0.1}), 2)
    for name in ("9", "", ".", "../logs"):
        assert made.run([name]) == FAILED and "no log at" in capsys.readouterr().err
    assert not made.state.days, "what is no day is not written down"
    assert made.run(["1"]) == 0
    assert made.run(["0"]) == FAILED and "an older one does not replace it" in capsys.readouterr().err


def test_earlier_days_than_the_first_are_history(pipeline):
    jobs = FakeJobs({"1": 0.1, "2": 0.1})
    made = pipeline(jobs, 3, ['logs.first_day="1"'])
    assert made.pending() == ["1", "2"]
    assert run(made) == 0 and len(list(made.layout.of("inputs", "1").iterdir())) == 2


# --- the gate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "old", "settings", "publish"),
    [
        (0.1, None, {}, True),
        (0.1, None, {"floor": 0.2}, False),
        (0.2, None, {"floor": 0.2}, True),
        (0.095, 0.1, {"max_fall": 0.05}, True),
        (0.0949, 0.1, {"max_fall": 0.05}, False),
        (0.2, 0.1, {"max_fall": 0.0}, True),
        (0.1, 0.1, {"max_fall": 0.0}, True),
        (0.0999, 0.1, {"max_fall": 0.0}, False),
        (0.2, 0.1, {"floor": 0.3}, False),
        (0.0, 0.0, {}, True),
        (0.0, 0.1, {"max_fall": 1.0}, True),
        (float("nan"), 0.1, {"max_fall": 1.0}, False),
        (float("nan"), None, {}, False),
        (float("nan"), None, {"floor": 0.0}, False),
    ],
)
def test_the_gate(new, old, settings, publish):
    found = judge(GateConfig(**settings), evaluation(new), None if old is None else evaluation(old), "0")
    assert found[0] == publish, found[1]
    assert "ndcg@10 (queried at the last event's time)" in found[1]


def test_the_gate_compares_only_what_compares():
    with pytest.raises(StageError, match="measured with split = valid, this one with test"):
        judge(GateConfig(), evaluation(0.1), evaluation(0.1, split="valid"), "0")
    with pytest.raises(StageError, match=r"no hr@7 .*ndcg@10, hr@10, mrr"):
        judge(GateConfig(metric="hr@7"), evaluation(0.1), None, None)


@pytest.mark.parametrize("changed", ["evaluate.split=valid", "evaluate.filter_seen=true"])
@pytest.mark.parametrize("compared", [False, True])
def test_a_changed_setting_of_the_evaluation_is_put_back_or_compares_on_the_same_data(pipeline, changed, compared):
    jobs = FakeJobs({"0": 0.1, "1": 0.1, "compare": 0.1})
    assert run(pipeline(jobs, 1)) == 0
    made = pipeline(jobs, 2, [changed])
    assert run(made) == FAILED and "they do not compare. Put evaluate." in made.state.days["1"].reason
    made = pipeline(jobs, 2, [changed, "gate.against=same_data"] if compared else [])
    assert run(made) == 0 and made.releases.line() == ["1", "0"]
    assert jobs.submitted.count(("evaluate", "1")) == (1 if compared else 2)
    assert jobs.submitted.count(("train", "1")) == 1


# --- the pointer -----------------------------------------------------------------------------------------------------


@pytest.fixture
def releases(tmp_path):
    layout = Layout(tmp_path / "root")
    made = Releases(layout)
    for day in "0123":
        layout.of("exports", day).mkdir(parents=True)
        (layout.of("exports", day) / "manifest.json").write_text("{}")
    return made


def publish(releases, *days):
    for day in days:
        current = releases.current()
        releases.publish(Release(day, day, evaluation(0.1), current.day if current else None))


def test_rollback_goes_back_one_by_one_and_to_a_named_day(releases):
    with pytest.raises(DailyError, match="nothing is published"):
        releases.roll_back(None)
    publish(releases, "0", "1", "2")
    assert releases.roll_back(None) == ("2", "1")
    assert releases.roll_back(None) == ("1", "0")
    with pytest.raises(DailyError, match="nothing was published before day 0"):
        releases.roll_back(None)
    assert releases.roll_back("2") == ("0", "2")
    assert releases.line() == ["2", "1", "0"]
    with pytest.raises(DailyError, match="day 3 was never published; published were: 0, 1, 2"):
        releases.roll_back("3")
    (releases.layout.of("exports", "0") / "manifest.json").unlink()
    with pytest.raises(DailyError, match="the export of day 0 is gone"):
        releases.roll_back("0")
    assert releases.current().day == "2"


def test_what_was_rolled_back_is_not_before_what_comes_next(releases):
    publish(releases, "0", "1", "2")
    releases.roll_back(None)
    publish(releases, "3")
    assert releases.line() == ["3", "1", "0"]
    assert releases.roll_back(None) == ("3", "1")
    assert releases.ever() == {"0", "1", "2", "3"}


def test_readers_always_find_a_whole_release(releases):
    publish(releases, "0", "1")
    stop, seen, wrong = threading.Event(), set(), []

    def read():
        while not stop.is_set():
            try:
                seen.add((releases.pointer / "export").resolve(strict=True).name)
                assert json.loads((releases.pointer / "release.json").read_text())["day"] in "01"
            except Exception as error:
                wrong.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        moves = 0
        while moves < 100 or (seen != {"0", "1"} and not wrong):  # until it has read in between
            releases.roll_back("0")
            releases.roll_back("1")
            moves += 1
    finally:
        stop.set()
        reader.join()
    assert not wrong and seen == {"0", "1"}


def test_a_day_begun_from_what_was_rolled_back_is_not_published(pipeline, capsys):
    jobs = FakeJobs({"0": 0.1, "1": 0.1, "2": 0.1}, killed_before=[("export", "2")])
    with pytest.raises(KilledError):
        run(pipeline(jobs))
    made = pipeline(jobs)
    made.releases.roll_back(None)
    assert run(made) == FAILED
    assert "begun from 1, now 0 is published: --redo 2" in capsys.readouterr().err
    made.forget("2")
    assert made.run(["2"]) == 0
    assert made.releases.line() == ["2", "0"]
    assert options(jobs.jobs["train", "2"])["--init-from"].endswith("runs/0")


def test_a_rollback_during_the_last_stage_wins(pipeline, capsys):
    made = pipeline(FakeJobs({"0": 0.1, "1": 0.1}), 2)
    assert run(made) == 0
    jobs = FakeJobs({"2": 0.1})
    made = pipeline(jobs, 3)
    original = jobs.work

    def work(job):
        original(job)
        if job.stage == "export":
            made.releases.roll_back(None)

    jobs.work = work
    assert run(made) == FAILED
    assert made.releases.current().day == "0" and "begun from 1, now 0" in capsys.readouterr().err


def test_a_published_day_is_not_redone_and_one_that_was_rolled_back_is(pipeline, capsys):
    jobs = FakeJobs(dict.fromkeys("0123", 0.1))
    made = pipeline(jobs, 4)
    assert run(made) == 0 and made.run(["3"]) == 0
    with pytest.raises(DailyError, match="day 3 is published"):
        made.forget("3")
    made.releases.roll_back("1")
    assert made.run(["1"]) == 0
    for day in "23":
        assert made.run([day]) == FAILED, "it is not called published"
        said = capsys.readouterr().err
        assert f"day {day}: it was rolled back: --rollback {day} publishes it again, --redo {day}" in said
    made.forget("2")
    assert not made.layout.of("runs", "2").exists()
    jobs.broken = {("train", "2")}
    assert made.run(["2"]) == FAILED and pipeline(jobs, 4).pending() == ["2"], "it is still to do"
    jobs.broken = set()
    made = pipeline(jobs, 4)
    assert run(made) == 0 and made.releases.line() == ["2", "1", "0"]
    assert pipeline(jobs, 4).pending() == [], "day 3 stays rolled back"


def test_a_day_is_redone_only_if_it_can_be_run(pipeline, tmp_path):
    made = pipeline(FakeJobs({"0": 0.1, "1": 0.1, "2": 0.1}))
    run(made)
    before = sorted(tmp_path.rglob("*"))
    made.releases.roll_back("1")
    for name in ("", ".", "..", "9", "../logs"):
        with pytest.raises(DailyError, match="no log at"):
            made.forget(name)
        with pytest.raises(DailyError, match=r"cannot be a day's name|never published"):
            made.releases.roll_back(name)
    with pytest.raises(DailyError, match="day 1 is published: an older one"):
        made.forget("0")
    (made.layout.of("releases", "2") / daily_state.LEFT).unlink()
    assert sorted(tmp_path.rglob("*")) == before, "nothing was removed"


def test_a_day_is_redone_after_the_job_that_outlived_its_pipeline(pipeline):
    jobs = FakeJobs({"0": 0.1}, killed_before=[("train", "0")])
    made = pipeline(jobs, 1)
    with pytest.raises(KilledError):
        run(made)
    made = pipeline(jobs, 1)
    made.forget("0")
    assert jobs.waited == ["fake://train-0"]
    assert not made.layout.of("data", "0").exists() and run(made) == 0


@pytest.mark.parametrize("step", range(6))
def test_an_interrupted_redo_never_mixes_old_and_new(pipeline, tmp_path, monkeypatch, step):
    assert run(pipeline(FakeJobs({"0": 0.1, "1": 0.01}), 2)) == REJECTED
    (tmp_path / "logs" / "part-1.parquet").write_text("a mended log")
    made = pipeline(FakeJobs({}), 0)
    made.state.days["1"].status = "failed"
    made.layout.of("exports", "1").mkdir()
    left = [step]

    def killed_at(function):
        def call(*arguments, **more):
            if not left[0]:
                raise KilledError
            left[0] -= 1
            return function(*arguments, **more)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(daily_state.os, "rename", killed_at(os.rename))
        patch.setattr(State, "save", killed_at(State.save))
        patch.setattr(daily_loop, "shutil", SimpleNamespace(rmtree=killed_at(shutil.rmtree)))
        with pytest.raises(KilledError):
            made.forget("1")
    kept = [path.parent.name for path in (made.layout.of("data", "1"), made.layout.of("runs", "1")) if path.exists()]
    assert kept in (["data", "runs"], ["data"], []), "a run stays only with the data that it was made from"
    made = pipeline(FakeJobs({"1": 0.1}), 0)
    if step == 5:
        assert "1" not in made.state.days
    made.forget("1")
    assert run(made) == 0 and made.releases.line() == ["1", "0"]
    assert [each.name for each in made.layout.root.rglob("*.removed")] == []


# --- the state file --------------------------------------------------------------------------------------------------


def test_the_state_comes_back_as_it_was_written_and_a_damaged_file_is_named(tmp_path):
    state = State(tmp_path)
    state.days["0"] = Day()
    state.start("0", "prepare").job = "slurm://torchx/7"
    state.end("0", "prepare", "finished")
    state.start("0", "train")
    again = State(tmp_path)
    assert {name: dataclasses.asdict(day) for name, day in again.days.items()} == {
        name: dataclasses.asdict(day) for name, day in state.days.items()
    }
    assert again.days["0"].stages["prepare"].job == "slurm://torchx/7"
    assert again.days["0"].stages["prepare"].took().endswith(" s")
    text, plain = state.path.read_text(), json.loads(state.path.read_text())
    del plain["checksum"]  # as somebody does who changes it by hand
    for broken, what in (
        (text[:-9], "not readable as JSON"),
        (text.replace('"version": 2', '"version": 1'), "version 1, this software reads version 2"),
        (text.replace('"attempts": 1', '"attempts": 2', 1), "damaged, or changed since it was written"),
        (
            json.dumps(plain).replace('"attempts": 1', '"attempts": "many"', 1),
            "days.0.stages.prepare.attempts = 'many'",
        ),
    ):
        state.path.write_text(broken)
        with pytest.raises(DailyError, match=rf"state.json: {what}.*; move it away"):
            State(tmp_path)


def test_a_flipped_bit_in_a_release_is_refused_or_changes_nothing(tmp_path):
    releases = Releases(Layout(tmp_path))
    releases.publish(Release("0", "0", Evaluation("test", False, "step-1", 1, "data", 9, {"mrr": 0.5})))
    path, release = tmp_path / "releases" / "0" / "release.json", releases.read("0")
    text = path.read_bytes()
    for bit in range(0, 8 * len(text), 7):
        damaged = bytearray(text)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found, told = releases.read("0"), str(path)
        except DailyError as error:
            found, told = release, str(error)
        assert found == release and str(path) in told


def test_a_lock_is_held_by_one(tmp_path):
    path = tmp_path / ".lock"
    assert not is_locked(path)
    with daily_state.locked(path, "the pipeline"):
        assert is_locked(path)
        with (
            pytest.raises(DailyError, match=f"the pipeline is locked by process {os.getpid()}"),
            daily_state.locked(path, "the pipeline"),
        ):
            pass
    assert not is_locked(path)


# --- logs ------------------------------------------------------------------------------------------------------------


def touch(directory, *names):
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("")


def test_days_are_found_in_files_directories_and_globs(tmp_path):
    touch(tmp_path, "part-9.parquet", "part-10.parquet", "part-x.txt", "other.parquet")
    assert Logs(LogsConfig(path=f"{tmp_path}/part-{{day}}.parquet")).days() == ["9", "10"]
    days = tmp_path / "days"
    touch(days, "2024-05-01/b.parquet", "2024-05-01/a.parquet", "2024-05-02/c.csv", "empty/note.txt")
    touch(days, *(f"{name}/a.parquet" for name in ("2024-05-02.tmp", "_temporary", ".2024-05-03")))  # being written
    logs = Logs(LogsConfig(path=f"{days}/{{day}}"))
    assert logs.days() == ["2024-05-01", "2024-05-02"]
    assert [each.name for each in logs.files("2024-05-01")] == ["a.parquet", "b.parquet"]
    assert Logs(LogsConfig(path=f"{days}/{{day}}/*.csv")).days() == ["2024-05-02"]
    links = logs.link(["2024-05-01", "2024-05-02"], tmp_path / "links")
    assert [os.path.basename(each) for each in links.values()] == ["a.parquet", "b.parquet", "c.csv"]
    assert sorted(links) == list(links)


def test_what_is_no_log_is_no_day_and_what_is_being_written_is_not_read(tmp_path):
    touch(tmp_path, "1/a.parquet", "1/_temporary/0/part.parquet", "1/b.parquet.tmp", "1/_SUCCESS", "1/.c.parquet")
    touch(tmp_path, "1/x/d.csv", "README.txt", "2.csv")
    logs = Logs(LogsConfig(path=f"{tmp_path}/{{day}}"))
    assert logs.days() == ["1", "2.csv"]
    assert [each.name for each in logs.files("1")] == ["a.parquet", "d.csv"]
    deep = Logs(LogsConfig(path=f"{tmp_path}/{{day}}/**/*.parquet"))
    assert [each.name for each in deep.files("1")] == ["a.parquet"]
    assert Logs(LogsConfig(path=f"{tmp_path}/{{day}}.csv")).days() == ["2"]


def test_days_are_found_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "_part-1.parquet").write_text("")
    assert Logs(LogsConfig(path="_part-{day}.parquet")).files("1") == [tmp_path / "_part-1.parquet"]
    assert Logs(LogsConfig(path="_part-{day}.parquet")).days() == ["1"]


def test_what_lies_beside_the_logs_is_named_before_anything_is_done(pipeline, tmp_path, capsys):
    jobs = FakeJobs({"0": 0.1, "1": 0.1})
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "part-archive.parquet").write_text("event")
    made = pipeline(jobs, 2)
    assert run(made) == FAILED and not jobs.submitted and not made.state.days
    said = capsys.readouterr().err
    assert "archive: not named as day 0 is" in said and "--skip archive" in said
    with pytest.raises(DailyError, match="not named as day 0 is"):
        made.forget("0")
    with pytest.raises(DailyError, match="not named as day 0 is"):
        dry_run(made, "0")
    assert "archive" in status(made), "looking is allowed"
    made.skip("archive")
    assert run(made) == 0 and made.releases.line() == ["1", "0"]


@pytest.mark.parametrize("path", ["logs/all.parquet", "{day}/{day}", "logs/{day}-*.parquet", "*/{day}"])
def test_a_path_that_names_no_day_is_refused(path):
    with pytest.raises(ConfigError, match="path"):
        strict_yaml.load(DailyConfig, None, [f'logs.path="{path}"'])


# --- for people ------------------------------------------------------------------------------------------------------


def test_the_status_says_what_was_done_and_what_is_published(pipeline, capsys):
    jobs = FakeJobs({"0": 0.1, "1": 0.01, "2": 0.1}, killed_before=[("train", "2")])
    made = pipeline(jobs, 4)
    with pytest.raises(KilledError):
        run(made)
    lines = status(made).splitlines()
    shown = ("day", "state", "from", "prepare", "train", "evaluate", "gate", "export", "publish", "ndcg@10")
    assert lines[0].split() == list(shown)
    assert lines[1].startswith("*  0") and lines[1].endswith("0.1000")
    assert "rejected" in lines[2] and "stopped" in lines[3] and "waiting" in lines[4]
    assert any(line.startswith("1: ndcg@10") for line in lines[5:])


def test_the_command_line(pipeline, tmp_path, capsys):
    made = pipeline(FakeJobs({"0": 0.1, "1": 0.1}), 2)
    run(made)
    file = tmp_path / "daily.yaml"
    file.write_text(f"root: {made.layout.root}\nlogs:\n  path: {made.config.logs.path}\n")
    assert main(["--config", str(file), "--rollback"]) == 0
    assert "day 0 is published, day 1 is not any more" in capsys.readouterr().out
    assert main(["--config", str(file), "--status"]) == 0
    assert "rolled back" in capsys.readouterr().out
    assert main(["--config", str(file), "--rollback", "7"]) == 1
    assert "day 7 was never published" in capsys.readouterr().err
    assert main(["--config", str(file), "--rollback", ""]) == 1
    assert "'' cannot be a day's name" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--config", str(file), "--rollback", "1", "--dryrun"])
    assert "--dryrun shows jobs" in capsys.readouterr().err and made.releases.current().day == "0"
    assert main(["--config", str(file), "--status", "gate.metrik=mrr"]) == 1
    assert "did you mean gate.metric?" in capsys.readouterr().err


def test_a_full_disk_is_a_message(pipeline, tmp_path, capsys, monkeypatch):
    file = tmp_path / "daily.yaml"
    file.write_text(f"root: {tmp_path}/root\nlogs:\n  path: {tmp_path}/logs/part-{{day}}.parquet\n")
    pipeline(FakeJobs({}), 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "state.json")

    monkeypatch.setattr(daily_state, "write_atomically", full)
    assert main(["--config", str(file)]) == FAILED
    assert "No space left on device: 'state.json'; mend it, and run again" in capsys.readouterr().err


def test_a_dry_run_shows_each_stage_and_runs_none(pipeline, tmp_path, capsys):
    made = pipeline(FakeJobs({"0": 0.1}), 1)
    run(made)
    made = pipeline(FakeJobs({}), 2)
    made.jobs = daily_jobs.TorchXJobs(get_runner(), "local_cwd", made.config.jobs, made.layout.root)
    dry_run(made, "1")
    assert not (made.layout.root / "jobs").exists()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[-6:]] == [*STAGES[:3], "gate", "export", "publish"]
    assert lines[-5].startswith("train: torchx run dist.ddp -j 1x2 -m pipelines.train -- --config=configs/demo.yaml ")
    assert f"--init-from={made.layout.of('runs', '0')}" in lines[-5] and "1" not in State(made.layout.root).days
    dry_run(made, "0")
    assert "--init-from" not in capsys.readouterr().out, "a day that is done, as it was"


def test_a_training_config_of_another_time_unit_is_refused(tmp_path):
    (tmp_path / "model.yaml").write_text("data:\n  time_unit: ms\n")
    config = strict_yaml.load(DailyConfig, None, [f"train.config={tmp_path}/model.yaml"])
    with pytest.raises(DailyError, match=r"data.time_unit = ms, but logs.time_unit = s"):
        check_training(config, local=True)
    with pytest.raises(ConfigError):
        check_training(strict_yaml.load(DailyConfig, None, ["train.config=no.yaml"]), local=True)
    check_training(strict_yaml.load(DailyConfig, None, ["train.config=no.yaml"]), local=False)
