"""What stands before the service: nobody without the token is listened to, and no body is read beyond its limit."""

import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CLOSING = {"Connection": "close"}  # a body that was not read is in the way of the next request


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as callers see it; what cannot be written as JSON is replaced."""
    return JSONResponse({"detail": detail.encode("utf-8", "replace").decode()}, status, headers)


class Guard:
    """Asks for the token before the body, limits bodies, counts requests and times them.

    Args:
        token: that callers must show, if given.
        open_paths: where no token is needed, and no body is read.
        paths: that there are; the others are counted as one.
        observe: is told path, status and seconds of every request.
    """

    def __init__(
        self,
        app: Any,
        token: str | None,
        open_paths: frozenset[str],
        paths: frozenset[str],
        body_bytes: int,
        observe: Callable[[str, int, float], None],
    ) -> None:
        self.app, self.token, self.open_paths, self.paths = app, token, open_paths, paths
        self.body_bytes, self.observe = body_bytes, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, sending)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.observe(path, status, time.perf_counter() - began)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"])
        length = given.get(b"content-length", b"0")
        if scope["path"] in self.open_paths:
            await self.app(scope, receive, send)
        elif not self._may(given.get(b"authorization", b"")):
            said = "the bearer token is missing or wrong"
            await problem(401, said, {"WWW-Authenticate": "Bearer", **CLOSING})(scope, receive, send)
        elif length.isdigit() and int(length) > self.body_bytes:
            await problem(413, self._too_large(), CLOSING)(scope, receive, send)
        else:
            await self.app(scope, self._counted(receive), send)

    def _may(self, authorization: bytes) -> bool:
        if self.token is None:
            return True
        kind, _, shown = authorization.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(shown.strip(), self.token.encode())

    def _counted(self, receive: Receive) -> Receive:
        left = self.body_bytes

        async def counted() -> MutableMapping[str, Any]:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, self._too_large(), CLOSING)
            return message

        return counted

    def _too_large(self) -> str:
        return f"the body is larger than {self.body_bytes:,} bytes"
