"""The chunkwise and recurrent forms against the parallel definition: values, final states and every gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuxi_torchrec.ops import parallel, recurrent
from fuxi_torchrec.ops.chunks import Chunks
from fuxi_torchrec.ops.positional import ChunkPositions, positional
from fuxi_torchrec.ops.retention import retention
from fuxi_torchrec.ops.temporal import ChunkTimes, phase_vectors, query_vectors, temporal

CPU = torch.device("cpu")
PERIODS = torch.tensor([7, 60, 86_400, 31_536_000])
CHUNK = 4
LENGTHS = st.lists(
    st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 2]), min_size=1, max_size=5
)
GAPS = st.sampled_from([0, 0, 1, 59, 3_600, 86_400, 30 * 31_536_000, -5, -40_000])


class Case:
    """A ragged batch with random leaves, and the three channels in terms of the generic definition."""

    def __init__(self, lengths, gaps, seed, dtype=torch.float64, scale=1):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.dtype = dtype
        self.offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        events, users = self.offsets[-1], len(lengths)
        gap_T = torch.tensor((gaps * (events + users))[: events + users], dtype=torch.int64) * scale
        # a user's times t_1 .. t_{n+1}, and the clock that ignores steps back
        times, nexts, clocks, next_clocks = [], [], [], []
        for n in lengths:
            steps, gap_T = gap_T[: n + 1], gap_T[n + 1 :]
            t = 1_700_000_000 * scale + steps.cumsum(0)
            c = steps.clamp(min=0).cumsum(0)
            times.append(t[:-1]), nexts.append(t[1:]), clocks.append(c[:-1]), next_clocks.append(c[1:])
        self.time_T, self.next_T, self.clock_T, self.next_clock_T = map(torch.cat, (times, nexts, clocks, next_clocks))
        self.start_B = torch.tensor([3 * i for i in range(users)])
        self.position_T = torch.cat([torch.arange(n) + s for n, s in zip(lengths, self.start_B.tolist(), strict=True)])
        self.retention = [
            randn(events, 2, 3),
            randn(events, 2, 3),
            randn(events, 2, 5),
            -randn(2).exp(),
            randn(users, 2, 3, 5),
        ]
        self.positional = [randn(events, 6), randn(9, 4), randn(()), randn(()), randn(users, 4, 6)]
        log_decay = -randn(4).exp() / PERIODS.to(dtype)
        self.temporal = [randn(events, 8, 3), log_decay, randn(8), randn(8), randn(users, 8, 2, 3)]

    def run_retention(self, form, q, k, v, log_decay, initial, lag=0):
        if form == "chunkwise":
            return retention(q, k, v, log_decay, Chunks(self.offsets, CHUNK, CPU), initial, lag)
        clock = torch.arange(len(q))
        return form.attention(q, k, v, log_decay, clock, clock + lag, clock + 1, self.offsets, initial)

    def run_positional(self, form, v, table, gain, skip, initial):
        if form == "chunkwise":
            chunks = Chunks(self.offsets, CHUNK, CPU)
            return positional(v, table, gain, skip, chunks, ChunkPositions(chunks, len(table), self.start_B), initial)
        kernel = table[self.position_T.clamp(max=len(table) - 1)].unsqueeze(1)
        clock = torch.zeros_like(self.position_T)
        zero = v.new_zeros(1)
        y, final = form.attention(
            *(kernel, kernel, v.unsqueeze(1), zero, clock, clock, clock, self.offsets),
            None if initial is None else initial.unsqueeze(1),
        )
        return gain * y.squeeze(1) + skip * v, final.squeeze(1)

    def run_temporal(self, form, v, log_decay, gain, skip, initial):
        key = phase_vectors(self.time_T, PERIODS, self.dtype)
        query = query_vectors(phase_vectors(self.next_T, PERIODS, self.dtype))
        if form == "chunkwise":
            times = ChunkTimes(Chunks(self.offsets, CHUNK, CPU), key, query, self.clock_T, self.next_clock_T)
            return temporal(v, log_decay, gain, skip, times, initial)
        y, final = form.attention(
            *(query, key.repeat(1, 2, 1), v, log_decay.repeat(2)),
            *(self.clock_T, self.next_clock_T, self.next_clock_T, self.offsets, initial),
        )
        return gain[:, None] * y + skip[:, None] * v, final


def outcome(case, channel, form, *extra, initial=True):
    """Outputs, final state and the gradients of all leaves under one fixed upstream gradient."""
    leaves = [leaf.clone().requires_grad_() for leaf in getattr(case, channel)]
    if not initial:
        leaves = leaves[:-1]
    y, final = getattr(case, f"run_{channel}")(form, *leaves, *([] if initial else [None]), *extra)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (y, final)]
    loss = (y * weights[0]).sum() + (final * weights[1]).sum() + sum(leaf[:0].sum() for leaf in leaves if leaf.dim())
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return [y, final, *gradients]


def assert_same(found, wanted, tolerance):
    for a, b in zip(found, wanted, strict=True):
        scale = max(1.0, float(b.detach().abs().max()) if b.numel() else 1.0)
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("channel", ["retention", "positional", "temporal"])
@settings(max_examples=40)
@given(lengths=LENGTHS, gaps=st.lists(GAPS, min_size=1, max_size=12), seed=st.integers(0, 1000), initial=st.booleans())
def test_the_three_forms_agree_on_values_states_and_gradients(channel, lengths, gaps, seed, initial):
    case = Case(lengths, gaps, seed)
    wanted = outcome(case, channel, parallel, initial=initial)
    assert_same(outcome(case, channel, "chunkwise", initial=initial), wanted, 1e-11)
    assert_same(outcome(case, channel, recurrent, initial=initial), wanted, 1e-11)


@pytest.mark.parametrize("lag", [0, 1])
def test_retention_with_a_lag_agrees(lag):
    case = Case([5, 0, 9], [1], 0)
    wanted = outcome(case, "retention", parallel, lag)
    assert_same(outcome(case, "retention", "chunkwise", lag), wanted, 1e-11)


@pytest.mark.parametrize("channel", ["retention", "positional", "temporal"])
def test_chunkwise_gradients_pass_gradcheck(channel):
    case = Case([6, 1, 0, 4], [0, 3, 50, 1000], 3)
    leaves = [leaf.clone().requires_grad_() for leaf in getattr(case, channel)]
    if channel == "temporal":  # the gradient by log r is of the size of the gaps: step in units of θ
        leaves[1] = (leaves[1].detach() * PERIODS).requires_grad_()

    def run(*leaves):
        if channel == "temporal":
            leaves = (leaves[0], leaves[1] / PERIODS, *leaves[2:])
        return getattr(case, f"run_{channel}")("chunkwise", *leaves)

    assert torch.autograd.gradcheck(run, leaves, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("channel", ["retention", "positional", "temporal"])
@pytest.mark.parametrize("scale", [1, 1000], ids=["seconds", "milliseconds"])
def test_float32_stays_close_to_float64_with_gaps_of_decades(channel, scale):
    lengths, gaps = [37, 1, 130], [0, 0, 1, 5, 3_600, 86_400, 2_592_000, 30 * 31_536_000, -3_600]
    wanted = outcome(Case(lengths, gaps, 5, torch.float64, scale), channel, parallel)
    found = outcome(Case(lengths, gaps, 5, torch.float32, scale), channel, "chunkwise")
    if channel == "temporal":  # a short period's gradient by log r is lost beside a long one's: in units of 1/period
        found[3], wanted[3] = found[3] / PERIODS, wanted[3] / PERIODS
    assert_same([x.double() for x in found], wanted, 2e-5)


def test_padding_is_never_read(monkeypatch):
    """Memory that a chunk's padding could expose is filled with NaN; nothing of it reaches a result."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *s, **k: poisoned(*s, dtype=self.dtype, **k))
    case = Case([5, 0, 1, 9], [1, 7], 2)
    for channel in ("retention", "positional", "temporal"):
        for x in outcome(case, channel, "chunkwise"):
            assert torch.isfinite(x).all()


