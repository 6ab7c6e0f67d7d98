"""The L2 adapter of LMCache. Where LMCache is not installed, stand-ins replace what the adapter imports."""

from __future__ import annotations

import importlib
import importlib.util
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from radixkv.errors import ConfigError
from tests.patience import PATIENCE_S, wait_until

HAS_LMCACHE = importlib.util.find_spec("lmcache") is not None
SHAPE = torch.Size([2, 4, 16, 8])
MODULE = "radixkv.integrations.tiers.lmcache_adapter"


class Key(NamedTuple):
    """Imitates `ObjectKey` of LMCache."""

    chunk_hash: bytes
    model_name: str = "model"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""


class MemoryObject:
    """Imitates `MemoryObj` of LMCache over a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.tensor.view(torch.uint8).numpy().reshape(-1))

    def get_shapes(self) -> list[torch.Size]:
        return [self.tensor.shape]

    def get_dtypes(self) -> list[torch.dtype]:
        return [self.tensor.dtype]


def stand_ins() -> dict[str, ModuleType]:
    """Return modules with the names of LMCache that the adapter imports."""

    class Bitmap:
        def __init__(self, size: int) -> None:
            self.bits = [False] * size

        def set(self, index: int) -> None:
            self.bits[index] = True

        def test(self, index: int) -> bool:
            return self.bits[index]

    class L2StoreResult(int):
        def __new__(cls, success: bool, bytes_transferred: int) -> L2StoreResult:
            return super().__new__(cls, bytes_transferred if success else -1)

    class L2AdapterInterface:
        def __init__(self, max_capacity_bytes: int = 0) -> None:
            pass

        def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None: ...
        def _notify_keys_accessed(self, keys: list[Any]) -> None: ...
        def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None: ...

    class AdapterUsage(NamedTuple):
        total_bytes_used: int
        total_capacity_bytes: int
        bytes_by_cache_salt: dict[str, int]

    class Event:
        def __init__(self) -> None:
            self._fd = os.eventfd(0)

        def fileno(self) -> int:
            return self._fd

        def notify(self) -> None:
            os.eventfd_write(self._fd, 1)

        def close(self) -> None:
            os.close(self._fd)

    contents = {
        "lmcache": {"__version__": "0.5.6"},
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
        "lmcache.v1": {},
        "lmcache.v1.distributed": {},
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
        "lmcache.v1.distributed.l2_adapters": {},
        "lmcache.v1.distributed.l2_adapters.base": {
            "AdapterUsage": AdapterUsage,
            "L2AdapterInterface": L2AdapterInterface,
        },
        "lmcache.v1.platform": {"create_event_notifier": Event},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, stand_in in modules.items():
        vars(stand_in).update(contents[name])
    return modules


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """Return the module of the adapter."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_LMCACHE:
            for name, stand_in in stand_ins().items():
                patch.setitem(sys.modules, name, stand_in)
        patch.delitem(sys.modules, MODULE, raising=False)
        yield importlib.import_module(MODULE)
        sys.modules.pop(MODULE, None)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    tmp_path.chmod(0o700)
    return {"disk_path": str(tmp_path / "tiers"), "disk_bytes": 1 << 20, "load_limit_s": PATIENCE_S}


def value_of(key: Key) -> torch.Tensor:
    """Return the only value that may be loaded under a key."""
    seed = int.from_bytes(blake2b(repr(tuple(key)).encode(), digest_size=4).digest(), "little")
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed))


def key_of(name: str, **fields: Any) -> Key:
    return Key(name.encode().ljust(32, b"."), **fields)


def await_event(fd: int) -> None:
    assert select.select([fd], [], [], PATIENCE_S)[0]
    os.eventfd_read(fd)


def store(adapter: Any, keys: list[Key]) -> int:
    """Store the values of keys. Returns the number of stored bytes that the adapter reports."""
    objects = [MemoryObject(value_of(key)) for key in keys]
    task = adapter.submit_store_task(keys, objects)
    for each in objects:
        each.tensor.zero_()  # as LMCache may after submitting the task, so the adapter must have copied the values
    await_event(adapter.get_store_event_fd())
    return int(adapter.pop_completed_store_tasks()[task])


