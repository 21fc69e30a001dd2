"""The kernels in Triton's interpreter against the parallel definition in float64, and against goldens."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from fuxi_torchrec.encoders.tests import test_goldens as goldens
from fuxi_torchrec.encoders.tests.batches import make_batch, make_encoder
from fuxi_torchrec.encoders.tests.test_native import Case
from fuxi_torchrec.ops import backends, triton

pytestmark = [
    pytest.mark.skipif(
        "triton" not in backends.available(),
        reason=f"no Triton interpreter here ({triton.load().missing or 'TRITON_INTERPRET is not set'}): "
        "make test-gpu-offline",
    ),
    pytest.mark.timeout(900),
]
# no event, one, one more than a chunk of each size; with gaps of 0, of 30 years, and steps back in time
LENGTHS = [0, 1, 33, 17]
SHAPE = (12, 3, 3, 6)


@pytest.fixture
def interpreted():
    with backends.use("triton"):
        yield


def check(case, dtype, tolerance):
    with backends.use("torch"):
        wanted = case.outcome(torch.float64, "parallel")
    found = case.outcome(dtype, "chunkwise")
    for kind, values in zip(("", "gradient of "), range(2), strict=True):
        for name, expected in wanted[values].items():
            atol = tolerance * max(1.0, float(expected.detach().abs().max()))
            result = found[values][name].double()
            torch.testing.assert_close(result, expected, rtol=0, atol=atol, msg=lambda m, n=kind + name: f"{n}: {m}")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("preset", ["paper", "official"])
@pytest.mark.parametrize("initial", [False, True], ids=["from nothing", "from a state"])
def test_values_states_and_all_gradients_in_float64(preset, initial):
    check(Case(SHAPE, LENGTHS, preset, initial=initial), torch.float64, 1e-11)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("shape", "switches"), [((32, 2, 2, 16), {}), ((8, 1, 1, 2), {"temporal_mix": False})])
def test_values_states_and_all_gradients_in_float32(shape, switches):
    check(Case(shape, LENGTHS[1:], **switches), torch.float32, 2e-6)


@pytest.mark.usefixtures("interpreted")
def test_uninitialised_memory_never_reaches_a_result():
    torch.use_deterministic_algorithms(True)  # fresh tensors are filled with NaN
    try:
        check(Case(SHAPE, [3, 0, 18]), torch.float64, 1e-11)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("preset", ["paper", "official"])
def test_append_and_query_equal_the_forward_pass(preset):
    encoder, batch = make_encoder(preset=preset), make_batch([3, 0, 18, 1])
    with torch.no_grad():
        wanted = encoder(*batch.inputs)
        last = [int(b) - 1 for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True) if b > a]
        with backends.use("triton"):
            state = encoder.append(encoder.init_state(4), batch.x, batch.offsets, batch.timestamps)
            found = encoder.query(state, batch.request)
            more = encoder.append(state, batch.x[:4], torch.arange(5), batch.request + 60)
        again = encoder.append(
            encoder.append(encoder.init_state(4), batch.x, batch.offsets, batch.timestamps),
            *(batch.x[:4], torch.arange(5), batch.request + 60),
        )
    torch.testing.assert_close(found[[0, 2, 3]], wanted[last], rtol=0, atol=1e-12)
    assert not found[1].any()
    for one, other in zip(more._tensors(), again._tensors(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("interpreted")
def test_what_stands_in_the_row_of_a_user_without_events_does_not_matter():
    encoder, batch = make_encoder(), make_batch([1, 1])
    empty = encoder.init_state(2)
    with backends.use("triton"):
        wanted, found = (
            encoder.append(state, batch.x, batch.offsets, batch.timestamps)
            for state in (empty, replace(empty, pending=torch.ones_like(empty.pending)))
        )
    for one, other in zip(found._tensors(), wanted._tensors(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_golden_of_the_papers_preset(dtype):
    goldens.test_the_papers_preset_outputs_and_all_gradients(goldens.load("paper"), dtype, "chunkwise", 64)


@pytest.mark.usefixtures("interpreted")
def test_the_golden_of_decoding():
    goldens.test_decoding_through_append_and_query(torch.float64)


def test_bfloat16_rows_give_what_their_float32_copies_give():
    """Only loads and stores are of bfloat16; times, decays and states are not."""
    case = Case((16, 2, 2, 4), [3, 20], initial=False)
    block = case.encoder.layers[0].float()
    arguments = block_arguments(case, block)
    low = arguments[0].bfloat16()
    found = torch.ops.fuxi_torchrec.triton_block(low, *arguments[1:], False, True, False)
    wanted = torch.ops.fuxi_torchrec.triton_block(low.float(), *arguments[1:], False, True, False)
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found[0].float(), wanted[0], rtol=1e-2, atol=1e-2)
    for one, other in zip(found[-3:], wanted[-3:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_under_autocast_states_stay_precise_and_gradients_are_as_good_as_torchs():
    """In a process of its own: without the variable, bf16 products kill it on CPUs that promise more than they have."""
    code = """
