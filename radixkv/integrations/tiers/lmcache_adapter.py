"""An L2 adapter of LMCache over the tiers, for all engines that LMCache serves: vLLM, SGLang, TensorRT-LLM.

    lmcache server ... --l2-adapter '{"type": "plugin", "class_name": "RadixKVL2Adapter",
        "module_path": "radixkv.integrations.tiers.lmcache_adapter",
        "adapter_params": {"disk_path": "/var/lib/radixkv", "disk_bytes": 100000000000, "model_id": "llama of May"}}'

The cache salt of a request is the tenant that quotas apply to.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from radixkv.integrations.tiers.options import TierOptions
from radixkv.integrations.tiers.sized_stores import SizedStores, ValueName
from radixkv.namespace import Namespace

try:
    from lmcache import __version__
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier
except ImportError as error:
    raise ImportError("radixkv.integrations.tiers.lmcache_adapter needs LMCache 0.5.6: pip install lmcache") from error

_RANK_BYTES = 8
_GROUP_BYTES = 4


class RadixKVL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache is not installed where types are checked
    """Stores LMCache's objects in the tiers, which evict by themselves. Thread-safe.

    An object may be evicted between lookup and load; the load is then a miss.

    Args:
        options: `adapter_params` of the plugin; see `TierOptions.of`.
        l1_memory_desc: ignored, since objects are copied.

    Raises:
        ConfigError: an option is invalid.
    """

    def __init__(self, options: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        super().__init__()
        self._stores = SizedStores(TierOptions.of(options), f"lmcache {__version__}")
        self._store_event, self._lookup_event, self._load_event = (create_event_notifier() for _ in range(3))
        self._task_ids = itertools.count()
        self._results_lock = threading.Lock()
        self._store_results: dict[int, Any] = {}
        self._lookup_results: dict[int, Any] = {}
        self._load_results: dict[int, Any] = {}

    def get_store_event_fd(self) -> int:
        """Return the descriptor that is signalled when a store task has ended."""
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that is signalled when a lookup has ended."""
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that is signalled when a load has ended."""
        return int(self._load_event.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Copy objects and save the copies. Objects that no tier has room for do not fail the task."""
        names = [_name_of(key, value) for key, value in zip(keys, objects, strict=True)]
        copies = [bytes(value.byte_array) for value in objects]

        def report_saved(is_saved: Sequence[bool]) -> Any:
            sizes = [len(copy) for copy in copies]
            saved = [index for index, each in enumerate(is_saved) if each]
            self._notify_keys_stored([keys[index] for index in saved], [sizes[index] for index in saved])
            return L2StoreResult(True, sum(sizes[index] for index in saved))

        future = self._stores.save(list(zip(names, copies, strict=True)))
        return self._add_task(future, report_saved, self._store_results, self._store_event)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the results of the tasks that have ended since the last call."""
        with self._results_lock:
            results = dict(self._store_results)
            self._store_results.clear()
        return results

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Look up keys. Nothing is locked."""
        for layout in group_layout_descs.values():  # a shared store is queried only for sizes that are open
            self._stores.of_size(_size_of(layout))
        future = self._stores.exists([_name_of(key) for key in keys])
        return self._add_task(future, _bitmap_of, self._lookup_results, self._lookup_event)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return the bitmap of the keys that were found, and forget it; None while the lookup runs."""
        with self._results_lock:
            return self._lookup_results.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing, since nothing is locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Load objects into the buffers of `objects`."""
        names = [_name_of(key, value) for key, value in zip(keys, objects, strict=True)]

        def report_loaded(is_loaded: Sequence[bool]) -> Any:
            self._notify_keys_accessed([key for key, each in zip(keys, is_loaded, strict=True) if each])
            return _bitmap_of(is_loaded)

        buffers = [memoryview(value.byte_array).cast("B") for value in objects]
        future = self._stores.load_into(list(zip(names, buffers, strict=True)))
        return self._add_task(future, report_loaded, self._load_results, self._load_event)

    def query_load_result(self, task_id: int) -> Any:
        """Return the bitmap of the objects that were loaded, and forget it; None while the load runs."""
        with self._results_lock:
            return self._load_results.pop(task_id, None)

    def delete(self, keys: list[Any]) -> None:
        """Delete objects, without waiting."""
        self._stores.delete([_name_of(key) for key in keys])
        self._notify_keys_deleted(keys, [0] * len(keys))

    def get_usage(self) -> Any:
        """Return the bytes of objects in host memory or on disk by cache salt, including those of earlier processes."""
        bytes_by_salt: dict[str, int] = {}
        for store in self._stores.stores():
            for tenant, num_values in store.num_values_of_tenants().items():
                bytes_by_salt[tenant] = bytes_by_salt.get(tenant, 0) + num_values * store.block_format.payload_bytes
        return AdapterUsage(sum(bytes_by_salt.values()), 0, bytes_by_salt)

    def report_status(self) -> dict[str, Any]:
        """Return the counts of the tiers; see `ByteStore.counts`."""
        return {"is_healthy": True, "type": type(self).__name__, **self._stores.counts()}

    def close(self) -> None:
        """Write what is waiting, and close the stores."""
        self._stores.close()
        for each in (self._store_event, self._lookup_event, self._load_event):
            each.close()

    def _add_task(
        self,
        future: Future[list[bool]],
        result_of: Callable[[Sequence[bool]], Any],
        results: dict[int, Any],
        event: Any,
    ) -> int:
        """Return the id of a new task. When `future` is done, the result is stored, and the event is signalled."""
        task_id = next(self._task_ids)

        def store_result(future: Future[list[bool]]) -> None:
            result = result_of(future.result())
            with self._results_lock:
                results[task_id] = result
            event.notify()

        future.add_done_callback(store_result)
        return task_id


def _name_of(key: Any, value: Any = None) -> ValueName:
    name = key.chunk_hash + key.kv_rank.to_bytes(_RANK_BYTES, "little")
    name += key.object_group_id.to_bytes(_GROUP_BYTES, "little")
    layout = "" if value is None else f"{list(map(tuple, value.get_shapes()))} {value.get_dtypes()}"
    # On the disk, the tags of a key identify its owner. There is no tag for `model`, so the model's name is the salt.
    return ValueName(Namespace("", key.cache_salt, "", key.model_name), name, layout)


def _size_of(layout: Any) -> int:
    return sum(shape.numel() * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True))


def _bitmap_of(values: Sequence[bool]) -> Any:
    bitmap = Bitmap(len(values))
    for index, value in enumerate(values):
        if value:
            bitmap.set(index)
    return bitmap
