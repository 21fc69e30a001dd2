"""The chunked recurrences against plain loops: outputs, final states and every gradient."""

import itertools

import pytest
import torch

from fuxi_torchrec.ops.chunks import Chunks
from fuxi_torchrec.ops.scans import diagonal_scan, selective_scan

LENGTHS = [[0, 1, 7, 8, 9, 40, 0], [3], [], [0], [8, 8], [1, 1, 1]]


def offsets_of(lengths):
    return list(itertools.accumulate(lengths, initial=0))


def diagonal_loop(log_decay, update, offsets, initial):
    rows, final = [], []
    for user, (a, b) in enumerate(itertools.pairwise(offsets)):
        h = initial[user]
        for i in range(a, b):
            h = log_decay[i].exp() * h + update[i]
            rows.append(h)
        final.append(h)
    return torch.stack(rows) if rows else update, torch.stack(final) if final else initial


def selective_loop(u, step, A, B, C, offsets, initial):
    rows, final = [], []
    for user, (a, b) in enumerate(itertools.pairwise(offsets)):
        h = initial[user]
        for i in range(a, b):
            h = torch.exp(step[i, :, None] * A) * h + (step[i] * u[i])[:, None] * B[i]
            rows.append(h @ C[i])
        final.append(h)
    return torch.stack(rows) if rows else u, torch.stack(final) if final else initial


def check(op, loop, inputs, offsets, initial, size, dtype):
    """Both ways with an initial state and without, on a loss of outputs and final states."""
    chunks = Chunks(offsets, size, torch.device("cpu"))
    for with_initial in (True, False):
        start = initial if with_initial else torch.zeros_like(initial)
        found_in = [x.to(dtype, copy=True).requires_grad_() for x in (*inputs, start)]
        wanted_in = [x.clone().requires_grad_() for x in (*inputs, start)]
        y, final = op(*found_in[:-1], chunks, found_in[-1] if with_initial else None)
        y_wanted, final_wanted = loop(*wanted_in[:-1], offsets, wanted_in[-1])
        assert y.dtype == dtype
        tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-5}
        torch.testing.assert_close(y.double(), y_wanted, **tolerance)
        torch.testing.assert_close(final.double(), final_wanted, **tolerance)
        (y.double().sin().sum() + final.double().cos().sum()).backward()
        (y_wanted.sin().sum() + final_wanted.cos().sum()).backward()
        for a, b in list(zip(found_in, wanted_in, strict=True))[: None if with_initial else -1]:
            if b.numel() and b.grad is not None:  # A is not used without events
                worst = 1e-11 if dtype == torch.float64 else 1e-4 * float(b.grad.abs().max())
                torch.testing.assert_close(a.grad.double(), b.grad, rtol=0, atol=worst)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1, 8, 16])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_diagonal_scan_equals_a_loop_with_every_gradient(lengths, size, dtype):
    torch.manual_seed(0)
    offsets = offsets_of(lengths)
    events = offsets[-1]
    log_decay = -torch.rand(events, 5, dtype=torch.float64) * 3
    inputs = (log_decay, torch.randn(events, 5, dtype=torch.float64))
    check(diagonal_scan, diagonal_loop, inputs, offsets, torch.randn(len(lengths), 5).double(), size, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1, 8, 16])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_selective_scan_equals_a_loop_with_every_gradient(lengths, size, dtype, monkeypatch):
    monkeypatch.setattr("fuxi_torchrec.ops.scans._GROUP_ELEMENTS", 24)  # groups of two chunks
    torch.manual_seed(0)
    offsets = offsets_of(lengths)
    events = offsets[-1]
    u, B, C = (torch.randn(events, n).double() for n in (4, 3, 3))
    step, A = torch.rand(events, 4).double(), -torch.rand(4, 3).double() * 4
    initial = torch.randn(len(lengths), 4, 3).double()
    check(selective_scan, selective_loop, (u, step, A, B, C), offsets, initial, size, dtype)


def test_a_long_history_in_float32_stays_near_float64():
    torch.manual_seed(0)
    log_decay, update = -torch.rand(10_000, 4).double() * 0.01, torch.randn(10_000, 4).double()
    chunks = Chunks([0, 10_000], 64, torch.device("cpu"))
    exact, _ = diagonal_scan(log_decay, update, chunks)
    found, _ = diagonal_scan(log_decay.float(), update.float(), chunks)
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-5
