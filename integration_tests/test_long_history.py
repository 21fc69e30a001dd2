"""Long histories: 100,000 events forward and backward in bounded memory, 20,000 appended one by one."""

import subprocess
import sys

import pytest
import torch

from fuxi_torchrec.encoders.tests.batches import make_batch, make_encoder

CODE = """
import torch
from fuxi_torchrec import FuXiLinearConfig, FuXiLinearEncoder

torch.set_num_threads(2)
n = 100_000
encoder = FuXiLinearEncoder(FuXiLinearConfig(
    dim=64, num_layers=2, num_heads=2, max_positions=16_384, temporal_periods=(3_600, 86_400, 604_800, 31_536_000)))
x = torch.randn(n, 64, requires_grad=True)
times = 1_700_000_000 + torch.randint(0, 5_000, (n,)).cumsum(0)
y = encoder(x, torch.tensor([0, n]), times, times[-1:] + 60)
y.square().mean().backward()
assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()
with open("/proc/self/status") as file:
    print(next(line for line in file if line.startswith("VmHWM")).split()[1])
"""


def test_a_hundred_thousand_events_train_within_four_gigabytes():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 4e9


@pytest.mark.timeout(400)
@pytest.mark.parametrize("trained", [False, True], ids=["as initialised", "away from it"])
def test_twenty_thousand_one_event_appends_stay_with_the_forward_pass(trained):
    n = 20_000
    shape = {"dim": 32, "num_layers": 2, "num_heads": 4, "max_positions": 16_384, "kernel_dim": 16, "ffn_dim": 32}
    shape |= {"temporal_periods": (3_600, 86_400, 604_800, 31_536_000)}
    shape |= {"retention_chunk": 64, "positional_chunk": 64, "temporal_chunk": 16}
    encoder = make_encoder(torch.float32, **shape)
    if not trained:
        encoder.reset_parameters()
    batch = make_batch([n], dim=32, dtype=torch.float32, gaps=[0, 1, 60, 600, 4_000, 90_000])
    state = encoder.init_state(1)
    one = torch.tensor([0, 1])
    for i in range(n):
        state = encoder.append(state, batch.x[i : i + 1], one, batch.timestamps[i : i + 1], validate=False)
        if i + 1 in (100, 1_000, n):
            now = batch.timestamps[i : i + 1] + 500
            with torch.no_grad():
                y = encoder(batch.x[: i + 1], torch.tensor([0, i + 1]), batch.timestamps[: i + 1], now)[-1:]
            torch.testing.assert_close(encoder.query(state, now), y, rtol=0, atol=1e-5)
