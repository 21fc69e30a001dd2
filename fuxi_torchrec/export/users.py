"""The users of an export: vectors, histories and states, every rank its share."""

import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuxi_torchrec.data.batches import EventBatch
from fuxi_torchrec.distributed import raise_on_all_ranks
from fuxi_torchrec.events.histories import Histories, Ints
from fuxi_torchrec.export.bundle import HISTORIES, STATES, USERS, ExportError, scaled
from fuxi_torchrec.export.job import ExportJob, plain_ids, summed
from fuxi_torchrec.export.parts import Users, part_name, write_histories, write_users
from fuxi_torchrec.export.states import TRAILER_BYTES, StateFile
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.tasks.window_state import WindowState
from fuxi_torchrec.training.progress import ProgressLines

logger = get_logger(__name__)

_PART_EVENTS, _PART_USERS = 2**22, 2**16  # of a file of users


def export_users(job: ExportJob, model_id: str) -> tuple[int, int]:
    """Users, their histories and states; how many users and states there are in all."""
    run, max_length = job.run, job.run.config.batch.max_length
    lengths = run.lengths()
    rows = np.flatnonzero(lengths > 0)
    encoded = np.minimum(lengths[rows], max_length)
    _show_states(job, encoded)
    partition = run.users.partition(rows, encoded)
    plan = [_parts(batches, encoded, rows) for batches in partition.batches]
    number = sum(max(each, default=-1) + 1 for each in plan[: job.world.rank])  # of this rank's first part
    until = job.as_of if job.as_of < run.dataset.info.last_time else None
    own, progress, done, part = plan[job.world.rank], ProgressLines("encoded", len(rows), "users"), 0, None
    windows = ExportedWindows(job) if job.window else None
    users = states = 0
    for step in range(len(partition.batches[0])):
        with raise_on_all_ranks("reading users"):
            batch, before = run.maker.histories(partition.batches[job.world.rank][step], max_length, until)
        state, user_rows = run.users.states(batch)
        if windows is not None:
            windows.find(batch)
        with raise_on_all_ranks("writing users"):
            if step < len(own):
                part = part or _Part(job, number + own[step], model_id)
                request_times = torch.full((len(batch),), job.as_of, device=run.model.device)
                vectors = scaled(run.users.query(state, user_rows, request_times), job.similarity)
                if not vectors.isfinite().all():
                    raise ExportError(f"{run.checkpoint}: the encoder's outputs are not finite")
                part.add(batch, before, vectors.cpu(), state, windows)
                if step + 1 == len(own) or own[step + 1] != own[step]:
                    written, part = part.finish(), None
                    users, states = users + len(written), states + int((written.state_row >= 0).sum())
        done += sum(len(batches[step]) for batches in partition.batches)
        progress.show(done)
    return summed(users), summed(states)


def _show_states(job: ExportJob, encoded: Ints) -> None:
    """Say how large the states will be, and refuse what does not fit."""
    if not job.record_bytes:
        kind = job.run.config.model.kind
        logger.info("no states: those of a %s encoder grow with the history, and are made from it", kind)
        return
    least, size = job.options.state_min_events, job.record_bytes + TRAILER_BYTES
    count = int((encoded >= least).sum())
    total = f"{count * size / 2**20:,.1f} MiB, {size / 2**10:.1f} KiB each"
    logger.info("states of %s users with at least %s events: %s", f"{count:,}", f"{least:,}", total)
    with raise_on_all_ranks("looking for room on disk"):
        free = shutil.disk_usage(job.directory).free
        if count * size > free:
            raise ExportError(
                f"{job.directory}: {count * size / 2**30:,.1f} GiB of states, {free / 2**30:,.1f} GiB are free: "
                "raise --state-min-events, or take another place"
            )


