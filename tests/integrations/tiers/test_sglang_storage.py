"""The storage backend of SGLang. Where SGLang is not installed, stand-ins replace what the backend imports."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from radixkv.errors import ConfigError
from tests.offload.tiers.redis_server import SERVER, WHY_NOT, redis_server
from tests.patience import PATIENCE_S

MODULE = "radixkv.integrations.tiers.sglang_storage"
PAGE_TOKENS = 4
try:  # packages that SGLang imports may be missing even if SGLang is installed
    from sglang.srt.mem_cache import hicache_storage
except ImportError:
    hicache_storage = None


def stand_ins() -> dict[str, ModuleType]:
    """Return modules with the names of SGLang that the backend imports."""

    class HiCacheStorage:
        def register_mem_pool_host(self, mem_pool_host: Any) -> None:
            self.mem_pool_host = mem_pool_host

        def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
            self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}

    class PoolHitPolicy(StrEnum):
        ALL_PAGES = "all_pages"
        TRAILING_PAGES = "trailing_pages"
        BLOCK_GROUPS = "block_groups"

    class PoolTransferResult(NamedTuple):
        kv_hit_pages: int
        extra_pool_hit_pages: dict[str, int]
        restorable_prefix_pages: list[int] | None = None

    contents = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "PoolHitPolicy": PoolHitPolicy,
            "PoolTransferResult": PoolTransferResult,
        },
        "sglang.version": {"__version__": "0.5.23"},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, stand_in in modules.items():
        vars(stand_in).update(contents[name])
    return modules


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """Return the module of the backend."""
    with pytest.MonkeyPatch.context() as patch:
        if hicache_storage is None:
            for name, stand_in in stand_ins().items():
                patch.setitem(sys.modules, name, stand_in)
        patch.delitem(sys.modules, MODULE, raising=False)
        yield importlib.import_module(MODULE)
        sys.modules.pop(MODULE, None)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    tmp_path.chmod(0o700)
    return {"disk_path": str(tmp_path / "tiers"), "disk_bytes": 1 << 21, "load_limit_s": PATIENCE_S}


class HostPool:
    """Imitates SGLang's pool of host memory with the layout `layer_first`. Pages are given by their first token."""

    layout = "layer_first"

    def __init__(self, num_layers: int = 3, dtype: torch.dtype = torch.bfloat16, num_tokens: int = 64) -> None:
        self.page_size = PAGE_TOKENS
        self.buffer = torch.zeros(2, num_layers, num_tokens, 2, 8, dtype=dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.buffer[:, :, index : index + PAGE_TOKENS].flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.get_data_page(0))

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.buffer[:, :, index : index + PAGE_TOKENS] = data_page.reshape(2, -1, PAGE_TOKENS, 2, 8)

    def fill(self, index: int, key: str) -> None:
        self.set_from_flat_data_page(index, self.value(key))

    def value(self, key: str) -> torch.Tensor:
        """Return the only contents of a page that may be loaded under a key."""
        generator = torch.Generator().manual_seed(int.from_bytes(key.encode()[:7], "little"))
        return torch.rand(self.get_data_page(0).shape, generator=generator).to(self.buffer.dtype)


def config_of(options: dict[str, Any], **fields: Any) -> Any:
    """Return SGLang's configuration of a storage backend."""
    defaults: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "model_name": "model",
        "dp_rank": 0,
        "dcp_size": 1,
        "dcp_rank": 0,
        "extra_config": {"backend_name": "radixkv", "interface_v1": 1, "tiers": options},
    }
    if hicache_storage is not None:
        defaults |= {"enable_storage_metrics": False, "is_page_first_layout": False}
        return hicache_storage.HiCacheStorageConfig(**{**defaults, **fields})
    return SimpleNamespace(**{**defaults, **fields})


def storage_of(module: Any, options: dict[str, Any], pool: HostPool | None = None, **fields: Any) -> Any:
    storage = module.RadixKVStorage(config_of(options, **fields), {})
    storage.register_mem_pool_host(pool or HostPool())
    return storage


def indices_of(pages: list[int]) -> torch.Tensor:
    """Return the indices of all tokens of pages in host memory."""
    return torch.tensor([page * PAGE_TOKENS + offset for page in pages for offset in range(PAGE_TOKENS)])


