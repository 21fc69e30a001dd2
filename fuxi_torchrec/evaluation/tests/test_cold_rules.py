"""Rules for new items: by the user's categories, by everybody's."""

import numpy as np
import torch

from fuxi_torchrec.data.batches import EventBatch
from fuxi_torchrec.evaluation.cold_rules import ColdRules
from fuxi_torchrec.events.feature_table import FeatureTable
from fuxi_torchrec.tasks.rank_metrics import UNRANKED

BRAND = np.array([0, 1, 1, 2, 3, 1, 2, 3])  # of items 0 .. 7; 5, 6 and 7 are new
COUNTS = np.array([0, 4, 3, 5, 9, 0, 0, 0])


def ranked(history, target):
    cold = np.arange(8) >= 5
    rules = ColdRules(FeatureTable((), {"brand": BRAND}, {}, np.ones(8, bool)), cold, COUNTS)
    none = torch.zeros(0, dtype=torch.int64)
    items, offsets = torch.tensor(history, dtype=torch.int64), torch.tensor([0, len(history)])
    batch = EventBatch(items, none, none.float(), items, none, offsets, torch.zeros(1, dtype=torch.int64))
    found = rules.ranks(batch, [target], False)
    return [int(found[name]) for name in ("new items by brand", "new items by brand, of everybody")]


def test_the_users_category_comes_first_and_then_everybodys():
    # brands by everybody: 3 with 9 events, 1 with 7, 2 with 5
    assert [ranked([3, 3, 1], new) for new in (5, 6, 7)] == [[2, 2], [1, 3], [3, 1]]
    assert [ranked([], new) for new in (5, 6, 7)] == [[2, 2], [3, 3], [1, 1]]  # nothing known: everybody's


def test_a_target_that_is_not_new_has_no_rank():
    assert ranked([1], 2) == [UNRANKED, UNRANKED]
