"""Training on several processes: the same losses on any number of them, and after any interruption."""

import json
import logging
from pathlib import Path

import pytest
import torch

from fuxi_torchrec.ops import backends
from fuxi_torchrec.training.checkpoint.info import named, point, read_info
from fuxi_torchrec.worker_group import WorkerError
from integration_tests import runs

GOLDEN = Path(__file__).parent / "goldens" / "losses.json"
WIDE = ["train.epochs=100"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return [f"data.path={runs.small_dataset(tmp_path_factory.mktemp('data') / 'set')}", *WIDE]


def differ(a, b):
    assert a.keys() == b.keys()
    return max(abs(a[step] - b[step]) for step in a)


@pytest.mark.parametrize("kind", ["adamw", "rowwise_adagrad"])
@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
def test_losses_are_the_same_on_1_2_and_4_processes_and_as_recorded(workers, data, tmp_path, sharding, kind):
    settings = [*data, f"tables.sharding={sharding}", f"optimizer.kind={kind}", "train.max_steps=30"]
    settings += ["optimizer.lr=1e-3"]  # larger steps make more of what rounds differently
    found = {n: workers(n).run(runs.run, tmp_path / f"run-{n}", settings)[0] for n in (1, 2, 4)}
    assert len(found[1]) == 30
    assert differ(found[1], found[2]) < 1e-5
    assert differ(found[1], found[4]) < 1e-5
    recorded = {int(step): loss for step, loss in json.loads(GOLDEN.read_text())[kind].items()}
    assert differ(found[1], recorded) < 1e-4  # other processors round differently


def run_with(backend, *arguments):
    with backends.use(backend):
        return runs.run(*arguments)


@pytest.mark.parametrize("backend", [name for name in backends.available() if name != "native"])
def test_losses_are_as_recorded_on_every_backend(workers, data, tmp_path, backend):
    settings = [*data, "tables.sharding=row_wise", "optimizer.kind=adamw", "train.max_steps=10", "optimizer.lr=1e-3"]
    found = workers(2).run(run_with, backend, tmp_path / "run", settings)[0]
    recorded = json.loads(GOLDEN.read_text())["adamw"]
    assert len(found) == 10
    assert differ(found, {step: recorded[str(step)] for step in found}) < 1e-4


@pytest.mark.parametrize("negatives", ["shared", "uniform", "full"])
def test_losses_with_repeats_are_the_same_on_1_2_and_4_ranks_and_in_micro_batches(workers, data, tmp_path, negatives):
    settings = [*data, "task.repeats.window=16", "task.repeats.periods=[86400]", f"loss.negatives={negatives}"]
    settings += ["loss.num_negatives=32", "train.max_steps=10", "batch.truncation=windows", "batch.max_length=64"]
    settings.append("optimizer.lr=3e-4")  # ten times as much makes 1e-4 of rounding on some CPUs
    found = {n: workers(n).run(runs.run, tmp_path / f"run-{n}", settings)[0] for n in (1, 2, 4)}
    parts = workers(1).run(runs.run, tmp_path / "parts", [*settings, "batch.max_events_per_rank=512"])[0]
    assert len(found[1]) == 10
    assert max(differ(found[1], each) for each in (found[2], found[4], parts)) < 1e-5
    without = [each for each in settings if "repeats" not in each]
    plain = workers(1).run(runs.run, tmp_path / "plain", without)[0]
    assert differ(found[1], plain) > 1e-4  # the bias is used, and learned
    with pytest.raises(RuntimeError, match=r"task.s weights are others there \(repeats.count, .*task.repeats"):
        workers(1).run(runs.run, tmp_path / "warm", without, init_from=tmp_path / "run-1")


@pytest.mark.parametrize("sharding", ["table_wise", "column_wise"])
def test_other_shardings_give_the_same_losses(workers, data, tmp_path, sharding):
    steps = "train.max_steps=5"
    expected = workers(2).run(runs.run, tmp_path / "row", [*data, steps])[0]
    found = workers(2).run(runs.run, tmp_path / "other", [*data, steps, f"tables.sharding={sharding}"])[0]
    assert differ(expected, found) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        ["train.pipeline=sparse_dist"],
        ["batch.max_events_per_rank=400"],
        ["batch.max_events_per_rank=400", "train.pipeline=sparse_dist"],
        ["model.activation_checkpointing=true"],
    ],
    ids=["sparse_dist", "micro_batches", "all_together", "activation_checkpointing"],
)
def test_operational_settings_do_not_change_the_losses(workers, data, tmp_path, settings):
    common = [*data, "train.max_steps=6", "optimizer.clip_norm=0.5"]
    expected = workers(1).run(runs.run, tmp_path / "plain", common)[0]
    found = workers(2).run(runs.run, tmp_path / "other", [*common, *settings])[0]
    assert differ(expected, found) < 1e-5


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_a_pipeline_goes_on_after_a_validation_with_what_it_has_read_ahead(workers, data, tmp_path, sharding):
    settings = [*data, f"tables.sharding={sharding}", "train.max_steps=8", "validation.every_epochs=0.5"]
    base, ahead = (
        workers(2).run(runs.run, tmp_path / kind, [*settings, f"train.pipeline={kind}"])[0]
        for kind in ("base", "sparse_dist")
    )
    validated = [line for line in (tmp_path / "base" / "metrics.jsonl").read_text().splitlines() if "ndcg@10" in line]
    assert len(validated) >= 2
    assert differ(base, ahead) < 1e-5


