"""Which connections a service keeps open when there are more than it can have."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Protocol

from fuxi_torchrec.options import check_bounds, option

RESERVED = 32  # connections beyond the limit, for /health alone


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections there are, and how long a client may let one wait."""

    max_connections: int = option(1024, "open at once; one more takes the place of the one that waits longest", least=1)
    max_per_address: int = option(
        512, "of them from one address; a proxy is one, and may have --max-connections", least=1
    )
    header_seconds: float = option(10.0, "until the header of a request is complete", least=0.1)
    body_seconds: float = option(30.0, "until its body is complete, or its answer was read", least=0.1)
    idle_seconds: float = option(60.0, "between two requests", least=0.1)

    def __post_init__(self) -> None:
        check_bounds(self)


class Client(Protocol):
    """One connection."""

    address: str

    def make_room(self) -> None:
        """End, and leave the share at once."""


class Share:
    """So many connections, of an address and in all.

    One more takes the place of one that waits for its client: rather of one whose request is not complete than of one
    between two requests, rather of the address that has the most of these, and there of the one that waits longest.
    What is being answered stays.
    """

    def __init__(self, most: int, most_per_address: int) -> None:
        self.most, self.most_per_address, self.count = most, most_per_address, 0
        self._open = Counter[str]()
        # by address, the one that waits longest first
        self._unfinished: dict[str, dict[Client, None]] = defaultdict(dict)
        self._idle: dict[str, dict[Client, None]] = defaultdict(dict)

    def admit(self, client: Client) -> bool:
        """Count a connection, if there is room or can be made."""
        if self._open[client.address] >= self.most_per_address and not self._make_room(client.address):
            return False
        if self.count >= self.most and not self._make_room():
            return False
        self._open[client.address] += 1
        self.count += 1
        return True

    def wait(self, client: Client, idle: bool) -> None:
        """The connection waits for its client from now on."""
        self.answer(client)
        (self._idle if idle else self._unfinished)[client.address][client] = None

    def answer(self, client: Client) -> None:
        """The client waits for us."""
        for waiting in (self._unfinished, self._idle):
            waiting[client.address].pop(client, None)
            if not waiting[client.address]:
                del waiting[client.address]

    def leave(self, client: Client) -> None:
        """The connection ends."""
        self.answer(client)
        self.count -= 1
        self._open[client.address] -= 1
        if not self._open[client.address]:
            del self._open[client.address]

    def _make_room(self, address: str | None = None) -> bool:
        for waiting in (self._unfinished, self._idle):
            among = max(waiting.values(), key=len, default={}) if address is None else waiting.get(address, {})
            if among:
                next(iter(among)).make_room()
                return True
        return False
