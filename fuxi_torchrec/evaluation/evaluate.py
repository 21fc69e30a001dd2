"""Exact metrics of held-out targets, over all users, on the sharded catalogue."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuxi_torchrec.data.batches import BatchMaker, EventBatch
from fuxi_torchrec.data.repeats import DISTANCES, SHARES, distances, repeat_shares
from fuxi_torchrec.distributed import raise_on_all_ranks
from fuxi_torchrec.evaluation.baselines import Baselines, Rules
from fuxi_torchrec.evaluation.cold_rules import ColdRules
from fuxi_torchrec.evaluation.held_out import REQUEST_TIMES, HeldOut, HeldOutPart, RequestTime
from fuxi_torchrec.evaluation.loading import Loaded, RetrievalError
from fuxi_torchrec.evaluation.user_ranks import UserRanks
from fuxi_torchrec.tasks.base import Task
from fuxi_torchrec.training.progress import ProgressLines
from fuxi_torchrec.training.validation_plan import sample_users

# upper bounds of the buckets of history lengths
BUCKETS = (20, 50, 200, 1_000, 5_000)
BUCKET_NAMES = [*(f"<={bound}" for bound in BUCKETS), f">{BUCKETS[-1]}"]


class Grouped:
    """Which group of each kind users are in: by length of the history, share of repeats, distance of the target.

    Args:
        cold: (items + 1,) which items have no event in training; None where such items have no row, and there are no
            groups of warm and cold targets.
    """

    def __init__(self, cold: Tensor | None) -> None:
        self.cold = cold
        self.names: dict[str, Sequence[str]] = {
            "by_history_length": BUCKET_NAMES,
            "by_repeats": SHARES,
            "by_distance": DISTANCES,
            **({} if cold is None else {"by_target": ("warm", "cold")}),
        }

    def of(self, whole: EventBatch, targets: Tensor) -> Tensor:
        """(users, kinds) places among the names."""
        items, offsets = whole.items.numpy(), whole.offsets.numpy()
        found = [
            torch.bucketize(whole.offsets.diff(), torch.tensor(BUCKETS)),
            torch.from_numpy(repeat_shares(items, offsets)),
            torch.from_numpy(distances(items, offsets, targets.numpy())),
        ]
        return torch.stack(found if self.cold is None else [*found, self.cold[targets].long()], 1)


class Bucketed:
    """Metrics of everybody and of each group."""

    def __init__(self, task: Task, grouped: Grouped) -> None:
        self.all = task.metrics()
        self.groups = {kind: {name: task.metrics() for name in names} for kind, names in grouped.names.items()}

    def add(self, ranks: Tensor, groups: Tensor) -> None:
        """Of users and the groups that they are in, by :meth:`Grouped.of`."""
        self.all.add(ranks)
        for each, own in zip(self.groups.values(), groups.unbind(1), strict=True):
            for number, metrics in enumerate(each.values()):
                metrics.add(ranks[own == number])

    def result(self) -> dict[str, Any]:
        """Of all ranks: a collective."""
        for metrics in (self.all, *(metrics for each in self.groups.values() for metrics in each.values())):
            metrics.add_peers()
        result: dict[str, Any] = dict(self.all.result())
        for kind, each in self.groups.items():
            found = {name: metrics.result() for name, metrics in each.items()}
            result[kind] = {n: found[n] for n in found if found[n]["users"] or kind == "by_target"}
        return result


def evaluate(
    run: Loaded,
    part: HeldOutPart = "test",
    request_times: Sequence[RequestTime] = REQUEST_TIMES,
    filter_seen: bool = False,
    users: int | None = None,
    baselines: bool = True,
    targets: Literal["all", "cold"] = "all",
    candidates: Literal["all", "cold"] = "all",
    ranks_file: Path | None = None,
) -> dict[str, Any]:
    """Metrics of all users' targets among all known items: a collective, the same result on every rank.

    Args:
        request_times: queried at the target's time, at the last event's, or both.
        filter_seen: leave items of the user's whole history out of the candidates; the target stays.
        users: a fixed sample of so many of those that have a target; None takes all.
        targets: ``cold``: of each user the first item of the period that has no event in training.
        candidates: ``cold``: such items alone are ranked.
        ranks_file: rank 0 writes each user's ranks there, as Parquet.
    """
    began = time.monotonic()
    if (cold_only := "cold" in (targets, candidates)) and run.lookups.items is None:
        raise RetrievalError("cold items need features: the run's features.item is empty")
    cold = run.maker.items.seen & (run.items.counts == 0)
    if targets == "cold":
        run = _with_targets(run, cold)
    chosen = np.flatnonzero(cold) if candidates == "cold" else run.candidates
    lengths, having = run.users_with(part)
    with raise_on_all_ranks("reading the dataset"):
        _check_any(run, part, len(having))
        rows = sample_users(having, users, run.config.seed)
        rules = _rules(run, cold if cold_only else None) if baselines else []
    task, marks = run.module.task, torch.from_numpy(cold) if run.lookups.items is not None else None
    grouped, waiting = Grouped(marks), list[Tensor]()  # groups of users that the rules have seen and the model has not
    model = {each: Bucketed(task, grouped) for each in request_times}
    others = {name: Bucketed(task, grouped) for each in rules for name in each.names}
    kept = UserRanks([*model, *others])

    def look(whole: EventBatch, targets: Tensor) -> None:
        waiting.append(grouped.of(whole, targets))
        for each in rules:
            for name, ranks in each.ranks(whole, targets.tolist(), filter_seen).items():
                others[name].add(ranks, waiting[-1])
                kept.add(name, ranks)

    held_out = HeldOut(run.users, run.maker, part, chosen, run.config, filter_seen)
    progress = ProgressLines("evaluated", len(rows), "users")
    for batch in held_out.ranked(rows, lengths[rows], request_times, look):
        kept.add_users(batch.rows, batch.targets, batch.lengths)
        groups = torch.cat(waiting)
        waiting.clear()
        for each in request_times:
            model[each].add(batch.ranks[each][batch.own], groups)
            kept.add(each, batch.ranks[each][batch.own])
        progress.show(batch.users)
    found: dict[str, Any] = {each: metrics.result() for each, metrics in model.items()}
    if ranks_file is not None:
        kept.write(ranks_file, run.maker.reader, run.vocabulary, cold)
    if rules:
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
        "candidates": len(chosen),
        **({"targets": targets, "ranked": candidates} if cold_only else {}),
        "users": found[request_times[0]]["users"],
        "users_without_target": len(lengths) - len(having),
        "unknown_targets": found[request_times[0]]["unknown_targets"],
        "world_size": run.world.size,
        "seconds": round(time.monotonic() - began, 2),
    }
    return {**about, **found}


def _check_any(run: Loaded, part: HeldOutPart, users: int) -> None:
    if not users:
        raise RetrievalError(
            f"{run.dataset.path}: no user has a {part} target with a history before it: nothing to evaluate. The "
            f"run's split is {run.config.data.split}"
        )


def _with_targets(run: Loaded, only: NDArray[np.bool_]) -> Loaded:
    """The same with some items alone as targets."""
    maker = BatchMaker(run.maker.reader, run.maker.split, run.maker.items, only)
    return dataclasses.replace(run, maker=maker)


def _rules(run: Loaded, cold: NDArray[np.bool_] | None) -> list[Rules]:
    """What the model is compared with: rules for items that nobody has had if these are asked for."""
    if cold is None:
        return [Baselines(run.maker, run.items.known, run.items.counts)]
    assert run.lookups.items is not None
    return [ColdRules(run.lookups.items.table, cold, run.items.counts)]


# --- for people ------------------------------------------------------------------------------------------------------

_SHOWN = ("hr@1", "hr@5", "hr@10", "hr@50", "hr@200", "ndcg@10", "ndcg@50", "mrr")
_TITLES = {"target": "model, queried at the target's time", "last": "model, queried at the last event's time"}
_REPEATS = {
    "by_repeats": "by share of repeats in the history",
    "by_distance": "by events back to the target",
}


def as_text(found: dict[str, Any]) -> str:
    """The result as tables: the model and the baselines, the model by history length, all by how users repeat."""
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
    for name, metrics in (*model["by_history_length"].items(), *model.get("by_target", {}).items()):
        lines.append(_line(name, [*(f"{metrics[m]:.4f}" for m in _SHOWN), f"{metrics['users']:,}"]))
    for kind, title in _REPEATS.items():
        names = list(model[kind])
        lines += ["", _line(f"HR@10/NDCG@10 {title}", names, 12)]
        lines += [_line(name, [_short(metrics[kind][each]) for each in names], 12) for name, metrics in rows]
        lines.append(_line("users", [f"{model[kind][each]['users']:,}" for each in names], 12))
    return "\n".join(lines)


def _short(metrics: dict[str, float]) -> str:
    return f"{metrics['hr@10']:.3f}/{metrics['ndcg@10']:.3f}"


def _line(name: str, cells: Sequence[str], width: int = 9) -> str:
    return f"{name:<50}" + "".join(f"{cell:>{width}}" for cell in cells)
