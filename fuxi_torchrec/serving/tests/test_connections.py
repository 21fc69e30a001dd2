"""Connections of the service: who gets one, who loses one, and how long a client may take. Real sockets on loopback."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from fuxi_torchrec.serving.http import server
from fuxi_torchrec.serving.http.connections import RESERVED, ConnectionLimits, Share
from fuxi_torchrec.serving.http.protocol import bounded

HALF = b"GET /health HTTP/1.1\r\nHost"
WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class Client:
    def __init__(self, share, address="a"):
        self.share, self.address, self.ended = share, address, False

    def make_room(self):
        self.ended = True
        self.share.leave(self)


def admitted(share, address="a", idle=False):
    client = Client(share, address)
    assert share.admit(client)
    share.wait(client, idle)
    return client


def test_one_more_takes_the_place_of_the_one_that_waits_longest():
    share = Share(2, 2)
    first, second = admitted(share), admitted(share)
    admitted(share)
    assert first.ended and not second.ended and share.count == 2


def test_idle_connections_stay_while_others_have_sent_half_a_request():
    share = Share(2, 2)
    idle, half = admitted(share, idle=True), admitted(share)
    admitted(share)
    assert half.ended and not idle.ended


def test_the_address_with_the_most_makes_room():
    share = Share(4, 4)
    alone, many = admitted(share, "alone"), [admitted(share, "many") for _ in range(3)]
    admitted(share, "new")
    assert [client.ended for client in many] == [True, False, False] and not alone.ended


def test_an_address_beyond_its_share_makes_room_for_itself():
    share = Share(10, 2)
    other, first = admitted(share, "b"), admitted(share)
    admitted(share)
    admitted(share)
    assert first.ended and not other.ended and share.count == 3


def test_what_is_being_answered_stays():
    share = Share(2, 2)
    clients = [admitted(share), admitted(share)]
    for client in clients:
        share.answer(client)
    assert not share.admit(Client(share)) and not any(client.ended for client in clients)
    share.leave(clients[0])
    assert share.admit(Client(share))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["admit", "wait", "idle", "answer", "leave"]), st.integers(0, 5))))
def test_a_share_is_never_exceeded_and_remembers_nobody(steps):
    share, inside = Share(4, 3), []
    for step, n in steps:
        if step == "admit":
            client = Client(share, f"address {n % 2}")
            inside += [client] if share.admit(client) else []
        elif inside:
            client = inside[n % len(inside)]
            if step == "leave":
                client.make_room()
            elif step == "answer":
                share.answer(client)
            else:
                share.wait(client, idle=step == "idle")
        inside = [client for client in inside if not client.ended]
        assert share.count == len(inside) <= 4
        assert all([client.address for client in inside].count(address) <= 3 for address in ("address 0", "address 1"))
    for client in inside:
        share.leave(client)
    assert share.count == 0 and not share._open and not share._unfinished and not share._idle


# --- on sockets ------------------------------------------------------------------------------------------------------


class Served:
    """A small ASGI application behind the protocol, on a free port."""

    def __init__(self, limits, answer=b"fine"):
        self.dropped, self.held, self.answer = [], threading.Event(), answer
        protocol = bounded(limits, self.dropped.append)
        config = uvicorn.Config(
            self.app, http=protocol, ws="none", lifespan="off", interface="asgi3", log_level="error"
        )
        self.server, self.bound = uvicorn.Server(config), server.bind("127.0.0.1", 0)
        self.thread = threading.Thread(target=self.server.run, args=([self.bound],), daemon=True)

    async def app(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        if scope["path"] == "/held":
            await asyncio.to_thread(self.held.wait, 60)
        body = self.answer if scope["path"] == "/long" else b"fine"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    def connect(self, data=b""):
        connection = socket.create_connection(self.bound.getsockname(), 30)
        connection.sendall(data)
        return connection

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.001)
        return self

    def __exit__(self, *_):
        self.held.set()
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(30)


def read(connection):
    """Everything until the other side ends the connection."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(65536):
            got += more
    return got


def drip(connection, data, every=0.02):
    """Send a byte at a time, until the other side ends the connection."""
    with contextlib.suppress(OSError):
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(every)


