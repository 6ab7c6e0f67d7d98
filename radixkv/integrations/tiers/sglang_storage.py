"""A storage backend of SGLang's HiCache (its third level) over the tiers.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic \
        --hicache-storage-backend-extra-config '{"backend_name": "radixkv", "class_name": "RadixKVStorage",
            "module_path": "radixkv.integrations.tiers.sglang_storage", "interface_v1": 1,
            "tiers": {"disk_path": "/var/lib/radixkv", "disk_bytes": 100000000000, "model_id": "llama-3.1-8b of May"}}'

SGLang calls the backend on threads of its own, which may wait, and passes hashes of tokens and no tenants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from radixkv.errors import ConfigError
from radixkv.integrations.tiers.options import TierOptions
from radixkv.integrations.tiers.sized_stores import SizedStores, ValueName
from radixkv.namespace import Namespace

try:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult
    from sglang.version import __version__
except ImportError as error:
    raise ImportError("radixkv.integrations.tiers.sglang_storage needs SGLang 0.5.23: pip install sglang") from error

# SGLang's name of the pool of K/V; other pools hold other states of the same pages.
_KV = "kv"


class RadixKVStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """Stores pages of SGLang's host memory in the tiers.

    Args:
        storage_config: ranks and model; `extra_config["tiers"]` are the options, see `TierOptions.of`.
        backend_options: ignored.

    Raises:
        ConfigError: an option is invalid; or there are several ranks with the same K/V, but a store that they do not
            share.
    """

    def __init__(self, storage_config: Any, backend_options: object = None) -> None:
        extra = storage_config.extra_config or {}
        if not isinstance(extra.get("tiers"), Mapping):
            raise ConfigError("hicache-storage-backend-extra-config: expected an object `tiers`, got none")
        options = TierOptions.of(extra["tiers"])
        has_local_store = options.tiers.disk_path is not None or options.tiers.host_bytes is not None
        if storage_config.is_mla_model and storage_config.tp_size > 1 and has_local_store:
            raise ConfigError(
                "tiers: expected only redis_url, got disk_path or host_bytes; with this attention one rank writes the "
                "K/V of all, and the others cannot read its disk and its memory"
            )
        model = storage_config.model_name
        self._stores = SizedStores(options, f"sglang {__version__}, {model}, {_shard_of(storage_config)}")
        self._namespace = Namespace("")

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Load a page into a tensor. Returns the tensor; None if the page is not found."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load pages into contiguous tensors. Returns those that were loaded, and None for the others."""
        return self._load(_KV, self._layout_of(_KV), keys, list(target_locations))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Save a page. Returns whether a tier has it."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Save pages. Returns whether all are in a tier."""
        return all(self._save(_KV, self._layout_of(_KV), keys, list(values)))

    def exists(self, key: str) -> bool:
        """Return whether a page can be loaded."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return how many pages at the beginning of `keys` can be loaded."""
        return _num_leading(self._exist(_KV, keys))

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load pages into the host memory of SGLang. Returns whether each was loaded."""
        return self._load_pages(_KV, self.mem_pool_host, keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Save pages of the host memory of SGLang. Returns whether each is in a tier."""
        return self._save_pages(_KV, self.mem_pool_host, keys, host_indices)

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return how many pages can be loaded with the states of all pools that the policies of the pools require.

        The policy `block_groups` is not supported: if a pool has it, no pages can be loaded.
        """
        num_kv_pages = _num_leading(self._exist(_KV, keys))
        hits = {_KV: num_kv_pages} if num_kv_pages else {}
        usable_lengths = set(range(1, num_kv_pages + 1))  # numbers of leading pages that can be loaded from all pools
        for transfer in pool_transfers or ():
            is_stored = self._exist(str(transfer.name), keys[:num_kv_pages])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                usable_in_pool = set(range(1, _num_leading(is_stored) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                usable_in_pool = {
                    end for end in range(1, num_kv_pages + 1) if all(is_stored[max(0, end - window) : end])
                }
            else:
                usable_in_pool = set()
            if usable_in_pool:
                hits[str(transfer.name)] = max(usable_in_pool)
            usable_lengths &= usable_in_pool
        return PoolTransferResult(max(usable_lengths, default=0), hits, sorted(usable_lengths))

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Load pages of several pools. Returns whether each was loaded, by pool."""
        return self._call_for_pools(transfers, self._load_pages)

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Save pages of several pools. Returns whether each is in a tier, by pool."""
        return self._call_for_pools(transfers, self._save_pages)

    def clear(self) -> None:
        """Do nothing: tiers outlive what SGLang flushes. To delete their contents, delete the directory."""

    def get_stats(self) -> None:
        """Return None: SGLang expects other counts. See `counts`."""

    def counts(self) -> dict[str, int]:
        """Return counts since the start; see `ByteStore.counts`."""
        return self._stores.counts()

    def close(self) -> None:
        """Write what is waiting, and close the stores."""
        self._stores.close()

    def _layout_of(self, pool: str) -> str:
        """Describe the order of the numbers in a page, as far as the pool is known."""
        host_pool = getattr(self, "mem_pool_host", None)
        if pool != _KV or host_pool is None:
            host_pool = getattr(self, "registered_pools", {}).get(pool)
        return f"{getattr(host_pool, 'layout', '')}, pages of {getattr(host_pool, 'page_size', '')} tokens"

    def _name(self, pool: str, key: str, layout: str = "") -> ValueName:
        return ValueName(self._namespace, f"{pool}:{key}".encode(), layout)

    def _exist(self, pool: str, keys: Sequence[str]) -> list[bool]:
        return self._stores.exists([self._name(pool, key) for key in keys]).result()

    def _load(
        self, pool: str, layout: str, keys: Sequence[str], targets: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        wanted = [
            (self._name(pool, key, f"{layout} {target.dtype}"), _bytes_of(target))
            for key, target in zip(keys, targets, strict=True)
        ]
        loaded = self._stores.load_into(wanted).result()
        return [target if is_loaded else None for target, is_loaded in zip(targets, loaded, strict=True)]

    def _save(self, pool: str, layout: str, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        values = [
            (self._name(pool, key, f"{layout} {page.dtype}"), bytes(_bytes_of(page.contiguous())))
            for key, page in zip(keys, pages, strict=True)
        ]
        return self._stores.save(values).result()

    def _load_pages(self, pool: str, host_pool: Any, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        pages = [host_pool.get_dummy_flat_data_page() for _ in keys]
        loaded = self._load(pool, self._layout_of(pool), keys, pages)
        for index, page in zip(_first_indices(host_pool, host_indices), loaded, strict=True):
            if page is not None:
                host_pool.set_from_flat_data_page(index, page)
        return [page is not None for page in loaded]

    def _save_pages(self, pool: str, host_pool: Any, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        pages = [host_pool.get_data_page(index, flat=True) for index in _first_indices(host_pool, host_indices)]
        return self._save(pool, self._layout_of(pool), keys, pages)

    def _call_for_pools(
        self, transfers: Sequence[Any], call: Callable[[str, Any, Sequence[str], torch.Tensor], list[bool]]
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            pool, keys = str(transfer.name), transfer.keys or ()
            host_pool = self.registered_pools[transfer.name]
            num_rows = len(keys) * _rows_per_page(host_pool)
            is_whole = transfer.host_indices is not None and len(transfer.host_indices) == num_rows
            results[transfer.name] = (
                call(pool, host_pool, keys, transfer.host_indices) if is_whole else [False] * len(keys)
            )
        return results


def _shard_of(config: Any) -> str:
    """Describe which part of the K/V a rank has. Ranks with equal K/V have the same description."""
    ranks = "all ranks" if config.is_mla_model else f"rank {config.tp_rank} of {config.tp_size}, dp {config.dp_rank}"
    stages = f"stage {config.pp_rank} of {config.pp_size}"
    contexts = f"context {config.attn_cp_rank} of {config.attn_cp_size}, {config.dcp_rank} of {config.dcp_size}"
    return f"{ranks}, {stages}, {contexts}"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _rows_per_page(host_pool: Any) -> int:
    """Return the rows of a page in a pool: one per token; in pools of other states than K/V, one per page."""
    return int(getattr(host_pool, "page_size", 1) or 1)


def _first_indices(host_pool: Any, host_indices: torch.Tensor) -> list[int]:
    """Return the index of the first row of each page."""
    return [int(index) for index in host_indices[:: _rows_per_page(host_pool)]]


def _num_leading(values: Sequence[bool]) -> int:
    """Return how many values at the beginning are true."""
    return next((number for number, each in enumerate(values) if not each), len(values))
