"""A run's vectors, states and programs as files that need no TorchRec.

Every rank writes what it has: its rows of the tables, its items, its users. Only the FAISS index, the encoder and the
programs are written by rank 0, the index from the items' files.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch.distributed as dist
from safetensors import SafetensorError

from fuxi_torchrec import strict_yaml
from fuxi_torchrec.artifacts import NewDirectory
from fuxi_torchrec.distributed import raise_on_all_ranks, run_on_rank_0
from fuxi_torchrec.evaluation.loading import Loaded, own_dataset
from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.feature_files import FeatureFile
from fuxi_torchrec.events.features import Owner
from fuxi_torchrec.events.times import NAMES, last_time, likely_unit, parse_time, show_time
from fuxi_torchrec.export import index as indices
from fuxi_torchrec.export.bundle import (
    FEATURES,
    HISTORIES,
    INDEX,
    ITEMS,
    OWNED,
    PROGRAMS,
    STATES,
    USER_ROWS,
    USERS,
    ExportError,
    FileEntry,
    Manifest,
    values_folder,
    write_manifest,
)
from fuxi_torchrec.export.job import ExportJob, id_type
from fuxi_torchrec.export.options import ExportOptions
from fuxi_torchrec.export.programs import APPEND, QUERY, detached, write_programs
from fuxi_torchrec.export.states import TRAILER_BYTES
from fuxi_torchrec.export.tables import model_id, write_items, write_other_items, write_tables, write_user_rows
from fuxi_torchrec.export.users import export_users
from fuxi_torchrec.logging import get_logger

logger = get_logger(__name__)

INT8_INDEX = "index-int8.faiss"
RULES = {
    "score": "inner product of embeddings, over the temperature; items with equal scores are in no particular order",
    "rank": "a target's rank in evaluation is 1 + the number of other items with a strictly higher score",
    "as_of": "users are queried at as_of, which is not before any event that was encoded",
    "anchors": "a user's sequence is its last max_length events; anchor_time is the first one's time, anchor_count the "
    "number of events before it, events the number encoded",
    "states": "users with at least state_min_events encoded events have a state; state_row is -1 for others",
    "items": "index 0 is an item nobody knows: part of histories, never recommended",
    "rare items": "an item of later events that neither the model nor other-items.parquet has is index 0 too, unless "
    "log.rare_items is drop and log.min_item_events above 1: then its events are left out until the next full export",
    "repeats": "where the model has them, items of window_item score window_score, over the temperature, in place of "
    "the inner product; the best k are those of both, of the index's best k + window without the window's",
    "programs": "a state is (count, pending_time, pending, one tensor per channel), users first; query takes rows of "
    "user-rows/ too, 0 for users that have none, where there are features of users",
    "features of users": "the row of user-rows/ is added to the encoder's output; users that are not there have none",
}


def choose_as_of(run: Loaded, options: ExportOptions) -> int:
    """The users' request time; refused if it is implausible."""
    info = run.dataset.info
    if options.as_of is None:
        return info.last_time
    as_of, unit = parse_time(options.as_of, info.time_unit), info.time_unit
    first = info.first_time
    if not first <= as_of <= last_time(unit):
        if other := likely_unit(as_of, unit):
            raise ExportError(f"--as-of {as_of} looks like {NAMES[other]}: the data's times are in {NAMES[unit]}")
        if as_of > first:
            raise ExportError(f"--as-of {as_of} is after the year 2200: times are in {NAMES[unit]}")
        raise ExportError(
            f"--as-of {as_of} ({show_time(as_of, unit)}) is before the data's first event, {first} "
            f"({show_time(first, unit)}): times are in {NAMES[unit]}"
        )
    if as_of < info.last_time and not options.truncate:
        raise ExportError(
            f"--as-of {as_of} ({show_time(as_of, unit)}) is before the data's last event, {info.last_time} "
            f"({show_time(info.last_time, unit)}): a user is not queried before a known event. Give a "
            "later time, or leave later events out with --truncate"
        )
    return as_of


def export(run: Loaded, output: str | Path, options: ExportOptions | None = None) -> Manifest:
    """Write an export to a directory that does not exist, on storage that all ranks share: a collective, all or
    nothing.
    """
    options, output = options or ExportOptions(), Path(output)
    with raise_on_all_ranks("preparing the export"):
        NewDirectory(output).check()
        as_of = choose_as_of(run, options)
        if options.index and find_spec("faiss") is None:
            raise ExportError("faiss is not installed: pip install fuxi_torchrec[serve], or leave it out: --no-index")
    new = NewDirectory(output)
    try:
        with raise_on_all_ranks("making the output directory"):
            if run.world.rank == 0:
                place = new.begin()
                folders = (FEATURES, *map(values_folder, OWNED), ITEMS, USERS, USER_ROWS, HISTORIES, STATES, PROGRAMS)
                for folder in folders:
                    (place / folder).mkdir()
        manifest = _Exporter(run, new.place, options, as_of).write()
        with raise_on_all_ranks("renaming the output"):
            if run.world.rank == 0:
                new.commit()
    except (OSError, SafetensorError) as error:  # a full disk, most likely
        raise ExportError(f"{output}: cannot be written: {error}") from None
    finally:
        new.end()
    return manifest


