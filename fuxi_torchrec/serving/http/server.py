"""uvicorn around the service: where it listens, how many files it may open, how it stops."""

import resource
import signal
import socket
import sys
from dataclasses import replace

import uvicorn
from fastapi import FastAPI

from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.serving.http.connections import RESERVED, ConnectionLimits
from fuxi_torchrec.serving.http.protocol import bounded

logger = get_logger(__name__)

BACKLOG = 1024  # connections that the kernel holds until they are accepted
# so many are accepted before those that are open get a turn: a flood keeps nobody waiting, and a connection is read
# before others could take its place
AT_ONCE = 64
OTHER_FILES = 256 + 4 * AT_ONCE  # of the export, the store, libraries; connections that come and go


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the address, and does not listen yet: nobody connects before there are answers."""
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound is not None:
            bound.close()
        raise ValueError(f"cannot listen on --host {host} --port {port}: {error.strerror}") from None
    return bound


def within_open_files(limits: ConnectionLimits) -> ConnectionLimits:
    """As many connections as the process may have files; the limit is raised as far as it may be."""
    others = RESERVED + OTHER_FILES
    needed = limits.max_connections + others
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft not in (resource.RLIM_INFINITY, max(soft, needed)):
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft <= others:
            raise ValueError(f"at most {soft:,} files may be open (ulimit -n): {others + 1:,} are the least")
        if soft < needed:
            logger.warning("--max-connections %d, since at most %d files may be open (ulimit -n)", soft - others, soft)
            return replace(limits, max_connections=soft - others)
    return limits


def run(app: FastAPI, bound: socket.socket, limits: ConnectionLimits, stop_seconds: int) -> None:
    """Serve until SIGTERM or SIGINT, after which requests have ``stop_seconds`` to finish.

    Args:
        app: of :func:`~fuxi_torchrec.serving.http.service.create_app`.
    """
    config = uvicorn.Config(
        app,
        http=bounded(limits, lambda why: app.state.metrics.dropped.labels(why).inc()),  # type: ignore[arg-type]
        ws="none",
        log_level="info",
        access_log=False,
        backlog=min(AT_ONCE, max(limits.max_connections // 4, 1)),  # asyncio takes it for both
        timeout_keep_alive=limits.idle_seconds + 1,  # type: ignore[arg-type]  # ours is first
        timeout_graceful_shutdown=stop_seconds,
    )
    # uvicorn has its own handlers while it serves, and in the end repeats the signal to these: to stop is no failure
    before = {number: signal.signal(number, lambda *_: sys.exit(0)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _Server(config).run([bound])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or []:
            bound.listen(BACKLOG)
            host, port = bound.getsockname()[:2]
            logger.info("running on http://%s:%d", f"[{host}]" if ":" in host else host, port)
