"""The native operators as torch sees them: schema, shapes, autograd, export, compilation; and decoding by them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from fuxi_torchrec.encoders.fuxi_linear.encoder import _pending
from fuxi_torchrec.encoders.fuxi_linear.sequences import Sequences
from fuxi_torchrec.encoders.tests.batches import make_batch, make_encoder
from fuxi_torchrec.ops import backends

KERNELS = [name for name in backends.available() if name.startswith("native-")]

pytestmark = pytest.mark.skipif(not KERNELS, reason=f"no native kernels: {backends.found().missing}")


def block_arguments(with_state, grad=True):
    """A call of the fused block, as the encoder makes it."""
    calls = []
    encoder, batch = make_encoder(torch.float32, dim=24, num_layers=1), make_batch([5, 0, 40], dim=24)
    sequences = Sequences(encoder.config, batch.offsets.tolist(), *batch.inputs[2:], torch.float32)
    state = {n: torch.randn_like(x) for n, x in encoder.init_state(3).memory[0].items()} if with_state else None

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.fuxi_torchrec.block.default:
                calls.append(args)
            return function(*args, **(kwargs or {}))

    with Record(), torch.set_grad_enabled(grad):
        encoder.layers[0](batch.x.float(), sequences, "chunkwise", state, with_state)
    (arguments,) = calls
    floats = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in arguments]
    leaves = {0, 2, 6, 7, 8, 9, 10, 11, 13, 14, 15}
    return [
        x.detach().clone().requires_grad_() if float_ and n in leaves and grad else x
        for n, (x, float_) in enumerate(zip(arguments, floats, strict=True))
    ]


@pytest.mark.parametrize("with_state", [False, True])
def test_the_fused_block_passes_torchs_own_checks(with_state):
    opcheck(torch.ops.fuxi_torchrec.block.default, block_arguments(with_state))


def test_the_backward_passes_torchs_own_checks():
    arguments = block_arguments(True, grad=False)
    arguments[-1] = True
    gated, *others = torch.ops.fuxi_torchrec.block(*arguments)
    kept, after = others[:4], others[4:]
    grads = [torch.randn_like(x) for x in (gated, *after)]
    opcheck(torch.ops.fuxi_torchrec.block_backward.default, (*grads, *kept, *arguments[:-2]))


def norm_case(official):
    norm = F.layer_norm if official else F.rms_norm
    return "norm", (official,), lambda x: norm(x, x.shape[-1:], eps=1e-6)


def swiglu(x):
    linear, gate = x.chunk(2, dim=-1)
    return linear * F.silu(gate)


# operator, its settings, the same in torch
ROW_OPERATORS = {
    "rms norm": norm_case(False),
    "layer norm": norm_case(True),
    "swiglu": ("swiglu", (), swiglu),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ROW_OPERATORS)
@settings(max_examples=25)
@given(rows=st.sampled_from([0, 1, 3, 200]), width=st.integers(2, 40), seed=st.integers(0, 1000))
def test_operators_over_rows_are_torchs_in_float64(kernels, name, rows, width, seed):
    operator, arguments, definition = ROW_OPERATORS[name]
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, 4 * width + 1, generator=generator, dtype=torch.float64)
    x = wide[:, 1 : 2 * width + 1].requires_grad_()  # neither contiguous nor aligned
    narrow = wide.float()[:, 1 : 2 * width + 1].detach().requires_grad_()
    with backends.use(kernels):
        wanted, found = definition(x), getattr(torch.ops.fuxi_torchrec, operator)(narrow, *arguments)
        weights = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
        (wanted_grad,) = torch.autograd.grad((wanted * weights).sum(), x)
        (found_grad,) = torch.autograd.grad((found * weights.float()).sum(), narrow)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    scale = max(1.0, float(wanted_grad.abs().max())) if rows else 1.0
    torch.testing.assert_close(found_grad.double(), wanted_grad, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name", ROW_OPERATORS)
def test_operators_over_rows_pass_torchs_own_checks(name):
    operator, arguments, definition = ROW_OPERATORS[name]
    x = torch.randn(5, 12, requires_grad=True)
    opcheck(getattr(torch.ops.fuxi_torchrec, operator).default, (x, *arguments))
    grad = torch.randn_like(definition(x.detach()))
    opcheck(getattr(torch.ops.fuxi_torchrec, operator + "_backward").default, (grad, x.detach(), *arguments))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ROW_OPERATORS)
def test_numbers_that_are_none_stay_so_in_their_row_alone(kernels, name):
    operator, arguments, _ = ROW_OPERATORS[name]
    x = torch.randn(3, 38)
    x[1, 30] = float("nan")
    with backends.use(kernels):
        y = getattr(torch.ops.fuxi_torchrec, operator)(x, *arguments)
    assert y[1].isnan().any() and y[[0, 2]].isfinite().all()


def stored(lengths, dtype=torch.float32, **changes):
    encoder = make_encoder(dtype, **changes)
    batch = make_batch(lengths, dim=encoder.config.dim, dtype=dtype)
    with backends.use("torch"):
        return encoder, encoder.append(encoder.init_state(len(lengths)), *batch.inputs[:3]), batch.request


def test_decoding_passes_torchs_own_checks():
    encoder, state, times = stored([5, 0, 40])
    arguments = (*_pending(state), times, *encoder._weights())
    for name in ("query", "append"):
        with torch.no_grad():
            opcheck(
                getattr(torch.ops.fuxi_torchrec, name).default,
                arguments,
                test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
            )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("users", [1, 2, 5, 17, 70])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"preset": "official", "dim": 30, "num_heads": 5, "kernel_dim": 10, "temporal_periods": (7, 60, 3600)},
        {"temporal_mix": False, "temporal_phases": False, "num_layers": 1, "dim": 64, "ffn_dim": 9},
        {"preset": "official", "learn_temporal_decay": False, "num_layers": 3},
    ],
    ids=str,
)
def test_queries_and_appends_are_those_of_torch_in_float64(kernels, users, changes):
    lengths = [(7 * n) % 23 for n in range(users)]
    encoder, state, times = stored(lengths, torch.float64, **changes)
    rows = torch.randn(users, encoder.config.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    wanted = encoder.append(state, rows, torch.arange(users + 1), times)
    queried = [encoder.query(s, times + 1000) for s in (state, wanted)]
    encoder.float()
    narrow = state.map(lambda x: x)  # the temporal memory stays float64
    narrow = type(state)(
        state.fingerprint,
        state.count,
        state.pending_time,
        state.pending.float(),
        tuple({n: x if n == "temporal" else x.float() for n, x in block.items()} for block in narrow.memory),
    )
    with backends.use(kernels):
        found = encoder.append(narrow, rows.float(), torch.arange(users + 1), times)
        found_queried = [encoder.query(s, times + 1000) for s in (narrow, found)]
    for a, b in zip([*found._tensors(), *found_queried], [*wanted._tensors(), *queried], strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=1e-5 * max(1.0, float(b.abs().max())))
    assert not found_queried[0][state.count == 0].any(), "a user without events has a zero vector"


def test_no_user_at_all_is_no_trouble():
    encoder, state, times = stored([3])
    nobody = state.select([])
    assert encoder.query(nobody, times[:0]).shape == (0, 16)


def test_with_gradients_a_query_is_torchs():
    encoder, state, times = stored([3])
    assert encoder.query_unchecked(state, times).requires_grad


class Query(torch.nn.Module):
    def __init__(self, encoder, state):
        super().__init__()
        self.encoder, self.like = encoder, state

    def forward(self, state, times):
        with torch.no_grad():
            return self.encoder.query_unchecked(self.like.from_flat(state), times)


def test_an_exported_query_needs_no_operator_of_ours():
    encoder, state, times = stored([3, 8])
    exported = torch.export.export(Query(encoder, state), (state.flat(), times), strict=False)
    assert not any("fuxi_torchrec." in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(state.flat(), times), encoder.query(state, times), rtol=0, atol=1e-5)


def test_an_encoder_decodes_the_same_after_it_was_exported():
    encoder, state, times = stored([3, 8])
    before = encoder.query(state, times)
    torch.export.export(Query(encoder, state), (state.flat(), times), strict=False)
    torch.testing.assert_close(encoder.query(state, times), before, rtol=0, atol=0)
    with torch.no_grad():
        encoder.layers[0].out_proj.zero_()
    assert not torch.equal(encoder.query(state, times), before)


class Whole(torch.nn.Module):
    """An encoder over one layout of users, as a program."""

    def __init__(self, encoder, sequences):
        super().__init__()
        self.block, self.sequences = encoder.layers[0], sequences

    def forward(self, x):
        return self.block(x, self.sequences)[0]


@pytest.fixture
def whole():
    encoder, batch = make_encoder(torch.float32), make_batch([5, 0, 40], dtype=torch.float32)
    sequences = Sequences(encoder.config, batch.offsets.tolist(), *batch.inputs[2:], torch.float32)
    program = Whole(encoder, sequences)
    program(batch.x)  # the layout is made, and not part of the program
    return program, batch.x


def test_an_exported_block_is_the_eager_one_and_holds_the_operator(whole):
    program, x = whole
    exported = torch.export.export(program, (x,))
    assert any("fuxi_torchrec.block" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x), program(x), rtol=0, atol=1e-6)


def test_a_block_compiles_as_one_graph_with_its_gradients(whole):
    program, x = whole
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    results = []
    for run in (program, compiled):
        rows = x.clone().requires_grad_()
        y = run(rows)
        results.append([y, *torch.autograd.grad(y.square().sum(), [rows, *program.block.parameters()])])
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * max(1.0, float(wanted.detach().abs().max())))
