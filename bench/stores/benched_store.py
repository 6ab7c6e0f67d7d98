"""The stores that are measured, each with a peer that copies the same bytes without the store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest

from radixkv.model.on_cpu import native_copies
from radixkv.offload.block_keys import BlockFormat
from radixkv.offload.tiers.block_store import StoreBackend
from radixkv.offload.tiers.host import map_memory
from radixkv.offload.tiers.open_store import StoreOptions, open_backend
from radixkv.offload.tiers.slot_files import SlotSizes

Buffers = Sequence[memoryview]

_BATCH_BLOCKS = 16  # of a bare client: 16 MiB, with the default payload
_SLOT_ALIGNMENT = 64  # of the store in host memory, which pads each slot to a multiple


@dataclass(frozen=True, slots=True)
class BenchedStore:
    """A store and its peer.

    Attributes:
        name: name of the store.
        backend: the store.
        write: writes payloads with the peer.
        read: reads them back into buffers with the peer.
        forget: makes the next read cold; None if the store has no cache.
        copies: whether a load includes a copy into the caller's memory, as a read of the peer does.
        verify: does what `read` does, and computes a checksum of each payload; None if not measured.
    """

    name: str
    backend: StoreBackend
    write: Callable[[Buffers], None]
    read: Callable[[Buffers], None]
    forget: Callable[[], None] | None = None
    copies: bool = True
    verify: Callable[[Buffers], None] | None = None


@contextlib.contextmanager
def host(block_format: BlockFormat, object_bytes: int, num_blocks: int) -> Iterator[BenchedStore]:
    """Open host memory. Its peer copies into and out of memory that is already allocated."""
    payload_bytes = block_format.payload_bytes
    capacity_bytes = (object_bytes + _SLOT_ALIGNMENT) * num_blocks
    arena = np.frombuffer(map_memory(num_blocks * payload_bytes), np.uint8).reshape(num_blocks, payload_bytes)

    def write(sources: Buffers) -> None:
        for row, source in zip(arena, sources, strict=True):
            row[:] = np.frombuffer(source, np.uint8)

    def read(targets: Buffers) -> None:
        for row, target in zip(arena, targets, strict=True):
            np.frombuffer(target, np.uint8)[:] = row

    backend = open_backend("host", StoreOptions(block_format, object_bytes, capacity_bytes, native=native_copies()))
    yield BenchedStore("host", backend, write, read)


@contextlib.contextmanager
def disk(block_format: BlockFormat, object_bytes: int, num_blocks: int, folder: Path) -> Iterator[BenchedStore]:
    """Open a disk store, with a bare file as its peer, both through the page cache."""
    size = block_format.payload_bytes
    bare_file = os.open(folder / "bare", os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(bare_file, 0, num_blocks * size)

    def write(sources: Buffers) -> None:
        for number, source in enumerate(sources):
            if os.pwrite(bare_file, source, number * size) != size:
                raise OSError("bare file: expected a complete write, got a partial one")

    def read(targets: Buffers) -> None:
        for number, target in enumerate(targets):
            if os.preadv(bare_file, [target], number * size) != size:
                raise OSError("bare file: expected a complete read, got a partial one")

    def verify(targets: Buffers) -> None:
        for number, target in enumerate(targets):
            if os.preadv(bare_file, [target], number * size) != size:
                raise OSError("bare file: expected a complete read, got a partial one")
            xxh3_128_digest(target)

    def forget() -> None:
        for path in (folder / "bare", *folder.glob("*/heads"), *folder.glob("*/blocks")):
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

    capacity_bytes = SlotSizes.of(object_bytes, size).slot_bytes * num_blocks
    backend = open_backend(
        "disk", StoreOptions(block_format, object_bytes, capacity_bytes, str(folder), native_copies())
    )
    try:
        yield BenchedStore("disk", backend, write, read, forget, copies=False, verify=verify)
    finally:
        os.close(bare_file)


@contextlib.contextmanager
def redis(block_format: BlockFormat, object_bytes: int, url: str) -> Iterator[BenchedStore]:
    """Open Redis, with its bare client and the same pipelines as its peer."""
    import redis as package

    client: Any = package.Redis.from_url(url)

    def write(sources: Buffers) -> None:
        for start in range(0, len(sources), _BATCH_BLOCKS):
            pipeline = client.pipeline(transaction=False)
            for number, source in enumerate(sources[start : start + _BATCH_BLOCKS], start):
                pipeline.set(f"bare:{number}", bytes(source))
            pipeline.execute()

    def read(targets: Buffers) -> None:
        for start in range(0, len(targets), _BATCH_BLOCKS):
            client.mget([f"bare:{number}" for number in range(start, min(start + _BATCH_BLOCKS, len(targets)))])

    backend = open_backend("redis", StoreOptions(block_format, object_bytes, place=url))
    with client:
        yield BenchedStore("redis", backend, write, read, copies=False)


@contextlib.contextmanager
def mooncake(block_format: BlockFormat, object_bytes: int, master: str) -> Iterator[BenchedStore]:
    """Open Mooncake. Its peer is a bare client, which is also a server and provides the same amount of memory."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    if code := client.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 30, 256 << 20, "tcp", "", master):
        raise OSError(f"mooncake: expected a connection, got code {code}")

    def write(sources: Buffers) -> None:
        for number, source in enumerate(sources):
            if code := client.upsert(f"bare-{number}", source):
                raise OSError(f"mooncake: expected to store a value, got code {code}")

    def read(targets: Buffers) -> None:
        for start in range(0, len(targets), _BATCH_BLOCKS):
            client.get_batch([f"bare-{number}" for number in range(start, min(start + _BATCH_BLOCKS, len(targets)))])

    backend = open_backend("mooncake", StoreOptions(block_format, object_bytes, place=master))
    try:
        yield BenchedStore("mooncake", backend, write, read, copies=False)
    finally:
        client.close()
