from dataclasses import dataclass

import numpy as np
import pytest

from fuxi_torchrec.tasks.base import ItemSet
from fuxi_torchrec.tasks.samplers import SAMPLERS
from fuxi_torchrec.tasks.samplers import uniform as module

KNOWN = np.array([2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31])


@dataclass(frozen=True)
class At:
    """What a sampler asks of a draw."""

    seed: int = 0
    epoch: int = 0
    step: int = 0
    where: tuple = ()
    targets_P: tuple = ()

    def places(self):
        return self.where


def shared_pool(known, count, *key):
    found = SAMPLERS["shared"](count).draw(ItemSet(known), At(*key))
    return found.ids, found.log_weights


def uniform_per_position(known, count, seed, epoch, step, *where):
    return SAMPLERS["uniform"](count).draw(ItemSet(known), At(seed, epoch, step, where)).ids


def in_batch_pool(targets, counts):
    found = SAMPLERS["in_batch"](1).draw(ItemSet(np.flatnonzero(counts), counts), At(targets_P=targets))
    return found.ids, found.log_weights


def positions(count, seed=0):
    """Users, starts (also before 1970) and positions."""
    generator = np.random.default_rng(seed)
    return (
        generator.integers(0, 5, count),
        generator.integers(-(10**9), 10**9, count),
        generator.integers(0, 300, count),
    )


def assert_uniform(draws, known):
    """χ² of n − 1 degrees of freedom: mean n − 1, standard deviation √2(n − 1); six of those above is no accident."""
    ids, times = np.unique(draws, return_counts=True)
    assert set(ids) <= set(known)
    times = np.concatenate([times, np.zeros(len(known) - len(ids))])
    expected, freedom = draws.size / len(known), len(known) - 1
    assert ((times - expected) ** 2 / expected).sum() < freedom + 6 * (2 * freedom) ** 0.5


def test_shared_pool_is_sorted_distinct_and_counts_its_draws():
    ids, log_weights = shared_pool(KNOWN, 1000, 1, 2, 3)
    assert ids.dtype == np.int64 and log_weights.dtype == np.float32
    np.testing.assert_array_equal(ids, KNOWN)  # 1000 draws from 11 leave none out
    times = np.exp(log_weights)
    np.testing.assert_allclose(times.sum(), 1000, rtol=1e-5)
    assert_uniform(np.repeat(ids, np.rint(times).astype(int)), KNOWN)
    few, _ = shared_pool(KNOWN, 4, 1, 2, 3)
    assert (np.diff(few) > 0).all() and 1 <= len(few) <= 4 and set(few) <= set(KNOWN)
    assert [len(x) for x in shared_pool(KNOWN, 0, 1, 2, 3)] == [0, 0]


def test_shared_pool_depends_on_seed_epoch_and_step():
    known = np.arange(1, 10**6)
    first, _ = shared_pool(known, 50, 1, 2, 3)
    np.testing.assert_array_equal(first, shared_pool(known, 50, 1, 2, 3)[0])
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3)):
        assert len(np.intersect1d(first, shared_pool(known, 50, *other)[0])) < 5


def test_uniform_draws_are_uniform_over_the_known():
    draws = uniform_per_position(KNOWN, 64, 1, 2, 3, *positions(3000))
    assert draws.shape == (3000, 64) and draws.dtype == np.int64
    assert_uniform(draws, KNOWN)
    pairs = draws[:, :-1] * 100 + draws[:, 1:]  # neighbours along k have nothing to do with each other
    assert_uniform(pairs[:, ::2], [a * 100 + b for a in KNOWN for b in KNOWN])
    pairs = draws[:-1] * 100 + draws[1:]
    assert_uniform(pairs[::2], [a * 100 + b for a in KNOWN for b in KNOWN])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 1000, 1024, 10**6])
def test_uniform_draws_reach_both_ends_of_any_catalogue(count):
    known = np.arange(1, count + 1)
    draws = uniform_per_position(known, 100, 0, 0, 0, *positions(500))
    assert draws.min() >= 1 and draws.max() <= count
    assert draws.min() <= 1 + count // 1000 and draws.max() >= count - count // 1000


def test_uniform_draws_do_not_depend_on_the_other_positions(monkeypatch):
    where = positions(200)
    draws = uniform_per_position(KNOWN, 16, 1, 2, 3, *where)
    chosen = np.array([150, 3, 77])
    monkeypatch.setattr(module, "_BLOCK", 32)  # nor on how many are drawn at a time
    np.testing.assert_array_equal(uniform_per_position(KNOWN, 16, 1, 2, 3, *(x[chosen] for x in where)), draws[chosen])
    np.testing.assert_array_equal(uniform_per_position(KNOWN, 10, 1, 2, 3, *where), draws[:, :10])


def test_uniform_draws_depend_on_everything_else():
    known = np.arange(1, 10**6)

    def draw(seed=1, epoch=2, step=3, user=4, start=5, position=6):
        return uniform_per_position(known, 50, seed, epoch, step, *(np.array([x]) for x in (user, start, position)))

    for name in ("seed", "epoch", "step", "user", "start", "position"):
        assert (draw() != draw(**{name: 9})).mean() > 0.9, name


def test_nothing_to_draw():
    assert uniform_per_position(KNOWN, 8, 1, 2, 3, *positions(0)).shape == (0, 8)
    assert uniform_per_position(KNOWN, 0, 1, 2, 3, *positions(4)).shape == (4, 0)
    assert [len(x) for x in in_batch_pool(np.zeros(3, np.int64), np.zeros(5, np.int64))] == [0, 0]


def test_in_batch_pool_weighs_by_expected_count():
    counts = np.array([0, 10, 30, 60])
    ids, log_weights = in_batch_pool(np.array([3, 0, 1, 3, 3, 1, 0]), counts)
    np.testing.assert_array_equal(ids, [1, 3])
    np.testing.assert_allclose(np.exp(log_weights), [2 / (5 * 0.1), 3 / (5 * 0.6)], rtol=1e-6)
    assert log_weights.dtype == np.float32


def test_in_batch_pool_estimates_the_denominator_of_all_items():
    generator = np.random.default_rng(0)
    counts, scores = np.array([0, 5, 10, 20, 25, 40]), np.array([9.0, 1.0, -0.5, 2.0, 0.0, -1.0])
    estimates = []
    for _ in range(2000):
        ids, log_weights = in_batch_pool(generator.choice(6, 40, p=counts / 100), counts)
        estimates.append(np.exp(scores[ids] + log_weights).sum())
    exact = np.exp(scores[1:]).sum()
    error = np.std(estimates) / len(estimates) ** 0.5
    assert error < 0.01 * exact  # sharp enough to tell
    assert abs(np.mean(estimates) - exact) < 5 * error