def lookup(adapter: Any, keys: list[Key]) -> list[bool]:
    """Look up keys, and unlock them again. Returns which were found."""
    layout = SimpleNamespace(shapes=[SHAPE], dtypes=[torch.float32])
    task = adapter.submit_lookup_and_lock_task(keys, {0: layout})
    await_event(adapter.get_lookup_and_lock_event_fd())
    bitmap = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None
    adapter.submit_unlock(keys)
    return [bool(bitmap.test(index)) for index in range(len(keys))]


def load(adapter: Any, keys: list[Key], dtype: torch.dtype = torch.float32) -> list[bool]:
    """Load keys. Returns which were loaded: these must have their values, and the others must not be touched."""
    objects = [MemoryObject(torch.zeros(SHAPE).to(dtype)) for _ in keys]
    task = adapter.submit_load_task(keys, objects)
    await_event(adapter.get_load_event_fd())
    bitmap = adapter.query_load_result(task)
    assert adapter.query_load_result(task) is None
    loaded = [bool(bitmap.test(index)) for index in range(len(keys))]
    for key, value, is_loaded in zip(keys, objects, loaded, strict=True):
        assert torch.equal(value.tensor, value_of(key) if is_loaded else torch.zeros(SHAPE).to(dtype))
    return loaded


KEYS = [key_of(f"chunk {number}") for number in range(6)]


def test_objects_are_found_after_a_restart(module: Any, options: dict[str, Any]) -> None:
    adapter = module.RadixKVL2Adapter(options)
    assert lookup(adapter, KEYS) == [False] * 6
    num_bytes = SHAPE.numel() * 4
    assert store(adapter, KEYS[:4]) == 4 * num_bytes
    assert adapter.get_usage().total_bytes_used == 4 * num_bytes
    adapter.close()
    adapter = module.RadixKVL2Adapter(options)
    assert lookup(adapter, KEYS) == [True] * 4 + [False] * 2
    assert load(adapter, KEYS) == [True] * 4 + [False] * 2
    assert adapter.get_usage().total_bytes_used == 4 * num_bytes
    adapter.delete(KEYS[:1])
    assert lookup(adapter, KEYS[:2]) == [False, True]
    adapter.close()


def test_models_ranks_groups_and_salts_share_nothing(module: Any, options: dict[str, Any]) -> None:
    adapter = module.RadixKVL2Adapter(options)
    store(adapter, [key_of("chunk")])
    other_fields = [{"model_name": "other"}, {"kv_rank": 0x02010201}, {"object_group_id": 1}, {"cache_salt": "alice"}]
    keys = [key_of("chunk", **fields) for fields in other_fields]
    assert lookup(adapter, keys) == [False] * 4
    assert load(adapter, keys) == [False] * 4
    store(adapter, keys)
    assert load(adapter, [key_of("chunk"), *keys]) == [True] * 5
    adapter.close()
    adapter = module.RadixKVL2Adapter(options)
    assert load(adapter, [key_of("chunk"), *keys]) == [True] * 5
    adapter.close()


def test_another_dtype_is_a_miss(module: Any, options: dict[str, Any]) -> None:
    adapter = module.RadixKVL2Adapter(options)
    store(adapter, KEYS[:1])
    assert load(adapter, KEYS[:1], torch.int32) == [False]
    adapter.close()


def test_a_salt_cannot_exceed_its_quota(module: Any, options: dict[str, Any]) -> None:
    adapter = module.RadixKVL2Adapter({**options, "tenants": {"alice": {"ceiling": 0.1}}})
    for number in range(100):
        store(adapter, [key_of(f"{number}", cache_salt="alice")])
    usage = adapter.get_usage().bytes_by_cache_salt
    assert 0 < usage["alice"] <= 0.1 * options["disk_bytes"]
    store(adapter, [key_of("chunk", cache_salt="bob")])
    assert load(adapter, [key_of("99", cache_salt="alice"), key_of("chunk", cache_salt="bob")]) == [True, True]
    adapter.close()


