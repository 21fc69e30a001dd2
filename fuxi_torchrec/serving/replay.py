"""What an append log says, brought back into memory when an export is opened."""

from typing import Any

from fuxi_torchrec.export.bundle import ExportError, Manifest
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.serving.append_log import AppendLog, LogContent, about_of
from fuxi_torchrec.serving.catalogue import Catalogue
from fuxi_torchrec.serving.live_users import LiveUsers
from fuxi_torchrec.serving.requests import Event

logger = get_logger(__name__)

KINDS = ("user_id_type", "item_id_type", "time_unit")


def packed(event: Event) -> list[Any]:
    """An event as a log has it."""
    plain = [event.user_id, event.item_id, int(event.timestamp)]
    return [*plain, event.sides] if event.sides else plain


def replay(
    content: LogContent, log: AppendLog | None, manifest: Manifest, users: LiveUsers, catalogue: Catalogue
) -> None:
    """Bring back what was appended. On another export than the log was begun with, what that one has is left out:
    events before the user's last one there, and of those at the same time as many of an item as it has.

    Args:
        content: of the log.
        log: is written anew if it has what should not stay on disk; None for one that is only read.
        manifest: of the export.
        users: get the events.
        catalogue: of the export's items.
    """
    about = about_of(manifest)
    if any(content.about.get(kind) != about[kind] for kind in KINDS):
        raise ExportError(
            "the append log has other ids or times than the export: "
            + ", ".join(f"{kind} {content.about.get(kind)} and {about[kind]}" for kind in KINDS)
        )
    same = content.about == about
    covered, torn = 0, False
    # what the export has of a user's last time there; more of that time came after it was made
    events = () if same else (each for record in content.records for each in record.get("events", ()))
    ties = users.stored_ties((user, time) for user, _, time, *_ in events)
    for record in content.records:
        for user in (*record.get("forget", ()), *record.get("forgotten", ())):
            users.forget(user)
        torn = torn or "forget" in record
        for each in record.get("events", ()):
            event = Event(*each)
            (item,) = catalogue.find_few([event.item_id])
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
