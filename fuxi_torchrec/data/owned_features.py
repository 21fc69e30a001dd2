"""Files of features of items or users to tables of a dataset."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fuxi_torchrec.data.dataset import Dataset, OwnedFeatures
from fuxi_torchrec.data.writer import DatasetWriter
from fuxi_torchrec.events.columns import ColumnSpec
from fuxi_torchrec.events.database import Database
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.feature_files import RawFeatures, read_features
from fuxi_torchrec.events.feature_learning import Learned, encode, learn
from fuxi_torchrec.events.feature_table import FeatureTable
from fuxi_torchrec.events.features import Owner
from fuxi_torchrec.events.histories import Ints
from fuxi_torchrec.events.sources import FeatureSource
from fuxi_torchrec.logging import get_logger

logger = get_logger(__name__)


def write_features(
    database: Database,
    writer: DatasetWriter,
    source: FeatureSource,
    owner: Owner,
    ids: pa.Array,
    training: NDArray[np.bool_],
    extended: Dataset | None,
) -> OwnedFeatures:
    """Read a file of features, learn from it, and write its tables.

    Args:
        ids: of the dataset's items by index, or of its users by row.
        training: which of them are training data: what is learned, is learned from these.
        extended: a dataset whose vocabularies and statistics stay; its items keep what the file says nothing of.
    """
    columns = [ColumnSpec.parse(text) for text in source.columns]
    raw = read_features(database, source.path, source.id_column, columns)
    if pa.types.is_integer(raw.ids.type) != pa.types.is_integer(ids.type):
        raise DataError(
            f"{raw.where}: {owner} ids are {raw.ids.type}, the log's are {ids.type}: they cannot be matched"
        )
    ids = ids.cast(raw.ids.type)
    place: Ints = pc.fill_null(pc.index_in(ids, value_set=raw.ids), -1).to_numpy(zero_copy_only=False).astype(np.int64)
    there = place >= 0
    if not there.any():
        raise DataError(f"{raw.where}: no {owner} of the log is in it: is {source.id_column} the right column?")
    own = np.zeros(len(raw.ids), bool)
    own[place[there & training]] = True
    before = None
    if extended is not None and extended.owned(owner).there:
        features = extended.owned(owner).features
        names = [f.name for f in features if f.vocabulary]
        before = Learned(features, {name: extended.feature_values(name, owner) for name in names})
    learned = learn(raw, own, owner, before)
    encoded = encode(raw, learned.features, learned.values)
    table = FeatureTable.stack([FeatureTable.empty(learned.features, 1), encoded.table])
    rows = np.where(there, place + 1, 0)
    carried = 0
    if before is not None and extended is not None and owner == "item":
        rows, table, carried = _carried(extended, learned, rows, table)
    writer.write_table(f"{owner}-features.parquet", table.take(np.concatenate([[0], rows])).to_arrow())
    for name, values in learned.values.items():
        index = pa.array(np.arange(1, len(values) + 1, dtype=np.int32))
        writer.write_table(f"{owner}-feature-{name}.parquet", pa.table({"value": values, "index": index}))
    if owner == "item" and raw.file.display:
        writer.write_table("item-display.parquet", _display(raw, np.where(there, place, -1)))
    about = OwnedFeatures(
        learned.features,
        raw.file,
        without=int((~there).sum()) - carried,
        others=len(raw.ids) - int(there.sum()),
        repeated=raw.repeated,
        unknown=encoded.unknown,
    )
    writer.describe_features(owner, about)
    logger.info(
        "%s: features of %s %ss; %s have none, %s rows are of others and left out, %s are repeated",
        *(raw.where, f"{int(there.sum()) + carried:,}", owner),
        *(f"{count:,}" for count in (about.without, about.others, about.repeated)),
    )
    return about


def _carried(extended: Dataset, learned: Learned, rows: Ints, table: FeatureTable) -> tuple[Ints, FeatureTable, int]:
    """Items that the new file does not have keep what the extended dataset says of them."""
    old = extended.features_of("item")
    if {f.name for f in old.features} != {f.name for f in learned.features}:
        names = ", ".join(sorted(f.name for f in old.features))
        raise DataError(f"{extended.path} has item features {names}: the new file must have these, and no others")
    old = old.select([next(f for f in old.features if f.name == feature.name) for feature in learned.features])
    before = np.arange(1, len(old))
    mine = rows[: len(before)]
    kept = (mine == 0) & old.filled[before]
    rows = rows.copy()
    rows[: len(before)] = np.where(kept, len(table) + before, mine)
    return rows, FeatureTable.stack([table, old]), int(kept.sum())


def _display(raw: RawFeatures, place: Ints) -> pa.Table:
    where = pa.array(place, mask=place < 0)
    return pa.table({name: raw.columns[name].take(where) for name in raw.file.display})
