"""The items of an export: raw ids, dense indices, and the search for those that score best."""

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fuxi_torchrec.events.histories import Ints
from fuxi_torchrec.export.bundle import DISPLAY, FEATURES, INDEX, ITEMS, OTHER_ITEMS, Bundle, ExportError
from fuxi_torchrec.export.parts import combined, read_table
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.serving.options import Search
from fuxi_torchrec.tasks.base import Correction

logger = get_logger(__name__)

UNKNOWN, LEFT_OUT = 0, -1
_SCORES = 2**22  # scores held at once


class ItemIds:
    """Raw ids and dense indices, without vectors.

    Args:
        ids: raw ids of the recommendable items, by index.
        index: (n,) their dense indices, rising.
        others: raw ids that are unknown; any other one is left out. None leaves nothing out.
    """

    def __init__(self, ids: pa.Array, index: Ints, others: pa.Array | None = None) -> None:
        self.ids, self.index, self.others = ids, index, others

    @staticmethod
    def read(bundle: Bundle) -> "ItemIds":
        """From items/, and the rule for rare items."""
        tables = [read_table(path, ["item_id", "index"]) for path in bundle.parts(ITEMS)]
        index: Ints = np.concatenate([table["index"].to_numpy().astype(np.int64) for table in tables])
        if len(index) != bundle.manifest.items or (np.diff(index, prepend=UNKNOWN) <= 0).any():
            raise ExportError(f"{bundle.path / ITEMS}: indices must rise from 1, {bundle.manifest.items} of them")
        ids, others = pa.concat_arrays([combined(table["item_id"]) for table in tables]), None
        if bundle.manifest.log.drops_rare_items:
            others = combined(read_table(bundle.file(OTHER_ITEMS), ["item_id"])["item_id"])
        return ItemIds(ids, index, others)

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, raw: pa.Array) -> Ints:
        """Dense indices of many raw ids; UNKNOWN, or LEFT_OUT for rare ones whose events do not count."""
        places = pc.fill_null(pc.index_in(raw, value_set=self.ids), -1).to_numpy(zero_copy_only=False)
        found = np.where(places < 0, UNKNOWN, self.index[places]).astype(np.int64)
        if self.others is not None:
            known = pc.is_in(raw, value_set=self.others).to_numpy(zero_copy_only=False)
            found[(found == UNKNOWN) & ~known] = LEFT_OUT
        return found

    @cached_property
    def _of_raw(self) -> dict[Any, int]:
        others = dict.fromkeys(self.others.to_pylist() if self.others is not None else (), UNKNOWN)
        return others | dict(zip(self.ids.to_pylist(), self.index.tolist(), strict=True))

    def find_few(self, raw: Sequence[Any]) -> list[int]:
        """The same of a few, fast."""
        missing = UNKNOWN if self.others is None else LEFT_OUT
        return [self._of_raw.get(item, missing) for item in raw]


def feature_values(bundle: Bundle) -> dict[str, dict[str, int]]:
    """Of features with text values: value to index. Values that are not there are 0."""
    found = {}
    for feature in bundle.manifest.features:
        name = f"{FEATURES}/{feature.name}.parquet"
        if name in bundle.manifest.files:
            table = read_table(bundle.file(name), ["value", "index"])
            found[feature.name] = dict(zip(table["value"].to_pylist(), table["index"].to_pylist(), strict=True))
    return found


