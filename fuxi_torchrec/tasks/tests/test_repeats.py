"""The loss with repeats against its definition: user by user, item by item, differentiated by autograd."""

import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fuxi_torchrec.tasks import repeat_softmax as module
from fuxi_torchrec.tasks.base import ItemSet
from fuxi_torchrec.tasks.next_item import LossConfig, NextItem, asked_at_last, request_times
from fuxi_torchrec.tasks.repeats import PARTS, PHASES, RepeatsConfig, edges
from fuxi_torchrec.tasks.samplers import SAMPLERS

D, ITEMS = 5, 12
PERIODS = (10, 24)


@dataclass
class Batch:
    """Events of users."""

    items: torch.Tensor
    targets: torch.Tensor
    target_weights: torch.Tensor
    timestamps: torch.Tensor
    request_timestamps: torch.Tensor
    offsets: torch.Tensor
    users: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


def batch_of(lengths, seed=0, ordered=True):
    draw = torch.Generator().manual_seed(seed)
    total, users = sum(lengths), len(lengths)
    items, targets = (torch.randint(0, 8, (total,), generator=draw) for _ in range(2))  # few, so that they repeat
    times = torch.randint(0, 60, (total,), generator=draw)
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    if ordered:
        times = torch.cat([times[a:b].sort().values for a, b in itertools.pairwise(offsets)] or [times])
    weights = torch.randint(0, 3, (total,), generator=draw).float() * (targets > 0)
    requests = torch.randint(50, 99, (users,), generator=draw)
    return Batch(items, targets, weights, times, requests, offsets, torch.arange(users))


def task_of(negatives, window, similarity="cosine", seed=0, **repeats):
    config = LossConfig(negatives=negatives, num_negatives=6, similarity=similarity, temperature=0.5)
    task = NextItem(config, RepeatsConfig(window, **{"at_last": 0.0} | repeats), D).double()
    draw = torch.Generator().manual_seed(seed)
    for parameter in task.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return task


def bucket(value):
    """By its definition: 0, then two an octave."""
    return 0 if value < 1 else sum(edge <= value for edge in edges())


