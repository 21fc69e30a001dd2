"""Attention tile by tile against the formula over all pairs: outputs and every gradient."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from fuxi_torchrec.encoders.tests import peers
from fuxi_torchrec.ops import tiles, time_maps
from fuxi_torchrec.ops.chunks import Chunks
from fuxi_torchrec.ops.softmax import softmax_attention
from fuxi_torchrec.ops.tiles import biased_attention, content_attention, relative_maps

SIZE = 16
LENGTHS = [[0, 1, SIZE - 1, SIZE, SIZE + 1, 70, 0, 70], [700], [], [0], [3 * SIZE] * 4, [1, 1, 1]]
HEADS, KEYS, VALUES, POSITIONS = 2, 3, 5, 60
EXACT, NEAR = {"rtol": 0, "atol": 1e-11}, {"rtol": 0, "atol": 1e-10}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(tiles, "_GROUP_ELEMENTS", 3 * HEADS * SIZE**2)


def inputs(lengths):
    torch.manual_seed(0)
    offsets = list(itertools.accumulate(lengths, initial=0))
    events = offsets[-1]
    q, k = torch.randn(2, events, HEADS, KEYS, dtype=torch.float64)
    v = torch.randn(events, HEADS, VALUES, dtype=torch.float64)
    position, time = torch.randn(POSITIONS).double(), torch.randn(129).double()
    times = torch.randint(10_000, (events,))  # not sorted: gaps may be negative
    following = torch.randint(10_000, (events,))
    return offsets, q, k, v, position, time, (times, following)


def pairs(offsets, clocks, position, weigh):
    """Of each user: rows, map of positions, map of times."""
    for a, b in itertools.pairwise(offsets):
        apart = (torch.arange(b - a)[:, None] - torch.arange(b - a)).clamp(0, POSITIONS - 1)
        gaps = clocks[1][a:b, None] - clocks[0][a:b]
        yield slice(a, b), position[apart], weigh(gaps), peers.causal(b - a)


def bucketed(table):
    return lambda gaps: table[torch.searchsorted(peers.bucket_thresholds(), gaps.abs(), right=True)]


def assert_same(op, formula, *given):
    ours, plain = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    found, wanted = op(*ours), formula(*plain)
    torch.testing.assert_close(found, wanted, **EXACT)
    with torch.no_grad():
        torch.testing.assert_close(op(*given), wanted, **EXACT)
    for y in (found, wanted):
        (y * torch.linspace(-1, 1, max(1, y.numel())).double()[: y.numel()].view_as(y)).sum().backward()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, torch.zeros_like(b) if b.grad is None else b.grad, **NEAR)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_biased_attention_is_the_formula_with_every_gradient(lengths):
    offsets, q, k, v, position, time, clocks = inputs(lengths)
    chunks = Chunks(offsets, SIZE, q.device)

    def formula(q, k, v, position, time):
        rows = [v[:0]]
        for user, by_position, by_time, causal in pairs(offsets, clocks, position, bucketed(time)):
            scores = torch.einsum("ihk,jhk->hij", q[user], k[user]) + by_position + by_time
            rows.append(torch.einsum("hij,jhv->ihv", F.silu(scores) * causal, v[user]))
        return torch.cat(rows)

    def op(q, k, v, position, time):
        return biased_attention(q, k, v, position, time, clocks, chunks)

    assert_same(op, formula, q, k, v, position, time)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_content_attention_is_the_formula_with_every_gradient(lengths):
    offsets, q, k, v, _, _, _ = inputs(lengths)
    chunks = Chunks(offsets, SIZE, q.device)

    def formula(q, k, v):
        rows = [v[:0]]
        for a, b in itertools.pairwise(offsets):
            scores = F.silu(torch.einsum("ihk,jhk->hij", q[a:b], k[a:b])) * peers.causal(b - a)
            rows.append(torch.einsum("hij,jhv->ihv", scores, v[a:b]))
        return torch.cat(rows)

    assert_same(lambda q, k, v: content_attention(q, k, v, chunks), formula, q, k, v)


@pytest.mark.parametrize("kind", ["buckets", "exp", "pow"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_relative_maps_are_the_formula_with_every_gradient(lengths, kind):
    offsets, _, _, v, position, time, clocks = inputs(lengths)
    chunks = Chunks(offsets, SIZE, v.device)
    parameters = time if kind == "buckets" else torch.tensor([0.7, -6.0 if kind == "exp" else 0.5]).double()

    def formula(v, position, parameters):
        def weigh(gaps):
            if kind == "buckets":
                return bucketed(parameters)(gaps)
            (a, b), passed = parameters, gaps.clamp(min=0).double()
            return a * torch.exp(-torch.exp(b) * passed) if kind == "exp" else a * (1 + passed) ** -b

        rows = [v[:0].repeat(1, 2)]
        for user, by_position, by_time, causal in pairs(offsets, clocks, position, weigh):
            rows.append(torch.cat(((by_position * causal) @ v[user], (by_time * causal) @ v[user]), 1))
        return torch.cat(rows)

    def op(v, position, parameters):
        return torch.cat(relative_maps(v, position, parameters, kind, clocks, chunks), 1)

    assert_same(op, formula, v.flatten(1), position, parameters)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_softmax_attention_is_the_formula_with_every_gradient(lengths):
    offsets, q, k, v, _, _, _ = inputs(lengths)
    chunks = Chunks(offsets, SIZE, q.device)

    def formula(q, k, v):
        rows = [v[:0]]
        for a, b in itertools.pairwise(offsets):
            scores = torch.einsum("ihk,jhk->hij", q[a:b], k[a:b]) / math.sqrt(KEYS)
            scores = scores.masked_fill(~peers.causal(b - a), -math.inf).softmax(2)
            rows.append(torch.einsum("hij,jhv->ihv", scores, v[a:b]))
        return torch.cat(rows)

    # scores far apart: what is not below the running maximum would overflow
    assert_same(lambda q, k, v: softmax_attention(q, k, v, chunks)[0], formula, 30 * q, 30 * k, v)


def test_softmax_dropout_drops_the_same_weights_in_the_backward_pass():
    offsets, q, k, _, _, _, _ = inputs([70])
    chunks, rate = Chunks(offsets, SIZE, q.device), 0.375

    def run(q, k, v):
        torch.manual_seed(3)
        return softmax_attention(q, k, v, chunks, rate)[0]

    # the weights themselves: values that tell keys apart
    v = torch.eye(70).double().unsqueeze(1).repeat(1, HEADS, 1)
    weights, whole = run(q, k, v), softmax_attention(q, k, v, chunks)[0]
    stay = weights != 0
    torch.testing.assert_close(weights, whole * stay / (1 - rate), **EXACT)
    below = peers.causal(70).unsqueeze(1).expand_as(stay)
    assert abs(float(stay[below].double().mean()) - (1 - rate)) < 0.03
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in (q, k, torch.randn(70, HEADS, 2).double())])
    assert not torch.equal(softmax_attention(q, k, v, chunks, rate)[0], softmax_attention(q, k, v, chunks, rate)[0])


def test_buckets_are_exact_at_every_threshold_and_up_to_62_bits():
    thresholds = peers.bucket_thresholds()
    assert time_maps.bucket_thresholds() == thresholds.tolist()
    powers = 2 ** torch.arange(63)
    near = [base + step for base in (thresholds, powers) for step in (-2, -1, 0, 1, 2)]
    # where float32 numbers begin to round up into a larger cell
    near += [powers[30:] * (16 + cell) // 16 - powers[30:] // 2**25 + step for cell in range(16) for step in (-1, 0, 1)]
    gaps = torch.cat([*near, torch.arange(200_000), torch.randint(2**62, (100_000,)), torch.tensor([2**63 - 1])])
    gaps = gaps[gaps >= 0]
    wanted = torch.searchsorted(thresholds, gaps, right=True)
    found = time_maps.TimeMap("buckets", torch.arange(129).double())
    assert torch.equal(found.weights(gaps).long(), wanted)
    assert torch.equal(found.weights(-gaps).long(), wanted)
    counts = found.gradient(gaps, torch.ones(len(gaps)).double())
    assert torch.equal(counts.long(), torch.bincount(wanted, minlength=129))