class _Exporter(ExportJob):
    def write(self) -> Manifest:
        """Every file, then the manifest."""
        write_tables(self)
        weights = model_id(self)
        items = write_items(self)
        write_user_rows(self)
        run_on_rank_0(self.world, "writing other items", lambda: write_other_items(self))
        self._feature_values()
        users, states = export_users(self, weights)
        index = None
        if self.options.index:
            dist.barrier()  # the items of all ranks are there
            index = run_on_rank_0(self.world, "building the index", lambda: self._build_index(items))
        if self.options.programs:
            self._programs()
        files = self._files()
        info, config = self.run.dataset.info, self.run.config
        manifest = Manifest(
            model=strict_yaml.to_dict(config)["model"],
            model_id=weights,
            **self.about,
            dimension=config.model.dim,
            as_of=self.as_of,
            max_length=config.batch.max_length,
            state_min_events=self.options.state_min_events,
            state_bytes=self.record_bytes + TRAILER_BYTES if self.record_bytes else 0,
            items=items,
            users=users,
            states=states,
            item_id_type=id_type(self.run.vocabulary.ids.type),
            user_id_type=id_type(self.run.maker.reader.ids_of(np.zeros(0, np.int64)).type),
            log=info.log,
            features=self.features,
            item_features=self.owned["item"],
            item_file=self._file_of("item"),
            user_features=self.owned["user"],
            user_file=self._file_of("user"),
            index=index or {},
            dataset=info.fingerprint,
            run={
                "name": self.run.directory.path.name,
                "checkpoint": self.run.checkpoint.name,
                "step": self.run.info.progress.step,
            },
            rules=RULES,
            files=files,
        )
        with raise_on_all_ranks("writing the manifest"):
            if self.first:
                write_manifest(self.directory, manifest)
        return manifest

    def _feature_values(self) -> None:
        """What text values of features stand for in the run's tables, so that new events can be understood."""
        run = self.run

        def work() -> None:
            for feature in (*self.features, *self.owned["item"], *self.owned["user"]):
                if not feature.vocabulary:
                    continue
                dataset = own_dataset(run.config, run.info, run.dataset, feature.name)
                file = f"{values_folder(feature.owner)}/{feature.name}.parquet"
                values = dataset.feature_values(feature.name, feature.owner)
                table = pa.table({"value": values, "index": pa.array(np.arange(1, len(values) + 1))})
                parquet.write_table(self.directory / file, table)
                self.wrote(file)

        run_on_rank_0(self.world, "writing features", work)

    def _file_of(self, owner: Owner) -> FeatureFile:
        """How a file of items or users is read: the columns that the model reads, and those that are shown."""
        names = {feature.name for feature in self.owned[owner]}
        if not names:
            return FeatureFile()
        run = self.run
        file = own_dataset(run.config, run.info, run.dataset, "features").owned(owner).file
        columns = tuple(spec for spec in file.columns if spec.kind == "display" or spec.name in names)
        return replace(file, columns=columns)

    def _build_index(self, items: int) -> dict[str, Any]:
        """FAISS's indices and what they find, from the files of all ranks."""
        dim = self.run.config.model.dim
        paths, users = (sorted((self.directory / folder).glob("*.parquet")) for folder in (ITEMS, USERS))
        queries = indices.sample_queries(users, self.options.recall_users, dim)
        exact = indices.nearest_scores(paths, queries, indices.NEAREST)
        found, about = indices.build(paths, items, dim, self.options.exact_items)
        about = {"file": INDEX, **indices.tuned(found, about, queries, exact, paths)}
        indices.write(found, self.directory / INDEX)
        self.wrote(INDEX)
        logger.info("%s index of %s items, recall@100 %.4f", about["kind"], f"{items:,}", about["recall@100"])
        del found
        if self.options.quantize == "int8":
            small = indices.build_int8(paths, items, dim)
            recall = indices.recall(small, queries, exact, paths)
            indices.write(small, self.directory / INT8_INDEX)
            self.wrote(INT8_INDEX)
            size = self.files[INT8_INDEX].size
            about["int8"] = {"file": INT8_INDEX, "recall@100": recall, "recall_lost": 1.0 - recall, "bytes": size}
            logger.info("int8 index: %.1f MiB, recall@100 %.4f", size / 2**20, recall)
        return about

    def _programs(self) -> None:
        if self.run.encoder.state_kind != "constant":
            logger.info("no portable programs: states of a %s encoder grow", self.run.config.model.kind)
            return

        def work() -> None:
            user_rows, place = self.run.lookups.users is not None, self.directory / PROGRAMS
            repeats = (self.bias(), self.about["temperature"])
            worst = write_programs(detached(self.run.encoder), self.similarity, place, user_rows, *repeats)
            logger.info("portable programs differ from the encoder by at most %.1e", worst)
            self.wrote(f"{PROGRAMS}/{QUERY}", f"{PROGRAMS}/{APPEND}")

        run_on_rank_0(self.world, "exporting programs", work)

    def _files(self) -> dict[str, FileEntry]:
        """Sizes and checksums of all ranks' files."""
        everyone: list[dict[str, FileEntry]] = [{} for _ in range(self.world.size)]
        dist.all_gather_object(everyone, self.files)
        return dict(sorted(entry for part in everyone for entry in part.items()))
