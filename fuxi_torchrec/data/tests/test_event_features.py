"""Numbers, buckets and vectors of events in a dataset: what is learned, what is kept, what is refused."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.prepare import PrepareOptions, prepare
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.sources import events

START = 1_600_000_000
LOG = {
    "user_id": ["a", "a", "a", "b", "b"],
    "item_id": [1, 2, 3, 1, 2],
    "timestamp": [START + t for t in (1, 2, 900, 3, 4)],
    "watched": [1.0, 3.0, 50.0, None, 2.0],
    "price": [1, 2, 9, 3, None],
    "scene": [[1.0, 0.0], None, [2.0, 2.0], [0.0, 1.0], [0.5, 0.5]],
    "tags": ["x|y", "", None, "y", "z"],
}
KINDS = ["watched:number", "price:bucket:3", "scene:vector", "tags:id:|"]
NAMES = ["watched", "price", "scene", "tags"]


def made(tmp_path, name="data", log=LOG, kinds=KINDS, **options):
    pq.write_table(pa.table(log), tmp_path / f"{name}.parquet")
    source = events(str(tmp_path / f"{name}.parquet"), "user_id", "item_id", "timestamp", "s", kinds)
    prepare(source, tmp_path / name, PrepareOptions(train_until=str(START + 500), **options))
    return Dataset.open(tmp_path / name)


def test_every_kind_is_learned_from_training_data_and_read_back(tmp_path):
    dataset = made(tmp_path)
    about = {feature.name: feature for feature in dataset.info.features}
    assert about["watched"].mean == 2.0 and about["watched"].deviation == pytest.approx((2 / 3) ** 0.5)
    assert about["price"].boundaries == (2.0,) or about["price"].boundaries == (2.0, 3.0)
    assert (about["scene"].width, about["tags"].multiple) == (2, True)
    block = Reader(dataset, NAMES).block(0)
    np.testing.assert_array_equal(block.features["watched"][:, 0], np.float32([1, 3, 50, np.nan, 2]))
    expected = np.float32([[1, 0], [np.nan, np.nan], [2, 2], [0, 1], [0.5, 0.5]])
    np.testing.assert_array_equal(block.features["scene"], expected)
    assert block.features["price"].tolist()[-1] == 0 and block.features["price"][0] == 1
    assert np.diff(block.features["tags"].bounds).tolist() == [2, 0, 0, 1, 1]


def test_extended_datasets_keep_statistics_and_vocabularies(tmp_path):
    first = made(tmp_path)
    later = {**LOG, "watched": [100.0] * 5, "price": [70] * 5, "tags": ["new|y"] * 5}
    second = made(tmp_path, "later", later, extend=first.path)
    old, new = ({f.name: f for f in each.info.features} for each in (first, second))
    assert all(old[name] == new[name] for name in ("watched", "price", "scene"))
    values = second.feature_values("tags").to_pylist()
    assert values[: len(first.feature_values("tags"))] == first.feature_values("tags").to_pylist()
    assert "new" in values and first.info.fingerprint != second.info.fingerprint
    wider = {**LOG, "scene": [[1.0, 2.0, 3.0]] * 5}
    with pytest.raises(DataError, match=r"scene was a vector of 2 elements .* here it is a vector of 3"):
        made(tmp_path, "wider", wider, extend=first.path)
    with pytest.raises(DataError, match=r"watched was a number .* here it is a bucket"):
        made(tmp_path, "other", kinds=["watched:bucket", *KINDS[1:]], extend=first.path)


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("watched", [1.0, float("nan"), 1.0, 1.0, 1.0], "feature watched is not finite"),
        ("watched", [1.0, float("inf"), 1.0, 1.0, 1.0], "feature watched is not finite"),
        ("watched", ["x"] * 5, "column watched is VARCHAR: that is no feature of kind number"),
        ("scene", [[1.0, 2.0], [1.0], None, [1.0, 2.0], None], "feature scene is not finite, or no 2 elements"),
        ("scene", [[1.0, None], [1.0, 2.0], None, [1.0, 2.0], None], "feature scene is not finite, or no 2 elements"),
        ("scene", [1.0] * 5, "column scene is DOUBLE: that is no feature of kind vector"),
        ("price", pa.nulls(5, pa.int64()), "price: no event of the training data has a bucket"),
    ],
)
def test_what_is_no_number_is_refused(tmp_path, column, values, said):
    with pytest.raises(DataError, match=said):
        made(tmp_path, log={**LOG, column: values})


def test_bad_rows_may_be_left_out_and_are_counted(tmp_path):
    log = {**LOG, "watched": [1.0, float("nan"), 1.0, 1.0, 1.0]}
    dataset = made(tmp_path, log=log, on_bad_rows="skip")
    assert dataset.info.events == 4 and dataset.info.skipped_rows == {"feature watched is not finite": 1}


def test_kinds_that_do_not_fit_events_are_refused(tmp_path):
    with pytest.raises(DataError, match="columns of items are shown"):
        made(tmp_path, kinds=["watched:display"])
    with pytest.raises(DataError, match=r"watched is DOUBLE: an id is text or an integer.*watched:number"):
        made(tmp_path, kinds=["watched"])
