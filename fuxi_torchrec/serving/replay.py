"""What was appended, brought back on the export that is served now."""

from collections import Counter

from fuxi_torchrec.export.bundle import ExportError, Manifest
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.serving.catalogue import LEFT_OUT, ItemIds
from fuxi_torchrec.serving.forgotten import Forgotten
from fuxi_torchrec.serving.live_users import LiveUsers
from fuxi_torchrec.serving.new_items import latest
from fuxi_torchrec.serving.store import Content, Store, about_of

logger = get_logger(__name__)


def replay(content: Content, manifest: Manifest, items: ItemIds, users: LiveUsers, store: Store | None) -> None:
    """Bring back what was appended.

    On another export than before, events do not count that it has: those before the user's last one there, and of those
    at the same time as many of an item as it has. What two exports in a row have goes from the store, and so does
    whatever users did until a refresh forgot them.

    Args:
        manifest, items: of the export that is served.
        store: None leaves it as it is.
    """
    about = about_of(manifest)
    kinds = [kind for kind in ("user_id_type", "item_id_type", "time_unit") if content.about[kind] != about[kind]]
    if kinds:
        said = ", ".join(f"{kind} {content.about[kind]} and {about[kind]}" for kind in kinds)
        raise ExportError(f"the store of appended events has other ids or times than the export: {said}")
    same, events = content.about == about, content.events
    until = {} if same else Forgotten.of(manifest).until_of({row.user for row in events})
    gone = [row for row in events if row.time <= until.get(row.user, -1)]
    events = [row for row in events if row.time > until.get(row.user, -1)]
    forgotten = {row.user: row._replace(item=None, time=None, features=None, live=1) for row in gone}
    forgotten |= {row.user: row for row in content.forgotten}
    for user in forgotten:
        users.forget(user)
    # what the export has of a user's last time there; more of that time came after it was made
    compared = () if same else ((row.user, row.time) for row in events if row.user not in users.forgotten)
    ties = users.stored_ties(compared)
    after = []
    for row, item in zip(events, items.find_few([row.item for row in events]), strict=True):
        live = row.live
        if not same:
            tied = ties.get((row.user, row.time), Counter())
            late = row.time < users.last_time(row.user)
            live = int(item != LEFT_OUT and not late and not tied[item])  # a dataset may have fewer items
            tied[item] -= tied[item] > 0
        if live:
            users.add(row.event(), item)
        if live or row.live or same:
            after.append(row._replace(live=live))
    if not same and len(after) > users.recent_events:
        logger.info("%d appended events are part of this export already", len(after) - users.recent_events)
    if store is not None and (not same or content.state.erased):
        kept = latest(content.items, manifest.item_file.id_column).values()
        store.rewrite(about, [*forgotten.values(), *kept, *after])
