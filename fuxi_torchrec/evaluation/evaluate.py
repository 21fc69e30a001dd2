"""Exact metrics of held-out targets, over all users, on the sharded catalogue."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuxi_torchrec.data.batches import EventBatch
from fuxi_torchrec.distributed import raise_on_all_ranks
from fuxi_torchrec.evaluation.baselines import NAMES, Baselines
from fuxi_torchrec.evaluation.loading import Loaded, RetrievalError
from fuxi_torchrec.evaluation.ranking import Catalogue, Metrics, Queries
from fuxi_torchrec.evaluation.validation import EVERYTHING, sample_users
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.training.progress import ProgressLines

logger = get_logger(__name__)

Ints = NDArray[np.int64]
RequestTime = Literal["target", "last"]
REQUEST_TIMES: tuple[RequestTime, ...] = ("target", "last")
HeldOut = Literal["test", "valid"]

# upper bounds of the buckets of history lengths
BUCKETS = (20, 50, 200, 1_000, 5_000)
BUCKET_NAMES = [*(f"<={bound}" for bound in BUCKETS), f">{BUCKETS[-1]}"]

_RANKED_USERS = 512  # scored together: matrix products of fewer are slower


class Bucketed:
    """Metrics of everybody and of each bucket of history lengths."""

    def __init__(self) -> None:
        self.all = Metrics()
        self.buckets = [Metrics() for _ in BUCKET_NAMES]

    def add(self, ranks: Tensor, lengths: Tensor) -> None:
        """Ranks of users with histories of these lengths."""
        self.all.add(ranks)
        bucket = torch.bucketize(lengths, torch.tensor(BUCKETS))
        for number, metrics in enumerate(self.buckets):
            metrics.add(ranks[bucket == number])

    def result(self) -> dict[str, Any]:
        """Of all processes: a collective."""
        for metrics in (self.all, *self.buckets):
            metrics.add_peers()
        found = {name: metrics.result() for name, metrics in zip(BUCKET_NAMES, self.buckets, strict=True)}
        return {**self.all.result(), "by_history_length": {name: each for name, each in found.items() if each["users"]}}


@dataclass
class _Waiting:
    """Users encoded and not yet ranked."""

    vectors: dict[RequestTime, list[Tensor]]
    targets: list[Tensor] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)

    def queries(self, request_time: RequestTime, filter_seen: bool) -> Queries:
        found = Queries(torch.cat(self.vectors[request_time]), torch.cat(self.targets))
        if filter_seen:
            found.seen, found.seen_lengths = torch.cat(self.seen), torch.cat(self.lengths)
        return found


def evaluate(
    run: Loaded,
    part: HeldOut = "test",
    request_times: Sequence[RequestTime] = REQUEST_TIMES,
    filter_seen: bool = False,
    users: int | None = None,
    baselines: bool = True,
) -> dict[str, Any]:
    """Metrics of all users' targets among all known items: a collective, the same result on every process.

    Args:
        run: the model and the data.
        part: which targets.
        request_times: asked at the target's time, at the last event's, or both.
        filter_seen: leave items of the user's whole history out of the candidates; the target stays.
        users: a fixed sample of so many of those that have a target; None takes all.
        baselines: rank by popularity, recent and frequent items and transitions too.
    """
    began = time.monotonic()
    world, max_length = run.world, run.config.batch.max_length
    with raise_on_all_ranks("reading the dataset"):
        lengths = run.maker.reader.lengths()
        having = run.maker.users_with(part)
        if not len(having):
            raise RetrievalError(
                f"{run.dataset.path}: no user has a {part} target with a history before it: nothing to evaluate. The "
                f"run's split is {run.config.data.split}"
            )
        rows = sample_users(having, users, run.config.seed)
        rules = Baselines(run.maker, run.items.known, run.items.counts) if baselines else None
    shares = run.shares(rows, np.minimum(lengths[rows], max_length))
    dim, similarity = run.tables.items.dim, run.config.loss.similarity
    catalogue = Catalogue(run.module.items, torch.from_numpy(run.items.ids), dim, similarity, world)
    model, others = {each: Bucketed() for each in request_times}, {name: Bucketed() for name in NAMES}
    waiting = _Waiting({each: [] for each in request_times})
    progress, done = ProgressLines("evaluated", len(rows), "users"), 0
    for number, flush in enumerate(shares.flushes(_RANKED_USERS)):
        with raise_on_all_ranks("reading users to evaluate"):
            batch = run.maker.evaluation(shares.batches[world.rank][number], part, max_length)
            whole = _whole(run, batch, part)
            last = batch.offsets[1:] - 1
            targets, histories = batch.targets[last], whole.offsets.diff()
            if rules is not None:
                for name, ranks in rules.ranks(whole, targets.tolist(), filter_seen).items():
                    others[name].add(ranks, histories)
        state = run.states(batch)
        asked = {"target": batch.request_timestamps, "last": batch.timestamps[last]}
        for each in request_times:
            waiting.vectors[each].append(run.encoder.query(state, asked[each].to(run.model.device)))
        waiting.targets.append(targets)
        waiting.lengths.append(histories)
        if filter_seen:
            waiting.seen.append(whole.items)
        if flush:
            for each in request_times:
                ranks, counts = catalogue.ranks(waiting.queries(each, filter_seen))
                model[each].add(ranks.split(counts.tolist())[world.rank], torch.cat(waiting.lengths))
            waiting = _Waiting({each: [] for each in request_times})
        done += sum(len(batches[number]) for batches in shares.batches)
        progress.show(done)
    found: dict[str, Any] = {each: metrics.result() for each, metrics in model.items()}
    if rules is not None:
        found["baselines"] = {name: metrics.result() for name, metrics in others.items()}
    about = {
        "split": part,
        "filter_seen": filter_seen,
        "checkpoint": run.checkpoint.name,
        "step": run.info.progress.step,
        "dataset": run.dataset.info.fingerprint,
        "dataset_path": run.dataset.path,
        "own_data": run.dataset.info.fingerprint == run.info.identity.dataset,
        "unknown_items": run.unknown_items,
        "max_length": max_length,
        "candidates": len(run.items.ids),
        "users": found[request_times[0]]["users"],
        "users_without_target": len(lengths) - len(having),
        "unknown_targets": found[request_times[0]]["unknown_targets"],
        "processes": world.size,
        "seconds": round(time.monotonic() - began, 2),
    }
    return {**about, **found}


def _whole(run: Loaded, batch: EventBatch, part: HeldOut) -> EventBatch:
    """The batch's users with everything before their targets."""
    longest = int(batch.offsets.diff().max()) if len(batch) else 0
    if longest < run.config.batch.max_length:
        return batch
    return run.maker.evaluation(batch.users.numpy(), part, EVERYTHING)


