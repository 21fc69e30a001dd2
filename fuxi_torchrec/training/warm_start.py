"""Starting a run from the weights of another, over a vocabulary that may have grown."""

import dataclasses
from pathlib import Path

import pyarrow as pa

from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.distributed import World, broadcast_from_rank_0, raise_on_all_ranks
from fuxi_torchrec.embeddings.pipeline import ShardedModel
from fuxi_torchrec.embeddings.tables import ITEM_TABLE, owner_of, table_of
from fuxi_torchrec.encoders.base import EncoderConfig
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import OWNERS
from fuxi_torchrec.events.vocabulary import Vocabulary
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.training.checkpoint.info import Identity, find_checkpoint
from fuxi_torchrec.training.checkpoint.reader import CheckpointReader
from fuxi_torchrec.training.checkpoint.store import Checkpoints, state_of, table_rows
from fuxi_torchrec.training.errors import TrainingError
from fuxi_torchrec.training.run_directory import RunDirectory

logger = get_logger(__name__)

_TASK = "model.head.task."


def warm_start(other: Path, model: ShardedModel, own: Identity, dataset: Dataset, world: World) -> None:
    """Load weights of another run directory, of its best checkpoint or else the latest: a collective.

    Its items keep their rows, the rest stay as initialised.
    """
    checkpoints = Checkpoints(RunDirectory(other).checkpoints, 1, world)
    path = broadcast_from_rank_0(f"opening --init-from {other}", lambda: find_checkpoint(checkpoints.directory))
    found = checkpoints.read_info(path).identity
    new: dict[str, int] = {}
    with raise_on_all_ranks(f"comparing {other} with this run"):
        _check(other, found, own, dataset, model.module.encoder.config)
        _check_features(other, found, dataset)
        _check_task(other, path, model)
        new = _new_rows(other, path, model)
    checkpoints.load(path, model, None, grown=True)
    more = own.items - found.items
    logger.info("started from %s: %d items' rows taken over, %d new ones initialised", path, found.items, more)
    for name, rows in new.items():
        if rows and name != ITEM_TABLE:
            logger.info("%s: %d new rows initialised", name, rows)


def _check_task(other: Path, path: Path, model: ShardedModel) -> None:
    """The task's own weights must be there, and of the same shapes."""
    theirs = {n: tuple(about.size) for n, about in CheckpointReader(path).tensors().items() if n.startswith(_TASK)}
    ours = {n: tuple(value.shape) for n, value in state_of(model, None).items() if n.startswith(_TASK)}
    if theirs != ours:
        names = ", ".join(
            sorted(n.removeprefix(_TASK) for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
        )
        raise TrainingError(
            f"--init-from {other}: the task's weights are others there ({names}): take that run's task.repeats, or "
            "train from the beginning"
        )


def _new_rows(other: Path, path: Path, model: ShardedModel) -> dict[str, int]:
    """By table, how many rows this run has beyond the checkpoint's; an error if it has fewer."""
    found, saved = {}, table_rows(path)
    for name, value in state_of(model, None).items():
        if (table := table_of(name)) is not None and name not in saved:
            key = f"features.{owner_of(table)}"
            raise TrainingError(f"--init-from {other}: it has no table {table}: {key} must be the same")
        if name in saved:
            table = table_of(name) or name
            found[table] = value.size(0) - saved[name]
            if found[table] < 0:
                raise TrainingError(
                    f"--init-from {other}: {table} has {saved[name]} rows there and {value.size(0)} here: prepare the "
                    "dataset with --extend over that run's, so that old values keep their rows"
                )
    return found


def _check(other: Path, found: Identity, own: Identity, dataset: Dataset, model: EncoderConfig) -> None:
    if found.time_unit != own.time_unit:
        raise TrainingError(
            f"--init-from {other}: its times are in {found.time_unit}, this run's in {own.time_unit}: prepare the "
            f"dataset in {found.time_unit}, or train from the beginning"
        )
    if found.encoder != own.encoder:
        theirs = RunDirectory(other).read_config().model
        differ = [
            f"model.{key.name} is {getattr(theirs, key.name)} there and {getattr(model, key.name)} here"
            for key in dataclasses.fields(model)
            if hasattr(theirs, key.name) and getattr(theirs, key.name) != getattr(model, key.name)
        ]
        raise TrainingError(
            f"--init-from {other}: its encoder has another configuration: {'; '.join(differ) or 'of another version'}. "
            "Take its settings, or train from the beginning"
        )
    if found.items > own.items:
        raise TrainingError(
            f"--init-from {other}: it has {found.items} items and this run {own.items}: prepare the dataset "
            "with --extend, so that old items keep their indices"
        )
    theirs = Vocabulary.read(str(other / "items.parquet")).ids
    ours = dataset.vocabulary().ids
    if pa.types.is_integer(ours.type) != pa.types.is_integer(theirs.type):
        raise TrainingError(
            f"--init-from {other}: its item ids are of type {theirs.type}, this dataset's {ours.type}: prepare the "
            "dataset with --extend over that run's"
        )
    if not ours[: found.items].equals(theirs.cast(ours.type)):
        raise TrainingError(
            f"--init-from {other}: its items have other indices than this dataset's: prepare the dataset with "
            "--extend over that run's"
        )


def _check_features(other: Path, found: Identity, dataset: Dataset) -> None:
    """Texts of features must have kept their rows, and numbers what they are standardised by, as far as the other run's
    dataset is there to tell.
    """
    config = RunDirectory(other).read_config()
    wanted = [
        (owner, f.name)
        for owner in OWNERS
        for f in dataset.info.features_of(owner)
        if (f.vocabulary or f.kind != "id") and f.name in config.features.of(owner)
    ]
    names = [name for _, name in wanted]
    if not names or found.dataset == dataset.info.fingerprint:
        return
    try:
        theirs = Dataset.open(config.data.path)
        if theirs.info.fingerprint != found.dataset:
            raise DataError(f"{theirs.path} is not the run's dataset any more")
        about = {(owner, f.name): f for owner in OWNERS for f in theirs.info.features_of(owner)}
        here = {(owner, f.name): f for owner in OWNERS for f in dataset.info.features_of(owner)}
        texts = [each for each in wanted if here[each].vocabulary]
        values = {(owner, name): theirs.feature_values(name, owner) for owner, name in texts}
    except DataError as error:
        logger.warning("--init-from %s: values of %s cannot be compared: %s", other, ", ".join(names), error)
        return
    for each in wanted:
        was, now = ((f.kind, f.boundaries, f.mean, f.deviation) for f in (about.get(each, here[each]), here[each]))
        if was != now:
            raise TrainingError(
                f"--init-from {other}: the feature {each[1]} has other statistics, or is of another kind, than in "
                f"{theirs.path}: prepare the dataset with --extend over that run's"
            )
    for (owner, name), old in values.items():
        ours = dataset.feature_values(name, owner)
        if not ours[: len(old)].equals(old.cast(ours.type)):
            raise TrainingError(
                f"--init-from {other}: values of the feature {name} have other indices than in {theirs.path}: "
                "prepare the dataset with --extend over that run's"
            )