@pytest.mark.parametrize("negatives", ["uniform", "full", "in_batch"])
def test_every_kind_of_negatives_trains(workers, data, tmp_path, negatives):
    settings = [*data, "train.max_steps=10", f"loss.negatives={negatives}", "loss.num_negatives=16"]
    one, two = (workers(n).run(runs.run, tmp_path / f"run-{n}", settings)[0] for n in (1, 2))
    assert one[10] < one[1]
    if negatives != "in_batch":  # which takes this process's targets
        assert differ(one, two) < 1e-5


def test_a_resume_with_dropout_repeats_the_uninterrupted_run_exactly(workers, data, tmp_path):
    settings = [*data, "model.dropout=0.2", "optimizer.lr_schedule=cosine", "optimizer.warmup_steps=3"]
    settings += ["optimizer.decay_steps=12"]
    whole = workers(2).run(runs.run, tmp_path / "whole", [*settings, "train.max_steps=12"])[0]
    workers(2).run(runs.run, tmp_path / "cut", [*settings, "train.max_steps=5"])
    until_then = json.loads((tmp_path / "cut" / "summary.json").read_text())["seconds"]
    resumed = workers(2).run(runs.run, tmp_path / "cut", [*settings, "train.max_steps=12"])[0]
    assert whole == resumed
    # time and events are those of both starts
    one, two = (read_info(tmp_path / name / "checkpoints" / "step-000000012").progress for name in ("whole", "cut"))
    assert one.events == two.events > 0 and two.seconds > until_then > 0


@pytest.mark.parametrize("kind", ["adamw", "rowwise_adagrad"])
def test_a_run_saved_on_2_processes_continues_on_1_2_4_and_with_another_sharding(workers, data, tmp_path, kind):
    settings = [*data, f"optimizer.kind={kind}"]
    whole = workers(2).run(runs.run, tmp_path / "whole", [*settings, "train.max_steps=10"])[0]
    changes = [(1, []), (2, []), (4, []), (2, ["tables.sharding=table_wise"]), (2, ["tables.sharding=data_parallel"])]
    changes += [(2, ["tables.sharding=column_wise"])] if kind == "adamw" else []
    for number, (processes, change) in enumerate(changes):
        run_dir = tmp_path / f"run-{number}"
        workers(2).run(runs.run, run_dir, [*settings, "train.max_steps=5"])
        found = workers(processes).run(runs.run, run_dir, [*settings, *change, "train.max_steps=10"])[0]
        assert differ(whole, found) < 1e-5, (processes, change)


def test_equal_shards_are_not_copies_of_each_other(workers, tmp_path):
    """Averages of equal size and one name on every process: a checkpoint that keeps one process's copy is wrong."""
    data = [f"data.path={runs.small_dataset(tmp_path / 'set', items=511, groups=7)}", *WIDE, "train.max_steps=4"]
    saved = workers(2).run(moments_after, tmp_path / "run", data)
    loaded = workers(4).run(moments_after, tmp_path / "run", data)
    assert all(saved[0][name].shape == saved[1][name].shape for name in saved[0])
    assert any("exp_avg" in name for name in saved[0])
    for name in saved[0]:
        assert not torch.equal(saved[0][name], saved[1][name])
        assert torch.equal(torch.cat([part[name] for part in saved]), torch.cat([part[name] for part in loaded])), name