def test_modified_objects_are_misses(module: Any, options: dict[str, Any]) -> None:
    adapter = module.RadixKVL2Adapter(options)
    store(adapter, KEYS)
    blocks = next(Path(options["disk_path"]).glob("*/blocks"))
    blocks.write_bytes(bytes(blocks.stat().st_size))
    assert load(adapter, KEYS) == [False] * 6
    assert adapter.report_status()["disk_damaged"] == 6
    assert adapter.report_status()["is_healthy"]
    adapter.close()


def test_random_tasks_of_two_threads_load_only_right_values(module: Any, options: dict[str, Any]) -> None:
    """LMCache calls from a thread that stores and one that loads. `load` compares all values."""
    adapter = module.RadixKVL2Adapter({**options, "disk_bytes": 20 * 12_288})
    keys = [key_of(f"{number}", cache_salt=salt) for number in range(20) for salt in ("", "alice")]

    def store_random_keys() -> None:
        random = Random(0)
        for _ in range(60):
            store(adapter, random.sample(keys, 4))

    thread = threading.Thread(target=store_random_keys)
    thread.start()
    random = Random(1)
    num_loaded = 0
    while thread.is_alive():
        num_loaded += sum(load(adapter, random.sample(keys, 6)))
    thread.join()
    num_loaded += sum(load(adapter, keys))  # in case the other thread ended before the first load
    assert num_loaded
    adapter.close()


def test_invalid_options_are_refused(module: Any) -> None:
    with pytest.raises(ConfigError, match="disk_pth: unknown key; the nearest is disk_path"):
        module.RadixKVL2Adapter({"disk_pth": "/tmp"})


@pytest.mark.skipif(HAS_LMCACHE, reason="LMCache is installed")
def test_without_lmcache_the_error_says_what_to_install() -> None:
    result = subprocess.run([sys.executable, "-c", f"import {MODULE}"], capture_output=True, text=True, check=False)
    assert "pip install lmcache" in result.stderr


@pytest.mark.skipif(not HAS_LMCACHE, reason="LMCache is not installed")
def test_the_storage_manager_of_lmcache_finds_objects_after_a_restart(options: dict[str, Any]) -> None:
    from lmcache.v1.distributed import api, config
    from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
    from lmcache.v1.distributed.storage_manager import StorageManager

    plugin = {"module_path": MODULE, "class_name": "RadixKVL2Adapter", "adapter_params": options}
    eviction = config.EvictionConfig("LRU")
    dram = {"tag": "_default", "size_gb": 0.01, "use_lazy": False}
    layout = api.MemoryLayoutDesc([SHAPE], [torch.float32])
    keys = [api.ObjectKey(key.chunk_hash, "model", key.kv_rank) for key in KEYS]

    def new_manager() -> Any:
        return StorageManager(
            config.StorageManagerConfig(
                l1_manager_config=config.DRAML1ManagerConfig.from_dict(dram, eviction),
                eviction_config=eviction,
                l2_adapter_config=L2AdaptersConfig([PluginL2AdapterConfig.from_dict(plugin)]),
            )
        )

    first = new_manager()
    for key, value in first.reserve_write(keys[:4], layout).items():
        value.tensor.copy_(value_of(Key(key.chunk_hash)))
    first.finish_write(keys[:4])
    adapter = first.l2_adapters()[0][1]
    wait_until(lambda: adapter.get_usage().total_bytes_used == 4 * SHAPE.numel() * 4)
    first.close()

    second = new_manager()
    group = api.GroupedObjectKeys(keys, 0, layout)
    handle = second.submit_prefetch_task(api.PrefetchTaskSpec([group], num_kv_readers=1))
    assert second.wait_prefetch_status(handle, PATIENCE_S)
    status = second.query_prefetch_status(handle)
    assert status.l2_hit_count == 4
    with second.read_prefetched_results(keys[:4]) as objects:
        assert objects is not None
        for key, value in zip(keys[:4], objects, strict=True):
            assert torch.equal(value.tensor, value_of(Key(key.chunk_hash)))
    second.close()