def is_answered(connection):
    """Whether a whole answer, of status 200, comes."""
    got = b""
    while not got.endswith(b"fine"):
        more = connection.recv(65536)
        assert more, got
        got += more
    return got.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("first", ["", "after another request"])
@pytest.mark.parametrize(
    ("stage", "sent"),
    [
        ("header", b""),
        ("header", HALF),
        ("body", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"),
        ("body", b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"),
    ],
)
def test_a_client_that_takes_too_long_is_dropped(stage, sent, first):
    if first and not sent:
        stage = "idle"
    limits = {
        f"{name}_seconds": (1.5 if first else 0.5) if name == stage else 600 for name in ("header", "body", "idle")
    }
    with Served(ConnectionLimits(**limits)) as served, served.connect() as connection:
        if first:
            connection.sendall(WHOLE)
            assert is_answered(connection)
        connection.sendall(sent)
        got = read(connection)
        assert served.dropped == [stage]
        assert got == b"" if stage == "idle" else got.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("stage", "first", "rest"),
    [
        ("header", b"GET / HTTP/1.1\r\nX: ", b"x" * 10_000),
        ("body", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n", b"x" * 10_000),
    ],
)
def test_sending_a_little_all_the_time_does_not_help(stage, first, rest):
    limits = ConnectionLimits(header_seconds=0.5, body_seconds=0.5)
    with Served(limits) as served, served.connect(first) as connection:
        drip(connection, rest)
        assert served.dropped == [stage]


def test_a_client_that_does_not_read_its_answer_is_dropped():
    with Served(ConnectionLimits(body_seconds=0.3), answer=b"x" * 50_000_000) as served:
        with served.connect(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n"):
            while not served.dropped:
                time.sleep(0.01)
        assert served.dropped == ["answer"]


def test_our_own_time_is_not_the_clients():
    limits = ConnectionLimits(header_seconds=600, body_seconds=0.1, idle_seconds=0.1)
    with Served(limits) as served, served.connect(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n") as connection:
        time.sleep(0.5)
        served.held.set()
        assert read(connection).startswith(b"HTTP/1.1 200") and served.dropped == ["idle"]


def test_requests_on_one_connection_each_have_their_time():
    with Served(ConnectionLimits(header_seconds=3, idle_seconds=3)) as served, served.connect() as connection:
        for _ in range(8):  # together longer than the limits
            time.sleep(0.5)
            connection.sendall(WHOLE)
            assert is_answered(connection)
        assert served.dropped == []


def test_at_the_limit_half_requests_make_room_for_new_ones():
    with Served(ConnectionLimits(max_connections=4)) as served:
        slow = [served.connect(HALF) for _ in range(20)]
        for _ in range(10):
            with served.connect(WHOLE) as connection:
                assert is_answered(connection)
        assert served.dropped.count("room") >= 16
        assert read(slow[0]) in (b"", read(slow[1])), "503, unless the reset was faster"
        for connection in slow:
            connection.close()


def test_when_everything_is_being_answered_health_still_is_and_the_rest_is_told_to_come_again():
    held = b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n"
    limits = ConnectionLimits(max_connections=3, header_seconds=600, body_seconds=600, idle_seconds=600)
    with Served(limits) as served, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(served.connect(held)) for _ in range(3)]
        while len(served.server.server_state.tasks) < 3:
            time.sleep(0.001)
        slow = [stack.enter_context(served.connect(HALF)) for _ in range(2 * RESERVED)]
        for _ in range(3):
            assert is_answered(stack.enter_context(served.connect(WHOLE)))
            refused = read(stack.enter_context(served.connect(WHOLE.replace(b"/health", b"/recommend"))))
            assert refused.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in refused.lower()
        served.held.set()
        assert all(is_answered(connection) for connection in busy)
        assert set(served.dropped) == {"room"} and len(slow) == 2 * RESERVED


def test_who_comes_when_even_the_reserve_is_busy_is_refused():
    held = b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n"
    limits = ConnectionLimits(max_connections=1, max_per_address=1)
    with Served(limits) as served, served.connect(held):
        while not served.server.server_state.tasks:
            time.sleep(0.001)
        protocol = next(iter(served.server.server_state.connections))
        reserve = protocol._shares[1]
        reserve.most = 0
        with served.connect() as connection:
            assert read(connection).startswith(b"HTTP/1.1 503")
        assert served.dropped == ["refused"]
