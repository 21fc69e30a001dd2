"""No damage to a dataset passes unnoticed."""

import copy
import json

import numpy as np
import pytest

from fuxi_torchrec.data.dataset import Dataset, DatasetInfo
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.tests.small import describe, make_dataset, random_histories
from fuxi_torchrec.events.errors import DataError

VALUES = [None, True, -1, 0.5, 10**30, "", "x", "../x", [], {}, [1], {"x": -1}]


@pytest.fixture
def dataset(tmp_path):
    histories = random_histories(0, users=6, longest=8, weights=True)
    return make_dataset(tmp_path / "set", histories, texts=["a", "b", "c", "d"])


def content(path):
    """All that can be read of a dataset."""
    dataset = Dataset.open(path)
    reader = Reader(dataset, ["action"])
    blocks = [reader.block(number) for number in range(len(reader.groups))]
    arrays = [array for b in blocks for array in (b.offsets, b.items, b.times, b.weights, b.features["action"])]
    words = [reader.ids_of(np.arange(reader.users)), dataset.vocabulary().ids, dataset.feature_values("action")]
    return dataset.info.to_json(), [a.tolist() for a in arrays], [word.to_pylist() for word in words]


@pytest.mark.parametrize("name", ["part-00000.parquet", "items.parquet", "feature-action.parquet", "dataset.json"])
def test_a_flipped_bit_is_refused_or_harmless(dataset, tmp_path, name):
    path, before = tmp_path / "set" / name, content(dataset.path)
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    refused, places = [], range(0, len(whole), 3)
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << int(generator.integers(8))
        path.write_bytes(changed)
        try:
            assert content(dataset.path) == before, f"byte {place}"
        except DataError as error:
            refused.append(str(error))
    assert len(refused) > 0.9 * len(places)
    assert all(name in message for message in refused)


def edits(plain):
    """The same with one value replaced, left out or added, at any depth."""
    places = [()]
    while places:
        place = places.pop()
        node = plain
        for key in place:
            node = node[key]
        if isinstance(node, dict | list):
            keys = node if isinstance(node, dict) else range(len(node))
            places += [(*place, key) for key in keys]
            for key in keys:
                for value in (*VALUES, "left out"):
                    edited = copy.deepcopy(plain)
                    parent = edited
                    for step in place:
                        parent = parent[step]
                    if value == "left out":
                        del parent[key]
                    else:
                        parent[key] = value
                    yield edited


def test_an_edited_description_is_refused_with_the_name_of_its_file(dataset, tmp_path):
    tried, refused = 0, []
    for edited in edits(json.loads(dataset.info.to_json())):
        tried += 1
        try:  # a value that is the same, or one left out that is so by default
            assert DatasetInfo.from_json(json.dumps(edited), "a/dataset.json") == dataset.info
        except DataError as error:
            refused.append(str(error))
    assert tried > 600
    assert len(refused) > 0.95 * tried
    assert all(message.startswith("a/dataset.json: ") for message in refused)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"users": 7}, "users = 7, but its parts have 6"),
        ({"events": -1}, "events = -1 is negative"),
        ({"items": 0}, "items = 0 is not in 1 .. 2147483647"),
        ({"first_time": 2**62}, "no times in order"),
        ({"last_time": 2**62}, "no times in order"),
        ({"skipped_rows": {"user is null": -2}}, "user is null = -2 is negative"),
        ({"length_histogram": {"<=5": 5}}, "users = 6, but its parts have 5"),
        ({"tables": {"../items.parquet": 1}}, "'../items.parquet' is not the name of one file"),
    ],
)
def test_values_of_a_description_fit_together(dataset, changes, why):
    with pytest.raises(ValueError, match=why):
        describe(dataset, **changes)


def test_a_table_that_is_not_the_datasets_own_is_refused(dataset, tmp_path):
    other = make_dataset(tmp_path / "other", random_histories(1, users=6, longest=8), items=51)
    (tmp_path / "set" / "items.parquet").write_bytes((tmp_path / "other" / "items.parquet").read_bytes())
    with pytest.raises(DataError, match=r"items\.parquet: another file than the one that was written"):
        dataset.vocabulary()
    assert len(other.vocabulary()) == 51


def test_a_link_out_of_the_dataset_is_not_followed(dataset, tmp_path):
    path = tmp_path / "set" / "items.parquet"
    path.rename(tmp_path / "elsewhere.parquet")
    path.symlink_to(tmp_path / "elsewhere.parquet")
    with pytest.raises(DataError, match="outside of the directory"):
        dataset.vocabulary()


def test_no_path_at_all_is_told_by_its_key():
    with pytest.raises(DataError, match=r"data\.path is not set"):
        Dataset.open("")
