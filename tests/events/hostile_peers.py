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
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame

_PAUSE_S = 0.05  # before a peer connects again


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return a frame of ZMTP: its flags, its size, and its body."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body


ALL_REPLAYS_REQUEST = frame(b"", MORE) + frame(bytes(8))  # an empty frame, and the sequence number 0


def hello(kind: bytes) -> bytes:
    """Return the handshake of a peer of a socket type: what it sends before it may send messages."""
    return GREETING + frame(READY_OF[kind], COMMAND)


class Peer:
    """A connection to a port.

    Attributes:
        reader: what the port sends. Most peers never read it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    async def send(self, message: bytes) -> None:
        """Send bytes, and wait while the port accepts none."""
        self._writer.write(message)
        await self._writer.drain()

    def close(self) -> None:
        """Close the connection."""
        self._writer.transport.abort()


async def subscribe_to_large_topic(peer: Peer) -> None:
    """Subscribe to a topic of 16 MB."""
    await peer.send(hello(b"SUB") + frame(b"\1" + bytes(16 * 10**6)))


async def subscribe_endlessly(peer: Peer) -> None:
    """Subscribe endlessly to different topics."""
    await peer.send(hello(b"SUB"))
    while True:
        await peer.send(b"".join(frame(b"\1" + os.urandom(200)) for _ in range(100)))


async def send_endless_message(peer: Peer) -> None:
    """Send a message of endlessly many frames."""
    await peer.send(hello(b"DEALER"))
    while True:
        await peer.send(frame(bytes(200), MORE) * 100)


async def send_malformed_requests(peer: Peer) -> None:
    """Request replays endlessly, with a sequence number that is too short."""
    await peer.send(hello(b"DEALER"))
    while True:
        await peer.send((frame(b"", MORE) + frame(b"123")) * 100)


async def request_replays_and_read_nothing(peer: Peer) -> None:
    """Request all replays endlessly, and read nothing."""
    await peer.send(hello(b"DEALER"))
    while True:
        await peer.send(ALL_REPLAYS_REQUEST * 100)


async def request_replays_and_read_them(peer: Peer) -> None:
    """Request all replays endlessly, and read them."""
    await peer.send(hello(b"DEALER") + ALL_REPLAYS_REQUEST * 10)
    while await peer.reader.read(65_536):
        await peer.send(ALL_REPLAYS_REQUEST)


async def subscribe_and_read_nothing(peer: Peer) -> None:
    """Subscribe, and read nothing."""
    await peer.send(hello(b"SUB") + frame(b"\1"))
    await asyncio.sleep(3600)


async def ping_endlessly(peer: Peer) -> None:
    """Ping endlessly, and read no answer."""
    await peer.send(hello(b"SUB"))
    while True:
        await peer.send(frame(b"\4PING\0\0" + bytes(16), COMMAND) * 100)


async def stay_silent(peer: Peer) -> None:
    """Do nothing, not even a handshake."""
    await asyncio.sleep(3600)


async def send_noise(peer: Peer) -> None:
    """Send random bytes, half of the time after a handshake."""
    await peer.send((hello(b"SUB") if random.random() < 0.5 else b"") + os.urandom(1000))


ON_PUB = (
    subscribe_to_large_topic,
    subscribe_endlessly,
    subscribe_and_read_nothing,
    ping_endlessly,
    stay_silent,
    send_noise,
)
ON_REPLAYS = (
    send_endless_message,
    send_malformed_requests,
    request_replays_and_read_nothing,
    request_replays_and_read_them,
    stay_silent,
    send_noise,
)


async def attack(endpoints: tuple[str, str], num_peers: int) -> None:
    """Run the peers, about half of them on each port, until the process ends."""

    async def connect_again_and_again(endpoint: str, behave: Callable[[Peer], Awaitable[None]]) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        while True:
            with contextlib.suppress(OSError):
                peer = Peer(*await asyncio.open_connection(host, int(port)))
                try:
                    await behave(peer)
                finally:
                    peer.close()
            await asyncio.sleep(_PAUSE_S)

    publisher, replays = endpoints
    behaviors = [(publisher, behave) for behave in ON_PUB] + [(replays, behave) for behave in ON_REPLAYS]
    print("attacking", flush=True)
    peers = (connect_again_and_again(*behaviors[index % len(behaviors)]) for index in range(num_peers))
    await asyncio.gather(*peers)


def main() -> None:
    """Attack the ports that the command line names."""
    publisher, replays, num_peers = sys.argv[1:]
    asyncio.run(attack((publisher, replays), int(num_peers)))


if __name__ == "__main__":
    main()
