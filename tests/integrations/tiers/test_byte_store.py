"""`ByteStore`: only their owner finds the values that other engines save, and no failure of a store raises."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from radixkv.errors import ConfigError, StoreUnavailable
from radixkv.integrations.tiers import byte_store
from radixkv.integrations.tiers.byte_store import ByteStore, call_when_done, keyed_value
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockFormat
from radixkv.offload.tiers import guard
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.offload.tiers.block_store import Loan, PutResult
from radixkv.offload.tiers.host import HostStore
from radixkv.offload.tiers.open_store import StoreOptions, open_backend
from tests.offload.tiers.redis_server import SERVER, WHY_NOT, redis_server
from tests.patience import PATIENCE_S, wait_until

from .values import FORMAT, PAYLOAD_BYTES, SLOT_BYTES, keyed, load, payload_of, save, store_at

NAMES = [f"page {number}" for number in range(20)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "tiers"


def test_saved_values_are_loaded_by_the_next_process(folder: Path) -> None:
    store = store_at(folder)
    assert save(store, NAMES) == [True] * len(NAMES)
    assert load(store, NAMES) == NAMES
    store.close()
    store = store_at(folder)
    assert load(store, [*NAMES, "another"]) == [*NAMES, None]
    assert store.local_keys() == {keyed(store, name).key for name in NAMES}
    store.close()


def test_any_number_of_missing_values_can_be_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_store, "_LOAD_BYTES", PAYLOAD_BYTES)  # so that each value is a batch
    store = store_at(folder)
    missing = keyed(store, "missing"), memoryview(bytearray(PAYLOAD_BYTES))
    assert store.load_into([missing] * 2000).result(PATIENCE_S) == [False] * 2000
    store.close()


@pytest.mark.parametrize(
    "other",
    [
        replace(FORMAT, model="other weights"),
        replace(FORMAT, dtype="float16"),
        replace(FORMAT, kv_dtype="fp8"),
        replace(FORMAT, layout="rank 1 of 2"),
        replace(FORMAT, block_size=32),
        replace(FORMAT, computed_by="another version"),
    ],
)
def test_another_model_or_layout_finds_nothing(folder: Path, other: BlockFormat) -> None:
    for block_format, names in ((FORMAT, NAMES[:5]), (other, NAMES[5:10])):
        store = store_at(folder, block_format)
        save(store, names)
        store.close()
    for block_format, names in ((FORMAT, NAMES[:5]), (other, NAMES[5:10])):
        store = store_at(folder, block_format)
        assert load(store, NAMES[:10]) == [name if name in names else None for name in NAMES[:10]]
        store.close()


def test_tenants_and_salts_share_nothing(folder: Path) -> None:
    store = store_at(folder)
    save(store, NAMES[:3], "alice")
    assert load(store, NAMES[:3], "bob") == [None] * 3
    salted = keyed(store, NAMES[0], "alice", salt="salt")
    assert store.load_into([(salted, memoryview(bytearray(PAYLOAD_BYTES)))]).result(PATIENCE_S) == [False]
    store.close()


def test_identities_with_the_same_key_are_not_confused(folder: Path) -> None:
    store = store_at(folder)
    save(store, ["first"])
    second = keyed_value(store.keys, Namespace("", "", "", ""), b"second")._replace(key=keyed(store, "first").key)
    buffer = bytearray(PAYLOAD_BYTES)
    assert store.load_into([(second, memoryview(buffer))]).result(PATIENCE_S) == [False]
    assert buffer == bytes(PAYLOAD_BYTES)
    assert store.counts()["disk_other_tokens"] == 1
    store.close()


def test_the_store_is_bounded_and_evicts_the_least_recently_used_values(folder: Path) -> None:
    store = store_at(folder, disk_bytes=8 * SLOT_BYTES)
    save(store, NAMES[:8])
    assert store.touch([keyed(store, NAMES[0]).key, keyed(store, "another").key]) == [True, False]
    assert load(store, [NAMES[1]]) == [NAMES[1]]
    save(store, NAMES[8:14])
    assert load(store, NAMES[:14]) == [*NAMES[:2], *[None] * 6, *NAMES[8:14]]
    assert store.num_values == {"disk": 8}
    store.close()


def test_a_ceiling_bounds_a_tenant_and_a_floor_protects_one(folder: Path) -> None:
    quotas = {"tenants": {"small": {"floor": 0.25}, "large": {"ceiling": 0.5}}}
    store = store_at(folder, disk_bytes=8 * SLOT_BYTES, **quotas)
    save(store, NAMES[:2], "small")
    for name in NAMES:
        save(store, [name], "large")
    assert load(store, NAMES, "large") == [*[None] * 16, *NAMES[16:]]
    for name in NAMES:
        save(store, [name], "other")
    assert load(store, NAMES[:2], "small") == NAMES[:2]
    store.close()
    store = store_at(folder, disk_bytes=8 * SLOT_BYTES, **quotas)  # quotas apply to what an earlier process stored
    for name in reversed(NAMES):
        save(store, [name], "other")
    assert load(store, NAMES[:2], "small") == NAMES[:2]
    store.close()


def test_values_that_fit_only_into_floors_of_other_tenants_are_refused_and_counted(folder: Path) -> None:
    floors = {name: {"floor": 0.5} for name in ("alice", "bob")}
    store = store_at(folder, disk_bytes=8 * SLOT_BYTES, tenants=floors)
    for tenant in floors:
        assert save(store, NAMES[:4], tenant) == [True] * 4
    assert save(store, NAMES[:2], "carol") == [False] * 2
    assert store.counts()["refused"] == 2
    assert all(load(store, NAMES[:4], tenant) == NAMES[:4] for tenant in floors)
    store.close()


def test_modified_values_are_misses_and_are_saved_again(folder: Path) -> None:
    store = store_at(folder)
    save(store, NAMES[:4])
    blocks = next(folder.glob("*/blocks"))
    with blocks.open("r+b") as file:
        file.seek(100)
        file.write(b"x" * PAYLOAD_BYTES)  # the end of the first value, and the beginning of the second one
    assert load(store, NAMES[:4]) == [None, None, *NAMES[2:4]]
    assert store.counts()["disk_damaged"] == 2
    assert save(store, NAMES[:4]) == [True] * 4
    assert load(store, NAMES[:4]) == NAMES[:4]
    store.close()


def test_encrypted_values_are_readable_with_the_key_only(folder: Path, tmp_path: Path) -> None:
    key_files = []
    for number in range(2):
        key_files.append(tmp_path / f"key {number}")
        key_files[-1].write_text(f"{number}" * 64)
        key_files[-1].chmod(0o600)
    store = store_at(folder, encryption_key_file=str(key_files[0]))
    save(store, NAMES[:3], "alice")
    store.close()
    assert payload_of(NAMES[0], "alice")[:32] not in next(folder.glob("*/blocks")).read_bytes()
    store = store_at(folder, encryption_key_file=str(key_files[0]))
    assert load(store, NAMES[:3], "alice") == NAMES[:3]
    store.close()
    store = store_at(folder, encryption_key_file=str(key_files[1]))
    assert load(store, NAMES[:3], "alice") == [None] * 3
    store.close()


def test_a_value_of_another_size_is_not_saved(folder: Path) -> None:
    store = store_at(folder)
    assert store.save([(keyed(store, "short"), memoryview(b"short"))]).result(PATIENCE_S) == [False]
    assert store.counts()["wrong_size"] == 1
    store.close()


def test_a_directory_in_use_turns_the_tier_off_and_raises_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = store_at(folder)
    with caplog.at_level(logging.ERROR):
        second = store_at(folder)
    assert "another process uses this directory" in caplog.text
    assert save(second, NAMES[:1]) == [False]
    assert load(second, NAMES[:1]) == [None]
    first.close()
    second.close()


def test_a_directory_that_others_can_write_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    earlier_threads = {*threading.enumerate()}  # stores of other tests may still have some
    with pytest.raises(ConfigError, match="secret_file"):
        store_at(folder, host_bytes=4 * SLOT_BYTES)
    prefixes = ("host-", "disk-", "store-")

    def store_threads() -> list[threading.Thread]:
        new_threads = {*threading.enumerate()} - earlier_threads
        return [thread for thread in new_threads if thread.name.startswith(prefixes)]

    wait_until(lambda: not store_threads())


def test_all_values_are_on_disk_and_some_also_in_host_memory(folder: Path) -> None:
    store = store_at(folder, host_bytes=4 * SLOT_BYTES)
    save(store, NAMES)
    assert load(store, NAMES) == NAMES
    assert 0 < store.num_values["host"] < len(NAMES) == store.num_values["disk"]
    store.close()


class FailingStore(HostStore):
    """Host memory whose calls fail at random, with the probability `failure_rate`.

    Args:
        random: decides which calls fail.
        event: each `put` waits until it is set; None if calls do not wait.
    """

    def __init__(self, options: StoreOptions, random: Random, event: threading.Event | None = None) -> None:
        super().__init__(options.map_memory(options.max_bytes or 0), options.object_bytes)
        self._random = random
        self._event = event
        self.failure_rate = 0.3

    def put(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> PutResult:
        if self._event is not None:
            assert self._event.wait(PATIENCE_S)
        fails = self._random.random() < self.failure_rate
        if fails and self._random.random() < 0.5:
            raise StoreUnavailable("put: expected success, got a failure before the write")
        result = super().put(objects, victims)
        if fails:
            raise StoreUnavailable("put: expected success, got a failure after the write")
        return result

    def get(self, keys: Sequence[bytes]) -> list[Loan | None]:
        if self._random.random() < self.failure_rate:
            raise StoreUnavailable("get: expected success, got a failure")
        return super().get(keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        if self._random.random() < self.failure_rate:
            raise StoreUnavailable("delete: expected success, got a failure")
        return super().delete(keys)


@pytest.fixture
def install_failing_host(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Random, threading.Event | None], list[FailingStore]]:
    """Return a function that makes later host stores fail. It returns a list, to which these stores are added."""

    def install(random: Random, event: threading.Event | None = None) -> list[FailingStore]:
        failing_stores: list[FailingStore] = []

        def open_failing(name: str, options: StoreOptions) -> object:
            if name != "host":
                return open_backend(name, options)
            failing_stores.append(FailingStore(options, random, event))
            return failing_stores[-1]

        monkeypatch.setattr(byte_store, "open_backend", open_failing)
        monkeypatch.setattr(guard, "CircuitBreaker", _NeverOpen)
        return failing_stores

    return install


class _NeverOpen(guard.CircuitBreaker):
    """Never switches a store off, however often it fails."""

    def fail(self, num_trials: int) -> bool:
        return False


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_over_failing_stores_loads_only_right_bytes(
    folder: Path, seed: int, install_failing_host: Callable[..., list[FailingStore]]
) -> None:
    """`load` compares the bytes of every loaded value. When nothing fails any more, everything can be saved again."""
    random = Random(seed)
    failing_stores = install_failing_host(random)
    store = store_at(folder, host_bytes=10 * SLOT_BYTES, disk_bytes=12 * SLOT_BYTES)
    for _ in range(200):
        tenant = random.choice(["", "alice"])
        names = random.sample(NAMES, random.randint(1, 6))
        match random.randrange(4):
            case 0:
                load(store, names, tenant)
            case 1:
                store.delete([keyed(store, name, tenant).key for name in names])
            case _:
                save(store, names, tenant)
    failing_stores[0].failure_rate = 0.0
    assert save(store, NAMES[:5]) == [True] * 5
    assert load(store, NAMES[:5]) == NAMES[:5]
    store.close()


def test_failed_calls_are_counted_and_their_values_can_be_saved_later(
    install_failing_host: Callable[..., list[FailingStore]],
) -> None:
    failing_stores = install_failing_host(Random(0))
    store = store_at(None, host_bytes=32 * SLOT_BYTES)
    failing_stores[0].failure_rate = 1.0
    assert save(store, NAMES[:4]) == [False] * 4
    assert load(store, NAMES[:4]) == [None] * 4
    assert store.counts()["failed"] == 4
    assert store.counts()["missed"] == 4
    failing_stores[0].failure_rate = 0.0
    assert save(store, NAMES[:4]) == [True] * 4
    assert load(store, NAMES[:4]) == NAMES[:4]
    store.close()


def test_the_bytes_of_values_that_wait_for_a_store_are_bounded(
    install_failing_host: Callable[..., list[FailingStore]],
) -> None:
    event = threading.Event()
    failing_stores = install_failing_host(Random(0), event)
    store = store_at(None, host_bytes=32 * SLOT_BYTES, max_waiting_bytes=3 * PAYLOAD_BYTES)
    failing_stores[0].failure_rate = 0.0
    futures = [store.save([(keyed(store, name), memoryview(payload_of(name)))]) for name in NAMES[:5]]
    event.set()
    assert [future.result(PATIENCE_S) for future in futures] == [[True]] * 3 + [[False]] * 2
    assert store.counts()["dropped"] == 2
    assert store.wait_for_writes(PATIENCE_S)
    assert save(store, NAMES[3:5]) == [True] * 2
    store.close()


def test_a_load_of_more_values_than_one_batch_finds_all_of_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_store, "_LOAD_BYTES", 3 * PAYLOAD_BYTES)
    store = store_at(folder)
    save(store, NAMES[::2])
    assert load(store, NAMES) == [name if name in NAMES[::2] else None for name in NAMES]
    store.close()


@pytest.mark.skipif(SERVER is None, reason=WHY_NOT)
def test_two_stores_share_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        first, second = (store_at(None, redis_url=server.url, trusted=True) for _ in range(2))
        assert save(first, NAMES[:4]) == [True] * 4
        keys = [keyed(second, name).key for name in NAMES[:5]]
        assert second.exists(keys).result(PATIENCE_S) == [True] * 4 + [False]
        assert load(second, NAMES[:5]) == [*NAMES[:4], None]
        server.stop()
        server.start()
        assert load(second, NAMES[:5]) == [None] * 5
        first.touch(keys)
        first.close()  # waits for the touch, which finds that the values are gone
        second.close()


WRITER = """
import itertools, sys
from pathlib import Path
from radixkv.integrations.tiers import byte_store
from tests.integrations.tiers.values import save, store_at
byte_store._native_copies = lambda: None  # they would import torch, which takes long
store = store_at(Path(sys.argv[1]))
for number in itertools.count(int(sys.argv[2])):
    save(store, [f"{number} {each}" for each in range(6)])
    print(number, flush=True)
