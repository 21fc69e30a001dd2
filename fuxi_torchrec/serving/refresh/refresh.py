"""A new export from an old one and the events since: touched users only, exactly as a full export would have them.

Rules, also in the manifest:

* A user's new events are appended to the state; without a state (or with a damaged one) the history is encoded again.
* A user whose encoded events would pass ``max_positions`` gets a new anchor: the last ``max_length`` events.
* An event older than the user's last one is late: it is counted and left out. The next full export has it.
* The same events applied again, whatever files they are in, are recognised and left out.
* Users to forget are left out, and what they did until now stays out of later refreshes too.
* Touched users are queried at the new ``as_of``; the others keep their vectors, unless all are queried again.
* Items that were added to a store are in the new export, and its events of them are of these.
* Users that a file of features has get its features in place of theirs, whole; all users are queried again then.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from fuxi_torchrec.artifacts import NewDirectory
from fuxi_torchrec.events.log import OnBadRows
from fuxi_torchrec.events.times import check_time, show_time
from fuxi_torchrec.export.bundle import MANIFEST, Bundle, ExportError
from fuxi_torchrec.serving.feature_rows import FeatureRows, UserRows, read_file
from fuxi_torchrec.serving.refresh.new_events import LogColumns, NewEvents, read_events, stored
from fuxi_torchrec.serving.refresh.new_items import with_stored_items
from fuxi_torchrec.serving.refresh.run import Progress, RefreshRun
from fuxi_torchrec.serving.refresh.summary import Summary


def refresh(
    export: str | Path,
    events: str | Path | None,
    output: str | Path,
    *,
    users: str | Path | None = None,
    as_of: int | None = None,
    requery_all: bool = False,
    forget: Sequence[int | str] = (),
    columns: LogColumns | None = None,
    on_bad_rows: OnBadRows | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Write a new export. Events are read as those of the export were: its manifest says how.

    Args:
        export: the one to begin with; it is not changed.
        events: CSV or Parquet logs (a file, a directory, a glob), or a Recommender's store; None for none.
        output: must not exist, or be this very refresh, already done.
        users: CSV or Parquet of users whose features are others now, or are new; all users are queried again then.
        as_of: the request time; the latest of the export's own and of the events by default, and never before.
        requery_all: query all users, not only touched ones.
        forget: users that the new export does not have.
        columns: names of the log's columns where they are others.
        on_bad_rows: as when the dataset was prepared by default.
    """
    bundle, output, began = Bundle.open(export), Path(output), time.perf_counter()
    content = None if events is None else stored(events)
    with with_stored_items(bundle, content, output) as (whole, added):
        manifest = whole.manifest
        new = NewEvents.none(manifest) if events is None else read_events(events, whole, columns, on_bad_rows, content)
        unit, latest = manifest.time_unit, max(manifest.as_of, int(new.histories.times.max(initial=0)))
        if as_of is None:
            as_of = latest
        check_time(as_of, manifest.as_of, unit, "as_of")
        if as_of < latest:
            raise ExportError(
                f"as_of {as_of} ({show_time(as_of, unit)}) is before {latest} ({show_time(latest, unit)}), the latest "
                "of the export's own as_of and the new events: a user is not queried before a known event. Give a "
                "later time, or none"
            )
        wanted = [bundle.manifest.to_json(), new.digest, as_of, requery_all, sorted(map(str, forget))]
        if content is not None and added:
            wanted += [[row.features for row in content.items]]
        summary = Summary(str(output), as_of, len(new), bad_rows=new.bad_rows, added_items=added)
        rows = None if users is None else _changed(whole, users, summary)
        if rows is not None:
            wanted += [hashlib.sha256(rows.table.numpy().tobytes() + str(rows.ids.to_pylist()).encode()).hexdigest()]
        summary.unknown_items, summary.rare_items = new.unknown_items, new.rare_items
        request = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()
        if _done_already(output, request):
            summary.already_done = True
            return summary
        with NewDirectory(output) as place:
            summary.seconds["reading"] = time.perf_counter() - began
            show = progress or (lambda *_: None)
            requery_all = requery_all or rows is not None
            RefreshRun(whole, new, place, as_of, requery_all, forget, summary, show, rows).run(request)
        return summary


def _changed(bundle: Bundle, users: str | Path, summary: Summary) -> UserRows:
    """Rows of users' features, those of a file in place of the export's."""
    raw, before = read_file(bundle, users, "user"), UserRows.read(bundle)
    assert before is not None  # the file could not be read else
    rows, summary.unknown_values = FeatureRows(bundle, bundle.tables(), "user").rows(raw)
    summary.changed_features = len(raw.ids)
    return before.updated(raw.ids, rows)


def _done_already(output: Path, request: str) -> bool:
    """Whether the output is this very refresh; an error if it is something else."""
    if not output.exists():
        return False
    if (output / MANIFEST).exists() and (Bundle.open(output).manifest.parent or {}).get("request") == request:
        return True
    raise ExportError(f"{output} exists and is not this refresh: exports are never changed, choose another output")
