"""What an export recommends to a user, or after a history.

python -m pipelines.recommend --export DIR --user ID [--time ISO|unix] [-k 10] [--exclude-seen] [--json]
python -m pipelines.recommend --export DIR --similar-to ITEM [-k 10] [--json]
python -m pipelines.recommend --export DIR --neighbours-of USER [--time ISO|unix] [-k 10] [--json]
python -m pipelines.recommend --export DIR --history ITEM@TIME,ITEM@TIME [--time ISO|unix] [-k 10] [--json]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fuxi_torchrec.events.times import parse_time, show_time
from fuxi_torchrec.logging import setup_logging
from fuxi_torchrec.options import add_encoder_option
from fuxi_torchrec.serving.neighbours import Neighbours
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.requests import Answer, Request, Similar


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.recommend", description=__doc__.splitlines()[0])
    parser.add_argument("--export", required=True, type=Path, metavar="DIR")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--user", metavar="ID", help="a user's raw id")
    who.add_argument("--similar-to", metavar="ITEM", help="items similar to this one, by its raw id")
    who.add_argument("--neighbours-of", metavar="USER", help="users with similar vectors, by the raw id of one")
    who.add_argument("--history", metavar="ITEM@TIME,...", help="an anonymous history: raw item ids and their times")
    parser.add_argument("--time", metavar="ISO|unix", help="of the request; the export's as_of by default")
    parser.add_argument("-k", type=int, default=Request.k, help="how many items; %(default)s by default")
    parser.add_argument("--exclude-seen", action="store_true", help="leave out items of the history")
    parser.add_argument("--log-dir", type=Path, help="of appended events; the export's path and .log by default")
    parser.add_argument("--json", action="store_true", help="an object with user, as_of and items")
    add_encoder_option(parser)
    return parser.parse_args(arguments)


def raw_id(text: str, kind: str, what: str) -> int | str:
    """An id of the export's type."""
    if kind == "string":
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{what} {text!r} is no integer: this export has integer ids") from None


def ask(args: argparse.Namespace, recommender: Recommender) -> Answer | Similar | Neighbours:
    """One answer."""
    manifest = recommender.manifest
    time = parse_time(args.time, manifest.time_unit) if args.time else manifest.as_of
    if args.similar_to is not None:
        return recommender.similar_items(raw_id(args.similar_to, manifest.item_id_type, "--similar-to"), args.k)
    if args.neighbours_of is not None:
        user = raw_id(args.neighbours_of, manifest.user_id_type, "--neighbours-of")
        return recommender.similar_users(user, time, args.k)
    if args.user is not None:
        user = raw_id(args.user, manifest.user_id_type, "--user")
        return recommender.recommend([user], time, args.k, args.exclude_seen)[0]
    items, times = [], []
    for event in filter(None, args.history.split(",")):
        item, at, when = event.rpartition("@")
        if not at:
            raise ValueError(f"--history: {event!r} is not ITEM@TIME")
        items.append(raw_id(item, manifest.item_id_type, "--history: item"))
        times.append(parse_time(when, manifest.time_unit))
    return recommender.recommend_history(items, times, time, args.k, args.exclude_seen)


def show_scored(
    what: str, ids: Sequence[int | str], scores: Sequence[float], display: Sequence[dict[str, str | None]] = ()
) -> None:
    """Ids, scores and what is shown of them, as a table."""
    width = max((len(str(each)) for each in ids), default=4)
    print(f"{'':>4}  {what:<{width}}  {'score':>9}")
    for place, (each, score) in enumerate(zip(ids, scores, strict=True)):
        more = "  ".join(text for text in display[place].values() if text) if display else ""
        print(f"{place + 1:>4}  {each!s:<{width}}  {score:>9.4f}{'  ' * bool(more)}{more}")


def show(answer: Answer, unit: str) -> None:
    """A table for people."""
    who = "this history" if answer.user_id is None else f"user {answer.user_id}"
    print(f"for {who} at {show_time(answer.as_of, unit)} UTC, after {answer.events:,} events")
    if not answer.known:
        print("the user is unknown: served as new, with the catalogue's first items")
    if answer.before_last_event:
        print("the time lies before the last event: no time has passed since, for the model")
    if answer.unknown_items:
        print(f"{answer.unknown_items} items of the history are unknown to the model")
    show_scored("item", answer.items, answer.scores, answer.display)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask and show."""
    args = parse(arguments)
    setup_logging("warning")
    try:
        recommender = Recommender.load(args.export, log_dir=args.log_dir, read_only=True, warm_up=False)
        answer = ask(args, recommender)
    except (ValueError, OSError) as error:
        print(f"recommend: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(answer.to_dict()))
    elif isinstance(answer, Answer):
        show(answer, recommender.manifest.time_unit)
    elif isinstance(answer, Neighbours):
        show_scored("user", answer.users, answer.scores)
    else:
        show_scored("item", answer.items, answer.scores, answer.display)
    return 0


if __name__ == "__main__":
    sys.exit(main())
