"""A bias for items that come back: what it costs in a training step, and in an answer.

    python -m benchmarks.repeats [--only step,recommend] [--quick]

Results are checked before anything is timed. Exit code 1 if a figure that must be reached is missed.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fuxi_torchrec
from benchmarks import harness, serving, training
from benchmarks.harness import Aim
from fuxi_torchrec.config import load_config
from fuxi_torchrec.export.bundle import scaled
from fuxi_torchrec.serving.encoding import UserModel
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.tasks.base import ItemSet, Targets
from fuxi_torchrec.tasks.next_item import NextItem
from fuxi_torchrec.tasks.repeats import Entries, RepeatsConfig
from fuxi_torchrec.tasks.softmax import scaled_items
from fuxi_torchrec.worker_group import WorkerGroup

ROOT = Path(__file__).parents[1]
LOG = ROOT / "benchmarks/sets/gitlog-void.parquet"
SAMPLERS = ("full", "shared")
WINDOW, WINDOWS = 64, (0, 64, 256)
PERIODS = (86_400, 604_800)
EVENTS = 5_000  # of the user who asks
STEP_AIM, ANSWER_AIM = 1.3, 1.3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, publish it unless it was quick."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.repeats", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="step,recommend")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and users; nothing is written down")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    wanted = options.only.split(",")
    if not options.quick:
        return harness.run_sections("repeats", SECTIONS, wanted, "One thread.")
    aims = list[Aim]()
    for name in wanted:
        with tempfile.TemporaryDirectory(prefix="repeats-benchmark-") as scratch:
            text, found, _ = {"step": step, "recommend": recommend}[name](Path(scratch), quick=True)
        print(text, flush=True)
        aims += found
    return harness.conclude(aims)


# --- a step of training ----------------------------------------------------------------------------------------------


def step(scratch: Path, quick: bool = False) -> tuple[str, list[Aim], Any]:
    """Steps with and without a window, in turn."""
    for sampler in SAMPLERS:
        check_loss(sampler)
    fuxi_torchrec.prepare(LOG, scratch / "gitlog")
    movies = replace(training.MOVIES, users=512) if quick else training.MOVIES
    data = {"git log": f"data.path={scratch / 'gitlog'}", "movies": training.dataset(scratch, "movies", movies)}
    own: dict[str, tuple[Path | None, list[str]]] = {
        "git log": (ROOT / "configs/gitlog.yaml", []),
        "movies": (None, training.MOVIES_SETTINGS),
    }
    rows, aims, raw = [], [], dict[str, Any]()
    for name, path in data.items():
        config, settings = own[name]
        for sampler in SAMPLERS:
            run = [*settings, path, f"loss.negatives={sampler}", *training.QUIET]
            with WorkerGroup(1, timeout_seconds=900) as group:
                (found,) = group.run(
                    timed, scratch / f"{name}-{sampler}", run, config, 3 if quick else 5, 5 if quick else 6
                )
            ratio = found["with"] / found["without"]
            raw[f"{name}, {sampler}"] = found
            rows.append([name, sampler, f"{found['events']:.0f}"])
            rows[-1] += [f"{found[which] * 1e3:.1f}" for which in ("without", "with")] + [f"{ratio:.2f}"]
            what = f"{name}, {sampler}: a step with a window of {WINDOW} over one without"
            aims.append(Aim(what, ratio, STEP_AIM, at_most=True))
    head = ["data", "negatives", "events a step", "without, ms", f"window of {WINDOW}, ms", "ratio"]
    what = (
        "A step of training, reader and optimizer included, with `task.repeats.window` and without: the median of "
        "blocks of steps taken in turn in one process. *git log*: `configs/gitlog.yaml` on its set; *movies*: "
        "synthetic histories of MovieLens-1M's size, d = 64, L = 2, 128 users of at most 200 events a step. 1,024 "
        "negatives where they are shared. Before, the loss and its gradients were compared with a plain softmax of all "
        "items, and where all are compared the first loss with the one without a window."
    )
    return f"{what}\n\n{harness.table(head, rows)}", aims, raw


def timed(run_dir: Path, settings: list[str], config: Path | None, rounds: int, steps: int) -> dict[str, float]:
    """Seconds of a step with and without a window."""
    with_window = [*settings, f"task.repeats.window={WINDOW}", f"task.repeats.periods={list(PERIODS)}"]
    trainers = [
        training.make_trainer(run_dir / name, own, config) for name, own in (("0", settings), ("W", with_window))
    ]
    runners = [trainer.begin() for trainer in trainers]
    first = [float(runner.train().report["loss"]) for runner in runners]
    if "loss.negatives=full" in settings and not math.isclose(*first, rel_tol=1e-4):
        raise AssertionError(f"a bias that is 0 changes the first loss: {first}")
    for runner in runners:
        runner.train()
    seconds: list[list[float]] = [[], []]
    events = 0
    for _ in range(rounds):
        for runner, own_seconds in zip(runners, seconds, strict=True):
            began = time.perf_counter()
            events += sum(runner.train().events for _ in range(steps))
            own_seconds.append((time.perf_counter() - began) / steps)
    for trainer in trainers:
        trainer.directory.unlock()
    without, with_ = (float(np.median(each)) for each in seconds)
    return {"without": without, "with": with_, "events": events / (2 * rounds * steps)}


def check_loss(sampler: str) -> None:
    """The loss and its gradients against a plain softmax, with a bias that matters."""
    items, dim = 300, 16
    settings = [f"model.dim={dim}", f"loss.negatives={sampler}", "loss.num_negatives=64"]
    task = NextItem(load_config(None, settings).loss, RepeatsConfig(WINDOW, PERIODS), dim).double()
    draw = torch.Generator().manual_seed(0)
    for parameter in task.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    maker = task.target_maker(ItemSet(np.arange(1, items + 1), np.ones(items + 1, np.int64)), 0)
    targets = maker(0, 0, training._batch(items, 1_000))
    outputs, table = (torch.randn(n, dim, generator=draw, dtype=torch.float64) for n in (1_000, items + 1))
    found = []
    for loss in (lambda y, rows: task(y, rows, targets)["loss"], partial(plain_loss, task, targets)):
        given = [outputs[targets.positions].requires_grad_(), table.clone().requires_grad_(), *task.parameters()]
        value = loss(given[0], given[1])  # items are their own rows here
        found.append([value, *torch.autograd.grad(value, given)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def plain_loss(task: NextItem, targets: Targets, outputs_PD: Tensor, rows_UD: Tensor) -> Tensor:
    """By torch's operations on positions x items."""
    assert task.repeats is not None
    y_PD, rows_UD = scaled_items(outputs_PD, task.config.similarity), scaled_items(rows_UD, task.config.similarity)
    items, constants = targets.items, targets.constants
    last_PW, own_P1, pool_M = constants["window"].long(), items["targets"][:, None], items["candidates"]
    about = (constants[name] for name in ("window_counts", "window_gaps", "window_times", "window_request_times"))
    entries = Entries.of(last_PW, targets.positions, *about)
    queries_PD = y_PD / task.config.temperature
    scores_PU = queries_PD @ rows_UD.T
    weights_M = constants.get("log_weights", torch.zeros(len(pool_M))) + constants["log_stands_for"]
    logits_PU = torch.full_like(scores_PU, -torch.inf).index_copy(1, pool_M, scores_PU[:, pool_M] + weights_M)
    logits_PU = logits_PU.scatter(1, own_P1, scores_PU.gather(1, own_P1))
    p, w = entries.there.nonzero(as_tuple=True)
    ids = items["inputs"][last_PW[p, w]]
    shifted_PU = (queries_PD + task.repeats.shift(y_PD)) @ rows_UD.T
    logits_PU = logits_PU.index_put((p, ids), shifted_PU[p, ids] + task.repeats(y_PD, entries)[p, w])
    nll_P = logits_PU.logsumexp(1) - logits_PU.gather(1, own_P1).squeeze(1)
    return (nll_P * targets.weights).sum()


