import numpy as np
import pyarrow as pa
import pytest

from fuxi_torchrec.events import parquet
from fuxi_torchrec.export import index as indices

DIM = 8


def write(path, vectors, **columns):
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), DIM)
    table = pa.table({"embedding": embedding, **columns})
    with parquet.Writer(path, table.schema) as writer:
        for begin in range(0, len(table), 70):
            writer.write(table.slice(begin, 70))
    return path


@pytest.fixture
def items(tmp_path):
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(500, DIM)).astype(np.float32)
    ids = np.arange(1, 501) * 3
    paths = [write(tmp_path / f"{n}", vectors[a : a + 250], index=ids[a : a + 250]) for n, a in enumerate((0, 250))]
    return paths, vectors, ids


@pytest.mark.parametrize("exact_items", [10, 1000], ids=["hnsw", "flat"])
def test_recall_is_the_share_of_the_nearest_that_is_found(items, exact_items):
    paths, vectors, ids = items
    queries = np.random.default_rng(1).normal(size=(20, DIM)).astype(np.float32)
    index, about = indices.build(paths, len(ids), DIM, exact_items)
    exact = indices.nearest_scores(paths, queries, 10)
    order = np.argsort(-queries @ vectors.T, axis=1)[:, :10]
    assert np.allclose(exact, np.take_along_axis(queries @ vectors.T, order, 1), atol=1e-5)
    found = index.search(queries, 10)[1]
    share = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found.tolist(), ids[order].tolist(), strict=True)])
    assert indices.recall(index, queries, exact, paths) == pytest.approx(share)
    assert about["kind"] == ("hnsw" if exact_items == 10 else "flat")
    assert share > 0.95


def test_items_that_tie_with_the_last_belong(tmp_path):
    vectors = np.tile(np.eye(DIM, dtype=np.float32)[:2], (20, 1))
    paths = [write(tmp_path / "0", vectors, index=np.arange(1, 41))]
    index, _ = indices.build(paths, 40, DIM, exact_items=40)
    queries = np.eye(DIM, dtype=np.float32)[:1]
    assert indices.recall(index, queries, indices.nearest_scores(paths, queries, 7), paths) == 1.0


def test_an_exact_index_finds_everything_also_where_the_last_score_is_about_zero(tmp_path):
    draw = np.random.default_rng(3)
    half = draw.normal(size=(2000, DIM)).astype(np.float32)
    vectors, queries = np.concatenate([half, -half]), draw.normal(size=(200, DIM)).astype(np.float32)
    paths = [write(tmp_path / "0", vectors, index=np.arange(1, len(vectors) + 1))]
    index, _ = indices.build(paths, len(vectors), DIM, exact_items=len(vectors))
    exact = indices.nearest_scores(paths, queries, len(half))
    assert np.abs(exact[:, -1]).max() < 0.1
    assert indices.recall(index, queries, exact, paths) == 1.0


def test_int8_loses_little_and_is_small(items):
    paths, vectors, ids = items
    index = indices.build_int8(paths, len(ids), DIM)
    exact = indices.nearest_scores(paths, vectors[:50], 10)
    assert 0.9 < indices.recall(index, vectors[:50], exact, paths) <= 1.0


def test_queries_come_from_every_file(tmp_path):
    paths = [write(tmp_path / f"{n}", np.full((300, DIM), n, np.float32), events=np.ones(300)) for n in range(3)]
    found = indices.sample_queries(paths, 9, DIM)
    assert found[:, 0].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert indices.sample_queries([], 9, DIM).shape == (0, DIM)


def test_an_approximate_index_searches_harder_until_enough_is_found(items, monkeypatch):
    paths, _, ids = items
    monkeypatch.setattr(indices, "_SEARCH_EFFORT", 8)
    monkeypatch.setattr(indices, "_BUILD_EFFORT", 4)
    monkeypatch.setattr(indices, "_LINKS", 4)
    queries = np.random.default_rng(1).normal(size=(50, DIM)).astype(np.float32)
    exact = indices.nearest_scores(paths, queries, 10)
    index, about = indices.build(paths, len(ids), DIM, exact_items=10)
    before = indices.recall(index, queries, exact, paths)
    assert before < 0.95, "or this shows nothing"
    said = indices.tuned(index, about, queries, exact, paths)
    assert said["recall@100"] == indices.recall(index, queries, exact, paths) > before
    assert said["search_effort"] > 8 and (said["recall@100"] >= 0.95 or said["search_effort"] == 4096)
    flat, about = indices.build(paths, len(ids), DIM, exact_items=len(ids))
    assert indices.tuned(flat, about, queries, exact, paths) == {"kind": "flat", "recall@100": 1.0, "queries": 50}
