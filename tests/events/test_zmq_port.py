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
from tests.events.hostile_peers import COMMAND, GREETING, MORE, READY_OF, frame, hello
from tests.patience import PATIENCE_S, wait_until

ANYWHERE = "tcp://127.0.0.1:*"
REQUEST = frame(b"", MORE) + frame(bytes(8))
END = frame(b"", MORE) + frame(b"", MORE) + frame(b"\xff" * 8, MORE) + frame(b"")


@contextlib.contextmanager
def published(source: FakeSource, endpoint: str = ANYWHERE, **config: str) -> Iterator[ZmqPublisher]:
    settings = {"zmq_endpoint": endpoint, "replay_endpoint": ANYWHERE, **config}
    with contextlib.closing(ZmqPublisher(source, EventsConfig(block_size=4, **settings))) as publisher:
        yield publisher


@contextlib.contextmanager
def peer(endpoint: str | None, sent: bytes = b"") -> Iterator[socket.socket]:
    """Connect, and send bytes."""
    assert endpoint is not None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S) as connection:
        connection.sendall(sent)
        yield connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """Return what comes until some bytes have come."""
    data = b""
    while not data.endswith(end):
        more = connection.recv(65_536)
        assert more, data
        data += more
    return data


def is_closed(connection: socket.socket) -> bool:
    """Read until the port closes the connection."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65_536):
            pass
    return True


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f\x02",  # ZMTP 2.0
        GREETING.replace(b"NULL", b"PLAIN"),
        GREETING + frame(b"\1"),  # a message before the handshake
        GREETING + frame(b"\5HELLO", COMMAND),
        GREETING + frame(b"", COMMAND),
        GREETING + frame(b"\xffREADY", COMMAND),
        GREETING + frame(b"\5READY\x0bSocket-Type\xff\xff\xff\xffSUB", COMMAND),
        GREETING + frame(b"\5READY\x08Identity\0\0\0\0", COMMAND),
        GREETING + frame(READY_OF[b"DEALER"], COMMAND),  # at the port for subscribers
        hello(b"SUB") + b"\x80\0",  # an unknown flag
        hello(b"SUB") + b"\2" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"),
        hello(b"SUB") + b"\2" + b"\xff" * 8,
        hello(b"SUB") + frame(b"\1", MORE) + frame(b""),
        hello(b"SUB") + frame(b"\2"),
        hello(b"SUB") + frame(b""),
        hello(b"SUB") + frame(b"\5ERROR\3why", COMMAND),
    ],
    ids=str,
)
def test_peers_that_violate_the_protocol_are_disconnected(sent: bytes) -> None:
    with published(FakeSource()) as publisher, peer(publisher.endpoint, sent) as connection:
        assert is_closed(connection)


def test_a_message_has_few_frames() -> None:
    with (
        published(FakeSource()) as publisher,
        peer(publisher.replay_endpoint, hello(b"DEALER") + frame(b"", MORE) * 4) as connection,
    ):
        assert is_closed(connection)


def test_random_bytes_do_not_end_the_port() -> None:
    source, numbers = FakeSource(), random.Random(0)
    with published(source) as publisher:
        source.store(1, 2, 3, 4)
        for endpoint, kind in ((publisher.endpoint, b"SUB"), (publisher.replay_endpoint, b"DEALER")):
            for _ in range(100):
                start = bytes(numbers.choice((b"", GREETING, hello(kind), hello(kind) + frame(b"\1"))))
                noise = bytearray(start + numbers.randbytes(numbers.randrange(1, 200)))
                if numbers.random() < 0.5:
                    noise[numbers.randrange(len(noise)) :] = numbers.randbytes(9)
                with peer(endpoint, bytes(noise)):
                    pass
        assert is_answered(publisher.replay_endpoint)


def test_frames_may_arrive_byte_by_byte() -> None:
    source = FakeSource()
    with published(source) as publisher, peer(publisher.replay_endpoint) as connection:
        source.store(1, 2, 3, 4)
        for byte in hello(b"DEALER") + REQUEST:
            connection.sendall(bytes([byte]))
        assert b"BlockStored" in read_until(connection, END)


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
        data = b""
        while b"BlockStored" not in data:
            data += connection.recv(65_536)
        assert frame(b"kv@one", MORE) in data
        connection.sendall(cancel + ping)
        read_until(connection, frame(b"\4PONGcontext", COMMAND))
        source.store(5, 6, 7, 8)
        connection.sendall(ping)
        assert read_until(connection, frame(b"\4PONGcontext", COMMAND)) == frame(b"\4PONGcontext", COMMAND)


def test_subscriptions_to_other_topics_are_forgotten() -> None:
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
        assert read_until(connection, frame(b"\4PONG", COMMAND)) == frame(b"\4PONG", COMMAND)


def test_a_replay_is_answered_before_the_next_request_is_read() -> None:
    source = FakeSource()
    with published(source) as publisher:
        source.store(1, 2, 3, 4)
        with peer(publisher.replay_endpoint, hello(b"DEALER") + REQUEST * 500) as connection:
            data, num_ends = b"", 0
            while num_ends < 500:
                data = data[-100:].rpartition(END)[2] if END in data else data
                more = connection.recv(65_536)
                assert more, f"the connection was closed after {num_ends} of 500 replays"
                data += more
                num_ends += data.count(END)


def is_answered(endpoint: str | None) -> bool:
    """Return whether a new reader gets a replay, or is disconnected."""
    with contextlib.suppress(ConnectionError), peer(endpoint, hello(b"DEALER") + REQUEST) as connection:
        data = b""
        while more := connection.recv(65_536):
            data += more
            if data.endswith(END):
                return True
    return False


@pytest.mark.parametrize("limit", [4])
def test_connections_beyond_the_limit_take_the_place_of_unfinished_ones(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_port, "MAX_PEERS", limit)
    source = FakeSource()
    with published(source) as publisher, contextlib.ExitStack() as stack:
        source.store(1, 2, 3, 4)
        silent = [stack.enter_context(peer(publisher.replay_endpoint)) for _ in range(limit)]
        honest = [
            stack.enter_context(peer(publisher.replay_endpoint, hello(b"DEALER") + REQUEST)) for _ in range(limit)
        ]
        for connection in honest:
            read_until(connection, END)
        assert all(is_closed(connection) for connection in silent)
        with peer(publisher.replay_endpoint, hello(b"DEALER")) as one_too_many:
            assert is_closed(one_too_many)
        honest[0].sendall(REQUEST)
        read_until(honest[0], END)
        honest.pop().close()
        wait_until(lambda: is_answered(publisher.replay_endpoint))


def test_peers_that_do_not_finish_their_handshake_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connection, "HANDSHAKE_S", 0.0)
    with published(FakeSource()) as publisher, peer(publisher.endpoint, GREETING) as connection:
        assert is_closed(connection)


def test_peers_that_read_nothing_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connection, "STALLED_S", 0.0)
    source = FakeSource(max_batches=1000)
    for token in range(1000):
        source.store(token, 2, 3, 4)
    with (
        published(source) as publisher,
        peer(publisher.replay_endpoint, hello(b"DEALER") + REQUEST * 1000) as connection,
    ):
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        assert poll.poll(PATIENCE_S * 1000)


def test_closing_ends_while_peers_read_nothing() -> None:
    source = FakeSource(max_batches=1000)
    with contextlib.ExitStack() as stack:
        with published(source) as publisher:
            for _ in range(20):
                stack.enter_context(peer(publisher.replay_endpoint, hello(b"DEALER") + REQUEST * 1000))
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
        data = b""
        while b"SUB" not in data and b"PUB" not in data:
            data += connection.recv(100)
    assert not path.exists()
