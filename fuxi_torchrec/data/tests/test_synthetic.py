"""Synthetic histories: shape, reproducibility, structure, and an oracle that is right."""

import dataclasses
import itertools

import numpy as np
import pytest

from fuxi_torchrec.data.synthetic import (
    MIN_LENGTH,
    START,
    GeneratedEvents,
    Process,
    SyntheticConfig,
    generate,
    oracle_hit_rate,
)


def joined(config, **kwargs):
    blocks = list(generate(config, **kwargs))
    return GeneratedEvents(
        *(np.concatenate([getattr(b, f.name) for b in blocks]) for f in dataclasses.fields(GeneratedEvents))
    )


def histories(config):
    events = joined(config)
    return np.split(events.item, np.flatnonzero(np.diff(events.user)) + 1)


def slots(timestamp):
    """Weekend or not, and the four-hour slot, by the calendar."""
    time = timestamp.astype("datetime64[s]")
    weekend = ~np.is_busday(time.astype("datetime64[D]"))
    return weekend * 6 + (time - time.astype("datetime64[D]")).astype(np.int64) // (4 * 3600)


def assert_same(left, right):
    for f in dataclasses.fields(GeneratedEvents):
        np.testing.assert_array_equal(getattr(left, f.name), getattr(right, f.name))


@pytest.fixture(scope="module")
def config():
    return SyntheticConfig(users=300, seed=3)


@pytest.fixture(scope="module")
def events(config):
    return joined(config)


def test_order_types_and_ranges(config, events):
    assert events.user.dtype == events.item.dtype == events.timestamp.dtype == np.int64
    assert np.unique(events.user).tolist() == list(range(config.users))
    step = np.diff(events.user)
    assert step.min() == 0
    assert np.diff(events.timestamp)[step == 0].min() >= 0
    assert np.unique(events.item).tolist() == list(range(config.items))
    first = events.timestamp[np.flatnonzero(np.diff(events.user, prepend=-1))]
    assert first.min() >= START
    assert first.max() < START + 30 * 86400
    assert events.timestamp.max() < START + 4 * 365 * 86400


@pytest.mark.parametrize("seed", range(4))
def test_lengths(seed):
    lengths = np.bincount(joined(SyntheticConfig(users=300, seed=seed)).user)
    assert lengths.min() == MIN_LENGTH
    assert 10_000 < lengths.max() <= 20_000
    assert 50 < np.median(lengths) < 70
    assert np.bincount(joined(SyntheticConfig(users=300, seed=seed, max_length=100)).user).max() == 100


def test_blocks_hold_whole_users_and_are_bounded(config, events):
    blocks = list(generate(config, block_events=5000))
    assert len(blocks) > 2
    for block in blocks:
        assert len(block.user) <= 5000 or block.user[0] == block.user[-1]
    for before, after in itertools.pairwise(blocks):
        assert after.user[0] == before.user[-1] + 1
    assert_same(joined(config, block_events=5000), events)


def test_deterministic_and_a_prefix_of_more_users(config, events):
    assert_same(joined(config), events)
    fewer = joined(dataclasses.replace(config, users=70))
    part = slice(0, len(fewer.user))
    assert_same(fewer, GeneratedEvents(events.user[part], events.item[part], events.timestamp[part]))
    other = joined(dataclasses.replace(config, seed=4))
    assert not np.array_equal(other.item[:100], events.item[:100])
    assert not np.array_equal(other.timestamp[:100], events.timestamp[:100])


def test_time_slot_decides_the_group():
    config = SyntheticConfig(users=40, repeat=0.0, noise=0.0, window=1, drift_days=1e9, max_length=2000)
    events = joined(config)
    key = events.user * 12 + slots(events.timestamp)
    pairs = np.unique(np.stack([key, events.item]), axis=1)
    assert pairs.shape[1] == len(np.unique(key))  # one item a slot
    items_a_user = [len(np.unique(events.item[events.user == u])) for u in range(config.users)]
    assert max(items_a_user) >= 8


