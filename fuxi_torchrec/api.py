"""The whole way as functions: what ``pipelines/`` does, without command lines.

``train``, ``evaluate`` and ``export`` join the process group that torchrun describes, or make one of a single rank.

Example:
    >>> import fuxi_torchrec, pathlib, tempfile
    >>> from fuxi_torchrec.data.synthetic import SyntheticConfig
    >>> keep = tempfile.TemporaryDirectory()
    >>> here = pathlib.Path(keep.name)
    >>> fuxi_torchrec.prepare(SyntheticConfig(users=40, median_length=20, items=400), here / "data").users
    40
    >>> config = fuxi_torchrec.load_config(None, [
    ...     f"data.path={here}/data", "model.dim=16", "model.num_layers=1", "model.max_positions=64",
    ...     "batch.max_length=64", "batch.events=512", "train.max_steps=2", "logging.tensorboard=false",
    ...     "model.temporal_periods=[3600, 86400]", "distributed.device=cpu"])
    >>> fuxi_torchrec.train(config, here / "run")["step"]
    2
    >>> fuxi_torchrec.evaluate(here / "run", fuxi_torchrec.EvaluateOptions(users=10))["last"]["users"]
    10
    >>> wanted = fuxi_torchrec.ExportOptions(index=False, programs=False)
    >>> fuxi_torchrec.export(here / "run", here / "export", wanted).users
    40
    >>> last = fuxi_torchrec.Bundle.open(here / "export").manifest.as_of
    >>> lines = here / "new.csv"
    >>> _ = lines.write_text(f"user_id,item_id,timestamp\\n3,7,{last + 60}\\n")
    >>> fuxi_torchrec.refresh(here / "export", lines, here / "export-2").as_of - last
    60
    >>> with fuxi_torchrec.Recommender.load(here / "export-2") as recommender:
    ...     len(recommender.recommend([3], last + 3600, k=5)[0].items)
    5
"""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuxi_torchrec.config import Config
    from fuxi_torchrec.data.dataset import DatasetInfo
    from fuxi_torchrec.data.prepare import PrepareOptions, Progress
    from fuxi_torchrec.data.synthetic import SyntheticConfig
    from fuxi_torchrec.distributed import World
    from fuxi_torchrec.evaluation.options import EvaluateOptions, RunOptions
    from fuxi_torchrec.events.sources import Source
    from fuxi_torchrec.export.bundle import Manifest
    from fuxi_torchrec.export.options import ExportOptions

COLUMNS = {"user_column": "user_id", "item_column": "item_id", "time_column": "timestamp", "time_unit": "s"}


def prepare(
    source: "Source | SyntheticConfig | str | Path",
    output: str | Path,
    options: "PrepareOptions | None" = None,
    progress: "Progress | None" = None,
    **log: Any,
) -> "DatasetInfo":
    """Write a dataset: one history per user.

    Args:
        source: CSV or Parquet logs (a file, a directory, a glob), a :class:`~fuxi_torchrec.events.sources.Source`, or
            what to generate.
        output: the dataset's directory; must not exist.
        options: of the work.
        progress: is told what is done, how many events so far, and of how many.
        log: how logs are read, as :func:`fuxi_torchrec.events.sources.events` takes it: ``user_column``, ``where``, ...
    """
    from fuxi_torchrec.data import prepare as preparing
    from fuxi_torchrec.data.synthetic import SyntheticConfig
    from fuxi_torchrec.events import sources

    if isinstance(source, str | Path):
        source = sources.events(str(source), **{**COLUMNS, **log})
    elif log:
        raise TypeError(f"{', '.join(log)}: how a log is read goes with the path of one")
    if isinstance(source, SyntheticConfig):
        return preparing.prepare_synthetic(source, output, progress)
    return preparing.prepare(source, output, options, progress)


