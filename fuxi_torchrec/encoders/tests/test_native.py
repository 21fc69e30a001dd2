"""The native kernels of every instruction set against the parallel definition in float64."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fuxi_torchrec.encoders.fuxi_linear.sequences import Sequences
from fuxi_torchrec.encoders.tests.batches import GAPS, make_batch, make_encoder
from fuxi_torchrec.ops import backends

KERNELS = [name for name in backends.available() if name.startswith("native-")]
CHUNK = 32
LENGTHS = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
# (dim, heads, scales, kernel width): usual ones, and some that fill no vector
SHAPES = [(64, 2, 4, 32), (32, 4, 8, 16), (16, 1, 1, 6), (12, 3, 3, 2), (30, 5, 3, 10), (150, 2, 5, 34), (8, 8, 2, 4)]

pytestmark = pytest.mark.skipif(not KERNELS, reason=f"no native kernels: {backends.found().missing}")


class Case:
    """A block, a ragged batch, and states before it, in float64 or float32 of the same numbers."""

    def __init__(self, shape, lengths, preset="paper", seed=0, initial=True, gaps=GAPS, **changes):
        dim, heads, scales, kernel = shape
        periods = tuple(7 * 60**k for k in range(scales))
        sizes = {"dim": dim, "num_heads": heads, "temporal_periods": periods, "kernel_dim": kernel}
        self.encoder = make_encoder(seed=seed, preset=preset, max_positions=50, num_layers=1, **sizes, **changes)
        self.batch = make_batch(lengths, seed, dim, gaps=gaps)
        generator = torch.Generator().manual_seed(seed)
        self.state = None
        self.start = None
        if initial:
            like = self.encoder.init_state(len(lengths)).memory[0]
            self.state = {n: torch.randn(x.shape, generator=generator, dtype=torch.float64) for n, x in like.items()}
            self.start = torch.arange(len(lengths)) * 9

    def outcome(self, dtype, form):
        """Output, states after, and the gradients of rows, parameters and states before."""
        block = copy.deepcopy(self.encoder.layers[0]).to(dtype)
        x = self.batch.x.to(dtype, copy=True).requires_grad_()
        state = None
        if self.state is not None:
            state = {
                name: s.to(torch.float64 if name == "temporal" else dtype, copy=True).requires_grad_()
                for name, s in self.state.items()
            }
        offsets, times, request = self.batch.inputs[1:]
        sequences = Sequences(self.encoder.config, offsets.tolist(), times, request, dtype, self.start)
        y, after = block(x, sequences, form, state, True)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (y, *after.values())]
        loss = sum((t.double() * w).sum() for t, w in zip((y, *after.values()), weights, strict=True))
        leaves = {"x": x, **dict(block.named_parameters()), **{f"before {n}": s for n, s in (state or {}).items()}}
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        values = {"y": y, **{f"after {name}": s for name, s in after.items()}}
        return values, dict(zip(leaves, grads, strict=True))


def check(case):
    values, gradients = case.outcome(torch.float64, "parallel")
    found, found_gradients = case.outcome(torch.float32, "chunkwise")
    with backends.use("torch"):
        usual, usual_gradients = case.outcome(torch.float32, "chunkwise")
    for name, wanted in values.items():
        assert_close(name, found[name], wanted, usual[name], 1e-5)
    for name, wanted in gradients.items():
        assert_close(f"gradient of {name}", found_gradients[name], wanted, usual_gradients[name], 1e-4)


def assert_close(name, found, wanted, usual, tolerance):
    """Of the largest value, at least 1; where float32 in torch is worse than that already, no more than a few times."""
    if wanted.numel():
        scale, error = (
            max(1.0, float(wanted.detach().abs().max())),
            float((usual.double() - wanted).detach().abs().max()),
        )
        atol = max(tolerance * scale, 4 * error)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=atol, msg=lambda m: f"{name}: {m}")
    assert found.shape == wanted.shape


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("preset", ["paper", "official"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("initial", [False, True], ids=["from nothing", "from a state"])
def test_values_states_and_all_gradients(kernels, preset, shape, initial):
    with backends.use(kernels):
        check(Case(shape, LENGTHS, preset, initial=initial))


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=25)
@given(
    lengths=st.lists(st.sampled_from([*LENGTHS, 2, 7, 8, 9, 16, 2 * CHUNK]), min_size=1, max_size=5),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 20)),
    preset=st.sampled_from(["paper", "official"]),
    seed=st.integers(0, 1000),
    initial=st.booleans(),
    switches=st.fixed_dictionaries({"temporal_mix": st.booleans(), "temporal_phases": st.booleans()}),
)
def test_any_shape_and_any_lengths(kernels, lengths, shape, preset, seed, initial, switches):
    times, heads, scales, half_kernel = shape
    dim = 2 * scales * heads * times
    # LayerNorm of two columns is ±1 whatever they are: its gradient is rounding, in torch (2e-4 and worse) as here
    assume(dim > 2 or preset == "paper")
    with backends.use(kernels):
        check(Case((dim, heads, scales, 2 * half_kernel), lengths, preset, seed, initial, **switches))


@pytest.mark.parametrize("kernels", KERNELS)
def test_ten_thousand_events_stay_close(kernels):
    encoder = make_encoder(torch.float64, dim=32, num_heads=2, max_positions=10_000, kernel_dim=8)
    batch = make_batch([10_000], dim=32, gaps=[0, 1, 60, 3_600, 86_400])
    with torch.no_grad():
        wanted = encoder(*batch.inputs)
        with backends.use(kernels):
            found = encoder.float()(batch.x.float(), *batch.inputs[1:])
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("kernels", KERNELS)
def test_threads_change_rounding_only_and_each_number_gives_the_same_every_time(kernels):
    case, before = Case((64, 2, 4, 32), [700, 0, 90, 3]), torch.get_num_threads()
    try:
        with backends.use(kernels):
            one = case.outcome(torch.float32, "chunkwise")
            torch.set_num_threads(3)
            three, again = (case.outcome(torch.float32, "chunkwise") for _ in range(2))
    finally:
        torch.set_num_threads(before)
    for found, same, wanted in zip(three, again, one, strict=True):
        for name, x in found.items():
            assert torch.equal(x, same[name]), name
            scale = float(wanted[name].detach().abs().max())
            torch.testing.assert_close(x, wanted[name], rtol=0, atol=1e-5 * max(1.0, scale))


def poisoned(x):
    """The same numbers, neither contiguous nor aligned, with NaN around them."""
    shape = [n + 3 for n in x.shape]
    around = torch.full(shape, float("nan"), dtype=x.dtype) if x.is_floating_point() else torch.full(shape, -7)
    inner = around[tuple(slice(1, n + 1) for n in x.shape)]
    return inner.copy_(x)


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_may_lie_anywhere_and_nothing_beside_them_is_read(kernels):
    encoder = make_encoder(torch.float32, dim=64, num_heads=2, kernel_dim=10, temporal_periods=(7, 60))
    batch = make_batch([40, 0, 1, 33], dim=64, dtype=torch.float32)
    odd = copy.deepcopy(encoder)
    for module in odd.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.dim():
                module._parameters[name] = torch.nn.Parameter(poisoned(parameter.detach()))
    with backends.use(kernels), torch.no_grad():
        wanted = encoder(*batch.inputs)
        found = odd(*(poisoned(x) for x in batch.inputs))
        # products of the projections may round otherwise for another layout
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.fixture
def poisoned_memory():
    """Fresh tensors are filled with NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.usefixtures("poisoned_memory")
