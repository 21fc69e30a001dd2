"""The encoder on a pretend CUDA device: nothing is mixed, nothing waits, and few kernels are launched."""

import itertools

import pytest
import torch

from fuxi_torchrec.encoders.tests.batches import make_batch, make_encoder
from fuxi_torchrec.ops import backends, triton
from fuxi_torchrec.ops.tests.pretend import Device, MixedDevicesError

needs_kernels = pytest.mark.skipif(
    "triton" not in backends.available(), reason="no Triton interpreter here: make test-gpu-offline"
)
# 24 users, 18,690 events, the longest 6,000
LENGTHS = [
    6000,
    4000,
    2500,
    1500,
    1000,
    800,
    600,
    500,
    400,
    300,
    250,
    200,
    150,
    120,
    100,
    80,
    60,
    50,
    40,
    20,
    10,
    5,
    4,
    1,
]
FORWARD, BACKWARD = 30, 60


def large(layers):
    encoder = make_encoder(torch.float32, dim=64, num_layers=layers, kernel_dim=32, max_positions=6000)
    batch = make_batch(LENGTHS, dim=64, dtype=torch.float32)
    assert len(batch.x) == 18_690
    return encoder, batch


def counted(layers):
    """Launches of a forward and of a backward pass, kernels not run; and that nothing waited."""
    encoder, batch = large(layers)
    with Device(numbers=False) as device:
        moved = device.moved(encoder).train()
        x = device.put(batch.x).requires_grad_()
        y = moved(x, batch.offsets, device.put(batch.timestamps), device.put(batch.request))
        forward, syncs = len(device.launches), list(device.syncs)
        device.forget()
        y.sum().backward()
        assert not syncs + device.syncs, syncs + device.syncs
        return forward, len(device.launches)


@needs_kernels
def test_launches_of_a_block_stay_within_their_budget_and_nothing_waits_for_the_device():
    one, two = counted(1), counted(2)
    forward, backward = (b - a for a, b in zip(one, two, strict=True))
    assert 0 < forward <= FORWARD
    assert 0 < backward <= BACKWARD


@needs_kernels
def test_all_that_is_launched_for_a_batch_of_two_blocks():
    """Layout, positions and times are made once for all blocks."""
    forward, backward = counted(2)
    assert forward <= 2 * FORWARD + 50
    assert backward <= 2 * BACKWARD + 20


@needs_kernels
def test_a_training_step_of_the_dense_part_gives_what_the_cpu_gives():
    encoder, batch = make_encoder(torch.float32), make_batch([3, 0, 18], dtype=torch.float32)

    def step(encoder, *inputs):
        optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
        encoder(*inputs, validate=False).square().mean().backward()
        optimizer.step()
        return encoder

    with Device() as device:
        moved = device.moved(encoder)
        step(moved, device.put(batch.x), batch.offsets, device.put(batch.timestamps), device.put(batch.request))
        assert not device.syncs
        assert {name.partition(".")[0] for name in device.kernels} == {"constant", "temporal", "scan", "norms"}
        found = [p.inner for p in moved.parameters()]
    with backends.use("torch"):
        step(encoder, *batch.inputs)
    for one, other in zip(found, encoder.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-5)


def serve(encoder, batch, put):
    """Append many, query, append one, append to some, select, put, concatenate, query."""
    state = encoder.append(encoder.init_state(3), put(batch.x), batch.offsets, put(batch.timestamps))
    first = encoder.query(state, put(batch.request))
    later = put(batch.request + 60)
    state = encoder.append(state, put(batch.x[:3]), torch.arange(4), later)
    state = encoder.append(state, put(batch.x[:2]), torch.tensor([0, 1, 1, 2]), later[:2] + 60)
    state = state.put([1], state.select([0]))
    state = encoder.append(state, put(batch.x[:5]), torch.tensor([0, 0, 3, 5]), put(batch.timestamps[:5]))
    both = type(state).concatenate([state, state])
    return first, encoder.query(both, torch.cat((later, later)) + 3600), state


@torch.no_grad()
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_kernels)])
def test_append_query_and_states_give_what_the_cpu_gives_and_never_wait(backend):
    encoder, batch = make_encoder(torch.float32), make_batch([3, 0, 18], dtype=torch.float32)
    with backends.use("torch"):
        *wanted, state = serve(encoder, batch, lambda x: x)
    with Device() as device, backends.use(backend):
        moved = device.moved(encoder)
        *found, there = serve(moved, batch, device.put)
        assert not device.syncs, device.syncs
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.inner, other, rtol=0, atol=1e-5)
        records = there.to_bytes()  # to the host and back
        back = type(there).from_bytes(records, moved.init_state(0))
        assert back.count.device.type == "cuda" and list(back.known) == state.count.tolist()
        torch.testing.assert_close(back.pending.inner, state.pending, rtol=0, atol=0)


@torch.no_grad()
def test_the_torch_path_never_waits_either():
    encoder, batch = make_encoder(torch.float32), make_batch([30, 0, 18, 5], dtype=torch.float32)
    with backends.use("torch"):
        wanted = encoder(*batch.inputs)
        with Device() as device:
            moved = device.moved(encoder)
            device.forget()
            found = moved(
                *(device.put(batch.x), batch.offsets, device.put(batch.timestamps), device.put(batch.request))
            )
            assert not device.syncs, device.syncs
    torch.testing.assert_close(found.inner, wanted, rtol=0, atol=1e-5)


def test_mixing_devices_raises_and_reading_a_number_is_a_sync():
    with Device() as device:
        x = device.put(torch.ones(3))
        with pytest.raises(MixedDevicesError, match="a tensor of the host among those of cuda:0"):
            x + torch.ones(3)
        assert (x + torch.tensor(1.0)).inner.tolist() == [2, 2, 2]
        assert not device.syncs
        for wait in (lambda: float(x.sum()), x.tolist, lambda: x[x > 0], lambda: x.to("cpu"), lambda: x.nonzero()):
            device.forget()
            wait()
            assert len(device.syncs) == 1


@needs_kernels
@pytest.mark.parametrize(
    ("device", "changes"),
    [(Device(capability=(7, 5)), {}), (Device(), {"dim": 160, "num_heads": 1})],
    ids=["an old device", "heads that are too wide"],
)
def test_what_the_kernels_do_not_cover_runs_in_torch(device, changes):
    encoder = make_encoder(torch.float32, **changes)
    batch = make_batch([3, 5], dim=encoder.config.dim, dtype=torch.float32)
    wanted = encoder(*batch.inputs)
    with device:
        found = device.moved(encoder)(
            *(device.put(batch.x), batch.offsets, device.put(batch.timestamps), device.put(batch.request))
        )
        assert not device.kernels
    torch.testing.assert_close(found.inner.detach(), wanted.detach(), rtol=0, atol=1e-5)


def test_a_missing_or_other_triton_is_a_reason_in_a_line(monkeypatch):
    monkeypatch.setattr(triton.importlib.util, "find_spec", lambda name: None)
    assert triton._load.__wrapped__().missing == "triton is not installed: it comes with torch's CUDA build"
    monkeypatch.setattr(triton.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(triton.importlib.metadata, "version", lambda name: "2.0.0")
    assert triton._load.__wrapped__().missing == "triton is 2.0.0, the kernels were verified on 3.7.1"


def test_lengths_are_those_of_the_budget():
    assert sum(LENGTHS) == 18_690 and len(LENGTHS) == 24
    assert all(a >= b for a, b in itertools.pairwise(LENGTHS))
