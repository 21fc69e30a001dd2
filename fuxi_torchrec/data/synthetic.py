"""Synthetic interaction histories whose structure is known, and the best hit rate any model can reach on them.

A user comes in visits: a few events close together, then a long pause. An event's item comes from one of three sources:

* taste: the four-hour slot of the day, on weekdays or weekends, decides the group of items (a table of the user's own).
  A group's items lie on a ring; a user moves along it with time, likes best the item just reached and the ones behind
  it less and less. Neighbours on a ring are thus liked together, by all users.
* repeat: one of the user's last few items again.
* noise: any item.

Every random number is a hash of the seed, the user and the event's position, so a history depends on nothing else: not
on the block it is made in, nor on how many users there are.
"""

import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from fuxi_torchrec.events.batching import batch_ends
from fuxi_torchrec.events.hashing import GOLDEN, Bits, scramble
from fuxi_torchrec.options import check_bounds, option

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

START = 1_672_531_200  # 2023-01-01 00:00 UTC
MIN_LENGTH = 5
_DAY = 86_400
_SLOT = 4 * 3600
_FIRST_EVENTS = 30 * _DAY  # first events are spread over this
_SPAN = 730 * _DAY  # the longest histories last about this long
_MAX_PAUSE = _DAY  # mean pause between the visits of a user with few events
_MIN_PAUSE = 1800
_IN_VISIT = 60  # mean seconds between the events of a visit
_STRATA = 256  # of so many users in a row, each has a length from another 256th of the distribution
# the exponential distribution as equally likely values: the hidden time of an event can then be summed over exactly
_EXPONENTIAL = np.array([-math.log((n + 0.5) / 256) for n in range(256)])
# what a random number is for
_LENGTH, _JITTER, _FIRST, _VISIT, _GAP, _GROUP, _PLACE, _SOURCE, _PICK, _CATALOGUE = range(10)


@dataclass(frozen=True)
class SyntheticConfig:
    """What to generate; checked when made.

    Lengths are log-normal, at least 5. Any 256 users counted from a multiple of 256 have one length in each 256th of
    the distribution; with the defaults, 256 users or more have a history beyond 10,000 events.
    """

    users: int = option(MISSING, "number of histories", least=1)
    seed: int = option(0, "decides all the rest", least=0)
    items: int = option(2000, "catalogue size, a multiple of groups", least=1)
    groups: int = option(20, "number of item groups", least=1)
    median_length: float = option(60.0, "median events of a history", least=1)
    length_sigma: float = option(1.95, "standard deviation of the lengths' logarithm", least=0)
    max_length: int = option(20_000, "longer histories are cut to this", least=MIN_LENGTH)
    window: int = option(20, "items of a group that a user likes at a time", least=1)
    fade: float = option(0.8, "liking of an item over that of the next newer one", least=1e-3)
    drift_days: float = option(10.0, "days until the window moves on by one item", least=1e-3)
    repeat: float = option(0.2, "probability that an event repeats a recent item", least=0)
    recent: int = option(5, "how many events back a repeat can reach", least=1)
    noise: float = option(0.05, "probability that an event is any item", least=0)
    new_visit: float = option(0.4, "probability that an event begins a visit", least=1e-3)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.items % self.groups:
            raise ValueError(f"items = {self.items} is not a multiple of groups = {self.groups}")
        if self.window > self.items // self.groups:
            raise ValueError(f"window = {self.window} is more than the {self.items // self.groups} items of a group")
        if self.repeat + self.noise > 1:
            raise ValueError(f"repeat + noise = {self.repeat + self.noise} is more than 1")
        if self.new_visit > 1:
            raise ValueError(f"new_visit = {self.new_visit} is more than 1")


@dataclass(frozen=True)
class GeneratedEvents:
    """Whole histories, one user after another, ordered by time within a user; one entry an event."""

    user: Ints
    item: Ints
    timestamp: Ints


