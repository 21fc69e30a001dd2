"""Exact metrics of held-out targets, over all users, on the sharded catalogue."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuxi_torchrec.data.batches import EventBatch
from fuxi_torchrec.distributed import raise_on_all_ranks
from fuxi_torchrec.evaluation.baselines import NAMES, Baselines
from fuxi_torchrec.evaluation.held_out import REQUEST_TIMES, HeldOut, HeldOutPart, RequestTime
from fuxi_torchrec.evaluation.loading import Loaded, RetrievalError
from fuxi_torchrec.tasks.base import Task
from fuxi_torchrec.training.progress import ProgressLines
from fuxi_torchrec.training.validation_plan import sample_users

# upper bounds of the buckets of history lengths
BUCKETS = (20, 50, 200, 1_000, 5_000)
BUCKET_NAMES = [*(f"<={bound}" for bound in BUCKETS), f">{BUCKETS[-1]}"]


class Bucketed:
    """Metrics of everybody and of each bucket of history lengths."""

    def __init__(self, task: Task) -> None:
        self.all = task.metrics()
        self.buckets = [task.metrics() for _ in BUCKET_NAMES]

    def add(self, ranks: Tensor, lengths: Tensor) -> None:
        self.all.add(ranks)
        bucket = torch.bucketize(lengths, torch.tensor(BUCKETS))
        for number, metrics in enumerate(self.buckets):
            metrics.add(ranks[bucket == number])

    def result(self) -> dict[str, Any]:
        """Of all ranks: a collective."""
        for metrics in (self.all, *self.buckets):
            metrics.add_peers()
        found = {name: metrics.result() for name, metrics in zip(BUCKET_NAMES, self.buckets, strict=True)}
        return {**self.all.result(), "by_history_length": {name: each for name, each in found.items() if each["users"]}}


def evaluate(
    run: Loaded,
    part: HeldOutPart = "test",
    request_times: Sequence[RequestTime] = REQUEST_TIMES,
    filter_seen: bool = False,
    users: int | None = None,
    baselines: bool = True,
) -> dict[str, Any]:
    """Metrics of all users' targets among all known items: a collective, the same result on every rank.

    Args:
        request_times: queried at the target's time, at the last event's, or both.
        filter_seen: leave items of the user's whole history out of the candidates; the target stays.
        users: a fixed sample of so many of those that have a target; None takes all.
    """
    began = time.monotonic()
    lengths, having = run.users_with(part)
    with raise_on_all_ranks("reading the dataset"):
        if not len(having):
            raise RetrievalError(
                f"{run.dataset.path}: no user has a {part} target with a history before it: nothing to evaluate. The "
                f"run's split is {run.config.data.split}"
            )
        rows = sample_users(having, users, run.config.seed)
        rules = Baselines(run.maker, run.items.known, run.items.counts) if baselines else None
    task = run.module.task
    model, others = {each: Bucketed(task) for each in request_times}, {name: Bucketed(task) for name in NAMES}

    def look(whole: EventBatch, targets: Tensor) -> None:
        if rules is not None:
            for name, ranks in rules.ranks(whole, targets.tolist(), filter_seen).items():
                others[name].add(ranks, whole.offsets.diff())

    held_out = HeldOut(run.users, run.maker, part, run.items.ids, run.config, filter_seen)
    progress = ProgressLines("evaluated", len(rows), "users")
    for batch in held_out.ranked(rows, lengths[rows], request_times, look):
        for each in request_times:
            model[each].add(batch.ranks[each][batch.own], batch.lengths)
        progress.show(batch.users)
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
        "max_length": run.config.batch.max_length,
        "candidates": len(run.items.ids),
        "users": found[request_times[0]]["users"],
        "users_without_target": len(lengths) - len(having),
        "unknown_targets": found[request_times[0]]["unknown_targets"],
        "processes": run.world.size,
        "seconds": round(time.monotonic() - began, 2),
    }
    return {**about, **found}


# --- for people ------------------------------------------------------------------------------------------------------

_SHOWN = ("hr@1", "hr@5", "hr@10", "hr@50", "hr@200", "ndcg@10", "ndcg@50", "mrr")
_TITLES = {"target": "model, queried at the target's time", "last": "model, queried at the last event's time"}


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
