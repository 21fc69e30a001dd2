"""The formulas of planning against what is really kept and held."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

from fuxi_torchrec.config import load_config
from fuxi_torchrec.encoders.fuxi_linear.config import FuXiLinearConfig
from fuxi_torchrec.encoders.fuxi_linear.encoder import FuXiLinearEncoder
from fuxi_torchrec.ops import backends
from fuxi_torchrec.training import planning
from fuxi_torchrec.training.errors import TrainingError
from fuxi_torchrec.training.planning import GB, Cluster, changes_that_fit, described_tables, estimate

EVENTS = 2048
EIGHT_NODES = Cluster(8, 8, "cuda", 80 * GB)


def kept_by(config):
    """Bytes that a forward pass keeps for the backward pass, parameters left out."""
    encoder = FuXiLinearEncoder(config)
    own = {p.untyped_storage().data_ptr() for p in encoder.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor too, or its place is used again
        return tensor

    x = torch.randn(EVENTS, config.dim, requires_grad=True)
    offsets = torch.arange(0, EVENTS + 1, EVENTS // 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        encoder(x, offsets, torch.arange(EVENTS) * 100, torch.full((4,), EVENTS * 100))
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dim": 128},
        {"dropout": 0.1},
        {"ffn_dim": 256},
        {"preset": "official"},
        {"use_temporal": False},
        {"use_retention": False},
        {"use_positional": False, "dropout": 0.1},
    ],
    ids=str,
)
def test_a_block_keeps_as_many_elements_of_an_event_as_the_formula_says(settings):
    given = {
        "dim": 64,
        "num_heads": 4,
        "max_positions": 1024,
        "temporal_periods": (60, 3600, 86400, 604800),
        **settings,
    }
    one, three = (FuXiLinearConfig(num_layers=n, **given) for n in (1, 3))
    with backends.use("torch"):
        found = (kept_by(three) - kept_by(one)) / 2 / EVENTS / 4 / one.dim
    assert found == pytest.approx(one.activation_widths(), rel=0.05)
    assert (kept_by(three) - kept_by(one)) / 2 / EVENTS / 4 / one.dim < 1.05 * found, "other backends keep no more"


def plan_for(cluster, items=100_000_000, *settings):
    given = ["model.dim=128", "model.max_positions=512", "model.temporal_periods=[3600, 86400]"]
    given += ["batch.max_length=4096", "batch.events=65536"]
    config = load_config(None, [*given, *settings])
    return config, estimate(config, described_tables(config, items, {}), cluster)


def test_a_hundred_million_items_fit_64_devices_of_80_gb():
    config, found = plan_for(EIGHT_NODES)
    assert len(found.parts) == 64
    assert found.memory["tables"] == -(-100_000_001 // 64) * 128 * 4
    assert found.memory["tables' optimizer"] == 2 * found.memory["tables"]
    assert found.fits(EIGHT_NODES)
    _, fused = plan_for(EIGHT_NODES, 100_000_000, "optimizer.kind=rowwise_adagrad")
    assert fused.memory["tables' optimizer"] == found.memory["tables"] // 128
    assert found.total - fused.total > 2 * found.memory["tables"]
    assert estimate(config, described_tables(config, 100_000_000, {}), EIGHT_NODES, cap=True).total == found.total


def test_what_does_not_fit_comes_with_changes_that_do():
    one = Cluster(1, 1, "cuda", 80 * GB)
    config, found = plan_for(one, 100_000_000, "validation.every_epochs=null")
    assert not found.fits(one)
    changes = changes_that_fit(config, 100_000_000, {}, one)
    assert set(changes) >= {("optimizer.kind=rowwise_adagrad",), ("--nodes 4",)}
    assert all(total <= planning.USABLE * one.memory for total in changes.values())
    pairs = changes_that_fit(config, 200_000_000, {}, Cluster(1, 2, "cuda", 40 * GB))
    assert pairs and all(len(settings) <= 2 for settings in pairs)
    assert not changes_that_fit(config, 10_000_000_000, {}, one)


def test_row_wise_lookups_send_a_row_to_every_rank_and_data_parallel_tables_their_gradients():
    cluster = Cluster(1, 4, "cuda", 80 * GB)
    _, rows = plan_for(cluster, 10_000)
    assert rows.sent["item_table: rows, reduce-scatter"] == rows.lookups * 128 * 4 * 3
    _, copies = plan_for(cluster, 10_000, "tables.sharding=data_parallel")
    assert copies.sent["item_table: gradients, all-reduce"] == 2 * 3 * 10_001 * 128
    _, alone = plan_for(dataclasses.replace(cluster, per_node=1), 10_000)
    assert sum(alone.sent.values()) == 0


def test_a_validation_holds_the_catalogue_once_more_while_no_step_does():
    name = "validation, beyond a step's own"
    _, found = plan_for(EIGHT_NODES, 1_000_000_000)
    step = sum(size for part, size in found.memory.items() if part.startswith(("activ", "looked", "partial", "loss")))
    catalogue = -(-1_000_000_001 // 64) * 128 * 4
    assert catalogue < found.memory[name] + step < 1.01 * catalogue
    _, without = plan_for(EIGHT_NODES, 1_000_000_000, "validation.every_epochs=null")
    assert without.memory[name] == 0
    assert found.total - without.total == found.memory[name]
    _, small = plan_for(EIGHT_NODES, 10_000)
    assert small.memory[name] == 0


# --- before a run begins ---------------------------------------------------------------------------------------------


def refused(events, memory, *overrides):
    config = load_config(None, overrides)
    info = SimpleNamespace(items=100_000, features_of=lambda _: ())
    with pytest.raises(TrainingError) as caught:
        planning.check_memory(config, info, 2, events, memory)
    return str(caught.value)


def fits(events, memory, *overrides):
    planning.check_memory(
        load_config(None, overrides), SimpleNamespace(items=100_000, features_of=lambda _: ()), 2, events, memory
    )
    return True


def test_a_model_that_memory_cannot_hold_is_refused_with_the_one_that_it_can():
    said = refused(1000, GB, "model.dim=4096")
    assert "a rank has 1.0 GB here" in said
    width = int(re.search(r"model\.dim=(\d+)", said)[1])
    assert width < 4096 and fits(100, GB, f"model.dim={width}")
    assert not re.search(r"model\.max_positions=", said)  # would not be enough


def test_a_step_that_memory_cannot_hold_is_refused_with_the_one_that_it_can():
    said = refused(1_000_000, 4 * GB)
    fewer = int(re.search(r"batch\.max_events_per_rank=(\d+)", said)[1])
    assert "a step of 1,000,000 events takes" in said and f"batch.events={2 * fewer} would fit" in said
    assert 1024 < fewer < 1_000_000 and fits(fewer, 4 * GB)
    assert "max_events_per_rank" not in refused(1_000_000, 4 * GB, "optimizer.kind=rowwise_adagrad")


def test_a_history_that_memory_cannot_hold_is_refused_with_the_length_that_it_can():
    assert "batch.max_length=" in refused(1_000_000, 2 * GB, "batch.max_length=1000000")
