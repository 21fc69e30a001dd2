"""Paired comparisons: users are matched by id, intervals cover what they must."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.paired import compare, paired


def test_users_are_matched_by_id_and_a_cold_target_is_known_from_either_file(tmp_path):
    cold, none = [False, True, False, True], pa.nulls(1, pa.bool_())
    pq.write_table(
        pa.table({"user_id": [1, 2, 3, 4], "cold": cold, "rank_last": [1, 5, 20, None]}), tmp_path / "a.parquet"
    )
    blind = pa.chunked_array([pa.array([None, False]), none, pa.array([False])])  # unknown to a run without features
    pq.write_table(
        pa.table({"user_id": [4, 3, 2, 1], "cold": blind, "rank_last": [None, 2, None, 3]}), tmp_path / "b.parquet"
    )
    a, b = str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")
    warm = paired(a, b, ("rank_last", "rank_last"), "hr@10", "warm")
    assert (warm.users, warm.first, warm.second) == (2, 0.5, 1.0)
    cold = paired(a, b, ("rank_last", "rank_last"), "hr@10", "cold")
    assert (cold.users, cold.first, cold.second) == (2, 0.5, 0.0)
    pq.write_table(pa.table({"user_id": [9], "cold": [False], "rank_last": [1]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="0 users in common"):
        paired(a, str(tmp_path / "c.parquet"), ("rank_last", "rank_last"), "hr@10", "all")


def test_pairs_give_a_narrower_interval_than_their_spread_alone():
    draw = np.random.default_rng(0)
    base = (draw.random(2_000) < 0.2).astype(float)
    better = np.maximum(base, draw.random(2_000) < 0.02)
    found = compare(better, base, draws=500)
    low, high = found.difference
    assert 0 < low < found.first - found.second < high < 0.035
    assert found.ratio[0] > 1