def train(
    config: "Config | str | Path | None",
    run_dir: str | Path,
    *,
    overrides: Sequence[str] = (),
    init_from: str | Path | None = None,
) -> dict[str, Any]:
    """Train, or resume where the run was stopped; its ``summary.json``. In the main thread: SIGTERM saves and ends.

    Args:
        config: of the experiment, or its YAML file; None is the run's own, or the defaults.
        run_dir: of the run; one that exists is resumed.
        overrides: ``key=value`` settings over a file's.
        init_from: start a new run from another run's weights.
    """
    from fuxi_torchrec.config import Config, load_config
    from fuxi_torchrec.training.run_directory import CONFIG, RunDirectory

    if not isinstance(config, Config):
        run = RunDirectory(run_dir)
        own = config is None and (run.path / CONFIG).exists()
        config = run.read_config(overrides) if own else load_config(config, overrides)  # the same on every rank
    elif overrides:
        raise TypeError("overrides go with a file: a Config has its settings")
    with _group(config) as world:
        from fuxi_torchrec.evaluation.validation import validate
        from fuxi_torchrec.training.interruption import StopRequest
        from fuxi_torchrec.training.trainer import Trainer

        with StopRequest().listening() as stop:
            start = Path(init_from) if init_from is not None else None
            return Trainer(config, RunDirectory(run_dir), world, validate, start, stop).train()


def evaluate(
    run_dir: str | Path,
    options: "EvaluateOptions | None" = None,
    run: "RunOptions | None" = None,
    output: str | Path | None = None,
    ranks: str | Path | None = None,
) -> dict[str, Any]:
    """Rank every target among all items the run knows; the same result on every rank.

    Args:
        run_dir: of the trained run.
        options: which targets, and how.
        run: which weights, on which data.
        output: where the result is written; ``RUN/eval-SPLIT.json`` by default.
        ranks: where each user's ranks are written, as Parquet, if they are wanted.
    """
    from fuxi_torchrec.artifacts import check_file, write_atomically
    from fuxi_torchrec.distributed import raise_on_all_ranks
    from fuxi_torchrec.evaluation.options import EvaluateOptions, RunOptions

    wanted = options or EvaluateOptions()
    file = Path(output) if output is not None else Path(run_dir) / f"eval-{wanted.split}.json"
    with _group_of(run_dir) as world:
        from fuxi_torchrec.evaluation.evaluate import evaluate
        from fuxi_torchrec.evaluation.held_out import REQUEST_TIMES
        from fuxi_torchrec.evaluation.loading import load

        with raise_on_all_ranks("looking for the output's directory"):
            for flag, path in (("--output", file), ("--ranks", ranks)):
                if world.rank == 0 and path is not None:
                    check_file(flag, Path(path))
        loaded = load(run_dir, world, *astuple(run or RunOptions()))
        times = (wanted.request_time,) if wanted.request_time else REQUEST_TIMES
        found = evaluate(
            *(loaded, wanted.split, times, wanted.filter_seen, wanted.users),
            *(wanted.baselines, wanted.targets, wanted.candidates, None if ranks is None else Path(ranks)),
        )
        with raise_on_all_ranks("writing the result"):
            if world.rank == 0:
                write_atomically(file, json.dumps(found, indent=1) + "\n")
    return found


def export(
    run_dir: str | Path,
    output: str | Path,
    options: "ExportOptions | None" = None,
    run: "RunOptions | None" = None,
) -> "Manifest":
    """Write item and user vectors, an index, user states, weights and portable programs; what the manifest says.

    Args:
        run_dir: of the trained run.
        output: the export's directory, on storage that all ranks share; must not exist.
        options: what to write.
        run: which weights, on which data.
    """
    from fuxi_torchrec.artifacts import NewDirectory
    from fuxi_torchrec.distributed import raise_on_all_ranks
    from fuxi_torchrec.evaluation.options import RunOptions

    with _group_of(run_dir) as world:
        from fuxi_torchrec.evaluation.loading import load
        from fuxi_torchrec.export import export as exporting

        with raise_on_all_ranks("looking at the output"):  # before the checkpoint is read
            NewDirectory(output).check()
        return exporting.export(load(run_dir, world, *astuple(run or RunOptions())), output, options)


def _group(config: "Config") -> AbstractContextManager["World"]:
    from fuxi_torchrec.distributed import process_group

    device = None if config.distributed.device == "auto" else config.distributed.device
    return process_group(config.distributed.timeout_seconds, device)


def _group_of(run_dir: str | Path) -> AbstractContextManager["World"]:
    """The ranks that work on a trained run, with the device and the timeouts of its configuration."""
    from fuxi_torchrec.training.run_directory import RunDirectory

    return _group(RunDirectory(run_dir).read_config())
