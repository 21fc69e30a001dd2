"""What was appended, brought back on the export that is served now."""

from typing import Any

from fuxi_torchrec.export.bundle import ExportError, Manifest
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.serving.append_log import AppendLog, LogContent, about_of
from fuxi_torchrec.serving.catalogue import LEFT_OUT, ItemIds
from fuxi_torchrec.serving.live_users import LiveUsers
from fuxi_torchrec.serving.requests import Event

logger = get_logger(__name__)


def replay(content: LogContent, manifest: Manifest, items: ItemIds, users: LiveUsers, log: AppendLog | None) -> None:
    """Bring back what was appended.

    On another export than the log was begun with, what that one has is left out: events before the user's last one
    there, and of those at the same time as many of an item as it has.

    Args:
        manifest, items: of the export that is served.
        log: is written anew without what was forgotten and what the export has; None leaves it.
    """
    about = about_of(manifest)
    kinds = ("user_id_type", "item_id_type", "time_unit")
    if any(content.about.get(kind) != about[kind] for kind in kinds):
        raise ExportError(
            "the append log has other ids or times than the export: "
            + ", ".join(f"{kind} {content.about.get(kind)} and {about[kind]}" for kind in kinds)
        )
    same = content.about == about
    covered, torn = 0, False
    # what the export has of a user's last time there; more of that time came after it was made
    events = () if same else (packed for record in content.records for packed in record.get("events", ()))
    ties = users.stored_ties((user, time) for user, _, time, *_ in events)
    for record in content.records:
        for user in (*record.get("forget", ()), *record.get("forgotten", ())):
            users.forget(user)
        torn = torn or "forget" in record
        for each in record.get("events", ()):
            event = Event(*each)
            (item,) = items.find_few([event.item_id])
            if item == LEFT_OUT:  # this export's dataset has fewer items
                continue
            tied = ties.get((event.user_id, event.timestamp))
            if event.timestamp < users.last_time(event.user_id):
                covered += 1
            elif tied is not None and tied[item] and event.user_id not in users.forgotten:
                tied[item] -= 1
                covered += 1
            else:
                users.add(event, item)
    if covered:
        logger.info("append log: %d events are part of this export already", covered)
    if log is not None and (torn or not same):
        # what was forgotten, and what the export has, does not stay on disk
        left = [packed(event) for recent in users.recent.values() for event in recent.raw]
        log.rewrite(about, [{"forgotten": list(users.forgotten)}, {"events": left}])


def packed(event: Event) -> list[Any]:
    """An event of the log's records."""
    plain = [event.user_id, event.item_id, int(event.timestamp)]
    return [*plain, event.features] if event.features else plain
