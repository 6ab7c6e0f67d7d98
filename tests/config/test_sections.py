"""Checks of single sections that do not follow from the types and bounds of their keys."""

from __future__ import annotations

import pytest

from radixkv.config import Config, FleetConfig, KVSourceConfig, TiersConfig
from radixkv.errors import ConfigError


class TestFleet:
    def test_a_fleet_routes_by_prefix(self) -> None:
        assert Config().fleet == FleetConfig(routing="prefix", least_match_tokens=1024)

    @pytest.mark.parametrize(
        "setting",
        [
            "routing=random",
            "least_match_tokens=-1",
            "health_timeout_s=0",
            "start_timeout_s=-1",
            "calls_per_replica=0",
            "grow_after_s=-1",
            "shrink_after_s=-1",
            "replicas=2",
        ],
    )
    def test_an_invalid_value_is_reported_with_its_key(self, setting: str) -> None:
        with pytest.raises(ConfigError, match=f"fleet.{setting.partition('=')[0]}"):
            Config.load(settings=[f"fleet.{setting}"])


class TestTiers:
    def test_all_tiers_are_off_by_default(self) -> None:
        assert Config().tiers == TiersConfig(None, None, None)

    def test_two_settings_enable_two_tiers(self) -> None:
        config = Config.load(settings=["tiers.host_bytes=1000000", "tiers.disk_path=/var/lib/radixkv"])
        assert config.tiers == TiersConfig(1_000_000, "/var/lib/radixkv", None)

    @pytest.mark.parametrize("key", ["host_bytes", "disk_bytes"])
    @pytest.mark.parametrize("value", ["0", "-1", "1.5", "9223372036854775808"])
    def test_a_size_must_be_a_positive_integer(self, key: str, value: str) -> None:
        with pytest.raises(ConfigError, match=rf"tiers\.{key}: expected"):
            Config.load(settings=[f"tiers.{key}={value}"])


class TestTransfer:
    def test_each_kv_source_has_a_section(self) -> None:
        config = Config.load(
            None, ["kv_sources.a.address=10.0.0.8:50051", "kv_sources.b.address=host:1", "transfer.serve=true"]
        )
        assert config.kv_sources == {"a": KVSourceConfig("10.0.0.8:50051"), "b": KVSourceConfig("host:1")}
        assert config.transfer.serve

    @pytest.mark.parametrize("address", ["host", ":1", "host:0", "host:65536", "host:x", "host:-1"])
    def test_an_address_without_a_valid_port_is_refused(self, address: str) -> None:
        with pytest.raises(ConfigError, match=r"kv_sources\.a\.address: expected HOST:PORT"):
            Config.load(None, [f"kv_sources.a.address={address}"])

    @pytest.mark.parametrize("setting", ["kv_sources.a.tls_ca=ca.pem", "kv_sources.a.address="])
    def test_an_address_is_required(self, setting: str) -> None:
        with pytest.raises(ConfigError, match=r"^kv_sources\.a\.address: an address HOST:PORT is required$"):
            Config.load(None, [setting])

    def test_a_size_of_zero_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"transfer\.max_fetching_bytes: expected"):
            Config.load(None, ["transfer.max_fetching_bytes=0"])

    def test_a_prefill_server_sends_kv(self) -> None:
        for role, sends in (("both", False), ("prefill", True), ("decode", False)):
            assert Config.load(None, [f"transfer.role={role}"]).transfer.sends == sends
        with pytest.raises(ConfigError, match=r"transfer\.role: expected one of"):
            Config.load(None, ["transfer.role=neither"])
