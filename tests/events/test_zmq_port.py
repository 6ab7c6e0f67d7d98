"""Peers with raw ZMTP connections at the event ports. Peers that use libzmq are in test_zmq_publisher.py."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
from collections.abc import Iterator

import pytest

from radixkv.config import EventsConfig
from radixkv.events import peer_connection, zmq_port
from radixkv.events.zmq_publisher import ZmqPublisher
from radixkv.events.zmtp import MAX_FRAME_BYTES
from tests.events.fake_source import FakeSource
from tests.events.hostile_peers import ALL_REPLAYS_REQUEST, COMMAND, GREETING, LONG, MORE, READY_OF, frame, hello
from tests.patience import PATIENCE_S, wait_until

ANYWHERE = "tcp://127.0.0.1:*"
END_OF_REPLAY = frame(b"", MORE) + frame(b"", MORE) + frame(b"\xff" * 8, MORE) + frame(b"")


@contextlib.contextmanager
def published(source: FakeSource, endpoint: str = ANYWHERE, **config: str) -> Iterator[ZmqPublisher]:
    settings = {"zmq_endpoint": endpoint, "replay_endpoint": ANYWHERE, **config}
    with contextlib.closing(ZmqPublisher(source, EventsConfig(block_size=4, **settings))) as publisher:
        yield publisher


@contextlib.contextmanager
def peer(endpoint: str | None, sent: bytes = b"") -> Iterator[socket.socket]:
    """Connect to a port, send bytes, and yield the connection."""
    assert endpoint is not None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S) as connection:
        connection.sendall(sent)
        yield connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """Return the received bytes as soon as they end with `end`."""
    received = b""
    while not received.endswith(end):
        chunk = connection.recv(65_536)
        assert chunk, f"the connection was closed after {received!r}"
        received += chunk
    return received


def wait_for_disconnection(connection: socket.socket) -> None:
    """Read until the port closes the connection.

    Raises:
        TimeoutError: the connection stays open.
    """
    with contextlib.suppress(ConnectionError):
        while connection.recv(65_536):
            pass


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="HTTP"),
        pytest.param(b"\xff" + bytes(8) + b"\x7f\x02", id="ZMTP 2.0"),
        pytest.param(GREETING.replace(b"NULL", b"PLAIN"), id="another mechanism"),
        pytest.param(GREETING + frame(b"\1"), id="a message before READY"),
        pytest.param(GREETING + frame(b"\5HELLO", COMMAND), id="another command than READY"),
        pytest.param(GREETING + frame(b"", COMMAND), id="an empty command"),
        pytest.param(GREETING + frame(b"\xffREADY", COMMAND), id="a command name longer than the frame"),
        pytest.param(
            GREETING + frame(b"\5READY\x0bSocket-Type\xff\xff\xff\xffSUB", COMMAND), id="a value longer than the frame"
        ),
        pytest.param(GREETING + frame(b"\5READY\x08Identity\0\0\0\0", COMMAND), id="no socket type"),
        pytest.param(GREETING + frame(READY_OF[b"DEALER"], COMMAND), id="a DEALER at the port for subscribers"),
        pytest.param(hello(b"SUB") + b"\x80\0", id="an unknown flag"),
        pytest.param(hello(b"SUB") + bytes([LONG]) + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"), id="a large frame"),
        pytest.param(hello(b"SUB") + bytes([LONG]) + b"\xff" * 8, id="a frame of 2^64 - 1 bytes"),
        pytest.param(hello(b"SUB") + frame(b"\1", MORE) + frame(b""), id="a subscription of two frames"),
        pytest.param(hello(b"SUB") + frame(b"\2"), id="neither a subscription nor a cancellation"),
        pytest.param(hello(b"SUB") + frame(b""), id="an empty message"),
        pytest.param(hello(b"SUB") + frame(b"\5ERROR\3why", COMMAND), id="ERROR"),
    ],
)
def test_peers_that_violate_the_protocol_are_disconnected(sent: bytes) -> None:
    with published(FakeSource()) as publisher, peer(publisher.endpoint, sent) as connection:
        wait_for_disconnection(connection)


def test_a_peer_whose_message_has_too_many_frames_is_disconnected() -> None:
    with (
        published(FakeSource()) as publisher,
        peer(publisher.replay_endpoint, hello(b"DEALER") + frame(b"", MORE) * 4) as connection,
    ):
        wait_for_disconnection(connection)


def test_random_bytes_do_not_end_the_port() -> None:
    source, rng = FakeSource(), random.Random(0)
    with published(source) as publisher:
        source.store(1, 2, 3, 4)
        for endpoint, kind in ((publisher.endpoint, b"SUB"), (publisher.replay_endpoint, b"DEALER")):
            for _ in range(100):
                start = bytes(rng.choice((b"", GREETING, hello(kind), hello(kind) + frame(b"\1"))))
                noise = bytearray(start + rng.randbytes(rng.randrange(1, 200)))
                if rng.random() < 0.5:
                    noise[rng.randrange(len(noise)) :] = rng.randbytes(9)
                with peer(endpoint, bytes(noise)):
                    pass
        assert is_answered(publisher.replay_endpoint)


def test_frames_may_arrive_byte_by_byte() -> None:
    source = FakeSource()
    with published(source) as publisher, peer(publisher.replay_endpoint) as connection:
        source.store(1, 2, 3, 4)
        for byte in hello(b"DEALER") + ALL_REPLAYS_REQUEST:
            connection.sendall(bytes([byte]))
        assert b"BlockStored" in read_until(connection, END_OF_REPLAY)


def test_commands_of_zmtp_3_1_subscribe_cancel_and_ping() -> None:
    source = FakeSource()
    subscribe, cancel = frame(b"\x09SUBSCRIBEkv", COMMAND), frame(b"\6CANCELkv", COMMAND)
    ping = frame(b"\4PING\0\0context", COMMAND)
    with (
        published(source, topic="kv@one") as publisher,
        peer(publisher.endpoint, hello(b"SUB") + subscribe + ping) as connection,
    ):
        read_until(connection, frame(b"\4PONGcontext", COMMAND))
        source.store(1, 2, 3, 4)
        received = b""
        while b"BlockStored" not in received:
            received += connection.recv(65_536)
        assert frame(b"kv@one", MORE) in received
        connection.sendall(cancel + ping)
        read_until(connection, frame(b"\4PONGcontext", COMMAND))
        source.store(5, 6, 7, 8)
        connection.sendall(ping)
        # Only the answer to the ping arrives, and no event.
        assert read_until(connection, frame(b"\4PONGcontext", COMMAND)) == frame(b"\4PONGcontext", COMMAND)


def test_subscriptions_to_other_topics_are_ignored() -> None:
    source = FakeSource()
    with (
        published(source, topic="kv") as publisher,
        peer(publisher.endpoint, hello(b"SUB")) as connection,
    ):
        for _ in range(100):
            connection.sendall(frame(b"\1" + os.urandom(200)))
        connection.sendall(frame(b"\4PING\0\0", COMMAND))
        read_until(connection, frame(b"\4PONG", COMMAND))
        (subscriber,) = [each._reader for each in publisher._publisher._peers]
        assert not subscriber._subscriptions
        source.store(1, 2, 3, 4)
        connection.sendall(frame(b"\4PING\0\0", COMMAND))
        # Only the answer to the ping arrives, and no event.
        assert read_until(connection, frame(b"\4PONG", COMMAND)) == frame(b"\4PONG", COMMAND)


def test_requests_that_arrive_during_a_replay_are_all_answered() -> None:
    source = FakeSource()
    with published(source) as publisher:
        source.store(1, 2, 3, 4)
        with peer(publisher.replay_endpoint, hello(b"DEALER") + ALL_REPLAYS_REQUEST * 500) as connection:
            begun, num_replays = b"", 0  # what has arrived of an incomplete replay, and the number of complete ones
            while num_replays < 500:
                chunk = connection.recv(65_536)
                assert chunk, f"the connection was closed after {num_replays} of 500 replays"
                *complete, begun = (begun + chunk).split(END_OF_REPLAY)
                num_replays += len(complete)


def is_answered(endpoint: str | None) -> bool:
    """Return whether a new reader gets a replay; if not, the port closes the connection."""
    with contextlib.suppress(ConnectionError), peer(endpoint, hello(b"DEALER") + ALL_REPLAYS_REQUEST) as connection:
        received = b""
        while chunk := connection.recv(65_536):
            received += chunk
            if received.endswith(END_OF_REPLAY):
                return True
    return False


def test_connections_beyond_the_limit_take_the_place_of_unfinished_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 4
    monkeypatch.setattr(zmq_port, "MAX_PEERS", limit)
    source = FakeSource()
    with published(source) as publisher, contextlib.ExitStack() as stack:
        source.store(1, 2, 3, 4)
        silent = [stack.enter_context(peer(publisher.replay_endpoint)) for _ in range(limit)]
        honest = [
            stack.enter_context(peer(publisher.replay_endpoint, hello(b"DEALER") + ALL_REPLAYS_REQUEST))
            for _ in range(limit)
        ]
        for connection in honest:
            read_until(connection, END_OF_REPLAY)
        for connection in silent:
            wait_for_disconnection(connection)
        with peer(publisher.replay_endpoint, hello(b"DEALER")) as one_too_many:
            wait_for_disconnection(one_too_many)
        honest[0].sendall(ALL_REPLAYS_REQUEST)
        read_until(honest[0], END_OF_REPLAY)
        honest.pop().close()
        wait_until(lambda: is_answered(publisher.replay_endpoint))


def test_peers_that_do_not_finish_their_handshake_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connection, "HANDSHAKE_S", 0.0)
    with published(FakeSource()) as publisher, peer(publisher.endpoint, GREETING) as connection:
        wait_for_disconnection(connection)


def test_peers_that_read_nothing_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connection, "STALLED_S", 0.0)
    source = FakeSource(max_batches=1000)
    for token in range(1000):
        source.store(token, 2, 3, 4)
    with (
        published(source) as publisher,
        peer(publisher.replay_endpoint, hello(b"DEALER") + ALL_REPLAYS_REQUEST * 1000) as connection,
    ):
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)  # the port closes the connection
        assert poll.poll(PATIENCE_S * 1000)


def test_the_publisher_closes_while_peers_read_nothing() -> None:
    source = FakeSource(max_batches=1000)
    with contextlib.ExitStack() as stack:
        with published(source) as publisher:
            for _ in range(20):
                stack.enter_context(peer(publisher.replay_endpoint, hello(b"DEALER") + ALL_REPLAYS_REQUEST * 1000))
                stack.enter_context(peer(publisher.endpoint, hello(b"SUB") + frame(b"\1")))
            for token in range(1000):
                source.store(token, 2, 3, 4)
        assert not publisher._thread.is_alive()


def test_a_unix_socket_takes_the_place_of_a_stale_one_and_is_removed(tmp_path) -> None:
    path = tmp_path / "events"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    source = FakeSource()
    with published(source, f"ipc://{path}"), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(hello(b"SUB") + frame(b"\1"))
        received = b""
        while b"PUB" not in received:  # the socket type in the port's handshake
            received += connection.recv(100)
    assert not path.exists()
