"""Float32 and autocast stay close to float64."""

import subprocess
import sys

import pytest
import torch

from fuxi_torchrec import geometric_periods
from fuxi_torchrec.encoders.fuxi_linear.sequences import Sequences
from fuxi_torchrec.encoders.tests.batches import make_batch, make_encoder


def test_no_events_have_the_dtype_of_events_under_autocast():
    encoder = make_encoder(torch.float32)
    for lengths in ([], [3]):
        batch = make_batch(lengths, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):
            x = batch.x.to(torch.float16)
            assert encoder(x, *batch.inputs[1:]).dtype == torch.float32


@pytest.mark.parametrize("scale", [1, 1000], ids=["seconds", "milliseconds"])
def test_float32_stays_close_to_float64(scale):
    periods = geometric_periods(1024 * scale, 8, 4)
    gaps = [0, 0, 1, 59, 3_600_000, 86_400_000, 946_080_000 * scale, -5]
    settings = {"dim": 32, "temporal_periods": periods, "max_positions": 600, "num_layers": 3}
    encoder = make_encoder(**settings, retention_chunk=64, positional_chunk=64, temporal_chunk=16)
    batch = make_batch([500, 1, 77], dim=32, gaps=gaps, start=1_700_000_000 * scale)
    exact = encoder(*batch.inputs, form="parallel")
    exact = exact.detach()
    single = encoder.float()(batch.x.float(), *batch.inputs[1:])
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("form", ["chunkwise", "recurrent"])
@pytest.mark.parametrize("gap", [60, 100])
def test_even_gaps_do_not_drift_in_float32(form, gap):
    """Every step multiplies by the same rounded factor: in a float32 state that error would grow with the steps."""
    events = 12_000
    encoder = make_encoder(temporal_periods=(3_600, 2_592_000), temporal_chunk=16)
    channel = encoder.layers[0].temporal
    with torch.no_grad():
        channel.decay.fill_(8.0)
    times = 1_700_000_000 + gap * torch.arange(events + 1)
    rows = make_batch([events]).x + 0.3

    def run(rows, form):
        sequences = Sequences(encoder.config, [0, events], times[:-1], times[-1:], rows.dtype)
        with torch.no_grad():
            return channel.to(rows.dtype)(rows, sequences, form)[0].double()

    exact = run(rows, "chunkwise")
    torch.testing.assert_close(run(rows.float(), form), exact, rtol=0, atol=1e-6 * float(exact.abs().max()))


def test_times_decays_and_states_stay_float32_under_autocast():
    """In a process of its own: without the variable, bf16 products kill it on CPUs that promise more than they have."""
    code = """
import torch
from fuxi_torchrec.encoders.fuxi_linear.sequences import Sequences
from fuxi_torchrec.encoders.tests.batches import make_batch, make_encoder
encoder = make_encoder(torch.float32, retention_chunk=64, positional_chunk=64, temporal_chunk=16)
batch = make_batch([50, 3], dtype=torch.float32, start=1_700_000_000)
exact = encoder(*batch.inputs)
states = []
for block in encoder.layers:
    for channel in block.channels.values():
        channel.register_forward_hook(lambda m, i, o: states.append(o[0].dtype))
batch.x.requires_grad_()
with torch.autocast("cpu", dtype=torch.bfloat16):
    y = encoder(*batch.inputs)
    y.float().square().mean().backward()
    for form in ("parallel", "recurrent"):
        encoder(*batch.inputs, form=form)
    x, times = batch.x.detach(), batch.timestamps
    state = encoder.append(encoder.init_state(2), x, batch.offsets, times)
    state = encoder.append(state, x[:2], torch.tensor([0, 1, 2]), times[-2:] + 10**6)
    found = encoder.query(state, batch.request)
    # from the same columns a channel reads one event as it reads many
    step = encoder._step(state, batch.request)
    one = (encoder.config, [0, 1, 2], state.pending_time, batch.request, torch.float32, step.position_B)
    for block, memory in zip(encoder.layers, state.memory):
        for name, channel in block.channels.items():
            rows = torch.randn(2, channel.columns).bfloat16()
            many, _ = channel(rows, Sequences(*one), "chunkwise", memory[name], True)
            torch.testing.assert_close(channel.step_output(rows, step, memory[name]), many, rtol=1e-4, atol=1e-4)
    whole = [torch.cat((x[:50], x[:1], x[50:], x[1:2])), torch.tensor([0, 51, 55])]
    later = times[-2:] + 10**6
    whole += [torch.cat((times[:50], later[:1], times[50:], later[1:])), batch.request]
    wanted = encoder(*whole)[[50, 54]]
assert set(states) == {torch.float32}, states
assert {x.dtype for block in state.memory for x in block.values()} == {torch.float32, torch.float64}
assert torch.isfinite(batch.x.grad).all()
error = float((y.float() - exact).norm() / exact.norm())
assert error < 0.02, error
error = float((found - wanted).norm() / wanted.norm())
assert error < 5e-3, error
"""
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX2", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
