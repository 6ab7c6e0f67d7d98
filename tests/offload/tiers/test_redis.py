from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from radixkv.errors import ConfigError, StoreUnavailable
from radixkv.offload.tiers.block_store import PutOutcome
from radixkv.offload.tiers.redis import RedisStore
from tests.patience import PATIENCE_S, wait_until

from .blocks import KEYS, OBJECT_BYTES, block, key_of, object_of, read_from
from .redis_server import SERVER, WHY_NOT, RedisServer, redis_server

pytestmark = pytest.mark.skipif(SERVER is None, reason=WHY_NOT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


def store_of(server: RedisServer, **options: float) -> RedisStore:
    return RedisStore(server.url, OBJECT_BYTES, **{"timeout_s": 60.0, **options})


@pytest.mark.usefixtures("client")
def test_one_server_finds_what_another_stored(server: RedisServer) -> None:
    first = store_of(server)
    second = store_of(server)
    first.put([block(1), block(2)])
    assert read_from(second, 2, 3, 1) == [object_of(2), None, object_of(1)]
    assert second.delete([key_of(1), key_of(3)]) == 1
    assert first.exists([key_of(1), key_of(2)]) == [False, True]


def test_a_scan_that_never_ends_is_aborted(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(server, purge_timeout_s=0.05)
    scans: list[object] = []

    def scan_endlessly(*command: object) -> tuple[bytes, list[bytes]]:
        scans.append(command)
        return b"7", []

    monkeypatch.setattr(store._client, "execute_command", scan_endlessly)
    with pytest.raises(StoreUnavailable, match=r"SCAN did not end within 0\.05 s"):
        store.purge(KEYS.scope(None, None, None))
    assert scans


def test_stored_blocks_are_not_sent_again(server: RedisServer, client: redis.Redis) -> None:
    store_of(server).put([block(1, generation=3)])
    (name,) = client.keys()
    client.append(name, b"mark")
    assert store_of(server).put([block(1, generation=2), block(2)]).outcomes == (
        PutOutcome.ALREADY_THERE,
        PutOutcome.STORED,
    )
    assert client.get(name) == object_of(1, 3) + b"mark"
    assert store_of(server).put([block(1, generation=4)]).outcomes == (PutOutcome.STORED,)
    assert client.get(name) == object_of(1, 4)


def test_a_value_that_is_no_object_is_replaced(server: RedisServer, client: redis.Redis) -> None:
    store = store_of(server)
    store.put([block(1)])
    (name,) = client.keys()
    client.set(name, b"something else")
    assert read_from(store, 1) == [b"something else"]
    assert store.put([block(1)]).outcomes == (PutOutcome.STORED,)
    assert read_from(store, 1) == [object_of(1)]


def test_a_value_of_another_type_under_a_key_is_replaced(server: RedisServer, client: redis.Redis) -> None:
    store = store_of(server)
    store.put([block(1)])
    (name,) = client.keys()
    client.delete(name)
    client.rpush(name, b"something else")
    assert read_from(store, 1) == [None]
    assert store.put([block(2), block(1)]).outcomes == (PutOutcome.STORED, PutOutcome.STORED)
    assert read_from(store, 1, 2) == [object_of(1), object_of(2)]


def test_each_use_restarts_the_time_to_live_of_an_object(server: RedisServer, client: redis.Redis) -> None:
    store = store_of(server, ttl_s=1000.0)
    store.put([block(1)])
    (name,) = client.keys()
    assert 0 < client.pttl(name) <= 1_000_000
    for use in (lambda: store.get([key_of(1)]), lambda: store.put([block(1)])):
        client.pexpire(name, 500_000)
        use()
        assert client.pttl(name) > 500_000
    client.pexpire(name, 500_000)
    store.exists([key_of(1)])
    assert client.pttl(name) <= 500_000


def test_a_touch_is_a_use_and_a_lookup_is_none(server: RedisServer, client: redis.Redis) -> None:
    """For Redis, `EXISTS` is no use of a key. It rounds idle times to seconds."""
    store = store_of(server, ttl_s=1000.0)
    store.put([block(1)])
    (name,) = client.keys()
    client.pexpire(name, 500_000)
    wait_until(lambda: client.object("idletime", name) >= 2)
    assert store.exists([key_of(1)]) == [True]
    assert client.object("idletime", name) >= 2
    assert store.touch([key_of(2), key_of(1), key_of(3)]) == [False, True, False]
    assert client.object("idletime", name) < 2
    assert client.pttl(name) > 500_000


@pytest.mark.usefixtures("client")
def test_large_batches_are_split_into_several_pipelines(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.offload.tiers.redis._BATCH_BYTES", 3 * OBJECT_BYTES)
    store = store_of(server)
    assert store.put([block(number) for number in range(8)]).outcomes == (PutOutcome.STORED,) * 8
    assert read_from(store, *range(9)) == [*(object_of(number) for number in range(8)), None]


@pytest.mark.usefixtures("client")
def test_an_object_that_is_too_large_is_refused(server: RedisServer) -> None:
    large = block(1)._replace(payload=memoryview(bytes(5000)))
    assert store_of(server).put([large, block(2)]).outcomes == (PutOutcome.TOO_LARGE, PutOutcome.STORED)


def test_a_server_without_memory_has_no_room(server: RedisServer, client: redis.Redis) -> None:
    store = store_of(server)
    store.put([block(1)])
    client.config_set("maxmemory", 1)
    assert store.put([block(1), block(2)]).outcomes == (PutOutcome.ALREADY_THERE, PutOutcome.NO_ROOM)
    assert read_from(store, 1) == [object_of(1)]
    client.config_set("maxmemory", 0)
    assert store.put([block(2)]).outcomes == (PutOutcome.STORED,)


def test_an_error_about_a_wrong_password_does_not_contain_it(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "correct") as server:
        for login, error in ((":wrong@", "AuthenticationError"), ("", "AuthenticationError")):
            store = RedisStore(f"redis://{login}127.0.0.1:{server.port}/0", OBJECT_BYTES, timeout_s=60.0)
            with pytest.raises(StoreUnavailable, match=f"redis_url: expected an answer, got {error}") as raised:
                store.get([key_of(1)])
            assert "wrong" not in str(raised.value)
        right = RedisStore(f"redis://:correct@127.0.0.1:{server.port}/0", OBJECT_BYTES, timeout_s=60.0)
        assert right.put([block(1)]).outcomes == (PutOutcome.STORED,)


def test_a_server_that_starts_later_and_restarts_is_used(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        server.stop()
        store = store_of(server)
        for call in (store.get, store.exists, store.delete):
            with pytest.raises(StoreUnavailable, match="got ConnectionError"):
                call([key_of(1)])
        server.start()
        assert store.put([block(1)]).outcomes == (PutOutcome.STORED,)
        server.stop()
        with pytest.raises(StoreUnavailable):
            store.put([block(1)])
        server.start()
        assert read_from(store, 1) == [None]
        assert store.put([block(1)]).outcomes == (PutOutcome.STORED,)


def test_a_call_times_out_if_the_server_does_not_answer(server: RedisServer) -> None:
    store = store_of(server, timeout_s=1.0)
    store.exists([key_of(1)])
    server.pause()
    try:
        with pytest.raises(StoreUnavailable, match="got TimeoutError"):
            store.get([key_of(1)])
    finally:
        server.resume()
    assert store_of(server).exists([key_of(9)]) == [False]


def test_a_connection_that_ends_in_the_middle_of_an_object_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def cut_off() -> None:
            with contextlib.suppress(OSError):  # the test has ended
                for _ in range(2):  # redis-py first negotiates the version of the protocol
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(b"*1\r\n$3200\r\n" + object_of(1)[:1000])

        threading.Thread(target=cut_off, daemon=True).start()
        store = RedisStore(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", OBJECT_BYTES, timeout_s=60.0)
        with contextlib.closing(store), pytest.raises(StoreUnavailable, match="got ConnectionError"):
            store.get([key_of(1)])


def test_a_value_that_is_larger_than_any_object_is_not_read(server: RedisServer, client: redis.Redis) -> None:
    store = store_of(server)
    store.put([block(1), block(2)])
    [name] = [name for name in client.scan_iter() if name.endswith(key_of(1).hex().encode())]
    client.setrange(name, 100_000_000, b"x")
    large, sound = read_from(store, 1, 2)
    assert large is not None
    assert len(large) == OBJECT_BYTES + 1  # larger than any object, so it is rejected
    assert sound == object_of(2)


def send_bytes_slowly(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"+")
        time.sleep(0.02)


def send_endless_string(connection: socket.socket) -> None:
    connection.sendall(b"$8000000000\r\n")
    while True:
        connection.sendall(bytes(1_000_000))


def send_endless_array(connection: socket.socket) -> None:
    connection.sendall(b"*1000000000\r\n")
    while True:
        connection.sendall(b"$1\r\nx\r\n" * 10_000)


def send_endless_line(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"+" * 1_000_000)


@pytest.mark.parametrize(
    ("answer", "timeout_s"),
    [(send_bytes_slowly, 0.2), (send_endless_string, 60.0), (send_endless_array, 60.0), (send_endless_line, 60.0)],
)
def test_a_reply_that_never_ends_is_aborted(answer: Callable[[socket.socket], None], timeout_s: float) -> None:
    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                if connection.recv(65_536) == b"end":
                    return
                answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve)
        server.start()
        store = RedisStore(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", OBJECT_BYTES, timeout_s=timeout_s)
        with pytest.raises(StoreUnavailable, match=r"tiers\.redis_url: expected an answer, got ConnectionError"):
            store.get([key_of(1)])
        with socket.create_connection(listener.getsockname()) as last:
            last.sendall(b"end")
            server.join(PATIENCE_S)
        assert not server.is_alive()
        store.close()


def test_the_error_about_an_invalid_url_does_not_contain_the_password() -> None:
    with pytest.raises(
        ConfigError, match=r"tiers.redis_url: expected redis://HOST:PORT/DB, got something else"
    ) as raised:
        RedisStore("http://user:password@host", OBJECT_BYTES)
    assert "password" not in str(raised.value)
