"""uvicorn's HTTP with limits: how long a client may take to send and to read, and how many there may be."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fuxi_torchrec.serving.http.connections import RESERVED, ConnectionLimits, Share
from fuxi_torchrec.serving.http.guard import CLOSING, Receive, Scope, Send, problem

_RETRY = {"Retry-After": "1", **CLOSING}


def bounded(limits: ConnectionLimits, dropped: Callable[[str], None]) -> Callable[..., H11Protocol]:
    """The protocol of all connections of one service, for uvicorn's ``http``.

    Args:
        dropped: is told why a connection was ended: ``header``, ``body``, ``answer``, ``idle`` for who took longer than
            the limit, ``room`` for who made room, ``refused`` for who found none, ``stop`` for who kept the
            service from stopping.
    """
    shares = (Share(limits.max_connections, limits.max_per_address), Share(RESERVED, RESERVED))
    return partial(BoundedProtocol, shares, limits, dropped)


class BoundedProtocol(H11Protocol):
    """One connection. It is counted in a share, and one timer says how long it may stay in its stage.

    Stages: ``header`` until a request's header is complete, ``body`` until its body is, ``idle`` between requests,
    ``answer`` while the client does not read what we write; no name while the client waits for us.
    """

    def __init__(
        self, shares: tuple[Share, Share], limits: ConnectionLimits, dropped: Callable[[str], None], **given: Any
    ) -> None:
        super().__init__(**given)
        self._shares, self._dropped = shares, dropped
        self._seconds = {
            "header": limits.header_seconds,
            "body": limits.body_seconds,
            "answer": limits.body_seconds,
            "idle": limits.idle_seconds,
        }
        self._share: Share | None = None
        self._stage: tuple[str, object] | None = None  # and the request it belongs to
        self._timer: asyncio.TimerHandle | None = None
        self.address = ""

    # --- what asyncio and uvicorn call -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._share = next((share for share in self._shares if share.admit(self)), None)
        if self._share is None:
            self._end("refused", 503)
            return
        if self._share is not self._shares[0]:
            self.app = partial(_health_only, self.app)
        self._wait("header")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait("header")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait("idle")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait("idle")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wait("idle")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave()

    def shutdown(self) -> None:
        super().shutdown()
        if self._stage and self._stage[0] in ("body", "answer") and self._timer is not None:
            self._timer.cancel()  # the other half of the time is for answers to what comes in this one
            self._timer = self.loop.call_later((self.config.timeout_graceful_shutdown or 0) / 2, self._end, "stop", 503)

    # --- limits ------------------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """For another connection."""
        self._end("room", 503)

    def _wait(self, between: str) -> None:
        """Set the timer for what the connection waits for, unless it waits for that already.

        Args:
            between: what it is if no request has begun: header or idle.
        """
        if self._share is None:
            return
        stage = ""
        if self.transport.is_closing() or self.flow.write_paused:
            stage = "answer"
        elif self.conn.their_state is h11.SEND_BODY:
            stage = "body"
        elif self.conn.their_state is h11.IDLE:
            stage = between
        if self._stage == (stage, self.cycle):
            return
        self._stage = (stage, self.cycle)
        if self._timer is not None:
            self._timer.cancel()
        if stage:
            self._share.wait(self, idle=stage == "idle")
            self._timer = self.loop.call_later(self._seconds[stage], self._end, stage, 408)
        else:
            self._share.answer(self)

    def _end(self, why: str, status: int) -> None:
        """End the connection; the client is told if it waits for an answer of which it has nothing yet."""
        self._dropped(why)
        stage = self._stage[0] if self._stage else "header"
        begun = self.cycle is not None and self.cycle.response_started
        if not self.transport.is_closing() and (stage == "header" or (stage == "body" and not begun)):
            self.transport.write(_answer(status))
        # to wait until everything is sent would be to wait for the client
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()
        self._leave()

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._share is not None:
            self._share.leave(self)
            self._share = None


async def _health_only(app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    if scope.get("path") != "/health":
        app = problem(503, "too many connections are open", _RETRY)
    await app(scope, receive, send)


def _answer(status: int) -> bytes:
    said = "too many connections are open" if status == 503 else "the request took too long to arrive"
    body = json.dumps({"detail": said}).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    headers |= _RETRY if status == 503 else CLOSING
    head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*head, "", ""]).encode() + body