import torch
from fuxi_torchrec.encoders.tests.batches import make_batch, make_encoder
from fuxi_torchrec.ops import backends
encoder, batch = make_encoder(torch.float32), make_batch([20, 3], dtype=torch.float32, start=1_700_000_000)
def run():
    encoder.zero_grad()
    x = batch.x.clone().requires_grad_()
    y = encoder(x, *batch.inputs[1:])
    y.float().square().mean().backward()
    return [y.detach().float(), x.grad, *(p.grad.clone() for p in encoder.parameters())]
with backends.use("torch"):
    exact = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        usual = run()
with backends.use("triton"), torch.autocast("cpu", dtype=torch.bfloat16):
    found = run()
    state = encoder.append(encoder.init_state(2), batch.x, batch.offsets, batch.timestamps)
    state = encoder.append(state, batch.x[:2], torch.arange(3), batch.request)
    assert torch.isfinite(encoder.query(state, batch.request + 60)).all()
assert {x.dtype for block in state.memory for x in block.values()} == {torch.float32, torch.float64}
for number, wanted in enumerate(exact):
    error, usually = (float((x[number] - wanted).norm() / wanted.norm().clamp(min=1e-6)) for x in (found, usual))
    assert error < max(0.05, 2 * usually), (number, error, usually)
"""
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX2", "TRITON_INTERPRET": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def block_arguments(case, block):
    from fuxi_torchrec.encoders.fuxi_linear.sequences import Sequences
    from fuxi_torchrec.ops.triton.block import _flat

    offsets, times, request = case.batch.inputs[1:]
    sequences = Sequences(case.encoder.config, offsets.tolist(), times, request, torch.float32)
    projection = (block.norm(case.batch.x.float()) @ block.in_proj).detach()
    parameters = [p.detach() for p in block._fused_parameters()]
    return [projection, *_flat(sequences.triton_events), *parameters, None, None, None]


def test_the_operators_keep_torchs_rules():
    """Schemas, shapes without numbers, autograd: what torch.compile and torch.export rest on."""
    case = Case((8, 1, 1, 2), [2, 17], initial=False)
    arguments = block_arguments(case, case.encoder.layers[0].float())
    arguments[0].requires_grad_()
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.fuxi_torchrec.triton_block, (*arguments, False, True, True), test_utils=tests)
    x = torch.randn(3, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.fuxi_torchrec.triton_norm, (x, True), test_utils=tests)


def rounded(x):
    """To the 10 bits that tf32 has."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize(
    ("setting", "plain", "close"), [("highest", False, True), ("high", False, True), ("high", True, False)]
)
def test_three_products_of_tf32_are_as_good_as_float32_and_one_is_not(setting, plain, close, monkeypatch):
    """The interpreter computes tf32 in float32: its rounding is done here."""
    from triton.runtime import interpreter

    usual, used = interpreter.InterpreterBuilder.create_dot, set()

    def dot(self, a, b, d, precision, *others):
        used.add(str(precision))
        if "TF32" not in str(precision):
            return usual(self, a, b, d, precision, *others)
        left, right = rounded(a.data), rounded(b.data)
        product = left @ right
        if not plain:
            product = product + left @ rounded(b.data - right) + rounded(a.data - left) @ right
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    case, before = Case((16, 1, 1, 16), [33], initial=False), torch.get_float32_matmul_precision()
    with backends.use("torch"):
        wanted = case.outcome(torch.float64, "parallel")[0]["y"]
    torch.set_float32_matmul_precision(setting)
    try:
        with backends.use("triton"):
            found = case.outcome(torch.float32, "chunkwise")[0]["y"]
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(used) == 1 and ("TF32x3" in used.pop()) == (setting == "high")
    error = float((found.double() - wanted).detach().abs().max())
    assert (error < 5e-6) == close, error
