"""Connections that never finish a header, for the service's benchmark.

python -m benchmarks.slow_clients PORT CONNECTIONS
"""

import asyncio
import contextlib
import sys

AGAIN = 6  # seconds until one that was dropped comes again


async def run(port: int, connections: int) -> None:
    """Clients that send a header byte by byte, for as long as our standard input is open."""
    opened, connected = 0, asyncio.Semaphore(0)

    async def client() -> None:
        nonlocal opened
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                opened += 1
                connected.release()
                writer.write(b"GET /health HTTP/1.1\r\nX: ")
                while not reader.at_eof():
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(1)
                writer.close()
            await asyncio.sleep(AGAIN)

    tasks = []
    for _ in range(connections):
        tasks.append(asyncio.create_task(client()))
        await connected.acquire()
    print("all have connected", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(opened, flush=True)


if __name__ == "__main__":
    asyncio.run(run(*map(int, sys.argv[1:])))
