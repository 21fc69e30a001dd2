"""Starting a run from the weights of another, over a vocabulary that may have grown."""

from pathlib import Path

import torch.distributed as dist

from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.vocabulary import Vocabulary
from fuxi_torchrec.distributed import World, failing_together
from fuxi_torchrec.embeddings.pipeline import ShardedModel
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.training.checkpoint import BEST, LATEST, Checkpoints, Identity
from fuxi_torchrec.training.run_directory import RunDirectory

logger = get_logger(__name__)


class TrainingError(RuntimeError):
    """Training cannot go on."""


def start_from(other: Path, model: ShardedModel, own: Identity, dataset: Dataset, world: World) -> None:
    """Load another run's weights: its items keep their rows, the rest stay as initialised. A collective.

    Args:
        other: the run directory; its best checkpoint is taken, or the latest.
        model: what to load them into.
        own: what this run's checkpoints belong to.
        dataset: this run's.
        world: this process among its peers.
    """
    checkpoints = Checkpoints(RunDirectory(other).checkpoints, 1, world)
    path = agreed(checkpoints.find(BEST) or checkpoints.find(LATEST))
    if path is None:
        raise TrainingError(f"--init-from {other}: no complete checkpoint there")
    found = checkpoints.read_info(path).identity
    with failing_together(f"comparing {other} with this run"):
        _check(other, found, own, dataset)
    checkpoints.load(path, model, None, rows=found.items + 1)
    logger.info(
        "started from %s: %d items' rows taken over, %d new ones initialised",
        path,
        found.items,
        own.items - found.items,
    )


def agreed(path: Path | None) -> Path | None:
    """What process 0 sees: shared file systems may show others an older state. A collective."""
    seen: list[Path | None] = [path]
    dist.broadcast_object_list(seen, 0)
    return seen[0]


def _check(other: Path, found: Identity, own: Identity, dataset: Dataset) -> None:
    if found.time_unit != own.time_unit:
        raise TrainingError(f"--init-from {other}: its times are in {found.time_unit}, this run's in {own.time_unit}")
    if found.encoder != own.encoder:
        raise TrainingError(f"--init-from {other}: its encoder has another configuration")
    if found.items > own.items:
        raise TrainingError(
            f"--init-from {other}: it has {found.items} items and this run {own.items}: prepare the dataset "
            "with --extend, so that old items keep their indices"
        )
    theirs = Vocabulary.read(str(other / "items.parquet")).ids
    ours = Vocabulary.of(dataset).ids
    if not ours[: found.items].equals(theirs.cast(ours.type)):
        raise TrainingError(
            f"--init-from {other}: its items have other indices than this dataset's: prepare the dataset with "
            "--extend over that run's"
        )
