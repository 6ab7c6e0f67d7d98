from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from radixkv.errors import ConfigError, StoreUnavailable
from radixkv.offload.tiers.block_store import PutOutcome
from tests.free_port import free_port
from tests.patience import PATIENCE_S

from .blocks import OBJECT_BYTES, block, key_of, object_of, read_from
from .mooncake_master import WHY_NOT, mooncake_master

if WHY_NOT is not None:
    pytest.skip(WHY_NOT, allow_module_level=True)

from radixkv.offload.tiers.mooncake import MooncakeStore

SIZES = {"lent_bytes": 16 << 20, "buffer_bytes": 16 << 20}


def test_one_server_finds_what_another_stored() -> None:
    with mooncake_master(free_port()) as master:
        first = MooncakeStore(master, OBJECT_BYTES, **SIZES)
        second = MooncakeStore(master, OBJECT_BYTES, **SIZES)
        large = block(9)._replace(payload=memoryview(bytes(5000)))
        outcomes = first.put([block(1), block(2), large]).outcomes
        assert outcomes == (PutOutcome.STORED, PutOutcome.STORED, PutOutcome.TOO_LARGE)
        assert read_from(second, 2, 3, 1) == [object_of(2), None, object_of(1)]
        assert second.put([block(1)]).outcomes == (PutOutcome.ALREADY_THERE,)
        assert second.delete([key_of(1), key_of(3)]) == 1
        assert first.exists([key_of(1), key_of(2)]) == [False, True]
        first.close()
        second.close()


def test_touched_blocks_outlive_others() -> None:
    payload_bytes = 256 << 10
    with mooncake_master(free_port(), "--default_kv_lease_ttl=100") as master:
        store = MooncakeStore(master, payload_bytes + 4096, **SIZES)

        def put(number: int) -> PutOutcome:
            return store.put([block(number)._replace(payload=memoryview(bytes(payload_bytes)))]).outcomes[0]

        hot, cold = [key_of(number) for number in range(4)], [key_of(number) for number in range(4, 8)]
        assert {put(number) for number in range(8)} == {PutOutcome.STORED}
        num_stored = 0
        for number in range(8, 400):  # several times the capacity; a full master evicts after a while
            num_stored += put(number) is PutOutcome.STORED
            assert store.touch(hot) == [True] * 4
        assert num_stored > SIZES["lent_bytes"] // payload_bytes, "more than fit at once, so blocks were evicted"
        assert not any(store.exists(cold))
        store.close()


def test_losing_the_master_is_an_error() -> None:
    with mooncake_master(free_port()) as master:
        store = MooncakeStore(master, OBJECT_BYTES, **SIZES)
        store.put([block(1)])
    with pytest.raises(StoreUnavailable, match="expected an answer, got Mooncake's code"):
        store.get([key_of(1)])
    store.close()


def test_a_master_that_starts_later_is_used() -> None:
    port = free_port()
    store = MooncakeStore(f"127.0.0.1:{port}", OBJECT_BYTES, **SIZES)
    with pytest.raises(
        StoreUnavailable, match=r"tiers.mooncake_master: expected a master, got 127.0.0.1:\d+: Connection refused"
    ):
        store.exists([key_of(1)])
    with mooncake_master(port):
        assert store.put([block(1)]).outcomes == (PutOutcome.STORED,)
        store.close()


def test_a_master_that_accepts_connections_but_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.offload.tiers.mooncake._TRIAL_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel accepts connections
        store = MooncakeStore(f"127.0.0.1:{listener.getsockname()[1]}", OBJECT_BYTES, **SIZES)
        with pytest.raises(StoreUnavailable, match="expected an answer, got TimeoutExpired"):
            store.exists([key_of(1)])
        store.close()


def test_a_master_that_stops_answering_blocks_neither_other_threads_nor_close() -> None:
    pids: list[int] = []
    with mooncake_master(free_port(), pids=pids) as master:
        store = MooncakeStore(master, OBJECT_BYTES, **SIZES)
        assert store.put([block(1)]).outcomes == (PutOutcome.STORED,)
        found: list[list[bool]] = []
        with suspended(pids[0]):
            lookup = threading.Thread(target=lambda: found.append(store.exists([key_of(1)])))
            lookup.start()  # waits without the GIL, so this thread continues
            store.close()
            assert not found
        lookup.join(PATIENCE_S)
        assert found == [[True]]


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[None]:
    """Suspend a process, which then answers nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:port"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"tiers.mooncake_master: .*HOST:PORT"):
        MooncakeStore(address, OBJECT_BYTES)
