"""Values, keys and stores for the tests of the tiers in other engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from radixkv.integrations.tiers.byte_store import ByteStore, keyed_value, store_keys
from radixkv.integrations.tiers.options import TierOptions
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockFormat
from radixkv.offload.index.prompt_blocks import KeyedBlock
from tests.patience import PATIENCE_S

PAYLOAD_BYTES = 8192
FORMAT = BlockFormat("model", "bfloat16", "auto", "pages", 16, PAYLOAD_BYTES, "an engine")
SLOT_BYTES = PAYLOAD_BYTES + 4096


def payload_of(name: str, tenant: str = "") -> bytes:
    """Return the only bytes that may be loaded under a name."""
    return Random(f"{tenant}/{name}").randbytes(PAYLOAD_BYTES)


def store_at(path: Path | None, block_format: BlockFormat = FORMAT, **values: Any) -> ByteStore:
    """Open a store on a disk of 64 values, unless `values` sets another size; without a path, it has no disk."""
    disk = {"disk_path": str(path), "disk_bytes": 64 * SLOT_BYTES} if path is not None else {}
    options = TierOptions.of({"load_limit_s": PATIENCE_S, **disk, **values})
    return ByteStore(options, block_format, store_keys(options, block_format))


def keyed(store: ByteStore, name: str, tenant: str = "", salt: str = "") -> KeyedBlock:
    """Return the identity of the value of a name, with its key."""
    return keyed_value(store.keys, Namespace("", tenant, "", salt), name.encode())


def save(store: ByteStore, names: Sequence[str], tenant: str = "") -> list[bool]:
    """Save the values of names, and wait for the stores. Returns which were saved."""
    values = [(keyed(store, name, tenant), memoryview(payload_of(name, tenant))) for name in names]
    return store.save(values).result(PATIENCE_S)


def load(store: ByteStore, names: Sequence[str], tenant: str = "") -> list[str | None]:
    """Load the values of names, which must have their own bytes. Returns the names, None for values not found."""
    buffers = [bytearray(PAYLOAD_BYTES) for _ in names]
    wanted = [(keyed(store, name, tenant), memoryview(buffer)) for name, buffer in zip(names, buffers, strict=True)]
    loaded = store.load_into(wanted).result(PATIENCE_S)
    for name, buffer, is_loaded in zip(names, buffers, loaded, strict=True):
        assert buffer == (payload_of(name, tenant) if is_loaded else bytes(PAYLOAD_BYTES))
    return [name if is_loaded else None for name, is_loaded in zip(names, loaded, strict=True)]
