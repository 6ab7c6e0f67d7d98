"""Starts the stores for evicted blocks in exact cases: folders, and servers on loopback."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from radixkv.config import TiersConfig
from tests.free_port import free_port
from tests.offload.tiers.mooncake_master import mooncake_master
from tests.offload.tiers.redis_server import redis_server

STORES = ("host", "disk", "redis", "mooncake")
_MOONCAKE_BYTES = 512 << 20


class Places:
    """Where stores are. Their servers run until the end of `open_places`.

    Args:
        places: the folder, URL or address of each store.
    """

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def config(self, host_blocks: int, disk_blocks: int, block_bytes: int) -> TiersConfig:
        """Return the section `[tiers]` with room for some blocks."""
        has_disk = "disk" in self._places
        return TiersConfig(
            host_bytes=host_blocks * (block_bytes + 1024) if "host" in self._places else None,
            disk_path=self._places.get("disk"),
            disk_bytes=disk_blocks * (block_bytes + 8192) if has_disk else None,
            redis_url=self._places.get("redis"),
            mooncake_master=self._places.get("mooncake"),
            mooncake_bytes=_MOONCAKE_BYTES,
            trusted=True,
        )


@contextlib.contextmanager
def open_places(stores: Sequence[str]) -> Iterator[Places]:
    """Make a folder, and start the servers of these stores."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        places = dict.fromkeys(stores, folder)
        if "redis" in stores:
            server = stack.enter_context(
                redis_server(Path(folder), "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru")
            )
            places["redis"] = server.url
        if "mooncake" in stores:
            places["mooncake"] = stack.enter_context(mooncake_master(free_port()))
        yield Places(places)