# --- an answer -------------------------------------------------------------------------------------------------------


def recommend(scratch: Path, quick: bool = False) -> tuple[str, list[Aim], Any]:
    """Answers to one user, with windows and without, in turn."""
    answers: dict[int, list[float]] = {window: [] for window in WINDOWS}
    with ExitStack() as stack:
        recommenders = {}
        for window in WINDOWS:
            repeats = {"window": window, "periods": PERIODS} if window else {}
            bundle = serving.export(scratch / str(window), [EVENTS], repeats=repeats)
            recommenders[window] = stack.enter_context(Recommender.load(bundle.path))
            check_answer(recommenders[window], bundle.manifest.as_of)
            now = bundle.manifest.as_of
        for n in range(20 if quick else 400):
            for window, recommender in recommenders.items():
                began = time.perf_counter()
                recommender.recommend([0], now + n)
                answers[window].append(time.perf_counter() - began)
    rows, raw = [], dict[str, Any]()
    for window, found in answers.items():
        p50, p99 = (float(np.percentile(found, p)) for p in (50, 99))
        raw[str(window)] = {"p50": p50, "p99": p99}
        rows.append([window or "none", f"{p50 * 1e3:.2f}", f"{p99 * 1e3:.2f}", f"{p50 / raw['0']['p50']:.2f}"])
    table = harness.table(["window", "p50, ms", "p99, ms", "ratio of p50"], rows)
    text = (
        f"`recommend` for one user of {EVENTS:,} events with a cached state, k = 10, every one of {serving.ITEMS:,} "
        "items scored, d = 128, L = 4, random weights, calls taken in turn. Before, each answer was compared with the "
        f"scores of all items.\n\n{table}"
    )
    ratio = raw[str(WINDOW)]["p50"] / raw["0"]["p50"]
    what = f"p50 of an answer with a window of {WINDOW} over one without"
    return text, [Aim(what, ratio, ANSWER_AIM, at_most=True)], raw


def check_answer(recommender: Recommender, now: int) -> None:
    """The best items are those of all scores."""
    model, state, when = UserModel(recommender.bundle), recommender.states([0]), np.array([now])
    vectors = model.vectors(state, when)
    every = (vectors @ scaled(model.items, recommender.manifest.similarity).T)[0]
    if recommender.manifest.window:
        ids, scores = model.window_scores(state, vectors, when)
        every[ids[0][ids[0] > 0]] = scores[0][ids[0] > 0]
    best = (every[1:].topk(10).indices + 1).tolist()
    found = [int(item) - 1000 for item in recommender.recommend([0], now)[0].items]
    if found != best:
        raise AssertionError(f"the best of all scores are {best}, the answer is {found}")


SECTIONS: dict[str, harness.Section] = {"step": step, "recommend": recommend}

if __name__ == "__main__":
    sys.exit(main())