def save(storage: Any, keys: list[str]) -> list[bool]:
    """Write the values of keys into the first pages of host memory, and save them. Returns which were saved."""
    for page, key in enumerate(keys):
        storage.mem_pool_host.fill(page * PAGE_TOKENS, key)
    saved: list[bool] = storage.batch_set_v1(keys, indices_of(list(range(len(keys)))))
    return saved


def load(storage: Any, keys: list[str]) -> list[bool]:
    """Load pages. Returns which were loaded: these must have their contents, and the others must not be touched."""
    pool = storage.mem_pool_host
    pages = Random(0).sample(range(16), len(keys))
    pool.buffer.zero_()
    loaded: list[bool] = storage.batch_get_v1(keys, indices_of(pages))
    for page, key, is_loaded in zip(pages, keys, loaded, strict=True):
        expected = pool.value(key) if is_loaded else pool.get_dummy_flat_data_page()
        assert torch.equal(pool.get_data_page(page * PAGE_TOKENS), expected)
    return loaded


KEYS = [f"hash {number}" for number in range(6)]


def test_pages_are_found_after_a_restart(module: Any, options: dict[str, Any]) -> None:
    storage = storage_of(module, options)
    assert storage.batch_exists(KEYS) == 0
    assert save(storage, KEYS[:4]) == [True] * 4
    storage.close()
    storage = storage_of(module, options)
    assert storage.batch_exists(KEYS) == 4
    assert storage.batch_exists(KEYS[3:]) == 1
    assert storage.exists(KEYS[0])
    assert not storage.exists(KEYS[5])
    assert load(storage, KEYS) == [True] * 4 + [False] * 2
    assert storage.counts()["loaded"] == 4
    storage.close()


def test_calls_for_single_pages_and_for_batches_store_the_same_pages(module: Any, options: dict[str, Any]) -> None:
    storage = storage_of(module, options)
    pool = storage.mem_pool_host
    assert storage.set(KEYS[0], pool.value(KEYS[0]))
    assert storage.batch_set(KEYS[1:3], [pool.value(key) for key in KEYS[1:3]])
    assert load(storage, KEYS[:4]) == [True] * 3 + [False]
    page = storage.get(KEYS[0], pool.get_dummy_flat_data_page())
    assert torch.equal(page, pool.value(KEYS[0]))
    assert storage.get(KEYS[4], pool.get_dummy_flat_data_page()) is None
    pages = storage.batch_get(KEYS[2:4], [pool.get_dummy_flat_data_page() for _ in range(2)])
    assert torch.equal(pages[0], pool.value(KEYS[2]))
    assert pages[1] is None
    storage.close()


@pytest.mark.parametrize(
    "fields",
    [{"model_name": "other"}, {"tp_rank": 1, "tp_size": 2}, {"pp_rank": 1, "pp_size": 2}, {"dp_rank": 1}],
)
def test_other_models_and_ranks_share_nothing(module: Any, options: dict[str, Any], fields: dict[str, Any]) -> None:
    storage = storage_of(module, options)
    save(storage, KEYS)
    storage.close()
    storage = storage_of(module, options, **fields)
    assert storage.batch_exists(KEYS) == 0
    assert load(storage, KEYS) == [False] * 6
    storage.close()


def test_another_dtype_or_layout_of_the_same_size_is_a_miss(module: Any, options: dict[str, Any]) -> None:
    storage = storage_of(module, options)
    save(storage, KEYS[:2])
    storage.register_mem_pool_host(HostPool(dtype=torch.float16))
    assert load(storage, KEYS[:1]) == [False]
    pool = HostPool()
    pool.layout = "page_first"
    storage.register_mem_pool_host(pool)
    assert load(storage, KEYS[1:2]) == [False]
    storage.close()