def biases(bias, y, history, times, request, table):
    """Of each item of the window, by item: tables of when and how often, what they mean together, y, and y·U·V·e."""
    found = {}
    window = {}  # of item: the events at which it has occurred since it came into the window, latest last
    for place, item in enumerate(history):
        if item:
            window[item] = [*window.pop(item, []), place]
            window = dict(list(window.items())[-bias.config.window :])
    latest = list(reversed(window.items()))
    before = latest[0][1][-2] if latest and len(latest[0][1]) > 1 else None  # the last item's time before its last
    for slot, (item, places) in enumerate(latest):
        last, since = places[-1], max(0, request - times[places[-1]])
        gap = last - places[-2] if len(places) > 1 else 0
        lead = 0 if before is None else last - before
        own = {"events_ago": len(history) - 1 - last, "items_ago": slot, "count": len(places), "gap": gap}
        own["since"] = since
        value = sum(bias.part(name)[bucket(number)] for name, number in own.items()) + y @ bias.user
        value = value + bias.lead[bucket(abs(lead)) + (len(bias.lead) // 2 if lead > 0 else 0)]
        first = latest[0][1]
        common = [max(0, request - times[first[-1]]), len(window), first[-1] - first[-2] if len(first) > 1 else 0]
        x = [bucket(number) / 12 - 1 for number in (*own.values(), max(0, lead), *common)]
        hidden = F.silu(bias.hidden(torch.tensor(x, dtype=y.dtype)) + y @ bias.hidden_user)
        value = value + hidden @ bias.mix
        for n, period in enumerate(bias.config.periods):
            value = value + bias.phase[n * PHASES + math.floor(since % period / period * PHASES)]
        found[item] = value + y @ bias.items @ bias.items_right @ table[item]
    return found


def oracle(task, outputs, table, batch, drawn):
    """``drawn``: of each position with a target, items and log weights."""
    if task.config.similarity == "cosine":
        outputs, table = F.normalize(outputs, dim=1, eps=1e-6), F.normalize(table, dim=1, eps=1e-6)
    total, number = 0 * outputs.sum(), 0
    for begin, end, request in zip(batch.offsets[:-1], batch.offsets[1:], batch.request_timestamps, strict=True):
        for at in range(begin, end):
            if not batch.target_weights[at]:
                continue
            y, target = outputs[at], int(batch.targets[at])
            asked = int(batch.timestamps[at + 1] if at + 1 < end else request)
            history, times = batch.items[begin : at + 1].tolist(), batch.timestamps[begin : at + 1].tolist()
            bias = biases(task.repeats, y, history, times, asked, table)
            scores = {item: y @ table[item] / task.config.temperature + value for item, value in bias.items()}
            own = scores.pop(target, y @ table[target] / task.config.temperature)
            logits = [own, *scores.values()]
            for item, weight in drawn[number]:
                if item != target and item not in scores:
                    logits.append(y @ table[item] / task.config.temperature + weight)
            total = total + batch.target_weights[at] * (torch.logsumexp(torch.stack(logits), 0) - own)
            number += 1
    return total


def both(task, batch, seed=0):
    """Loss and gradients of the task and of the oracle."""
    draw = torch.Generator().manual_seed(seed)
    outputs, table = (torch.randn(n, D, generator=draw, dtype=torch.float64) for n in (len(batch.items), ITEMS + 1))
    counts = np.arange(ITEMS + 1)
    targets = task.target_maker(ItemSet(np.arange(1, ITEMS + 1), counts), seed)(0, 0, batch)
    ids = targets.items["candidates"].numpy()
    weights = targets.constants.get("log_weights")
    # compared with a window, each of 6 draws stands for the sixth part of the items
    share = np.float32(math.log(ITEMS / 6) if task.config.negatives in ("shared", "uniform") else 0.0)
    weights = share + (np.zeros(len(ids), np.float32) if weights is None else weights.numpy())
    if ids.ndim == 1:
        drawn = [list(zip(ids.tolist(), weights.tolist(), strict=True))] * len(targets.positions)
    else:
        drawn = [[(item, float(share)) for item in row] for row in ids.tolist()]
    # items are their own rows here

    def ours(outputs, table):
        return task(outputs[targets.positions], table, targets)["loss"]

    return [
        gradients(task, function, outputs, table)
        for function in (ours, lambda outputs, table: oracle(task, outputs, table, batch, drawn))
    ]


def gradients(task, function, *leaves):
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    task.zero_grad()
    loss = function(*leaves)
    (3 * loss).backward()
    named = {"outputs": leaves[0], "rows": leaves[1], **dict(task.named_parameters())}
    found = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in named.items()}
    return {"loss": loss.detach(), **found}


def assert_same(got, expected):
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("negatives", SAMPLERS)
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("window", [1, 3, 40])
@pytest.mark.parametrize("gathered", [1, 2**21])  # one position at a time, all at once
def test_losses_and_gradients_are_those_of_the_definition(negatives, similarity, window, gathered, monkeypatch):
    monkeypatch.setattr(module, "_GATHERED", gathered)
    task = task_of(negatives, window, similarity, periods=PERIODS)
    got, expected = both(task, batch_of([7, 0, 1, 12, 3]))
    assert expected["loss"] > 0 and (expected["repeats.phase"] != 0).any()
    assert_same(got, expected)


@given(st.lists(st.integers(0, 9), max_size=5), st.sampled_from(list(SAMPLERS)), st.integers(0, 99), st.booleans())
def test_any_shape_and_times_that_go_back(lengths, negatives, seed, ordered):
    task = task_of(negatives, 4, seed=seed, periods=PERIODS[:1])
    got, expected = both(task, batch_of(lengths, seed, ordered), seed)
    assert_same(got, expected)


@pytest.mark.parametrize("negatives", ["full"])
def test_training_begins_at_the_model_without_repeats(negatives):
    config = LossConfig(negatives=negatives, num_negatives=6)
    batch, items = batch_of([9, 4]), ItemSet(np.arange(1, ITEMS + 1))
    outputs, table = torch.randn(13, D), torch.randn(ITEMS + 1, D)
    losses = []
    for window in (0, 8):
        task = NextItem(config, RepeatsConfig(window), D)
        targets = task.target_maker(items, 0)(0, 0, batch)
        losses.append(task(outputs[targets.positions], table, targets)["loss"])
    torch.testing.assert_close(losses[1], losses[0])


@pytest.mark.parametrize("part", PARTS)
def test_parts_that_are_left_out_are_zero_and_not_learned(part):
    task = task_of("full", 4, periods=PERIODS, without=(part,))
    assert not task.repeats.part(part).any() and f"repeats.{part}" not in dict(task.named_parameters())
    got, expected = both(task, batch_of([7, 0, 12]))
    assert_same(got, expected)


@pytest.mark.parametrize("periods", [(), PERIODS])
@pytest.mark.parametrize("without", [(), ("mix", "items")])
def test_every_parameter_has_a_gradient(periods, without):
    """Data-parallel training waits for all of them."""
    task, batch = task_of("full", 4, periods=periods, without=without), batch_of([7, 0, 12])
    targets = task.target_maker(ItemSet(np.arange(1, ITEMS + 1)), 0)(0, 0, batch)
    rows = torch.randn(ITEMS + 1, D, dtype=torch.float64)
    task(torch.randn(len(targets.positions), D, dtype=torch.float64), rows, targets)["loss"].backward()
    assert [name for name, each in task.named_parameters() if each.grad is None] == []


def test_a_share_of_the_targets_is_asked_for_at_the_last_event():
    batch = batch_of([500, 0, 500])
    after = request_times(batch)
    never, some, always = (asked_at_last(batch, after, share, 3, 1) for share in (0.0, 0.25, 1.0))
    assert torch.equal(never, after) and torch.equal(always, batch.timestamps)
    differ = after != batch.timestamps
    assert 0.1 < (some == batch.timestamps)[differ].double().mean() < 0.4
    assert ((some == after) | (some == batch.timestamps)).all()
    # alone as beside others
    own = replace(batch, users=batch.users[2:], offsets=torch.tensor([0, 500]))
    own = replace(own, timestamps=batch.timestamps[500:], items=batch.items[500:])
    assert torch.equal(asked_at_last(own, after[500:], 0.25, 3, 1), some[500:])
    targets = task_of("full", 4, at_last=1.0).target_maker(ItemSet(np.arange(1, ITEMS + 1)), 0)(0, 0, batch)
    assert torch.equal(targets.constants["window_request_times"], batch.timestamps[targets.positions])


def test_without_a_window_nothing_is_added():
    task = NextItem(LossConfig(), RepeatsConfig(), D)
    assert not list(task.parameters())
    targets = task.target_maker(ItemSet(np.arange(1, ITEMS + 1)), 0)(0, 0, batch_of([5]))
    assert targets.items.keys() == {"targets", "candidates"}


def test_an_item_that_is_in_the_window_and_drawn_counts_once():
    task = task_of("full", 3)
    batch = replace(batch_of([6]), items=torch.full((6,), 2), targets=torch.full((6,), 2))
    got, expected = both(task, replace(batch, target_weights=torch.ones(6)))
    assert_same(got, expected)


@pytest.mark.parametrize(
    "wrong", [{"window": -1}, {"window": 4, "periods": (0,)}, {"window": 0, "periods": (7,)}, {"without": ("it",)}]
)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=r"window|periods|without"):
        RepeatsConfig(**wrong)