def moments_after(run_dir, settings):
    """This process's part of the item table and of its averages, after training to the end."""
    made, _ = runs.trainer(run_dir, settings)
    made.train()
    weights = {f"model.{k}": v for k, v in made.model.state_dict().items()}
    values = {**weights, **made.optimizer.moments()}
    return {k: v.local_shards()[0].tensor.clone() for k, v in values.items() if hasattr(v, "local_shards")}


def test_init_from_takes_old_rows_over_and_starts_new_ones(workers, tmp_path):
    from fuxi_torchrec.data.prepare import PrepareOptions, prepare
    from fuxi_torchrec.events.sources import events

    first, second = event_logs(tmp_path)
    prepare(events(str(first), "user", "item", "time", "s"), tmp_path / "day1", PrepareOptions())
    prepare(
        events(str(second), "user", "item", "time", "s"),
        tmp_path / "day2",
        PrepareOptions(extend=str(tmp_path / "day1")),
    )
    one = [f"data.path={tmp_path / 'day1'}", "train.max_steps=3", *WIDE]
    two = [f"data.path={tmp_path / 'day2'}", "train.max_steps=3", *WIDE]
    workers(2).run(runs.run, tmp_path / "run1", one)
    old = torch.cat(workers(2).run(item_table, tmp_path / "run1", one, None))
    for processes in (1, 2, 4):
        run_dir = tmp_path / f"run2-{processes}"
        new = torch.cat(workers(processes).run(item_table, run_dir, two, tmp_path / "run1"))
        fresh = torch.cat(workers(processes).run(item_table, tmp_path / f"fresh-{processes}", two, None))
        assert len(new) > len(old)
        assert torch.equal(new[: len(old)], old)
        assert torch.equal(new[len(old) :], fresh[len(old) :])
    assert workers(2).run(runs.run, tmp_path / "run2-2", two)[0].keys() == {1, 2, 3}


def test_init_from_another_encoder_says_what_differs(workers, data, tmp_path):
    settings = [*data, "train.max_steps=1"]
    workers(2).run(runs.run, tmp_path / "first", settings)
    with pytest.raises(WorkerError, match=r"model\.num_layers is 2 there and 1 here.*Take its settings"):
        workers(2).run(runs.run, tmp_path / "next", [*settings, "model.num_layers=1"], init_from=tmp_path / "first")


def test_init_from_over_features_that_have_more_values(workers, tmp_path):
    from fuxi_torchrec.data.prepare import PrepareOptions, prepare
    from fuxi_torchrec.events.sources import events

    one, two = event_logs(tmp_path)
    settings = {}
    for day, log, largest, kind, before in (
        ("first", one, 5, "a", None),
        ("second", two, 9, "b", "first"),
        ("third", two, 2, "a", "second"),  # fewer values occur: their rows stay
        ("many", two, 9, "a", None),
        ("few", two, 2, "a", None),
        ("other", one, 9, "b", None),  # the first's items, another text at the first's row
    ):
        source = events(str(with_features(log, largest, kind)), "user", "item", "time", "s", ("kind", "size"))
        extend = str(tmp_path / before) if before else None
        prepare(source, tmp_path / day, PrepareOptions(extend=extend))
        settings[day] = [f"data.path={tmp_path / day}", "features.event={kind: {}, size: {}}", "train.max_steps=2"]
    for day in ("first", "many"):
        workers(2).run(runs.run, tmp_path / f"run-{day}", settings[day])
    old = workers(2).run(feature_tables, tmp_path / "run-first", settings["first"], None)[0]
    assert {name: len(rows) for name, rows in old.items()} == {"kind": 2, "size": 6}
    for day, processes in (("second", 1), ("second", 2), ("third", 2)):
        run_dir = tmp_path / f"run-{day}-{processes}"
        new = workers(processes).run(feature_tables, run_dir, settings[day], tmp_path / "run-first")[0]
        assert {name: len(rows) for name, rows in new.items()} == {"kind": 3, "size": 10}
        for name, rows in old.items():
            assert torch.equal(new[name][: len(rows)], rows)
    with pytest.raises(
        WorkerError, match=r"feature_size has 10 rows there and 3 here: prepare the dataset with --extend"
    ):
        workers(2).run(feature_tables, tmp_path / "run-few", settings["few"], tmp_path / "run-many")
    with pytest.raises(WorkerError, match=r"values of the feature kind have other indices than in .*first"):
        workers(2).run(feature_tables, tmp_path / "run-other", settings["other"], tmp_path / "run-first")
    one = [*settings["many"][:1], "features.event={size: {}}", "train.max_steps=1"]
    workers(2).run(runs.run, tmp_path / "run-one", one)
    with pytest.raises(WorkerError, match=r"it has no table feature_kind: features\.event must be the same"):
        workers(2).run(feature_tables, tmp_path / "run-more", settings["many"], tmp_path / "run-one")