def test_uninitialised_memory_never_reaches_a_result(kernels):
    with backends.use(kernels):
        check(Case((30, 5, 3, 10), LENGTHS))


def test_a_second_derivative_is_refused():
    encoder, batch = make_encoder(torch.float32), make_batch([5], dtype=torch.float32)
    x = batch.x.requires_grad_()
    with pytest.raises(RuntimeError, match='the chunkwise form has no second derivatives: use form="parallel"'):
        torch.autograd.grad(encoder(x, *batch.inputs[1:]).square().sum(), x, create_graph=True)


def test_without_gradients_nothing_is_kept():
    encoder, batch = make_encoder(torch.float32), make_batch([5, 40], dtype=torch.float32)
    with torch.no_grad():
        wanted = encoder(*batch.inputs)
    torch.testing.assert_close(encoder(*batch.inputs), wanted, rtol=0, atol=0)


def test_checkpointed_blocks_have_the_same_gradients():
    batch, results = make_batch([5, 40], dtype=torch.float32), []
    for again in (False, True):
        encoder = make_encoder(torch.float32, activation_checkpointing=again).train()
        y = encoder(batch.x.clone().requires_grad_(), *batch.inputs[1:])
        results.append(torch.autograd.grad(y.square().sum(), list(encoder.parameters())))
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
