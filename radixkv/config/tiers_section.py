"""The sections of the stores below the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from radixkv.config.bounds import Range, require_fields
from radixkv.errors import ConfigError

_Bytes = Annotated[int, Range(1, 2**63 - 1)]


@dataclass(frozen=True, slots=True)
class TiersConfig:
    """Stores for blocks that leave the device. Each is off without its keys.

    Attributes:
        host_bytes: host memory for blocks; pinned where there is a GPU.
        disk_path: directory for blocks on a local disk, which the next start of the same model finds. One process has
            it at a time.
        disk_bytes: room for blocks there. Without it, half of what is free there at the start.
        redis_url: `redis://[USER:PASSWORD@]HOST:PORT/DB`, `rediss://` for TLS, or `unix://PATH`: a Redis or Valkey for
            all servers of one model.
        mooncake_master: `HOST:PORT` of the master of a Mooncake Store for all servers of one model.
        mooncake_bytes: memory that this server lends to that store.
        secret_file: a file with a secret, the same on all servers that share a store. Without it, whoever can read a
            store can test whether a prompt is there.
        encryption_key_file: a file with 64 hexadecimal digits, from which each tenant's key is derived: blocks are
            encrypted on disk and in shared stores, not in host memory.
    """

    host_bytes: _Bytes | None = None
    disk_path: str | None = None
    disk_bytes: _Bytes | None = None
    redis_url: str | None = None
    mooncake_master: str | None = None
    mooncake_bytes: _Bytes = 2**30
    secret_file: str | None = None
    encryption_key_file: str | None = None

    def __post_init__(self) -> None:
        require_fields("tiers", self)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """A store of another package, below those of `tiers`, from a section `stores.NAME`.

    NAME is that of an entry point of the group `radixkv.stores`.

    Attributes:
        place: what it is told: a directory, a URL, an address.
        max_bytes: room that it is told. Without it, it has a bound of its own.
    """

    place: str = ""
    max_bytes: _Bytes | None = None

    def require(self, path: str) -> None:
        """Refuse values out of range; `Config` calls this, since only it knows the section's name.

        Args:
            path: `stores.NAME`.

        Raises:
            ConfigError: the message names the key.
        """
        require_fields(path, self)
        if path.removeprefix("stores.") in ("", "host", "disk", "redis", "mooncake"):
            raise ConfigError(
                f"{path}: expected the name of another package's store; ours have keys in the section tiers"
            )
