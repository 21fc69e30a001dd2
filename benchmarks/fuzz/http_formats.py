"""Requests to a service: bodies and headers, as bytes on a socket."""

import json
import socket
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.fuzz import mutations
from benchmarks.fuzz.fixtures import item_features
from benchmarks.fuzz.mutations import Mutation
from benchmarks.fuzz.outcomes import CORRECT, REFUSED, SILENT, UNCLEAR, Outcome, difference
from fuxi_torchrec import Recommender

TOKEN = "token-of-letters"
PATIENCE = 5.0  # seconds until a service that does not answer is told that nothing more comes
FEATURES = {"action": "buy", "surface": 2, "tags": [1, 2]}
SINCE = 1_000_000  # of requests, after the export


def requests(as_of: int) -> dict[str, dict[str, Any]]:
    """A body for each path."""
    now = as_of + SINCE
    past = [{"item_id": f"item-{n}", "timestamp": as_of - n, "features": FEATURES} for n in range(3)]
    return {
        "/recommend": {"user_id": "user-1", "time": now, "k": 5, "exclude_seen": True},
        "/recommend-history": {"events": past, "time": now, "k": 5, "exclude_seen": False},
        "/append": {"events": [{"user_id": "user-2", **event, "timestamp": as_of + 5} for event in past]},
        "/forget": {"user_ids": ["user-5", "nobody"]},
    }


def item_requests(now: int) -> dict[str, dict[str, Any]]:
    """The same of the paths that are about items, and of those that are about what is similar."""
    columns = item_features(range(1000, 1003))
    items = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    similar = {"/similar-items": {"item_id": "item-7", "k": 5}}
    return {"/items": {"items": items}, **similar, "/similar-users": {"user_id": "user-1", "time": now, "k": 5}}


