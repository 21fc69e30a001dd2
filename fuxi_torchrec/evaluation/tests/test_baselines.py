"""Baselines against sorting all items by each rule."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from fuxi_torchrec.data.batches import BatchMaker, Items
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.splits import LeaveOneOut
from fuxi_torchrec.data.survey import survey
from fuxi_torchrec.data.tests.small import make_dataset, random_histories
from fuxi_torchrec.evaluation.baselines import NAMES, Baselines
from fuxi_torchrec.tasks.rank_metrics import UNRANKED

ITEMS = 30


@pytest.fixture(scope="module")
def histories():
    return random_histories(2, 25, 40, ITEMS)


def expected(histories, known, filter_seen):
    """The place of each target in a list of all candidates, sorted by the rule."""
    train = [h[0][:-2].tolist() if len(h[0]) > 2 else h[0][: max(len(h[0]) - 1, 1)].tolist() for h in histories]
    counts = Counter(i for items in train for i in items)
    follows = Counter(pair for items in train for pair in pairwise(items))
    found = {name: [] for name in NAMES}
    for items, _ in histories:
        if len(items) < 2:
            continue
        *history, target = items.tolist()
        if not known[target]:
            for ranks in found.values():
                ranks.append(UNRANKED)
            continue
        pool = [i for i in range(1, ITEMS + 1) if known[i]]
        if filter_seen:
            pool = [i for i in pool if i == target or i not in history]
        popular = {i: (-counts[i], i) for i in pool}
        back = {i: n for n, i in reversed(list(enumerate(reversed(history))))}
        recent = {i: n for i, n in back.items() if not filter_seen}
        rules = {
            "popularity": popular.get,
            "recent items": lambda i, r=recent, p=popular: (r.get(i, 10**9), p[i]),
            "frequent items": lambda i, r=recent, o=Counter(history), p=popular: (
                (-o[i], r[i], p[i]) if i in r else (1, 0, p[i])
            ),
            "frequent and recent items": lambda i, r=recent, o=Counter(history), p=popular: (
                (-o[i] / (r[i] + 1), r[i], p[i]) if i in r else (1, 0, p[i])
            ),
            "transitions": lambda i, last=history[-1], p=popular: (-follows[last, i] if known[last] else 0, p[i]),
        }
        for name, rule in rules.items():
            found[name].append(1 + sorted(pool, key=rule).index(target))
    return found


@pytest.mark.parametrize("filter_seen", [False, True], ids=["all", "unseen"])
def test_targets_stand_where_sorting_puts_them(histories, tmp_path, filter_seen):
    known = np.arange(ITEMS + 1) % 7 > 0
    maker = BatchMaker(Reader(make_dataset(tmp_path / "set", histories, ITEMS)), LeaveOneOut(), Items(known))
    counts = survey(maker, items=True).item_counts
    batch = maker.evaluation(np.arange(len(histories)), "test", 2**62)
    targets = batch.targets[batch.offsets[1:] - 1].tolist()
    found = Baselines(maker, known, counts).ranks(batch, targets, filter_seen)
    wanted = expected(histories, known, filter_seen)
    assert UNRANKED in targets or 0 in targets
    for name in NAMES:
        assert found[name].tolist() == wanted[name], name
