"""On a machine with CUDA devices: ``pytest -m gpu``. Never run yet; docs/gpu.md says how to send back what it finds."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fuxi_torchrec.encoders.tests import test_goldens as goldens
from fuxi_torchrec.encoders.tests.batches import make_batch, make_encoder
from fuxi_torchrec.ops import backends

ROOT = Path(__file__).parents[1]
DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
needs_one = pytest.mark.skipif(DEVICES < 1, reason="no CUDA device here: the GPU path is verified as docs/gpu.md says")
needs_kernels = pytest.mark.skipif("triton" not in backends.available(), reason="no Triton kernels for a device here")


@needs_one
def test_the_triton_kernels_are_there():
    assert "triton" in backends.available(), backends.triton.load().missing


@needs_one
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_kernels)])
def test_the_papers_golden_outputs_and_all_gradients(backend):
    golden = goldens.load("paper")
    encoder = goldens.paper_encoder(golden, torch.float32).cuda()
    x = golden["in.x"].float().cuda().requires_grad_()
    with backends.use(backend):
        y = encoder(x, golden["in.offsets"], golden["in.timestamps"].cuda(), golden["in.request_timestamps"].cuda())
        (y * golden["in.weight"].float().cuda()).sum().backward()
    goldens.assert_close(y.cpu(), golden["out"], torch.float32)
    for name, parameter in encoder.named_parameters():
        goldens.assert_close(parameter.grad.cpu(), golden[f"grad.{name}"], torch.float32, gradient=True)


@needs_one
@torch.no_grad()
@pytest.mark.parametrize("preset", ["paper", "official"])
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_kernels)])
def test_forward_append_and_query_equal_the_cpu(backend, preset):
    encoder = make_encoder(torch.float32, dim=64, num_heads=2, kernel_dim=32, max_positions=700, preset=preset)
    batch = make_batch([700, 0, 1, 33, 16], dim=64, dtype=torch.float32)
    wanted, there = encoder(*batch.inputs), encoder.cuda()
    x, times, request = (t.cuda() for t in (batch.x, batch.timestamps, batch.request))
    with backends.use(backend):
        found = there(x, batch.offsets, times, request)
        state = there.append(there.init_state(5), x, batch.offsets, times)
        last = there.query(state, request)
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    rows = [int(b) - 1 for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True) if b > a]
    torch.testing.assert_close(last[[0, 2, 3, 4]].cpu(), wanted[rows], rtol=0, atol=1e-5 * float(wanted.abs().max()))


@needs_one
@needs_kernels
def test_the_same_batch_gives_the_same_bits_twice():
    encoder, batch = make_encoder(torch.float32, dim=64, kernel_dim=32).cuda(), make_batch([700, 33], dim=64)
    inputs = batch.x.float().cuda(), batch.offsets, batch.timestamps.cuda(), batch.request.cuda()
    first, second = (torch.autograd.grad(encoder(*inputs).square().sum(), list(encoder.parameters())) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_one
@needs_kernels
def test_no_step_waits_for_the_device():
    encoder, batch = make_encoder(torch.float32).cuda(), make_batch([40, 3])
    inputs = batch.x.float().cuda(), batch.offsets, batch.timestamps.cuda(), batch.request.cuda()
    encoder(*inputs).sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        encoder(*inputs).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_over_nccl(ranks, tmp_path):
    if ranks > DEVICES:
        pytest.skip(
            f"{ranks} CUDA devices are needed, there are {DEVICES}: the GPU path is verified as docs/gpu.md says"
        )
    prepared = [sys.executable, "-m", "pipelines.prepare", "synthetic", "--output", str(tmp_path / "data")]
    subprocess.run([*prepared, "--users", "200"], cwd=ROOT, check=True, timeout=300)
    train = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "-m", "pipelines.train"]
    settings = [f"data.path={tmp_path / 'data'}", "train.max_steps=20"]
    options = ["--config", "configs/demo.yaml", "--run-dir", str(tmp_path / "run"), *settings]
    subprocess.run([*train, *options], cwd=ROOT, check=True, timeout=600)


class Softmax(torch.nn.Module):
    """Causal softmax attention by flash SDPA, with the projections and feed-forward network of a usual block."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.ffn = torch.nn.Sequential(torch.nn.Linear(dim, 4 * dim), torch.nn.SiLU(), torch.nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        heads = (t.transpose(1, 2).bfloat16() for t in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2).float())
        return x + self.ffn(x)


def milliseconds(function, repeats=10):
    function()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / repeats


@needs_one
@needs_kernels
@pytest.mark.parametrize("events", [1024, 16_384])
def test_times_and_memory_beside_torch_and_flash_attention(events, capsys):
    """Says what it measured; asserts results and memory, no times."""
    users = 65_536 // events
    encoder = make_encoder(
        torch.float32, dim=128, num_layers=1, num_heads=4, kernel_dim=32, max_positions=events
    ).cuda()
    batch = make_batch([events] * users, dim=128, dtype=torch.float32)
    inputs = batch.x.cuda(), batch.offsets, batch.timestamps.cuda(), batch.request.cuda()
    softmax, padded = Softmax(128, 4).cuda(), inputs[0].view(users, events, 128)
    runs = {"triton": lambda: encoder(*inputs), "torch": lambda: encoder(*inputs), "softmax": lambda: softmax(padded)}
    lines, peak = [], {}
    for name, run in runs.items():
        torch.cuda.reset_peak_memory_stats()
        with backends.use("torch" if name == "torch" else "triton"):
            forward = milliseconds(run)
            both = milliseconds(lambda run=run: run().sum().backward())
        peak[name] = torch.cuda.max_memory_allocated()
        lines.append(
            f"{events} events x {users}, {name}: {forward:.2f} ms, with backward {both:.2f} ms, {peak[name]} B"
        )
    with capsys.disabled():
        print("", torch.cuda.get_device_name(), *lines, sep="\n")  # noqa: T201
    assert peak["triton"] <= peak["torch"]
