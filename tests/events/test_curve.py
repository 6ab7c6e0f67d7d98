"""Readers of libzmq that authenticate themselves with CURVE."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth

pytest.importorskip("nacl")

from radixkv.config import EventsConfig
from radixkv.errors import ConfigError
from radixkv.events.curve import read_curve_keys
from radixkv.events.zmq_publisher import ZmqPublisher
from tests.events.fake_source import FakeSource
from tests.events.test_zmq_publisher import ANYWHERE, TOKENS, receive, request_replay, wait_for_subscription
from tests.patience import PATIENCE_S


class Keys:
    """The keys of a server and of two readers, and the configuration of a server to which only one of them may connect.

    Attributes:
        server_file, server_secret_file: files with the server's public key, and with its secret key.
        server_key: the server's public key.
        allowed, stranger: the public and the secret key of the reader that may connect, and of the other one.
    """

    def __init__(self, folder: Path) -> None:
        clients = folder / "clients"
        clients.mkdir()
        self.server_file, self.server_secret_file = zmq.auth.create_certificates(folder, "server")
        self.allowed = zmq.auth.load_certificate(zmq.auth.create_certificates(folder, "allowed")[1])
        self.stranger = zmq.auth.load_certificate(zmq.auth.create_certificates(folder, "stranger")[1])
        (folder / "allowed.key").rename(clients / "allowed.key")
        self.server_key = zmq.auth.load_certificate(self.server_file)[0]
        self.config = EventsConfig(
            zmq_endpoint=ANYWHERE,
            replay_endpoint=ANYWHERE,
            curve_key_file=self.server_secret_file,
            curve_clients=str(clients),
            block_size=4,
        )


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@contextlib.contextmanager
def connected(
    kind: int, endpoint: str | None, server_key: bytes | None, reader_keys: tuple[bytes, bytes | None] | None
) -> Iterator[zmq.Socket[bytes]]:
    """Connect with keys, or without any.

    Args:
        kind: the socket type.
        endpoint: the address of the port.
        server_key: the public key that the reader expects of the server.
        reader_keys: the reader's public and secret key; None to connect without keys.
    """
    assert endpoint is not None
    with zmq.Context() as context, context.socket(kind) as reader:
        reader.setsockopt(zmq.LINGER, 0)
        reader.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        if kind == zmq.SUB:
            reader.setsockopt(zmq.SUBSCRIBE, b"")
        if reader_keys is not None:
            assert server_key is not None
            set_keys(reader, server_key, reader_keys)
        reader.connect(endpoint)
        yield reader


def set_keys(reader: zmq.Socket[bytes], server_key: bytes, reader_keys: tuple[bytes, bytes | None]) -> None:
    public_key, secret_key = reader_keys
    assert secret_key is not None
    reader.curve_serverkey, reader.curve_publickey, reader.curve_secretkey = server_key, public_key, secret_key


def test_readers_with_an_allowed_key_read_events_and_replays(keys: Keys) -> None:
    source = FakeSource()
    with contextlib.closing(ZmqPublisher(source, keys.config)) as publisher:
        with connected(zmq.SUB, publisher.endpoint, keys.server_key, keys.allowed) as reader:
            first = wait_for_subscription(source, reader)
            source.store(1, 2, 3, 4, *range(2000))  # more bytes than a short frame can have (255)
            number, (stored,) = receive(reader)
            assert number == first
            assert stored[TOKENS] == [1, 2, 3, 4, *range(2000)]
        with connected(zmq.DEALER, publisher.replay_endpoint, keys.server_key, keys.allowed) as reader:
            assert [number for number, _ in request_replay(reader, 0)] == [*range(first + 1)]
            assert [number for number, _ in request_replay(reader, first)] == [first]


FAILURES = {  # events of libzmq about a connection
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_DISCONNECTED,
}


@pytest.mark.parametrize("who", ["a stranger", "without keys", "with another server's key"])
def test_other_readers_are_refused(keys: Keys, who: str) -> None:
    source = FakeSource()
    reader_keys = {
        "a stranger": keys.stranger,
        "without keys": None,
        "with another server's key": keys.allowed,
    }[who]
    server_key = keys.stranger[0] if who == "with another server's key" else keys.server_key
    with contextlib.closing(ZmqPublisher(source, keys.config)) as publisher:
        for kind, endpoint in ((zmq.SUB, publisher.endpoint), (zmq.DEALER, publisher.replay_endpoint)):
            with zmq.Context() as context, context.socket(kind) as reader:
                reader.setsockopt(zmq.LINGER, 0)
                if reader_keys is not None:
                    set_keys(reader, server_key, reader_keys)
                with reader.get_monitor_socket() as monitor:
                    monitor.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
                    reader.connect(str(endpoint))
                    events: set[int] = set()
                    while not events & FAILURES:
                        message = monitor.recv_multipart()[0]
                        events.add(int.from_bytes(message[:2], "little"))
                assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events


@pytest.mark.parametrize("missing", ["curve_key_file", "curve_clients"])
def test_curve_key_file_and_curve_clients_must_be_set_together(keys: Keys, missing: str) -> None:
    given = {"curve_key_file": keys.server_secret_file, "curve_clients": str(Path(keys.server_file).parent)}
    del given[missing]
    with pytest.raises(ConfigError, match=r"^events.curve_key_file, curve_clients: expected both or neither"):
        read_curve_keys(EventsConfig(zmq_endpoint=ANYWHERE, **given))


def test_files_without_keys_are_named(keys: Keys, tmp_path: Path) -> None:
    clients = str(tmp_path / "clients")
    for file in (keys.server_file, str(tmp_path / "none"), str(tmp_path)):  # a public key, nothing, a directory
        with pytest.raises(ConfigError, match=r"^events.curve_key_file: expected a file with a line secret-key = "):
            read_curve_keys(EventsConfig(curve_key_file=file, curve_clients=clients))
    for folder in (str(tmp_path / "none"), keys.server_file):
        with pytest.raises(ConfigError, match=r"^events.curve_clients: expected a directory with a file NAME.key"):
            read_curve_keys(EventsConfig(curve_key_file=keys.server_secret_file, curve_clients=folder))
    (tmp_path / "clients" / "bad.key").write_text('public-key = "short"\n')
    with pytest.raises(
        ConfigError, match=r"^events.curve_clients: expected a file with a line public-key = .*bad.key$"
    ):
        read_curve_keys(EventsConfig(curve_key_file=keys.server_secret_file, curve_clients=clients))
