"""Peers that try to exhaust the event ports over raw ZMTP connections, in a separate process.

python -m tests.events.hostile_peers PUB_ENDPOINT REPLAY_ENDPOINT NUM_PEERS

Each peer repeats one way to take memory or time, and connects again when its connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import Awaitable, Callable

READY_OF = {kind: b"\x05READY\x0bSocket-Type\0\0\0" + bytes([len(kind)]) + kind for kind in (b"SUB", b"DEALER")}
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, COMMAND = 1, 4

_PAUSE_S = 0.05  # before a peer connects again


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return a frame of ZMTP."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body


def hello(kind: bytes) -> bytes:
    """Return what a peer sends until it may send messages."""
    return GREETING + frame(READY_OF[kind], COMMAND)


class Peer:
    """A connection that is only written to, unless it says otherwise."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Send bytes, and wait while the port takes none."""
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        """Close the connection."""
        self._writer.transport.abort()


async def large_subscription(peer: Peer) -> None:
    """Subscribe to a topic of 16 MB."""
    await peer.send(hello(b"SUB") + frame(b"\1" + bytes(16 * 10**6)))


async def many_subscriptions(peer: Peer) -> None:
    """Subscribe to different topics without end."""
    await peer.send(hello(b"SUB"))
    while True:
        await peer.send(b"".join(frame(b"\1" + os.urandom(200)) for _ in range(100)))


async def endless_message(peer: Peer) -> None:
    """Send a message without its last frame."""
    await peer.send(hello(b"DEALER"))
    while True:
        await peer.send(frame(bytes(200), MORE) * 100)


async def malformed_requests(peer: Peer) -> None:
    """Request replays endlessly, with a sequence number that is too short."""
    await peer.send(hello(b"DEALER"))
    while True:
        await peer.send((frame(b"", MORE) + frame(b"123")) * 100)


async def unread_replays(peer: Peer) -> None:
    """Request all replays endlessly, and read nothing."""
    await peer.send(hello(b"DEALER"))
    while True:
        await peer.send((frame(b"", MORE) + frame(bytes(8))) * 100)


async def read_replays(peer: Peer) -> None:
    """Request all replays endlessly, and read them."""
    await peer.send(hello(b"DEALER") + (frame(b"", MORE) + frame(bytes(8))) * 10)
    while await peer.reader.read(65_536):
        await peer.send(frame(b"", MORE) + frame(bytes(8)))


async def unread_events(peer: Peer) -> None:
    """Subscribe, and read nothing."""
    await peer.send(hello(b"SUB") + frame(b"\1"))
    await asyncio.sleep(3600)


async def pings(peer: Peer) -> None:
    """Ping without end, and read no answer."""
    await peer.send(hello(b"SUB"))
    while True:
        await peer.send(frame(b"\4PING\0\0" + bytes(16), COMMAND) * 100)


async def silence(peer: Peer) -> None:
    """Do nothing, not even a handshake."""
    await asyncio.sleep(3600)


async def noise(peer: Peer) -> None:
    """Send random bytes, some of them after a handshake."""
    await peer.send((hello(b"SUB") if random.random() < 0.5 else b"") + os.urandom(1000))


ON_PUB = (large_subscription, many_subscriptions, unread_events, pings, silence, noise)
ON_REPLAYS = (endless_message, malformed_requests, unread_replays, read_replays, silence, noise)


async def attack(endpoints: tuple[str, str], num_peers: int) -> None:
    """Run the peers, half of them on each port, until the process ends."""

    async def repeat(endpoint: str, behave: Callable[[Peer], Awaitable[None]]) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        while True:
            with contextlib.suppress(OSError):
                peer = Peer(*await asyncio.open_connection(host, int(port)))
                try:
                    await behave(peer)
                finally:
                    peer.close()
            await asyncio.sleep(_PAUSE_S)

    kinds = [(endpoints[0], behave) for behave in ON_PUB] + [(endpoints[1], behave) for behave in ON_REPLAYS]
    print("attacking", flush=True)
    await asyncio.gather(*(repeat(*kinds[index % len(kinds)]) for index in range(num_peers)))


def main() -> None:
    """Attack the ports that the command line names."""
    publisher, replays, num_peers = sys.argv[1:]
    asyncio.run(attack((publisher, replays), int(num_peers)))


if __name__ == "__main__":
    main()
