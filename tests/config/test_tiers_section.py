from __future__ import annotations

import pytest

from radixkv.config import Config
from radixkv.config.tiers_section import TiersConfig
from radixkv.errors import ConfigError


def test_without_keys_there_are_no_tiers() -> None:
    assert Config().tiers == TiersConfig(None, None, None)


def test_two_settings_turn_two_tiers_on() -> None:
    config = Config.load(settings=["tiers.host_bytes=1000000", "tiers.disk_path=/var/lib/radixkv"])
    assert config.tiers == TiersConfig(1_000_000, "/var/lib/radixkv", None)


@pytest.mark.parametrize("key", ["host_bytes", "disk_bytes"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "9223372036854775808"])
def test_bytes_are_a_positive_number(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"tiers\.{key}: expected"):
        Config.load(settings=[f"tiers.{key}={value}"])
