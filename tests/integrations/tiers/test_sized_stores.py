"""`SizedStores` keeps values of each size in a store of their own, and finds them after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.integrations.tiers.options import TierOptions
from radixkv.integrations.tiers.sized_stores import MAX_SIZES, SizedStores, ValueName
from radixkv.namespace import Namespace
from tests.offload.tiers.redis_server import SERVER, WHY_NOT, redis_server
from tests.patience import PATIENCE_S


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "tiers"


def stores_at(folder: Path, engine: str = "an engine 1.0", **values: object) -> SizedStores:
    defaults = {"disk_path": str(folder), "disk_bytes": 1 << 20, "load_limit_s": PATIENCE_S}
    return SizedStores(TierOptions.of({**defaults, **values}), engine)


def name_of(name: str, tenant: str = "", layout: str = "") -> ValueName:
    return ValueName(Namespace("", tenant, "", "a model"), name.encode(), layout)


def save(stores: SizedStores, **values: bytes) -> list[bool]:
    return stores.save([(name_of(name), data) for name, data in values.items()]).result(PATIENCE_S)


def load(stores: SizedStores, name: ValueName, size: int) -> bytes | None:
    buffer = bytearray(size)
    [is_loaded] = stores.load_into([(name, memoryview(buffer))]).result(PATIENCE_S)
    return bytes(buffer) if is_loaded else None


def test_values_of_several_sizes_are_found_after_a_restart(folder: Path) -> None:
    values = {"a": b"1" * 1000, "b": b"2" * 3000, "c": b"3" * 1000}
    stores = stores_at(folder)
    assert save(stores, **values) == [True] * 3
    stores.close()
    stores = stores_at(folder)
    names = [name_of(name) for name in (*values, "d")]
    assert stores.exists(names).result(PATIENCE_S) == [True] * 3 + [False]
    for name, data in values.items():
        assert load(stores, name_of(name), len(data)) == data
        assert load(stores, name_of(name), len(data) + 1) is None
        assert load(stores, name_of(name, tenant="alice"), len(data)) is None
    stores.close()


def test_another_version_of_an_engine_or_another_model_finds_nothing(folder: Path) -> None:
    stores = stores_at(folder)
    save(stores, a=b"1" * 1000)
    stores.close()
    for other in (stores_at(folder, "an engine 2.0"), stores_at(folder, model_id="other weights")):
        assert not other.stores()
        assert load(other, name_of("a"), 1000) is None
        other.close()


def test_another_layout_of_the_same_size_is_a_miss(folder: Path) -> None:
    stores = stores_at(folder)
    assert stores.save([(name_of("a", layout="bfloat16"), b"1" * 1000)]).result(PATIENCE_S) == [True]
    assert stores.exists([name_of("a")]).result(PATIENCE_S) == [True]
    assert load(stores, name_of("a", layout="float16"), 1000) is None
    assert stores.counts()["disk_other_tokens"] == 1
    stores.close()


def test_the_number_of_sizes_is_bounded(folder: Path) -> None:
    stores = stores_at(folder)
    saved = [save(stores, **{f"value {size}": b"1" * size}) for size in range(1000, 1000 + MAX_SIZES + 2)]
    assert saved == [[True]] * MAX_SIZES + [[False]] * 2
    stores.close()


def test_deleted_values_are_not_found(folder: Path) -> None:
    stores = stores_at(folder)
    save(stores, a=b"1" * 1000, b=b"2" * 1000)
    stores.delete([name_of("a")])
    assert stores.exists([name_of("a"), name_of("b")]).result(PATIENCE_S) == [False, True]
    stores.close()


def test_a_value_larger_than_the_tier_is_not_saved(folder: Path) -> None:
    stores = stores_at(folder)
    assert save(stores, a=b"1" * (2 << 20), b=b"2" * 1000) == [False, True]
    stores.close()


def test_invalid_options_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        stores_at(folder, disc_bytes=3)


@pytest.mark.skipif(SERVER is None, reason=WHY_NOT)
def test_two_stores_share_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        options = TierOptions.of({"redis_url": server.url, "trusted": True, "load_limit_s": PATIENCE_S})
        first, second = SizedStores(options, "an engine"), SizedStores(options, "an engine")
        assert save(first, a=b"1" * 1000) == [True]
        second.of_size(1000)  # opens the store; no earlier save has done so in `second`
        assert second.exists([name_of("a"), name_of("b")]).result(PATIENCE_S) == [True, False]
        assert load(second, name_of("a"), 1000) == b"1" * 1000
        first.close()
        second.close()
