"""FAISS indices over exported items, and how much of exact search they find."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.histories import Ints
from fuxi_torchrec.export.bundle import ExportError

Vectors = NDArray[np.float32]

NEAREST = 100  # recall of so many
_LINKS, _BUILD_EFFORT, _SEARCH_EFFORT = 32, 40, 256  # HNSW's M, efConstruction, efSearch
_MOST_EFFORT, _RECALL = 4096, 0.95  # the search effort grows to find so much
_ROUNDING = 2e-6  # of float32 inner products, in units of the vectors' lengths
_SCORED = 2**13  # items compared with all queries at once
_TRAINING = 2**17  # vectors from which int8 learns its ranges


def read_vectors(paths: Sequence[Path], keys: Sequence[str] = ("index",)) -> Iterator[tuple[Vectors, pa.Table]]:
    """Embeddings of Parquet files and the columns beside them, a row group at a time."""
    for path in paths:
        file = parquet.open_file(path)
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=["embedding", *keys])
            if len(table):
                flat = pc.list_flatten(table["embedding"]).to_numpy()
                yield np.ascontiguousarray(flat.reshape(len(table), -1), np.float32), table


def build(paths: Sequence[Path], items: int, dim: int, exact_items: int) -> tuple[Any, dict[str, Any]]:
    """An index over items/, ids are dense indices; and what the manifest says of it."""
    import faiss

    if items <= exact_items:
        return _filled(faiss.IndexFlatIP(dim), paths), {"kind": "flat"}
    graph = faiss.IndexHNSWFlat(dim, _LINKS, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction, graph.hnsw.efSearch = _BUILD_EFFORT, _SEARCH_EFFORT
    about = {"kind": "hnsw", "links": _LINKS, "build_effort": _BUILD_EFFORT, "search_effort": _SEARCH_EFFORT}
    return _filled(graph, paths), about


def build_int8(paths: Sequence[Path], items: int, dim: int) -> Any:
    """An index that holds a byte per element."""
    import faiss

    inner = faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
    step = max(1, items // _TRAINING)
    inner.train(np.concatenate([np.zeros((0, dim), np.float32), *(v[::step] for v, _ in read_vectors(paths))]))
    return _filled(inner, paths)


def _filled(inner: Any, paths: Sequence[Path]) -> Any:
    import faiss

    index, threads = faiss.IndexIDMap2(inner), faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(len(os.sched_getaffinity(0)))  # the other ranks are waiting
    try:
        for vectors, table in read_vectors(paths):
            index.add_with_ids(vectors, table["index"].to_numpy().astype(np.int64))
    finally:
        faiss.omp_set_num_threads(threads)
    return index


def tuned(index: Any, about: dict[str, Any], queries: Vectors, exact: Vectors, paths: Sequence[Path]) -> dict[str, Any]:
    """What the manifest says of an index, with its measured recall; an approximate one searches harder for more."""
    import faiss

    found = recall(index, queries, exact, paths)
    if about["kind"] == "hnsw":
        graph = cast(Any, faiss.downcast_index(index.index)).hnsw
        while found < _RECALL and graph.efSearch < _MOST_EFFORT:
            graph.efSearch *= 2
            found = recall(index, queries, exact, paths)
        about = {**about, "search_effort": graph.efSearch}
    return {**about, f"recall@{NEAREST}": found, "queries": len(queries)}


def write(index: Any, path: Path) -> None:
    """To a file."""
    import faiss

    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:
        raise ExportError(f"{path}: the index cannot be written: {error}") from None


def sample_queries(users: Sequence[Path], count: int, dim: int) -> Vectors:
    """Vectors of users, some of every file."""
    share = -(-count // max(1, len(users)))
    parts = [np.zeros((0, dim), np.float32)]
    for path in users:
        found = [vectors[:share] for vectors, _ in read_vectors([path], keys=("events",))]
        parts.append(np.concatenate([parts[0], *found])[:share])
    return np.concatenate(parts)[:count]


def nearest_scores(paths: Sequence[Path], queries: Vectors, k: int) -> Vectors:
    """(n, k) best scores of each query, falling: exact search, some items at a time."""
    best = np.full((len(queries), 0), -np.inf, np.float32)
    for vectors, _ in read_vectors(paths):
        for begin in range(0, len(vectors), _SCORED):
            both = np.concatenate([best, queries @ vectors[begin : begin + _SCORED].T], axis=1)
            kept = min(k, both.shape[1])
            both.partition(both.shape[1] - kept, axis=1)
            best = both[:, -kept:].copy()
    return -np.sort(-best, axis=1)


def recall(index: Any, queries: Vectors, exact: Vectors, paths: Sequence[Path]) -> float:
    """Share of the found items that belong to the exactly nearest; items that tie with the last of them belong."""
    users, k = exact.shape
    if not users or not k:
        return 1.0
    ids: Ints = index.search(queries, k)[1]
    longest = 0.0
    scores = np.full((users, k), -np.inf, np.float32)  # of what was found, with the vectors as they are
    for vectors, table in read_vectors(paths):
        own = table["index"].to_numpy().astype(np.int64)
        place = np.minimum(np.searchsorted(own, ids), len(own) - 1)
        user, column = np.nonzero(own[place] == ids)
        scores[user, column] = np.einsum("nd,nd->n", queries[user], vectors[place[user, column]])
        longest = max(longest, float(np.linalg.norm(vectors, axis=1).max()))
    # the same product, summed in another order, differs in proportion to the lengths, however small it is itself
    slack = _ROUNDING * longest * np.linalg.norm(queries, axis=1, keepdims=True)
    return float((scores >= exact[:, -1:] - slack).mean())
