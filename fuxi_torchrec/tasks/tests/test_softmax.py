"""The losses against their definition, written with whole matrices and differentiated by autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuxi_torchrec.tasks import softmax as module
from fuxi_torchrec.tasks.softmax import candidate_softmax, position_softmax, scaled_items, scaled_queries

D = 5
TOLERANCES = {torch.float64: {"rtol": 1e-10, "atol": 1e-11}, torch.float32: {"rtol": 1e-4, "atol": 1e-4}}


def candidate_oracle(queries, targets, candidates, log_weights, target_column, weights):
    total = 0 * queries.sum()
    for p, (q, t, w) in enumerate(zip(queries, targets, weights, strict=True)):
        others = [m for m in range(len(candidates)) if m != target_column[p]]
        bias = 0 if log_weights is None else log_weights[others]
        logits = torch.cat(((q @ t)[None], candidates[others] @ q + bias))
        total = total + w * (torch.logsumexp(logits, 0) - logits[0])
    return total


def position_oracle(queries, target_rows, rows, candidate_rows, weights):
    total = 0 * queries.sum()
    for p, (q, w) in enumerate(zip(queries, weights, strict=True)):
        others = [row for row in candidate_rows[p].tolist() if row != target_rows[p]]
        logits = rows[[target_rows[p].item(), *others]] @ q
        total = total + w * (torch.logsumexp(logits, 0) - logits[0])
    return total


class Case:
    """Positions, some of weight 0, and candidates that some positions have for a target."""

    def __init__(self, positions, candidates, dtype=torch.float64, width=D, scale=1.0, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return (scale * torch.randn(*shape, generator=generator)).to(dtype)  # the same values in any dtype

        def randint(low, high, *shape):
            return torch.randint(low, high, shape, generator=generator)

        self.queries, self.targets, self.candidates = (randn(n, width) for n in (positions, positions, candidates))
        self.log_weights = randn(candidates)
        self.column = randint(-1, candidates, positions) if candidates else torch.full((positions,), -1)
        self.weights = randint(0, 4, positions).to(dtype)
        # own candidates, from few rows: with duplicates, and with the target among them
        self.rows = randn(7, width)
        self.target_rows = randint(0, 7, positions)
        self.candidate_rows = randint(0, 7, positions, candidates)

    def candidate(self, function, log_weights=True):
        bias = self.log_weights if log_weights else None
        leaves = [self.queries, self.targets, self.candidates]
        return with_gradients(lambda q, t, c: function(q, t, c, bias, self.column, self.weights), leaves)

    def position(self, function):
        leaves = [self.queries, self.rows]
        return with_gradients(lambda q, r: function(q, self.target_rows, r, self.candidate_rows, self.weights), leaves)


def with_gradients(function, leaves):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    value = function(*leaves)
    (3 * value).backward()
    return [value.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def close(got, expected):
    torch.testing.assert_close(got, expected, **TOLERANCES[got[0].dtype])


@pytest.fixture(params=["one chunk", "small chunks"])
def _chunks(request, monkeypatch):
    if request.param == "small chunks":  # of D and of 1 positions
        monkeypatch.setattr(module, "LOGITS", 1)
        monkeypatch.setattr(module, "GATHERED", 1)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("positions", "candidates"), [(23, 9), (10, 1), (13, 0), (1, 30), (0, 4), (0, 0)])
def test_losses_and_gradients_are_those_of_the_definition(positions, candidates, dtype):
    case = Case(positions, candidates, dtype)
    close(case.candidate(candidate_softmax), case.candidate(candidate_oracle))
    close(case.candidate(candidate_softmax, False), case.candidate(candidate_oracle, False))
    close(case.position(position_softmax), case.position(position_oracle))


@pytest.mark.usefixtures("_chunks")
def test_gradcheck():
    case = Case(7, 4, width=2)
    queries, targets, candidates, rows = (
        x.requires_grad_() for x in (case.queries, case.targets, case.candidates, case.rows)
    )
    constants = (case.log_weights, case.column, case.weights)
    assert torch.autograd.gradcheck(
        lambda q, t, c: candidate_softmax(q, t, c, *constants), (queries, targets, candidates)
    )
    constants = (case.candidate_rows, case.weights)
    assert torch.autograd.gradcheck(lambda q, r: position_softmax(q, case.target_rows, r, *constants), (queries, rows))


def test_all_items_as_candidates_are_cross_entropy():
    case = Case(30, 12)
    case.column = torch.arange(30) % 12  # every target is in the pool

    def full(q, c):
        return candidate_softmax(q, c[case.column], c, None, case.column, case.weights)

    def cross_entropy(q, c):
        return (F.cross_entropy(q @ c.T, case.column, reduction="none") * case.weights).sum()

    leaves = [case.queries, case.candidates]
    close(with_gradients(full, leaves), with_gradients(cross_entropy, leaves))


def test_log_multiplicity_stands_for_repeated_draws():
    case = Case(20, 6)
    drawn = torch.tensor([4, 0, 4, 4, 2, 5, 0])
    ids, times = drawn.unique(return_counts=True)
    own = torch.tensor([0, 4, 1, 5] * 5)  # item 1 was not drawn

    def distinct(q, t, c):
        found = torch.tensor([ids.tolist().index(i) if i in ids.tolist() else -1 for i in own.tolist()])
        return candidate_softmax(q, t, c[ids], times.double().log(), found, case.weights)

    def repeated(q, t, c):
        logits = (q @ c[drawn].T).masked_fill(drawn == own[:, None], -torch.inf)
        logits = torch.cat(((q * t).sum(1, keepdim=True), logits), 1)
        return (case.weights * -logits.log_softmax(1)[:, 0]).sum()

    leaves = [case.queries, case.targets, case.candidates]
    close(with_gradients(distinct, leaves), with_gradients(repeated, leaves))


def test_a_pool_with_only_the_target_costs_nothing():
    case = Case(4, 1)
    case.column = torch.zeros(4, dtype=torch.int64)
    case.candidate_rows = case.target_rows[:, None]
    for loss, *gradients in (case.candidate(candidate_softmax), case.position(position_softmax)):
        assert loss == 0
        assert all((g == 0).all() for g in gradients)


def test_positions_of_weight_0_do_not_count():
    case = Case(40, 9)
    case.weights[:20] = 0
    _, dq, dt, _ = case.candidate(candidate_softmax)
    assert (dq[:20] == 0).all() and (dt[:20] == 0).all() and (dq[20:] != 0).any()
    loss = case.candidate(candidate_softmax)[0]
    case.queries[:20] = case.targets[:20] = 1e3
    assert case.candidate(candidate_softmax)[0] == loss
    assert (case.position(position_softmax)[1][:20] == 0).all()


@pytest.mark.parametrize("scale", [1e-8, 300.0, 1e4])  # beyond, autograd of the definition is no longer exact
def test_any_size_of_logits_is_safe(scale):
    low, high = Case(23, 9, torch.float32, scale=scale), Case(23, 9, torch.float64, scale=scale)
    for got, expected in (
        (low.candidate(candidate_softmax), high.candidate(candidate_oracle)),
        (low.position(position_softmax), high.position(position_oracle)),
    ):
        for x, y in zip(got, expected, strict=True):
            largest = max(1.0, y.abs().max().item())
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5 * largest)


def test_half_precision_is_computed_in_float32():
    case = Case(23, 9, torch.float32)
    case.queries, case.rows = case.queries.bfloat16(), case.rows.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        loss, dq, _, dc = case.candidate(candidate_softmax)
        position = case.position(position_softmax)
    assert (loss.dtype, dq.dtype, dc.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    case.queries, case.rows = case.queries.float(), case.rows.float()
    torch.testing.assert_close(loss, case.candidate(candidate_softmax)[0])
    torch.testing.assert_close(position[0], case.position(position_softmax)[0])


def test_rows_need_not_be_contiguous():
    case = Case(23, 9)
    expected = case.candidate(candidate_softmax), case.position(position_softmax)
    case.queries, case.candidates, case.rows = (x.T.contiguous().T for x in (case.queries, case.candidates, case.rows))
    case.targets = torch.cat((case.targets, case.targets), 1)[:, :D]
    close(case.candidate(candidate_softmax), expected[0])
    close(case.position(position_softmax), expected[1])


def test_backward_can_run_again_and_only_when_wanted():
    case = Case(23, 9)
    queries = case.queries.requires_grad_()
    loss = candidate_softmax(queries, case.targets, case.candidates, None, case.column, case.weights)
    (once,) = torch.autograd.grad(loss, queries, retain_graph=True)
    (twice,) = torch.autograd.grad(2 * loss, queries)
    close([twice], [2 * once])
    with torch.no_grad():
        again = candidate_softmax(queries, case.targets, case.candidates, None, case.column, case.weights)
    assert again == loss and not again.requires_grad


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor holds."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return made


def test_logits_of_all_positions_never_exist_at_once(monkeypatch):
    positions, candidates = 600, 300
    monkeypatch.setattr(module, "LOGITS", 2**13)
    monkeypatch.setattr(module, "GATHERED", 2**13)
    case = Case(positions, candidates, torch.float32)
    with Largest() as largest:
        case.candidate(candidate_softmax)
    assert positions * D < largest.elements <= 2**13
    case.candidate_rows = case.candidate_rows[:, :50].clone()
    with Largest() as largest:
        case.position(position_softmax)
    assert largest.elements == case.candidate_rows.numel()  # an input


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_scaled_rows(similarity):
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-9, 0.0]], requires_grad=True)
    items, queries = scaled_items(rows, similarity), scaled_queries(rows, similarity, 0.05)
    unit = torch.tensor([[0.6, 0.8], [0.0, 0.0], [1e-3, 0.0]])
    torch.testing.assert_close(items, unit if similarity == "cosine" else rows)
    torch.testing.assert_close(queries, 20 * items)
    queries.sum().backward()
    assert rows.grad.isfinite().all()