class Catalogue(ItemIds):
    """Items with their vectors.

    Args:
        search: ``index`` uses index.faiss where that is an approximate one; ``exact`` scores every item. An exact index
            and ``exclude_seen`` are always searched by scoring every item, which is faster than FAISS's flat search.
    """

    def __init__(self, bundle: Bundle, search: Search) -> None:
        known = ItemIds.read(bundle)
        super().__init__(known.ids, known.index, known.others)
        self.temperature = bundle.manifest.temperature
        width = bundle.manifest.dimension
        vectors = [
            pc.list_flatten(read_table(path, ["embedding"])["embedding"]).to_numpy() for path in bundle.parts(ITEMS)
        ]
        flat = np.concatenate(vectors).astype(np.float32)
        if flat.size != len(self) * width or not np.isfinite(flat).all():
            raise ExportError(f"{bundle.path / ITEMS}: embeddings are not {len(self)} finite vectors of width {width}")
        self.vectors = torch.from_numpy(flat.reshape(len(self), width))
        self._faiss: Any = _approximate_index(bundle) if search == "index" else None
        self.indexed = len(self)  # items that the index has
        names = [DISPLAY + name for name in bundle.manifest.item_file.display]
        shown = [read_table(path, names) for path in bundle.parts(ITEMS)] if names else []
        self.display = {
            name.removeprefix(DISPLAY): combined(pa.chunked_array([c for table in shown for c in table[name].chunks]))
            for name in names
        }

    def with_items(self, ids: pa.Array, index: Ints, vectors: Tensor, display: dict[str, pa.Array]) -> "Catalogue":
        """One that has more items, behind these; those that it has already get these vectors."""
        more = copy.copy(self)
        more.__dict__.pop("_of_raw", None)
        place = np.searchsorted(self.index, index)
        new = place >= len(self)
        known, at = torch.from_numpy(~new), torch.from_numpy(place[~new])
        more.vectors = torch.cat([self.vectors, vectors[~known]])
        more.vectors[at] = vectors[known]
        chosen = pa.array(np.flatnonzero(new))
        more.ids, more.index = pa.concat_arrays([self.ids, ids.take(chosen)]), np.concatenate([self.index, index[new]])
        more.display = {}
        for name, column in self.display.items():
            values = np.concatenate([column.to_numpy(zero_copy_only=False), display[name].take(chosen)])
            values[at] = display[name].filter(pa.array(~new)).to_numpy(zero_copy_only=False)
            more.display[name] = pa.array(values, pa.string())
        more._of_raw = self._of_raw | dict(zip(ids.to_pylist(), index.tolist(), strict=True))
        return more

    def shown(self, places: Ints) -> list[dict[str, str | None]]:
        """What is displayed of items at these places; empty where nothing is."""
        columns = {name: column.take(pa.array(places)).to_pylist() for name, column in self.display.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def search(
        self, vectors: Tensor, k: int, seen: Sequence[Ints | None], correction: Correction | None = None
    ) -> tuple[Ints, Any]:
        """Places in ``ids`` of the best items and their scores, (B, k) each, best first; -1 where there are no more.

        Args:
            vectors: (B, D) of users, as scores use them.
            seen: of each user, dense indices that are left out; None leaves nothing out.
            correction: of scores of users' last items; those of users with ``seen`` are left out with all others.
        """
        if correction is not None and any(indices is None for indices in seen):
            # whatever is among the best k and not of the window is among the best k + window before the correction
            places, scores = self._plain(vectors, k + correction.ids.shape[1], seen)
            places, scores = self._merged(vectors, places, scores, seen, correction)
            places, scores = places[:, :k], scores[:, :k]
        else:
            places, scores = self._plain(vectors, k, seen)
        places = np.where(np.isfinite(scores), places, -1)
        return places, scores / self.temperature

    def _merged(
        self, vectors: Tensor, places: Ints, scores: Any, seen: Sequence[Ints | None], correction: Correction
    ) -> tuple[Ints, Any]:
        """What was found, with items of the windows as they score: best first."""
        ids = correction.ids.numpy()
        own = np.minimum(np.searchsorted(self.index, ids), len(self) - 1)
        wanted = np.array([indices is None for indices in seen], bool)[:, None]
        own = np.where((self.index[own] == ids) & wanted, own, -1)  # empty slots are index 0, which no item has
        scored = correction.scores(vectors, self.vectors, torch.from_numpy(own)).numpy()
        user = np.arange(len(ids))[:, None] * (len(self) + 1) + 1
        scores = np.where(np.isin(places + user, (own + user)[own >= 0]), -np.inf, scores)
        places = np.concatenate([places, own], axis=1)
        scores = np.concatenate([scores, np.where(own >= 0, scored, -np.inf)], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")
        return np.take_along_axis(places, order, 1), np.take_along_axis(scores, order, 1)

    def _plain(self, vectors: Tensor, k: int, seen: Sequence[Ints | None]) -> tuple[Ints, Any]:
        """Without a correction, and before the temperature."""
        k = min(k, len(self))
        scores, places = np.empty((len(vectors), k), np.float32), np.empty((len(vectors), k), np.int64)
        indexed = np.array([self._faiss is not None and indices is None for indices in seen], bool)
        if indexed.any():
            scores[indexed], places[indexed] = self._by_index(vectors[torch.from_numpy(indexed)], k)
        if not indexed.all():
            rest = np.flatnonzero(~indexed).tolist()
            scores[rest], places[rest] = self._exact(vectors[rest], k, [seen[n] for n in rest])
        return places, scores

    def _by_index(self, vectors: Tensor, k: int) -> tuple[Any, Ints]:
        """By the index, and by scoring the items that it does not have."""
        scores, ids = self._faiss.search(vectors.numpy(), min(k, self.indexed))
        places = np.where(ids < 0, -1, np.searchsorted(self.index, ids))
        if len(self) == self.indexed:
            return scores, places
        more = vectors @ self.vectors[self.indexed :].T
        scores = np.concatenate([scores, more.numpy()], axis=1)
        own = np.arange(self.indexed, len(self))
        places = np.concatenate([places, np.broadcast_to(own, (len(vectors), len(own)))], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(places, order, 1)

    def _exact(self, vectors: Tensor, k: int, seen: Sequence[Ints | None]) -> tuple[Any, Ints]:
        each = [np.unique(indices) if indices is not None else np.zeros(0, np.int64) for indices in seen]
        users = np.repeat(np.arange(len(each)), [len(indices) for indices in each])
        wanted = np.concatenate(each)
        places = np.minimum(np.searchsorted(self.index, wanted), len(self) - 1)
        known = self.index[places] == wanted
        users, places = users[known], places[known]
        step = max(k, _SCORES // max(1, len(vectors)))
        best = torch.full((len(vectors), 0), -torch.inf)
        at = torch.zeros((len(vectors), 0), dtype=torch.int64)
        for begin in range(0, len(self), step):
            scores = vectors @ self.vectors[begin : begin + step].T
            here = (places >= begin) & (places < begin + step)
            scores[torch.from_numpy(users[here]), torch.from_numpy(places[here] - begin)] = -torch.inf
            top, found = torch.topk(scores, min(k, scores.shape[1]), dim=1)
            best, at = torch.cat((best, top), dim=1), torch.cat((at, found + begin), dim=1)
            if best.shape[1] > k:
                best, order = torch.topk(best, k, dim=1)
                at = at.gather(1, order)
        return best.numpy(), at.numpy()


def _approximate_index(bundle: Bundle) -> Any:
    """index.faiss if it is worth using."""
    if INDEX not in bundle.manifest.files:
        return None
    try:
        import faiss
    except ImportError:
        logger.info("faiss is not installed: every item is scored, which is exact and slower on large catalogues")
        return None
    try:
        index = faiss.read_index(str(bundle.file(INDEX)))
    except RuntimeError as error:
        raise ExportError(f"{bundle.path / INDEX}: not a readable FAISS index: {error}") from None
    if index.ntotal != bundle.manifest.items or index.d != bundle.manifest.dimension:
        raise ExportError(f"{bundle.path / INDEX}: {index.ntotal} vectors of width {index.d}: not of this export")
    inner: Any = faiss.downcast_index(index)
    while hasattr(inner, "id_map"):
        inner = faiss.downcast_index(inner.index)
    return None if isinstance(inner, faiss.IndexFlat) else index
