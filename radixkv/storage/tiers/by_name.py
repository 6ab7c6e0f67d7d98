"""Backends that can be chosen by name: ours, and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from radixkv.errors import ConfigError
from radixkv.kernels.native.copies import NativeCopies
from radixkv.storage.tiers.block_key import BlockFormat
from radixkv.storage.tiers.block_store import StoreBackend

ENTRY_POINTS = "radixkv.stores"


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """All that a backend is told.

    Attributes:
        block_format: format of the blocks.
        object_bytes: size of the largest object.
        max_bytes: the bound; None where the place has its own.
        place: a directory, a URL or an address; empty for none.
        native: copies in C++, for our own backends; None for none, and for those of other packages.
    """

    block_format: BlockFormat
    object_bytes: int
    max_bytes: int | None = None
    place: str = ""
    native: NativeCopies | None = None


OpenBackend = Callable[[StoreOptions], StoreBackend]


def open_backend(name: str, options: StoreOptions) -> StoreBackend:
    """Open a backend.

    Args:
        name: `host`, `disk`, `redis`, `mooncake`, or an entry point of the group `radixkv.stores`, which is called
            with the options.
        options: see `StoreOptions`.

    Raises:
        ConfigError: there is none of this name, it lacks a package, or the options make no sense.
        StoreUnavailable: the store can't be used now.
    """
    try:
        return _find(name)(options)
    except ImportError as error:
        raise ConfigError(f"store {name}: expected its packages, got: {error}") from error


def _find(name: str) -> OpenBackend:
    if name in _OURS:
        return _OURS[name]
    found = tuple(entry_points(group=ENTRY_POINTS, name=name))
    if not found:
        known = sorted({*_OURS, *entry_points(group=ENTRY_POINTS).names})
        raise ConfigError(f"store: expected one of {', '.join(known)}, got {name!r}")
    opened: OpenBackend = found[0].load()
    return opened


def _host(options: StoreOptions) -> StoreBackend:
    from radixkv.storage.tiers.host_memory import HostMemory, allocate_arena

    return HostMemory(allocate_arena(options.max_bytes or 0), options.object_bytes, options.native)


def _disk(options: StoreOptions) -> StoreBackend:
    from radixkv.storage.tiers.disk import DiskStore

    return DiskStore(
        Path(options.place), options.block_format, options.object_bytes, options.max_bytes or 0, native=options.native
    )


def _redis(options: StoreOptions) -> StoreBackend:
    from radixkv.storage.tiers.redis import RedisStore  # the package is an extra

    return RedisStore(options.place, options.object_bytes)


def _mooncake(options: StoreOptions) -> StoreBackend:
    from radixkv.storage.tiers.mooncake import MooncakeStore  # the package is an extra

    return MooncakeStore(options.place, options.object_bytes, lent_bytes=options.max_bytes or 0)


_OURS: dict[str, OpenBackend] = {"host": _host, "disk": _disk, "redis": _redis, "mooncake": _mooncake}
