"""What surrounds the lookup on a GPU, on a pretend CUDA device: nothing is mixed, and a step waits for nothing."""

import copy
from dataclasses import fields

import pytest
import torch

from fuxi_torchrec.embeddings.inputs import fitted, sizes_of
from fuxi_torchrec.embeddings.sharding import copied
from fuxi_torchrec.embeddings.tests.small import DIM, FEATURES, input_of, small_config, small_tables
from fuxi_torchrec.ops import backends
from fuxi_torchrec.ops.tests.pretend import CUDA, Device, Pretend
from fuxi_torchrec.training.model import SequenceModel


def step_input(pool):
    """A step's input of one rank, and the rows that the lookup would give."""
    given, draw = input_of(0, pool), torch.Generator().manual_seed(1)
    (ready,) = fitted([given], sizes_of([given])[None], pad=True)
    features = {name: torch.randn(len(ready.input_rows), DIM, generator=draw) for name in FEATURES}
    return ready, torch.randn(len(ready.items.lengths()), DIM, generator=draw), features


@pytest.mark.parametrize("pool", ["shared", "uniform"])
def test_an_input_moves_whole_but_for_its_offsets_and_its_loss_is_that_of_the_cpu(pool):
    ready, rows, features = step_input(pool)
    head = SequenceModel(small_config(), small_tables("row_wise")).head
    with backends.use("torch"), torch.no_grad():
        wanted, report = copy.deepcopy(head)(rows, features, None, None, ready)
        with Device() as device:
            moved = ready.to(CUDA, non_blocking=True)
            assert device.copies and not device.syncs, device.syncs
            for field in fields(moved):
                value = getattr(moved, field.name)
                if isinstance(value, torch.Tensor):
                    assert isinstance(value, Pretend) == (field.name != "offsets"), field.name
            assert all(x.device == CUDA for x in (moved.items.values(), moved.items.lengths(), moved.targets.positions))
            there = device.moved(head)
            given = device.put(rows), {name: device.put(x) for name, x in features.items()}
            device.forget()
            found, found_report = there(*given, None, None, moved)
            assert not device.syncs, device.syncs
    torch.testing.assert_close(found.inner, wanted, rtol=1e-5, atol=1e-6)
    for name, value in report.items():
        torch.testing.assert_close(found_report[name].inner, value, rtol=1e-5, atol=1e-6)


def test_a_checkpoints_copy_is_in_host_memory_and_its_own():
    with Device() as device:
        weight = device.put(torch.arange(6.0))
        found = copied(weight)
        assert not isinstance(found, Pretend) and len(device.copies) == len(device.syncs) == 1
        weight.inner.zero_()
    assert found.tolist() == [0, 1, 2, 3, 4, 5]