def with_features(log, largest, kinds):
    """A log with a feature of text and one of numbers."""
    lines = log.read_text().splitlines()
    rows = [f"{line},{kinds},{n % (largest + 1)}" for n, line in enumerate(lines[1:])]
    path = log.with_name(f"features-{largest}-{kinds}-{log.name}")
    path.write_text("\n".join([f"{lines[0]},kind,size", *rows]) + "\n")
    return path


def feature_tables(run_dir, settings, init_from):
    """Every row of the feature tables, which every process has, before training goes on."""
    made, _ = runs.trainer(run_dir, settings, init_from=init_from)
    tables = {k.split(".")[-2]: v for k, v in made.model.state_dict().items() if ".features." in f".{k}"}
    return {name.removeprefix("feature_"): value.clone() for name, value in tables.items()}


def item_table(run_dir, settings, init_from):
    """This process's rows of the item table before training goes on."""
    made, _ = runs.trainer(run_dir, settings, init_from=init_from)
    parts = [v for k, v in made.model.state_dict().items() if "item_table" in k]
    return parts[0].local_shards()[0].tensor.clone()


def event_logs(path):
    """A day's log, and another with more items."""
    generator = torch.Generator().manual_seed(0)

    def write(name, items, users):
        lines = ["user,item,time"]
        for user in range(users):
            for step, item in enumerate(torch.randint(items, (30,), generator=generator).tolist()):
                lines.append(f"u{user},i{item},{1_700_000_000 + 3600 * step + user}")
        (path / name).write_text("\n".join(lines) + "\n")
        return path / name

    return write("one.csv", 80, 40), write("two.csv", 131, 60)