def test_a_prefix_is_restorable_only_if_every_pool_has_the_pages_that_its_policy_requires(
    module: Any, options: dict[str, Any]
) -> None:
    """The K/V of four pages are stored, the states of pool `all` of three, and those of pool `last` of two."""
    storage = storage_of(module, options)
    pools = {"kv": storage.mem_pool_host, "all": HostPool(1), "last": HostPool(2)}
    for name, pool in pools.items():
        storage.register_mem_host_pool_v2(pool, name)
    policies = module.PoolHitPolicy
    stored = {"kv": KEYS[:4], "all": KEYS[:3], "last": KEYS[:2]}
    for name, keys in stored.items():
        for page, key in enumerate(keys):
            pools[name].fill(page * PAGE_TOKENS, key)
    transfers = [transfer_of(name, keys) for name, keys in stored.items()]
    assert storage.batch_set_v2(transfers) == {name: [True] * len(keys) for name, keys in stored.items()}

    def exists(**pool_policies: Any) -> Any:
        transfers = [transfer_of(name, KEYS[:1], policy) for name, policy in pool_policies.items()]
        return storage.batch_exists_v2(KEYS, transfers)

    assert exists().kv_hit_pages == 4
    assert exists(all=policies.ALL_PAGES).kv_hit_pages == 3
    result = exists(all=policies.ALL_PAGES, last=policies.TRAILING_PAGES)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (2, [1, 2])
    assert result.extra_pool_hit_pages == {"kv": 4, "all": 3, "last": 2}
    assert exists(all=policies.BLOCK_GROUPS).kv_hit_pages == 0
    for pool in pools.values():
        pool.buffer.zero_()
    loads = [transfer_of("all", KEYS[:4]), transfer_of("last", KEYS[1:2])]
    assert storage.batch_get_v2(loads) == {"all": [True] * 3 + [False], "last": [True]}
    assert torch.equal(pools["all"].get_data_page(2 * PAGE_TOKENS), pools["all"].value(KEYS[2]))
    assert torch.equal(pools["last"].get_data_page(0), pools["last"].value(KEYS[1]))
    too_few_indices = transfer_of("all", KEYS[:2])
    too_few_indices.host_indices = too_few_indices.host_indices[:PAGE_TOKENS]
    assert storage.batch_get_v2([too_few_indices]) == {"all": [False, False]}
    storage.close()


def transfer_of(name: str, keys: list[str], policy: Any = None) -> Any:
    """Return SGLang's request to look up, save or load pages of a pool, the first pages of its host memory."""
    return SimpleNamespace(name=name, keys=keys, host_indices=indices_of(list(range(len(keys)))), hit_policy=policy)


def test_modified_pages_are_misses(module: Any, options: dict[str, Any]) -> None:
    storage = storage_of(module, options)
    save(storage, KEYS)
    blocks = next(Path(options["disk_path"]).glob("*/blocks"))
    blocks.write_bytes(bytes(blocks.stat().st_size))
    assert load(storage, KEYS) == [False] * 6
    assert storage.batch_exists(KEYS) == 0
    storage.close()


@pytest.mark.skipif(SERVER is None, reason=WHY_NOT)
def test_ranks_with_equal_kv_share_redis_and_refuse_a_disk(
    module: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="expected only redis_url"):
        storage_of(module, options, is_mla_model=True, tp_size=2)
    with redis_server(tmp_path) as server:
        shared = {"redis_url": server.url, "trusted": True, "load_limit_s": PATIENCE_S}
        first, second = (storage_of(module, shared, is_mla_model=True, tp_size=2, tp_rank=rank) for rank in range(2))
        assert save(first, KEYS) == [True] * 6
        assert load(second, KEYS) == [True] * 6
        assert second.batch_exists(KEYS) == 6
        server.stop()
        assert load(second, KEYS) == [False] * 6
        first.close()
        second.close()


def test_options_are_required_by_name(module: Any) -> None:
    with pytest.raises(ConfigError, match="expected an object `tiers`"):
        module.RadixKVStorage(config_of({}, extra_config={"backend_name": "radixkv"}))


@pytest.mark.skipif(hicache_storage is not None, reason="SGLang is installed")
def test_without_sglang_the_error_says_what_to_install() -> None:
    result = subprocess.run([sys.executable, "-c", f"import {MODULE}"], capture_output=True, text=True, check=False)
    assert "pip install sglang" in result.stderr


@pytest.mark.skipif(hicache_storage is None, reason="SGLang cannot be imported")
def test_sglang_creates_the_backend(options: dict[str, Any]) -> None:
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    extra = {"backend_name": "radixkv", "module_path": MODULE, "class_name": "RadixKVStorage", "tiers": options}
    storage = StorageBackendFactory.create_backend("dynamic", config_of({}, extra_config=extra), None)
    assert not type(storage).__abstractmethods__
    storage.register_mem_pool_host(HostPool())
    assert save(storage, KEYS) == [True] * 6
    assert load(storage, KEYS) == [True] * 6
    storage.close()
