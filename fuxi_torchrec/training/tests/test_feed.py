import numpy as np
import pytest
import torch
import torch.distributed as dist

from fuxi_torchrec.data.schedule import Position
from fuxi_torchrec.distributed import PeerError
from fuxi_torchrec.embeddings.tests.small import ITEMS, input_of, random_batch, small_tables
from fuxi_torchrec.tasks.base import ItemSet
from fuxi_torchrec.tasks.next_item import LossConfig, NextItem, sequence_weights
from fuxi_torchrec.tasks.tests.test_samplers import in_batch_pool, shared_pool, uniform_per_position
from fuxi_torchrec.training.feed import Feed, StepInputs, StepMaker

KNOWN = np.arange(1, ITEMS)[np.arange(1, ITEMS) % 4 > 0]
COUNTS = np.where(np.isin(np.arange(ITEMS), KNOWN), np.arange(ITEMS) + 3, 0)
WHERE = Position(2, 5)


def batch_of(seed=1, sequences=9):
    batch = random_batch(sequences, seed)
    known = torch.from_numpy(np.isin(batch.targets.numpy(), KNOWN))
    batch.targets.mul_(known)
    batch.target_weights.mul_(known)
    return batch


def maker(**loss):
    targets = NextItem(LossConfig(**loss)).target_maker(ItemSet(KNOWN, COUNTS), seed=7)
    return StepMaker(targets, small_tables("row_wise"))


def one(made, batch, position=WHERE):
    object.__setattr__(batch, "end", Position(position.epoch, position.step + 1))
    (given,) = made(position, [batch]).inputs
    return given.targets, given.items.values().numpy()


def sequences_of(batch):
    return zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), batch.request_timestamps, strict=True)


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weighting", "power"), [("position", 1.0), ("user", 0.0), ("sqrt", 0.5)])
def test_a_sequence_weighs_what_its_weighting_says(weighting, power):
    batch = batch_of(sequences=20)
    found = sequence_weights(batch, weighting)
    empty = 0
    for a, b in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        given = batch.target_weights[a:b].double()
        if given.sum() == 0:
            empty += 1
            assert (found[a:b] == 0).all()
            continue
        expected = given / given.sum() * given.sum() ** power
        torch.testing.assert_close(found[a:b].double(), expected)
    assert 0 < empty < 20
    assert (found > 0).equal(batch.target_weights > 0)
    assert len(sequence_weights(random_batch(0, 0), weighting)) == 0