def test_taste_drifts():
    config = SyntheticConfig(users=300, repeat=0.0, noise=0.0)
    longest = max(histories(config), key=len)
    early, late, next_to_early = longest[:500], longest[5000:5500], longest[500:1000]
    assert np.isin(next_to_early, early).mean() > np.isin(late, early).mean() + 0.2


def test_repeats():
    config = SyntheticConfig(users=300, repeat=1.0, noise=0.0)
    for history in histories(config):
        assert (history == history[0]).all()  # everything goes back to the first event
    config = SyntheticConfig(users=300, repeat=0.5, noise=0.5, items=200_000, recent=3)
    longest = max(histories(config), key=len)
    back = np.stack([longest[3 - n : -n] == longest[3:] for n in (1, 2, 3)]).any(axis=0)
    assert back.mean() == pytest.approx(0.5, abs=0.03)


def test_oracle_by_drawing_last_items_again(config, events):
    draws = 20_000
    process = Process(config)
    probabilities = process.last_item_probabilities(events)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    last = np.flatnonzero(np.diff(events.user, append=-1))
    for user in range(0, config.users, 15):
        end, position = last[user], process.lengths[user] - 1
        counter = np.arange(draws) + 100_000  # beyond the positions
        like_last = [np.full(draws, x) for x in (user, position, events.timestamp[end])]
        item, back = process.draw(*like_last, counter)
        drawn = np.where(back > 0, events.item[end - back], item)
        best = np.argsort(probabilities[user])[-10:]
        expected = probabilities[user, best].sum()
        assert np.isin(drawn, best).mean() == pytest.approx(expected, abs=4 * np.sqrt(0.25 / draws))
        frequency = np.bincount(drawn, minlength=config.items) / draws
        assert np.abs(frequency - probabilities[user]).max() < 5 * np.sqrt(probabilities[user].max() / draws)


@pytest.mark.parametrize("know_time", [True, False])
def test_oracle_predicts_the_hits_of_its_own_ranking(know_time):
    config = SyntheticConfig(users=10_000, items=400, median_length=10, max_length=40)
    process = Process(config)
    hits, expected = [], []
    for block in generate(config, block_events=1 << 15):
        probabilities = process.last_item_probabilities(block, know_time)
        best = np.argsort(probabilities, axis=1)[:, -10:]
        last = np.flatnonzero(np.diff(block.user, append=-1))
        hits += (best == block.item[last][:, None]).any(axis=1).tolist()
        expected += np.take_along_axis(probabilities, best, axis=1).sum(axis=1).tolist()
    assert oracle_hit_rate(config, 10, know_time) == pytest.approx(np.mean(expected))
    assert np.mean(hits) == pytest.approx(np.mean(expected), abs=4 * np.sqrt(0.25 / config.users))


def test_oracle_beats_popularity_recency_and_not_knowing_the_time():
    config = SyntheticConfig(users=600)
    sequences = histories(config)
    counts = np.bincount(np.concatenate([s[:-1] for s in sequences]), minlength=config.items)
    popular = np.argsort(counts)[-10:]
    popularity = np.mean([s[-1] in popular for s in sequences])
    recency = np.mean([s[-1] in list(dict.fromkeys(s[-2::-1].tolist()))[:10] for s in sequences])
    oracle = oracle_hit_rate(config)
    timeless = oracle_hit_rate(config, know_time=False)
    assert popularity < 0.15
    assert 0.2 < recency < 0.45
    assert 0.6 < oracle < 0.85
    assert recency + 0.1 < timeless < oracle - 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"users": 0}, "--users must be at least 1"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"items": 30}, "not a multiple of groups"),
        ({"window": 101}, "100 items of a group"),
        ({"max_length": 4}, "at least 5"),
        ({"repeat": 0.6, "noise": 0.5}, "more than 1"),
        ({"new_visit": 0.0}, "--new-visit must be at least 0.001"),
        ({"new_visit": 1.5}, "new_visit = 1.5 is more than 1"),
    ],
)
def test_bad_config(change, message):
    with pytest.raises(ValueError, match=message):
        SyntheticConfig(**{"users": 3, **change})


def test_bad_k(config):
    with pytest.raises(ValueError, match="k must be"):
        oracle_hit_rate(config, 0)
