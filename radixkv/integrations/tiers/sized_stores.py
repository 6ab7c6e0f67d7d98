"""A store per size of values, for engines that name their values themselves."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from radixkv.errors import ConfigError
from radixkv.integrations.tiers.byte_store import ByteStore, call_when_done, keyed_value, store_keys
from radixkv.integrations.tiers.options import TierOptions
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockFormat
from radixkv.offload.index.prompt_blocks import KeyedBlock

_log = logging.getLogger(__name__)

# `host_bytes` and `disk_bytes` apply to each size, so the number of sizes is bounded.
MAX_SIZES = 4
# Space in a slot for the name and the layout of a value, in words of four bytes.
_NAME_WORDS = 64


class ValueName(NamedTuple):
    """The name that an engine gives to a value.

    Attributes:
        namespace: the owner; see `keyed_value`.
        name: distinguishes the value from other values of the namespace.
        layout: shapes and dtypes; see `keyed_value`.
    """

    namespace: Namespace
    name: bytes
    layout: str = ""


class SizedStores:
    """Values of at most four sizes, each in a `ByteStore`, which is opened when it is first needed. Thread-safe.

    Stores of an earlier process on the disk are opened at once.

    Args:
        options: the tiers, which apply to each size.
        engine: name and version of the engine, and everything else that determines the bytes of a value besides names.

    Raises:
        ConfigError: an option is invalid.
    """

    def __init__(self, options: TierOptions, engine: str) -> None:
        self._options = options
        self._format = BlockFormat(
            model=options.model_id,
            dtype="",
            kv_dtype="",
            layout="values of an engine",
            block_size=_NAME_WORDS,
            payload_bytes=0,
            computed_by=engine,
        )
        self._keys = store_keys(options, self._format)  # the same for all sizes
        self._lock = threading.Lock()
        self._stores: dict[int, ByteStore | None] = {}
        for num_bytes in self._sizes_on_disk():
            self.of_size(num_bytes)

    def of_size(self, num_bytes: int) -> ByteStore | None:
        """Return the store for values of a size; None if the size is 0, there are too many sizes, or opening fails."""
        with self._lock:
            if num_bytes not in self._stores:
                self._stores[num_bytes] = self._open_store(num_bytes)
            return self._stores[num_bytes]

    def key(self, name: ValueName) -> KeyedBlock:
        """Return the key of a value, which does not depend on its size."""
        return keyed_value(self._keys, *name)

    def save(self, values: Sequence[tuple[ValueName, bytes]]) -> Future[list[bool]]:
        """Save values. Returns which of them are in a tier; see `ByteStore.save`."""
        sizes = [len(data) for _, data in values]
        pairs = [(self.key(name), memoryview(data)) for name, data in values]
        return self._call_stores(sizes, lambda store, indexes: store.save([pairs[index] for index in indexes]))

    def load_into(self, values: Sequence[tuple[ValueName, memoryview]]) -> Future[list[bool]]:
        """Load values into buffers of their sizes; see `ByteStore.load_into`."""
        sizes = [buffer.nbytes for _, buffer in values]
        pairs = [(self.key(name), buffer) for name, buffer in values]
        return self._call_stores(sizes, lambda store, indexes: store.load_into([pairs[index] for index in indexes]))

    def exists(self, names: Sequence[ValueName]) -> Future[list[bool]]:
        """Return which values can be loaded, whatever their sizes."""
        keys = [self.key(name).key for name in names]
        calls = [store.exists(keys) for store in self.stores()]
        result: Future[list[bool]] = Future()

        def join() -> None:
            result.set_result([any(call.result()[index] for call in calls) for index in range(len(keys))])

        call_when_done(calls, join)
        return result

    def delete(self, names: Sequence[ValueName]) -> None:
        """Delete values, without waiting."""
        keys = [self.key(name).key for name in names]
        for store in self.stores():
            store.delete(keys)

    def stores(self) -> list[ByteStore]:
        """Return the open stores."""
        with self._lock:
            return [store for store in self._stores.values() if store is not None]

    def counts(self) -> dict[str, int]:
        """Return the sums of the counts of all stores."""
        return dict(sum((Counter(store.counts()) for store in self.stores()), Counter[str]()))

    def close(self) -> None:
        """Write what is waiting, and close the stores."""
        for store in self.stores():
            store.close()

    def _open_store(self, num_bytes: int) -> ByteStore | None:
        if sum(store is not None for store in self._stores.values()) >= MAX_SIZES:
            _log.error("tiers: values of %d bytes are not stored, since there are %d other sizes", num_bytes, MAX_SIZES)
            return None
        if not num_bytes:
            return None
        try:
            return ByteStore(self._options, replace(self._format, payload_bytes=num_bytes), self._keys)
        except ConfigError as error:
            _log.error("tiers: values of %d bytes are not stored: %s", num_bytes, error)
            return None

    def _call_stores(
        self, sizes: Sequence[int], call: Callable[[ByteStore, Sequence[int]], Future[list[bool]]]
    ) -> Future[list[bool]]:
        """Call the store of each size with the indexes of its values, and join the results in the values' order."""
        calls: list[tuple[list[int], Future[list[bool]]]] = []  # indexes, and the results for them
        for size in dict.fromkeys(sizes):
            store = self.of_size(size)
            if store is not None:
                indexes = [index for index, each in enumerate(sizes) if each == size]
                calls.append((indexes, call(store, indexes)))
        result: Future[list[bool]] = Future()

        def join() -> None:
            joined = [False] * len(sizes)
            for indexes, future in calls:
                for index, has_succeeded in zip(indexes, future.result(), strict=True):
                    joined[index] = has_succeeded
            result.set_result(joined)

        call_when_done([future for _, future in calls], join)
        return result

    def _sizes_on_disk(self) -> list[int]:
        """Return the sizes of the values that an earlier process stored."""
        if self._options.tiers.disk_path is None:
            return []
        sizes = []
        for format_file in sorted(Path(self._options.tiers.disk_path).glob("*/format.json")):
            try:
                fields = json.loads(format_file.read_bytes())
                size = int(fields["payload_bytes"])
                found_format = {name: fields[name] for name in asdict(self._format)}
            except (OSError, ValueError, TypeError, KeyError):
                continue  # opening the directory reports what is wrong
            if found_format == asdict(replace(self._format, payload_bytes=size)):
                sizes.append(size)
        return sizes
