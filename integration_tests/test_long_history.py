"""A history of 100,000 events goes forward and backward in bounded memory."""

import subprocess
import sys

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
