"""The options of the tiers in other engines."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.integrations.tiers.options import TierOptions
from radixkv.offload.index.tier_index import TierShares


def test_options_are_those_of_section_tiers_and_quotas() -> None:
    options = TierOptions.of(
        {
            "host_bytes": 1000,
            "tenants": {"alice": {"floor": 0.1, "ceiling": 0.5}},
            "other_tenants": {"ceiling": 0.2},
            "load_limit_s": 1,
        }
    )
    assert options.tiers.host_bytes == 1000
    assert options.shares_of("alice") == TierShares(0.1, 0.5)
    assert options.shares_of("bob") == TierShares(ceiling=0.2)
    assert options.load_limit_s == 1


def test_a_disk_path_may_begin_with_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    assert TierOptions.of({"disk_path": "~/kv"}).tiers.disk_path == "/home/alice/kv"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "expected host_bytes, disk_path or redis_url"),
        ({"disk_pth": "/tmp"}, "disk_pth: unknown key; the nearest is disk_path"),
        ({"disk_path": 3}, "disk_path: expected a string"),
        ({"redis_url": "redis://localhost:1/0"}, "redis_url: expected secret_file or encryption_key_file"),
        ({"host_bytes": 1, "tenants": []}, "tenants: expected an object"),
        (
            {"host_bytes": 1, "tenants": {"a": {"flor": 0.1}}},
            "tenants.a.flor: unknown key; the nearest is tenants.a.floor",
        ),
        ({"host_bytes": 1, "tenants": {"a": {"floor": 2}}}, "tenants.a.floor: expected a fraction from 0 to 1, got 2"),
        ({"host_bytes": 1, "other_tenants": {"floor": True}}, "other_tenants.floor: expected a fraction"),
        ({"host_bytes": 1, "model_id": 3}, "model_id: expected a string"),
        ({"host_bytes": 1, "load_limit_s": 0}, "load_limit_s: expected a number above 0"),
        ({"host_bytes": 1, "max_waiting_bytes": "1"}, "max_waiting_bytes: expected a number above 0"),
    ],
)
def test_invalid_options_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TierOptions.of(values)
    assert message in str(raised.value)