def test_validation_keeps_the_best_checkpoint_and_stops_early(workers, data, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    settings = [*data, "validation.every_epochs=1", "validation.users=50", "validation.patience=1"]
    settings += ["optimizer.lr=0.3", "checkpoint.keep_last=1", "train.max_steps=60"]
    workers(2).run(runs.run, tmp_path / "run", settings)
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    validations = [e["validation"]["ndcg@10"] for e in entries if "validation" in e]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["best_metric"] == max(validations)
    best = named(tmp_path / "run" / "checkpoints", "best").name
    assert int(best.removeprefix("step-")) == summary["best_step"]
    assert (tmp_path / "run" / "checkpoints" / best / "checkpoint.json").exists()
    assert validations[-1] <= max(validations[:-1])  # the reason to stop
    assert summary["step"] < 60
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    workers(2).run(runs.run, tmp_path / "run", settings)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before, "a run that stopped early stays so"
    again = json.loads((tmp_path / "run" / "summary.json").read_text())
    # reading the checkpoint back may take more memory than training did; a peak never falls
    assert again["peak_memory_mb"] >= summary["peak_memory_mb"]
    assert again == {**summary, "peak_memory_mb": again["peak_memory_mb"]} and summary["seconds"] > 0
    more = f"train.max_steps={summary['step'] + 1}"
    workers(2).run(runs.run, tmp_path / "run", [*settings, more, "validation.every_epochs=null"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == summary["step"] + 1


def test_a_run_stopped_before_its_last_validation_has_it_when_started_again(workers, data, tmp_path):
    settings = [*data, "validation.every_epochs=1", "validation.users=50", "train.max_steps=1"]
    workers(2).run(stopped_run, tmp_path / "run", settings)
    assert (tmp_path / "run" / "preempted").exists() and not (tmp_path / "run" / "checkpoints" / "best").exists()
    for _ in range(2):  # once only
        workers(2).run(runs.run, tmp_path / "run", settings)
        entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [("loss" in e, "validation" in e) for e in entries] == [(True, False), (False, True)]
        assert named(tmp_path / "run" / "checkpoints", "best").name == "step-000000001"


def test_the_last_validation_is_written_down_also_if_it_is_not_the_best(workers, data, tmp_path):
    settings = [*data, "validation.every_epochs=1", "validation.users=50", "checkpoint.every_steps=1"]
    settings += ["optimizer.lr=0.3", "train.epochs=6"]
    workers(2).run(runs.run, tmp_path / "run", settings)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["best_step"] < summary["step"]  # else this shows nothing
    last = named(tmp_path / "run" / "checkpoints", "latest")
    assert json.loads((last / "checkpoint.json").read_text())["progress"]["validated_step"] == summary["step"]
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    workers(2).run(runs.run, tmp_path / "run", settings)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_schedule_that_ended_is_warned_about(workers, data, tmp_path):
    settings = [*data, "optimizer.lr_schedule=cosine"]
    assert warnings_of(workers, tmp_path / "run", [*settings, "train.max_steps=2"]) == []
    assert warnings_of(workers, tmp_path / "run", [*settings, "train.max_steps=2"]) == []
    (said,) = warnings_of(workers, tmp_path / "run", [*settings, "train.max_steps=4"])
    assert said.startswith("4 steps are planned now and 2 were when the run began")


def test_values_of_another_metric_are_not_compared(workers, data, tmp_path):
    settings = [*data, "validation.every_epochs=1", "validation.users=50", "train.epochs=2"]
    assert warnings_of(workers, tmp_path / "run", settings) == []
    best = json.loads((tmp_path / "run" / "summary.json").read_text())["best_step"]
    settings += ["train.epochs=3", "validation.metric=mrr", "validation.patience=1"]
    (said,) = warnings_of(workers, tmp_path / "run", settings)
    assert "validation measures mrr of 50 users now, and ndcg@10 of 50 users before" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [entry for entry in entries if "validation" in entry][-1]
    assert summary["best_step"] == last["step"] == summary["step"] > best
    assert summary["best_metric"] == last["validation"]["mrr"]


def warnings_of(workers, run_dir, settings):
    return workers(2).run(warnings_of_a_run, run_dir, settings)[0]


def warnings_of_a_run(run_dir, settings):
    """What the trainer warns of."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("fuxi_torchrec.training.run")
    logger.addHandler(handler)
    try:
        runs.run(run_dir, settings)
    finally:
        logger.removeHandler(handler)
    return said


def test_processes_with_different_settings_are_refused(workers, data, tmp_path):
    for said in workers(2).run(differing_run, tmp_path / "run", list(data)):
        assert said.startswith("the configuration is not the same on all ranks, rank 1 has another than rank 0")
    assert not (tmp_path / "run").exists()


def differing_run(run_dir, settings):
    """Every process with a seed of its own."""
    try:
        runs.trainer(run_dir, [*settings, f"seed={runs.here().rank}"])
    except RuntimeError as error:
        return str(error)


def stopped_run(run_dir, settings):
    """Train until the first step is done, then leave as after SIGTERM."""
    made, _ = runs.trainer(run_dir, settings)
    made.stop.requested = True
    made.train()


def test_the_best_checkpoint_is_found_again_after_a_kill_before_it_was_noted(workers, data, tmp_path):
    settings = [*data, "validation.every_epochs=1", "validation.users=50", "checkpoint.keep_last=1"]
    workers(2).run(runs.run, tmp_path / "run", [*settings, "train.epochs=1"])
    checkpoints = tmp_path / "run" / "checkpoints"
    best = named(checkpoints, "best")
    (checkpoints / "best").unlink()
    workers(2).run(runs.run, tmp_path / "run", [*settings, "train.epochs=1"])
    assert named(checkpoints, "best") == best
    best.rename(checkpoints / "step-000009999")  # the best one is gone for good
    point(checkpoints, "latest", checkpoints / "step-000009999")
    (said,) = warnings_of(workers, tmp_path / "run", [*settings, "train.epochs=2"])
    assert said.startswith("the best checkpoint, of step")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert named(checkpoints, "best").name == f"step-{summary['best_step']:09d}"


def test_the_first_and_the_last_step_are_always_logged(workers, data, tmp_path):
    settings = [*data, "train.max_steps=5", "logging.every_steps=3"]
    assert list(workers(2).run(runs.run, tmp_path / "run", settings)[0]) == [1, 3, 5]
