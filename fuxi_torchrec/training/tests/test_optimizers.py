"""Steps of sharded models against plain AdamW on the same model unsharded."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fuxi_torchrec.config import OptimizerConfig
from fuxi_torchrec.data.schedule import Position
from fuxi_torchrec.embeddings.inputs import agree
from fuxi_torchrec.embeddings.pipeline import make_pipeline
from fuxi_torchrec.embeddings.sharding import local_parts
from fuxi_torchrec.embeddings.tests.small import (
    full_tables,
    global_loss,
    gradients,
    input_of,
    local_values,
    sharded_model,
    slice_of,
    small_config,
    small_tables,
    table_weights,
    whole_model,
)
from fuxi_torchrec.training.feed import Feed, StepInputs
from fuxi_torchrec.training.optimizers import StepOptimizer, learning_rate_share

# --- schedules -------------------------------------------------------------------------------------------------------


def shares(steps, total=100, **config):
    return [learning_rate_share(OptimizerConfig(**config), step, total) for step in steps]


def test_a_constant_rate_is_constant():
    assert shares(range(200)) == [1.0] * 200


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_the_warm_up_rises_linearly_and_reaches_the_rate(decay):
    assert shares(range(5), lr_schedule=decay, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_decays_end_at_the_final_share_and_stay_there():
    steps = [10, 55, 100, 101, 5000]
    assert shares(steps, lr_schedule="linear", warmup_steps=10, min_lr_factor=0.2) == pytest.approx(
        [1, 0.6, 0.2, 0.2, 0.2]
    )
    assert shares(steps, lr_schedule="cosine", warmup_steps=10, min_lr_factor=0.2) == pytest.approx(
        [1, 0.6, 0.2, 0.2, 0.2]
    )
    quarter = 0.5 * (1 + math.cos(math.pi / 4))
    assert shares([25], lr_schedule="cosine") == pytest.approx([quarter])
    assert shares([25], lr_schedule="linear") == pytest.approx([0.75])


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_decay_steps_come_before_the_planned_end(decay):
    assert shares([0, 20, 40, 60], lr_schedule=decay, decay_steps=40) == pytest.approx([1, 0.5, 0, 0])
    falling = shares(range(101), lr_schedule=decay, warmup_steps=7)
    assert falling[6:] == sorted(falling[6:], reverse=True) and falling[-1] == 0


def test_a_warm_up_longer_than_the_training_is_only_a_warm_up():
    assert shares([0, 9, 10, 11], total=5, lr_schedule="linear", warmup_steps=10) == [0.1, 1.0, 1.0, 0.0]


# --- steps -----------------------------------------------------------------------------------------------------------


def plain_adamw(model, config):
    """What is decayed, restated: matrices of the encoder, but no table of positions, never item or feature tables."""
    named = dict(model.named_parameters())
    tables = {n for n in named if "embedding_bags" in n}
    undecayed = {n for n, p in named.items() if p.ndim < 2 or n.endswith(("positions", "kernel"))}
    table_lr = config.lr if config.table_lr is None else config.table_lr
    groups = [
        {"params": [p for n, p in named.items() if n not in tables | undecayed], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named.items() if n in undecayed - tables], "weight_decay": 0.0},
        {"params": [p for n, p in named.items() if n in tables], "weight_decay": 0.0, "lr": table_lr},
    ]
    assert all(group["params"] for group in groups)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def compare_models(model, whole, tolerance=2e-5):
    for name, value in whole.head.named_parameters():
        torch.testing.assert_close(model.module.head.get_parameter(name), value, rtol=1e-3, atol=tolerance)
    for part in local_parts(model):
        expected = slice_of(part, table_weights(whole)[part.table].detach())
        torch.testing.assert_close(part.tensor, expected, rtol=1e-3, atol=tolerance)


def inputs_of_all(tables, seed):
    return [input_of(rank, "shared", seed, tables=tables) for rank in range(dist.get_world_size())]


def compare_clipped_steps(sharding, clip_norm):
    # eps is large: AdamW's first steps would hide by what gradients were multiplied
    optimizing = OptimizerConfig(lr=0.01, table_lr=0.05, weight_decay=0.1, eps=0.1, clip_norm=clip_norm)
    tables, config = small_tables(sharding), small_config(optimizing)
    values = full_tables(tables)
    model, _ = sharded_model(config, tables, values)
    whole = whole_model(config, tables, values)
    optimizer, plain = StepOptimizer(model, optimizing), plain_adamw(whole, optimizing)
    norms = []
    for step in range(3):
        inputs = inputs_of_all(tables, step)
        plain.zero_grad()
        global_loss(whole, inputs).backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), clip_norm)
        plain.step()
        (ready,) = agree([inputs[dist.get_rank()]], tables.needs_equal_bags)
        optimizer.zero_grad()
        model(ready)[0].backward()
        optimizer.step()
        assert float(optimizer.norm) == pytest.approx(float(norm), rel=1e-4)
        norms.append(float(optimizer.norm))
        found = gradients(model)
        for name, parameter in whole.head.named_parameters():
            torch.testing.assert_close(found[f"head.{name}"], parameter.grad, rtol=1e-3, atol=1e-6)
        of_tables = local_values(model, found)
        for part in local_parts(model):
            expected = slice_of(part, table_weights(whole)[part.table].grad)
            grad = of_tables[part.table, part.first_row, part.first_column]
            torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-6)
        compare_models(model, whole)
    return norms


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise", "data_parallel"])
def test_clipping_takes_the_norm_of_the_whole_model(workers, sharding):
    small = workers(2).run(compare_clipped_steps, sharding, 0.05)
    assert small[0] == small[1] and min(small[0]) > 0.05
    workers(2).run(compare_clipped_steps, sharding, 1e6)


def test_clipping_on_one_process_and_on_processes_that_hold_nothing(workers):
    workers(1).run(compare_clipped_steps, "row_wise", 0.05)
    workers(4).run(compare_clipped_steps, ("table_wise", "table_wise", "column_wise"), 0.05)


def compare_accumulated_steps(pipeline, sharding, clip_norm):
    """Three micro-batches a step, one of them without a sequence on some rank, against all of them at once."""
    optimizing = OptimizerConfig(lr=0.01, eps=0.1, clip_norm=clip_norm)
    tables, config = small_tables(sharding), small_config(optimizing)
    values = full_tables(tables)
    model, _ = sharded_model(config, tables, values)
    whole = whole_model(config, tables, values)
    optimizer, plain = StepOptimizer(model, optimizing), plain_adamw(whole, optimizing)
    rank, sizes = dist.get_rank(), ((5, 0), (1, 4), (0, 2))

    def part(step, number, of):
        return input_of(of, "shared", 10 * step + number, sizes[number], tables)

    steps = []
    for step in range(3):
        mine = [part(step, number, rank) for number in range(3)]
        steps.append(StepInputs(mine, [torch.zeros(0)] * 3, Position(0, step + 1)))
    feed = Feed(iter(steps), tables.needs_equal_bags)
    running = make_pipeline(pipeline, model, optimizer, torch.device("cpu"))
    optimizer.current = lambda: feed.waiting[0]
    marks = []
    for step in range(3):
        optimizer.share = 1.0 / (step + 1)
        for _ in range(3):
            running.progress(feed)
            about = feed.waiting.popleft()
            marks.append((about.first, about.last, about.end.step))
        plain.zero_grad()
        global_loss(whole, [part(step, number, of) for number in range(3) for of in range(2)]).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(whole.parameters(), clip_norm)
        for group in plain.param_groups:
            group["lr"] = 0.01 / (step + 1)
        plain.step()
        compare_models(model, whole)
    with pytest.raises(StopIteration):
        running.progress(feed)
    return marks


@pytest.mark.parametrize("pipeline", ["base", "sparse_dist"])
def test_micro_batches_are_one_step_together(workers, pipeline):
    mixed = ("row_wise", "table_wise", "data_parallel")
    for sharding, clip_norm in ((mixed, None), ("row_wise", 0.05)):
        for marks in workers(2).run(compare_accumulated_steps, pipeline, sharding, clip_norm):
            expected = [(number == 0, number == 2, step) for step in (1, 2, 3) for number in range(3)]
            assert marks == expected


# --- moments ---------------------------------------------------------------------------------------------------------


def moments_of(kind, sharding):
    optimizing = OptimizerConfig(kind=kind)
    tables, config = small_tables(sharding), small_config(optimizing)
    model, _ = sharded_model(config, tables, full_tables(tables))
    optimizer = StepOptimizer(model, optimizing)
    before = sorted(optimizer.moments())
    (ready,) = agree([input_of(dist.get_rank(), tables=tables)], tables.needs_equal_bags)
    optimizer.zero_grad()
    model(replace(ready))[0].backward()
    optimizer.step()
    assert sorted(optimizer.moments()) == before  # there from the beginning
    return before


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise", "data_parallel"])
def test_every_process_knows_every_average_of_adamw(workers, sharding):
    found = workers(2).run(moments_of, "adamw", sharding)
    assert found[0] == found[1]
    tables = [n for n in found[0] if ".embedding_bags." in n]
    assert len(tables) == 2 * 3 and len(set(found[0])) == len(found[0])


def test_rowwise_adagrad_keeps_one_sum_a_table(workers):
    for sharding in ("row_wise", "data_parallel", ("row_wise", "data_parallel", "row_wise")):
        for names in workers(2).run(moments_of, "rowwise_adagrad", sharding):
            assert sorted(n.split(".")[-3] for n in names if n.endswith(".sum")) == [
                "feature_action",
                "feature_tags",
                "item_table",
            ]
            assert all(".embedding_bags." not in n for n in names if not n.endswith(".sum"))