@pytest.mark.parametrize("channel", ["retention", "positional", "temporal"])
@pytest.mark.parametrize(("lengths", "states"), [([CHUNK, 1, 0, 2], 0), ([3 * CHUNK, 1, CHUNK + 1], 3)])
def test_no_state_is_kept_for_the_backward_pass_where_there_is_none(channel, lengths, states):
    """Neither for a history that fits a chunk nor for the first chunk of a longer one."""
    case, kept = Case(lengths, [1, 7], 2), 0
    leaves = [leaf.clone().requires_grad_() for leaf in getattr(case, channel)]

    def keep(x):
        nonlocal kept
        kept += x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        getattr(case, f"run_{channel}")("chunkwise", *leaves[:-1], None)
    assert kept == sum(x.nbytes for x in leaves[:-1]) + states * leaves[-1][0].nbytes


def test_chunks_cut_and_join_are_inverse_and_pad_with_zeros():
    chunks = Chunks([0, 5, 5, 6, 14], 4, CPU)
    x = torch.arange(14.0).reshape(14, 1, 1) + 1
    cut = chunks.cut(x)
    assert cut.shape == (chunks.count, 1, 4, 1) == (5, 1, 4, 1)
    assert cut.sum() == x.sum()
    torch.testing.assert_close(chunks.join(cut), x)
    assert chunks.active == [3, 2]
