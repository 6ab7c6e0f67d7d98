from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from radixkv.errors import ConfigError, StoreUnavailable
from radixkv.offload.tiers import open_store
from radixkv.offload.tiers.block_store import PutOutcome, StoreBackend
from radixkv.offload.tiers.host import HostStore, map_memory
from radixkv.offload.tiers.open_store import StoreOptions, open_backend, require_backend, require_redis_url

from .blocks import FORMAT, OBJECT_BYTES, block


def open_plug_in(options: StoreOptions) -> StoreBackend:
    """Open a plug-in store, as the entry point of another package would."""
    return HostStore(map_memory(len(options.place) * 4096), options.object_bytes)


def test_our_stores_are_opened_by_name(tmp_path: Path) -> None:
    for name, place in (("host", ""), ("disk", str(tmp_path))):
        backend = open_backend(name, StoreOptions(FORMAT, OBJECT_BYTES, 8 * 4096, place))
        assert backend.put([block(1)]).outcomes == (PutOutcome.STORED,)
        backend.close()
    open_backend("redis", StoreOptions(FORMAT, OBJECT_BYTES, place="redis://127.0.0.1:1/0")).close()


def test_a_store_without_a_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="host_bytes"):
        open_backend("host", StoreOptions(FORMAT, OBJECT_BYTES))
    with pytest.raises(StoreUnavailable, match="disk_bytes"):
        open_backend("disk", StoreOptions(FORMAT, OBJECT_BYTES, 1, str(tmp_path)))


def test_a_plug_in_store_is_opened_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in = EntryPoint("shelf", f"{__name__}:open_plug_in", open_store.ENTRY_POINTS)

    def entry_points(**wanted: str) -> EntryPoints:
        return EntryPoints([plug_in]).select(**wanted)

    monkeypatch.setitem(sys.modules, __name__, sys.modules[open_plug_in.__module__])
    monkeypatch.setattr(open_store, "entry_points", entry_points)
    backend = open_backend("shelf", StoreOptions(FORMAT, OBJECT_BYTES, place="xx"))
    assert backend.put([block(1)]).outcomes == (PutOutcome.STORED,)
    with pytest.raises(
        ConfigError,
        match=r"^stores\.drawer: expected the name of an .* \(installed: shelf; radixkv's own .*\), got 'drawer'$",
    ):
        open_backend("drawer", StoreOptions(FORMAT, OBJECT_BYTES))


def test_a_store_without_its_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setitem(sys.modules, "mooncake", None)
    for name, key in (("redis", "tiers.redis_url"), ("mooncake", "tiers.mooncake_master")):
        message = rf"^{key}: the package {name}[-a-z]* is missing; .*: pip install '\.\[{name}\]'$"
        with pytest.raises(ConfigError, match=message):
            open_backend(name, StoreOptions(FORMAT, OBJECT_BYTES, place="redis://127.0.0.1:1/0"))


def test_a_package_that_can_not_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "radixkv.offload.tiers.redis", raising=False)
    monkeypatch.setitem(sys.modules, "redis.backoff", None)
    with pytest.raises(ConfigError, match=r"^tiers\.redis_url: expected its packages, got: import of redis\.backoff"):
        open_backend("redis", StoreOptions(FORMAT, OBJECT_BYTES, place="redis://127.0.0.1:1/0"))


def test_names_and_packages_are_checked_without_opening_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_store, "entry_points", lambda **wanted: EntryPoints([]).select(**wanted))
    require_backend("host")
    with pytest.raises(ConfigError, match=r"^stores\.shelf: .* \(installed: none; radixkv's own .*\), got 'shelf'$"):
        require_backend("shelf")


def test_a_url_is_checked_without_connecting() -> None:
    require_redis_url("redis://127.0.0.1:1/0")
    with pytest.raises(ConfigError, match=r"^tiers\.redis_url: expected redis://HOST:PORT/DB, got something else$"):
        require_redis_url("nope")