def generate(config: SyntheticConfig, block_events: int = 1 << 18) -> Iterator[GeneratedEvents]:
    """All histories, in blocks of at most ``block_events`` events or one user.

    Example:
        >>> blocks = list(generate(SyntheticConfig(users=3, max_length=8)))
        >>> len(blocks), sorted(set(blocks[0].user.tolist()))
        (1, [0, 1, 2])
    """
    process = Process(config)
    first = 0
    for after in batch_ends(process.lengths, block_events):
        yield process.block(first, after)
        first = after


def oracle_hit_rate(config: SyntheticConfig, k: int = 10, know_time: bool = True) -> float:
    """The expected HR@k on every user's last event of the best ranking there is.

    It knows the events before, the user's hidden tables and the time of the last event. With ``know_time=False`` it
    knows all of this but the time, and weighs the times at which the next event may come: no model that is not told
    the time can expect more.
    """
    if not 0 < k <= config.items:
        raise ValueError(f"k must be from 1 to items = {config.items}, not {k}")
    process = Process(config)
    total = 0.0
    for block in generate(config, block_events=1 << 14):
        probabilities = process.last_item_probabilities(block, know_time)
        total += float(np.partition(probabilities, -k, axis=1)[:, -k:].sum())
    return total / config.users


class Process:
    """The random process behind the histories: hidden tables and draws as functions of user, time and position."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.lengths = self._lengths()
        self._ring = config.items // config.groups
        liking = config.fade ** np.arange(config.window)
        self._liking = liking / liking.sum()  # by rank: 0 is the newest item of the window
        # which item lies where: ring after ring
        self._catalogue = np.argsort(self._hash(_CATALOGUE, np.arange(config.items)), kind="stable")

    def block(self, first: int, after: int) -> GeneratedEvents:
        """The histories of users ``first`` to ``after - 1``."""
        lengths = self.lengths[first:after]
        user = np.repeat(np.arange(first, after), lengths)
        begin = np.repeat(lengths.cumsum() - lengths, lengths)
        event = np.arange(len(user))
        position = event - begin
        time = self._times(user, position, begin)
        item, back = self.draw(user, position, time, position)
        source = event - back
        while not np.array_equal(further := source[source], source):  # a repeat can point at a repeat
            source = further
        return GeneratedEvents(user, item[source], time)

    def draw(self, user: Ints, position: Ints, time: Ints, counter: Ints) -> tuple[Ints, Ints]:
        """An item, and how many events back to take the item from instead, 0 if not at all.

        The counter tells draws for one user apart: the generator's own are the events' positions.
        """
        config = self.config
        source = _uniform(self._hash(_SOURCE, user, counter))
        pick = self._hash(_PICK, user, counter)
        rank = np.searchsorted(self._liking.cumsum()[:-1], _uniform(pick), side="right")
        noise = source < config.noise
        newest = self.newest(user, time)
        behind = newest - rank + np.where(newest % self._ring < rank, self._ring, 0)
        item = np.where(noise, _below(pick, config.items), self._catalogue[behind])
        repeat = ~noise & (source < config.noise + config.repeat) & (position > 0)
        back = np.where(repeat, 1 + _below(pick, np.minimum(position, config.recent)), 0)
        return item, back

    def newest(self, user: Ints, time: Ints) -> Ints:
        """The place (group, place on its ring; as one number) of the item that the user likes best at that time."""
        weekend = (time // _DAY + 3) % 7 >= 5  # 1970 began on a Thursday
        slot = time // _SLOT % (_DAY // _SLOT) + weekend * (_DAY // _SLOT)
        group = _below(self._hash(_GROUP, user, slot), self.config.groups)
        place = _uniform(self._hash(_PLACE, user, group)) * self._ring
        place += (time - START) * (1 / (self.config.drift_days * _DAY))
        return group * self._ring + place.astype(np.int64) % self._ring

    def last_item_probabilities(self, block: GeneratedEvents, know_time: bool = True) -> Floats:
        """The probability of every item (users, items) to be a user's last, given the events before."""
        config = self.config
        last = np.flatnonzero(np.diff(block.user, append=-1))
        user = block.user[last]
        if know_time:
            times, weights = block.timestamp[last][:, None], np.ones(1)
        else:
            times, weights = self._next_times(user, block.timestamp[last - 1])
        newest = np.zeros((len(user), config.groups, self._ring))
        places = np.arange(len(user))[:, None] * config.items + self.newest(user[:, None], times)
        np.add.at(newest.reshape(-1), places.ravel(), np.broadcast_to(weights, places.shape).ravel())
        taste = sum(liking * np.roll(newest, -rank, axis=2) for rank, liking in enumerate(self._liking))
        probabilities = np.full((len(user), config.items), config.noise / config.items)
        probabilities[:, self._catalogue] += (1 - config.noise - config.repeat) * taste.reshape(len(user), -1)
        reach = np.minimum(self.lengths[user] - 1, config.recent)
        for back in range(1, config.recent + 1):
            reached = np.flatnonzero(reach >= back)
            probabilities[reached, block.item[last[reached] - back]] += config.repeat / reach[reached]
        return probabilities

    def _lengths(self) -> Ints:
        config = self.config
        user = np.arange(-(-config.users // _STRATA) * _STRATA)
        stratum = self._hash(_LENGTH, user).reshape(-1, _STRATA).argsort(axis=1, kind="stable").ravel()
        quantile = (stratum + _uniform(self._hash(_JITTER, user)))[: config.users] / _STRATA
        normal = np.array([NormalDist().inv_cdf(q) for q in quantile.tolist()])
        lengths = config.median_length * np.exp(config.length_sigma * normal)
        return np.clip(lengths.round(), MIN_LENGTH, config.max_length).astype(np.int64)

    def _times(self, user: Ints, position: Ints, begin: Ints) -> Ints:
        level = _EXPONENTIAL[_below(self._hash(_GAP, user, position), len(_EXPONENTIAL))]
        visits = _uniform(self._hash(_VISIT, user, position)) < self.config.new_visit
        gap = np.where(visits, _MIN_PAUSE + level * self._pause(user), level * _IN_VISIT).astype(np.int64)
        elapsed = gap.cumsum()
        start = START + _below(self._hash(_FIRST, user), _FIRST_EVENTS)
        return start + elapsed - elapsed[begin]

    def _next_times(self, user: Ints, time: Ints) -> tuple[Ints, Floats]:
        """All times (users, times) at which the event after ``time`` can come, and their probabilities."""
        pauses = _MIN_PAUSE + _EXPONENTIAL * self._pause(user)[:, None]
        short = np.broadcast_to(_EXPONENTIAL * _IN_VISIT, pauses.shape)
        gaps = np.concatenate([pauses, short], axis=1).astype(np.int64)
        new_visit = self.config.new_visit
        return time[:, None] + gaps, np.repeat([new_visit, 1 - new_visit], len(_EXPONENTIAL)) / len(_EXPONENTIAL)

    def _pause(self, user: Ints) -> Floats:
        """Mean seconds between a user's visits: less for those with many."""
        return np.minimum(_SPAN / (self.lengths * self.config.new_visit), _MAX_PAUSE)[user]

    def _hash(self, purpose: int, user: Ints, counter: Ints | None = None) -> Bits:
        """64 random bits each (SplitMix64's finaliser over a linear combination)."""
        bits = user.astype(np.uint64) * GOLDEN
        bits += np.random.SeedSequence([self.config.seed, purpose]).generate_state(1, np.uint64)
        if counter is not None:
            bits = bits + counter.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
        return scramble(bits)


def _uniform(bits: Bits) -> Floats:
    """Bits to numbers above 0 and below 1."""
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _below(bits: Bits, bound: int | Ints) -> Ints:
    """Bits to integers from 0 to ``bound - 1``; 0 if the bound is 0."""
    return ((bits >> np.uint64(32)) * np.asarray(bound, np.uint64) >> np.uint64(32)).astype(np.int64)
