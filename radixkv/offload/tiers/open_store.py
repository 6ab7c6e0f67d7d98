"""Opens backends by name: those of radixkv, and those of installed packages. Lists the stores that are configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from radixkv.config import StoreConfig, TiersConfig
from radixkv.config.needed_package import require_package
from radixkv.errors import ConfigError
from radixkv.kernels.native.copies import NativeCopies
from radixkv.offload.block_keys import BlockFormat
from radixkv.offload.tiers.block_object import max_object_bytes
from radixkv.offload.tiers.block_store import StoreBackend
from radixkv.offload.tiers.host import HostStore, map_memory

ENTRY_POINTS = "radixkv.stores"


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The options of a backend.

    Attributes:
        block_format: format of the blocks.
        object_bytes: size of the largest object.
        max_bytes: capacity in bytes, or, for Mooncake, the memory that this process contributes. None means half of the
            free space for `disk`, no contribution for `mooncake`, and the store's own default for other packages; it is
            invalid for `host`.
        place: a directory, a URL or an address; empty for none.
        native: copy functions in C++ for radixkv's own backends; None for backends of other packages, or to use Python.
        map_memory: returns host memory of a size, pinned if the blocks are on a GPU; raises MemoryError if there is
            not enough.
        must_be_private: whether a directory that other users can write is refused.
    """

    block_format: BlockFormat
    object_bytes: int
    max_bytes: int | None = None
    place: str = ""
    native: NativeCopies | None = None
    map_memory: Callable[[int], memoryview] = map_memory
    must_be_private: bool = False


def configured_stores(
    config: TiersConfig,
    plugin_stores: Mapping[str, StoreConfig],
    block_format: BlockFormat,
    native: NativeCopies | None,
    map_memory: Callable[[int], memoryview] = map_memory,
    *,
    must_be_private: bool,
) -> dict[str, StoreOptions]:
    """Return the options of the configured stores by name, the fastest first.

    Args:
        config: the section `tiers`.
        plugin_stores: stores of plug-ins, by the names of their entry points.
        block_format, native, map_memory, must_be_private: see `StoreOptions`.
    """
    num_bytes = max_object_bytes(block_format.block_size, block_format.payload_bytes)
    options: dict[str, StoreOptions] = {}
    if config.host_bytes is not None:
        options["host"] = StoreOptions(block_format, num_bytes, config.host_bytes, native=native, map_memory=map_memory)
    if config.disk_path is not None:
        options["disk"] = StoreOptions(
            block_format, num_bytes, config.disk_bytes, config.disk_path, native, must_be_private=must_be_private
        )
    if config.redis_url is not None:
        options["redis"] = StoreOptions(block_format, num_bytes, place=config.redis_url)
    if config.mooncake_master is not None:
        options["mooncake"] = StoreOptions(block_format, num_bytes, config.mooncake_bytes, config.mooncake_master)
    for name, store in plugin_stores.items():
        options[name] = StoreOptions(block_format, num_bytes, store.max_bytes, store.place)
    return options


OpenBackend = Callable[[StoreOptions], StoreBackend]


def open_backend(name: str, options: StoreOptions) -> StoreBackend:
    """Open a backend.

    Args:
        name: `host`, `disk`, `redis`, `mooncake`, or an entry point of the group `radixkv.stores`, which is called
            with the options.
        options: see `StoreOptions`.

    Raises:
        ConfigError: there is no backend of this name, its package is missing, or the options are invalid.
        StoreUnavailable: the store cannot be used at the moment.
    """
    require_backend(name)
    try:
        open_named_backend: OpenBackend = (
            _BUILT_IN_BACKENDS[name] if name in _BUILT_IN_BACKENDS else _entry_points(name)[0].load()
        )
        return open_named_backend(options)
    except ImportError as error:
        raise ConfigError(f"{_key_of(name)}: expected its packages, got: {error}") from error


def require_backend(name: str) -> None:
    """Raise if there is no backend of this name, or its package is missing. Does not import it.

    Raises:
        ConfigError: the message names the key of the configuration.
    """
    if name in _EXTRAS:
        require_package(_key_of(name), *_EXTRAS[name])
    elif name not in _BUILT_IN_BACKENDS and not _entry_points(name):
        known = ", ".join(sorted(entry_points(group=ENTRY_POINTS).names)) or "none"
        raise ConfigError(
            f"{_key_of(name)}: expected the name of an installed package's entry point in the group {ENTRY_POINTS} "
            f"(installed: {known}; radixkv's own stores are keys of tiers), got {name!r}"
        )


def require_redis_url(url: str) -> None:
    """Raise if a URL is not a valid Redis URL. Does not connect.

    Raises:
        ConfigError: the URL is invalid, or the package is missing.
    """
    require_backend("redis")
    from radixkv.offload.tiers.redis import RedisStore  # the package is an extra

    RedisStore(url, object_bytes=1).close()


def _key_of(name: str) -> str:
    """Return the configuration key that enables a backend."""
    return _KEYS.get(name, f"stores.{name}")


def _entry_points(name: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINTS, name=name))


def _host(options: StoreOptions) -> StoreBackend:
    num_bytes = options.max_bytes or 0
    try:
        arena = options.map_memory(num_bytes)
    except MemoryError as error:
        raise ConfigError(f"tiers.host_bytes: expected memory for {num_bytes} bytes, got none") from error
    return HostStore(arena, options.object_bytes, options.native)


def _disk(options: StoreOptions) -> StoreBackend:
    from radixkv.offload.tiers.disk import DiskStore

    return DiskStore(
        Path(options.place),
        options.block_format,
        options.object_bytes,
        options.max_bytes,
        native=options.native,
        must_be_private=options.must_be_private,
    )


def _redis(options: StoreOptions) -> StoreBackend:
    from radixkv.offload.tiers.redis import RedisStore  # the package is an extra

    return RedisStore(options.place, options.object_bytes)


def _mooncake(options: StoreOptions) -> StoreBackend:
    from radixkv.offload.tiers.mooncake import MooncakeStore  # the package is an extra

    return MooncakeStore(options.place, options.object_bytes, lent_bytes=options.max_bytes or 0)


_BUILT_IN_BACKENDS: dict[str, OpenBackend] = {"host": _host, "disk": _disk, "redis": _redis, "mooncake": _mooncake}
_KEYS = {
    "host": "tiers.host_bytes",
    "disk": "tiers.disk_path",
    "redis": "tiers.redis_url",
    "mooncake": "tiers.mooncake_master",
}
# For each backend: the module, the package, and the extra that installs it.
_EXTRAS = {
    "redis": ("redis", "redis", "redis"),
    "mooncake": ("mooncake", "mooncake-transfer-engine-non-cuda", "mooncake"),
}