# --- for people ------------------------------------------------------------------------------------------------------

_SHOWN = ("hr@1", "hr@5", "hr@10", "hr@50", "hr@200", "ndcg@10", "ndcg@50", "mrr")
_TITLES = {"target": "model, asked at the target's time", "last": "model, asked at the last event's time"}


def as_text(found: dict[str, Any]) -> str:
    """The result as a table: the model and the baselines, then the model by history length."""
    rows = [(_TITLES[each], found[each]) for each in REQUEST_TIMES if each in found]
    model = rows[-1][1]  # the honest one if there are both
    rows += list(found.get("baselines", {}).items())
    kind = "unseen items" if found["filter_seen"] else "all items"
    lines = [
        f"{found['split']} targets of {found['users']:,} users among {found['candidates']:,} candidates ({kind}), "
        f"{found['checkpoint']}",
        f"{found['unknown_targets']:,} targets are unknown items and count as misses; "
        f"{found['users_without_target']:,} users have no target",
        "",
        _line("", _SHOWN),
        *(_line(name, [f"{metrics[m]:.4f}" for m in _SHOWN]) for name, metrics in rows),
        "",
        _line(f"{rows[-1 - len(found.get('baselines', {}))][0]}, by history", (*_SHOWN, "users")),
    ]
    for name, metrics in model["by_history_length"].items():
        lines.append(_line(name, [*(f"{metrics[m]:.4f}" for m in _SHOWN), f"{metrics['users']:,}"]))
    return "\n".join(lines)


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:<50}" + "".join(f"{cell:>9}" for cell in cells)