class _Part:
    """A file of users, one of their histories and one of their states."""

    def __init__(self, job: ExportJob, number: int, model_id: str) -> None:
        self.job, self.number = job, number
        self.states_name = part_name(STATES, number, "bin")
        self.file: StateFile | None = None  # where states grow, none are stored
        if job.record_bytes:
            self.file = StateFile.create(job.directory / self.states_name, model_id, job.record_bytes)
        self._users: list[Users] = []
        self._histories: list[Histories] = []

    def add(
        self, batch: EventBatch, before: Ints, vectors: Tensor, state: Any, windows: "ExportedWindows | None"
    ) -> None:
        offsets = batch.offsets.numpy()
        ids = plain_ids(self.job.run.maker.reader.ids_of(batch.users.numpy()))
        users = Users.new(ids, vectors.shape[1])
        users.embedding, users.anchor_count, users.events = vectors.numpy(), before, np.diff(offsets)
        if windows is not None:
            users.window_item, users.window_score = windows.scored(vectors, batch.offsets.diff())
        users.as_of[:] = self.job.as_of
        times = batch.timestamps.numpy()
        users.anchor_time, users.last_time = times[offsets[:-1]], times[offsets[1:] - 1]
        if self.file is not None:
            kept = np.flatnonzero(users.events >= self.job.options.state_min_events)
            records = state.select(torch.from_numpy(kept)).to_bytes()
            if windows is not None:
                records = torch.cat([records, windows.state.select(torch.from_numpy(kept)).to_bytes()], 1)
            users.state_row[kept] = self.file.append(records)
        self._users.append(users)
        features = {feature.name: batch.features[feature.name] for feature in self.job.features}
        self._histories.append(Histories(offsets, batch.items.numpy(), times, features))

    def finish(self) -> Users:
        directory, number = self.job.directory, self.number
        if self.file is not None:
            self.file.close()
            self.job.wrote(self.states_name)
        users = Users.stack(self._users)
        write_users(directory / part_name(USERS, number), users)
        write_histories(directory / part_name(HISTORIES, number), users.ids, Histories.stack(self._histories))
        self.job.wrote(part_name(USERS, number), part_name(HISTORIES, number))
        return users


class ExportedWindows:
    """The windows of a batch's users, and rows of their items."""

    def __init__(self, job: ExportJob) -> None:
        bias = job.bias()
        assert bias is not None
        self.job, self.bias = job, bias

    def find(self, batch: EventBatch) -> None:
        """Of a batch: a collective."""
        run = self.job.run
        items, offsets, times = (part.numpy() for part in (batch.items, batch.offsets, batch.timestamps))
        self.state = WindowState.of(items, offsets, times, self.job.window)
        ids, place = np.unique(self.state.items.numpy(), return_inverse=True)
        lookup, dim = run.module.item_lookup(), run.tables.items.dim
        rows = lookup.rows(torch.from_numpy(ids).long(), dim, run.model.device, run.lookups.items)
        self.rows = scaled(rows.detach().float().cpu(), self.job.similarity)
        self.places = torch.from_numpy(place.reshape(self.state.items.shape))

    def scored(self, vectors: Tensor, counts: Tensor) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The items and their scores at as_of, before the temperature."""
        times = torch.full((len(vectors),), self.job.as_of)
        correction = self.state.correction(self.bias, counts, vectors, times, self.job.about["temperature"])
        scores = correction.scores(vectors, self.rows, self.places)
        return self.state.items.numpy(), torch.where(self.state.items > 0, scores, 0.0).numpy()


def _parts(batches: Sequence[Ints], encoded: Ints, rows: Ints) -> list[int]:
    """The part that each of a rank's batches belongs to; batches without users, at the end, to none."""
    found, part, users, events = [], 0, 0, 0
    for batch in batches:
        if not len(batch):
            break
        size = int(encoded[np.searchsorted(rows, batch)].sum())
        if users and (users + len(batch) > _PART_USERS or events + size > _PART_EVENTS):
            part, users, events = part + 1, 0, 0
        users, events = users + len(batch), events + size
        found.append(part)
    return found