"""


@pytest.mark.parametrize("num_kills", [5, pytest.param(100, marks=pytest.mark.long)])
def test_after_kills_in_the_middle_of_saves_only_right_bytes_are_loaded(folder: Path, num_kills: int) -> None:
    """Each process saves batches of six values with increasing numbers, and reports the number of each saved batch."""
    random = Random(num_kills)
    next_number = 0
    num_loaded = 0
    for _ in range(num_kills):
        command = [sys.executable, "-c", WRITER, str(folder), str(next_number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as writer:
            assert writer.stdout is not None
            for _ in range(random.randint(1, 6)):
                last_saved = int(writer.stdout.readline())
            threading.Event().wait(random.random() / 500)
            os.kill(writer.pid, signal.SIGKILL)
            whole_lines = writer.stdout.read().split("\n")[:-1]
            last_saved = max([last_saved, *map(int, whole_lines)])
        store = store_at(folder)
        # The disk holds about ten batches, and perhaps values of later ones, which were not reported.
        numbers = range(max(0, last_saved - 12), last_saved + 8)
        loaded_names = load(store, [f"{number} {each}" for number in numbers for each in range(6)])
        num_loaded += sum(name is not None for name in loaded_names)
        assert {f"{last_saved} {each}" for each in range(6)} <= {*loaded_names}
        store.close()
        next_number = last_saved + 1
    assert num_loaded


def test_keys_depend_on_the_secret(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    stores: list[ByteStore] = [store_at(folder / "a"), store_at(folder / "b", secret_file=str(secret))]
    assert len({keyed(store, "name").key for store in stores}) == 2
    for store in stores:
        assert save(store, ["name"]) == [True]
        store.close()


@pytest.mark.parametrize("num_done", range(4))
def test_a_function_is_called_once_when_all_futures_are_done(num_done: int) -> None:
    futures = [Future[None]() for _ in range(3)]
    calls: list[str] = []

    def fail(_: Future[None]) -> None:
        calls.append("callback")
        raise ValueError

    for future in futures:
        future.add_done_callback(fail)
    for future in futures[:num_done]:
        future.set_result(None)
    call_when_done(futures, lambda: calls.append("all done"))
    for future in futures[num_done:]:
        future.set_result(None)
    assert calls == ["callback"] * 3 + ["all done"]


def test_a_function_is_called_at_once_without_futures() -> None:
    calls: list[str] = []
    call_when_done([], lambda: calls.append("all done"))
    assert calls == ["all done"]