class _Service:
    """A service in threads of this process, which it shares with all cases of it."""

    def __init__(self, export: Path, store: Path) -> None:
        import uvicorn

        from fuxi_torchrec.serving.http.connections import ConnectionLimits
        from fuxi_torchrec.serving.http.protocol import bounded
        from fuxi_torchrec.serving.http.service import create_app

        self.recommender = Recommender.load(export, log_dir=store)
        self.bodies = requests(self.recommender.manifest.as_of)
        app, protocol = create_app(self.recommender, TOKEN), bounded(ConnectionLimits(), lambda _: None)
        config = uvicorn.Config(app, http=protocol, ws="none", port=0, log_level="critical", access_log=False)  # type: ignore[arg-type]
        self.server = uvicorn.Server(config)
        threading.Thread(target=self.server.run, daemon=True).start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def ask(self, request: bytes) -> tuple[int, bytes] | None:
        """Status and body of the first answer; None if the connection ends without one."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as connection:
            connection.sendall(request)
            if _unfinished(request):
                connection.shutdown(socket.SHUT_WR)
            answer = bytearray()
            while _unfinished(answer, open_ended=True):
                try:
                    block = connection.recv(1 << 16)
                except TimeoutError:  # it waits for more
                    connection.shutdown(socket.SHUT_WR)
                    block = connection.recv(1 << 16)
                except ConnectionResetError:
                    break
                if not block:
                    break
                answer += block
        if not answer:
            return None
        head, _, body = bytes(answer).partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    def probe(self, items: bool) -> Any:
        """What it answers to a plain request that depends on no earlier one; items may have been added."""
        if items:
            answer = self.ask(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            said = json.loads(answer[1]) if answer else {}
            return [answer and answer[0], {name: value for name, value in said.items() if name != "items"}]
        path = "/recommend-history"
        answer = self.ask(_request(path, json.dumps(self.bodies[path]).encode()))
        return [answer and answer[0], json.loads(answer[1]) if answer else None]


@cache
def _service(fixtures: Path, beside: Path, items: bool) -> _Service:
    return _Service(fixtures / "export", beside / f"service-store-{items}")


def _request(path: str, body: bytes) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Authorization: Bearer {TOKEN}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass(frozen=True)
class HttpFormat:
    """Requests whose bodies, or whose heads, are damaged."""

    name: str
    head: bool
    items: bool = False

    def answers(self, fixtures: Path, place: Path) -> Any:
        """Of a service that got nothing damaged."""
        return _service(fixtures, place.parent, self.items).probe(self.items)

    def draw(self, fixtures: Path, random: Random) -> tuple[str, Mutation]:
        """What is sent, and to which path."""
        manifest = json.loads((fixtures / "export" / "manifest.json").read_text())
        bodies = item_requests(manifest["as_of"] + SINCE) if self.items else requests(manifest["as_of"])
        path, body = random.choice(sorted(bodies.items()))
        plain = json.dumps(body).encode()
        if self.head:
            whole = _request(path, plain)
            found = mutations.damage(whole[: -len(plain)], random)
            return path, Mutation(found.what, found.data + plain)
        edited = random.random() < 0.7
        found = mutations.edit_json(plain, random) if edited else mutations.damage_document(plain, random, json.loads)
        return path, Mutation(found.what, _request(path, found.data), found.key)

    def run(self, fixtures: Path, place: Path, random: Random, wanted: Any) -> Outcome:
        """Send it, look at the answer, and at the service afterwards."""
        service, (path, mutation) = _service(fixtures, place.parent, self.items), self.draw(fixtures, random)
        before = service.recommender.info()["recent_events"]
        damage = f"{path}: {mutation.what}"
        answer = service.ask(mutation.data)
        outcome = _judge(service, path, mutation, answer, damage, before)
        told = difference(service.probe(self.items), wanted)
        return outcome if told is None else Outcome(SILENT, damage, f"afterwards {told}")


def _judge(
    service: _Service, path: str, mutation: Mutation, answer: tuple[int, bytes] | None, damage: str, before: int
) -> Outcome:
    head, _, body = mutation.data.partition(b"\r\n\r\n")
    if answer is None:
        kind = REFUSED if _unfinished(mutation.data) else UNCLEAR
        return Outcome(kind, damage, "the connection was closed without an answer")
    status, said = answer
    message = f"{status} {said[:500].decode(errors='replace')}"
    if status != 200:
        return Outcome(REFUSED if 400 <= status < 500 and _says_why(said, mutation.key) else UNCLEAR, damage, message)
    if TOKEN.encode() not in head:
        return Outcome(SILENT, damage, f"answered without the token: {message}")
    try:
        told = _wrong(service, path, json.loads(body), json.loads(said), before)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        told = f"{error!r} in what was taken for good: {message}"
    return Outcome(CORRECT, damage) if told is None else Outcome(SILENT, damage, told)


def _says_why(said: bytes, key: str | None) -> bool:
    """Whether an answer is a text that names what it is about."""
    words = ("body", "token", "Content-Type", "HTTP request", "Not Found", "Not Allowed", *([key] if key else []))
    return any(word in said.decode(errors="replace") for word in words)


def _unfinished(message: bytes | bytearray, open_ended: bool = False) -> bool:
    """Whether a request or an answer is shorter than it says, or does not say and may be ``open_ended``."""
    head, end, body = bytes(message).partition(b"\r\n\r\n")
    if not end:
        return True
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return len(body) < int(value)
    return open_ended


def _wrong(service: _Service, path: str, body: Any, answer: Any, before: int) -> str | None:
    """What an answer has that the body, read as plain JSON, did not ask for."""
    recommender = service.recommender
    if path == "/append":
        accepted = recommender.info()["recent_events"] - before
        sums = sum(answer[name] for name in ("accepted", "late", "rare_items", "filtered"))
        return difference([accepted, sums], [answer["accepted"], len(body["events"])])
    if path == "/forget":
        return None if answer["forgotten"] <= len(body["user_ids"]) else f"forgot {answer['forgotten']}"
    if path == "/items":
        ids = {item["item_id"] for item in body["items"]}
        return difference(sum(answer[name] for name in ("added", "replaced", "known")), len(ids))
    if path == "/similar-items":
        similar = recommender.similar_items(body["item_id"], body.get("k", 10))
        return difference(answer, json.loads(json.dumps(similar.to_dict())))
    if path == "/similar-users":
        if body.get("time") is None:
            return None  # of the server's clock
        neighbours = recommender.similar_users(body["user_id"], int(body["time"]), body.get("k", 10))
        return difference(answer, json.loads(json.dumps(neighbours.to_dict())))
    now, k = answer["as_of"], body.get("k", 10)
    if body.get("time") is not None and body["time"] != now:
        return f"answered for the time {now}"
    if path == "/recommend":
        (own,) = recommender.recommend([body["user_id"]], now, k, bool(body.get("exclude_seen", False)))
    else:
        events = sorted(body["events"], key=lambda event: event["timestamp"])
        own = recommender.recommend_history(
            [event["item_id"] for event in events],
            [int(event["timestamp"]) for event in events],
            now,
            k,
            bool(body.get("exclude_seen", False)),
            [_given(event.get("features") or {}) for event in events],
        )
    return difference(answer, json.loads(json.dumps(own.to_dict())))


def _given(features: dict[str, Any]) -> dict[str, Any]:
    """Without those that are null: they are not given."""
    return {name: value for name, value in features.items() if value is not None}


FORMATS = [HttpFormat("http-bodies", head=False), HttpFormat("http-headers", head=True)]
FORMATS += [HttpFormat("http-items", head=False, items=True)]