@pytest.mark.parametrize("weighting", ["position", "user", "sqrt"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_of_targets_at_the_time_of_the_event_before_a_share_is_kept(weighting, share):
    batch = batch_of(sequences=300)
    object.__setattr__(batch, "timestamps", batch.timestamps // 2)  # so that some share it
    object.__setattr__(batch, "request_timestamps", batch.timestamps[batch.offsets[1:] - 1])
    after = [[*batch.timestamps[a + 1 : b].tolist(), int(asked)][: b - a] for a, b, asked in sequences_of(batch)]
    same = torch.tensor([time for each in after for time in each]) == batch.timestamps
    assert 0 < same.sum() < len(same)
    made, could = maker(weighting=weighting, same_time=share), batch.target_weights > 0
    given, _ = one(made, batch)
    kept = torch.zeros_like(could)
    kept[given.positions] = True
    assert torch.equal(kept[~same], could[~same]) and not kept[~could].any()
    assert kept[same & could].double().mean().item() == pytest.approx(share, abs=0.1 * (0 < share < 1))
    object.__setattr__(batch, "target_weights", batch.target_weights * kept)
    assert torch.equal(given.weights, sequence_weights(batch, weighting)[kept])
    # others in each epoch, the same ones in each step
    object.__setattr__(batch, "target_weights", could.float())
    later, again = (one(made, batch, Position(*at))[0].positions for at in ((3, 5), (2, 9)))
    assert torch.equal(again, given.positions)
    assert torch.equal(later, given.positions) == (share in (0.0, 1.0))


@pytest.mark.parametrize("weighting", ["position", "user", "sqrt"])
def test_weights_reach_the_input(weighting):
    batch = batch_of()
    given, _ = one(maker(weighting=weighting), batch)
    weights = sequence_weights(batch, weighting)
    assert torch.equal(given.weights, weights[weights > 0])


# --- negatives -------------------------------------------------------------------------------------------------------


def test_full_compares_with_every_known_item():
    given, ids = one(maker(negatives="full"), batch_of())
    np.testing.assert_array_equal(ids[given.items["candidates"]], KNOWN)
    assert "log_weights" not in given.constants
    assert (given.constants["target_column"] >= 0).all()
    np.testing.assert_array_equal(KNOWN[given.constants["target_column"]], ids[given.items["targets"]])


def test_shared_is_one_pool_for_all_micro_batches_and_processes_of_a_step():
    made = maker(negatives="shared", num_negatives=6)
    expected, log_weights = shared_pool(KNOWN, 6, 7, 2, 5)
    for seed in range(3):
        given, ids = one(made, batch_of(seed))
        np.testing.assert_array_equal(ids[given.items["candidates"]], expected)
        np.testing.assert_array_equal(given.constants["log_weights"], log_weights)
    given, ids = one(made, batch_of(), Position(2, 6))
    assert ids[given.items["candidates"]].tolist() != expected.tolist()


def test_in_batch_takes_this_batchs_targets():
    batch = batch_of()
    given, ids = one(maker(negatives="in_batch"), batch)
    kept = batch.targets[batch.target_weights > 0].numpy()
    expected, log_weights = in_batch_pool(kept, COUNTS)
    np.testing.assert_array_equal(ids[given.items["candidates"]], expected)
    np.testing.assert_array_equal(given.constants["log_weights"], log_weights)
    assert set(expected) == set(kept.tolist())


def test_uniform_draws_for_each_position_by_user_and_place():
    batch = batch_of()
    given, ids = one(maker(negatives="uniform", num_negatives=5), batch)
    rows = []
    for user, (a, b) in enumerate(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)):
        for event in range(a, b):
            if batch.target_weights[event] > 0:
                rows.append((user, int(batch.timestamps[a]), event - a))
    users, starts, places = (np.array(column) for column in zip(*rows, strict=True))
    expected = uniform_per_position(KNOWN, 5, 7, 2, 5, users, starts, places)
    np.testing.assert_array_equal(ids[given.items["candidates"]], expected)
    assert "target_column" not in given.constants


@pytest.mark.parametrize("negatives", ["shared", "uniform", "full", "in_batch"])
def test_a_process_without_sequences_has_an_input_too(negatives):
    given, ids = one(maker(negatives=negatives, num_negatives=4), random_batch(0, 0))
    assert len(given.positions) == len(given.weights) == 0
    pooled = negatives in ("shared", "full")
    assert (len(ids) > 0) == pooled == (given.items["candidates"].numel() > 0)


# --- the feed --------------------------------------------------------------------------------------------------------


def read_feed():
    rank = dist.get_rank()
    steps = []
    for number, parts in enumerate((2, 1, 3)):
        inputs = [input_of(rank, "shared", 10 * number + part) for part in range(parts)]
        users = [torch.tensor([100 * rank + 10 * number + part]) for part in range(parts)]
        steps.append(StepInputs(inputs, users, Position(0, number + 1)))
    feed = Feed(iter(steps), pad=True)
    read = []
    for given in feed:
        about = feed.waiting[-1]
        assert about.scale == given.loss_scale
        events = torch.tensor(len(given.input_rows))
        dist.all_reduce(events)
        assert about.events == int(events)
        read.append((about.first, about.last, about.end.step, about.users.tolist(), len(given.items.lengths())))
    assert len(feed.waiting) == len(read)  # nothing was trained
    assert [a.users.tolist() for a in feed.waiting] == [users for *_, users, _ in read]
    return read, [about.scale for about in feed.waiting]


def test_the_feed_knows_what_it_has_handed_out(workers):
    (first, scales), (second, other) = workers(2).run(read_feed)
    assert [entry[:3] for entry in first] == [
        (True, False, 1),
        (False, True, 1),
        (True, True, 2),
        (True, False, 3),
        (False, False, 3),
        (False, True, 3),
    ]
    assert [entry[3] for entry in second] == [[100], [101], [110], [120], [121], [122]]
    assert [entry[4] for entry in first] == [entry[4] for entry in second]
    assert scales == other and len(set(scales)) == 3  # one a step


def steps_of(rank, broken):
    for number, parts in enumerate((1, 3, 2)):
        if (rank, number) == broken:
            raise OSError("the disk is gone")
        inputs = [input_of(rank, "shared", 10 * number + part) for part in range(parts)]
        yield StepInputs(inputs, [torch.zeros(0)] * parts, Position(0, number + 1))


def read_until_it_fails(broken):
    feed = Feed(steps_of(dist.get_rank(), broken), True, micro_batches=lambda position: (1, 3, 2)[position.step])
    try:
        return len(list(feed))
    except (OSError, PeerError) as error:
        return type(error).__name__, str(error), len(feed.waiting)


def test_a_rank_that_cannot_read_takes_the_others_with_it(workers):
    assert workers(2).run(read_until_it_fails, None) == [6, 6]
    peer, own = workers(2).run(read_until_it_fails, (1, 1))
    assert own == ("OSError", "the disk is gone", 1)
    assert peer[0] == "PeerError" and peer[2] == 1
    assert "reading training data failed on 1 of 2 ranks: rank 1: OSError: the disk is gone" in peer[1]


class Stopping:
    """Rank 1 says with the third step that it is preempted."""

    def __init__(self):
        self.said = 0

    def say(self):
        self.said += 1
        return [float(dist.get_rank() == 1 and self.said == 3)]

    def hear(self, everyone):
        return not everyone.any()


def read_until_asked_to_stop():
    feed, read = Feed(steps_of(dist.get_rank(), None), True, Stopping()), 0
    for _ in feed:
        read += 1
    return read, next(feed, None)


def test_signals_end_the_feed_on_all_ranks_at_once(workers):
    assert workers(2).run(read_until_asked_to_stop) == [(4, None)] * 2
