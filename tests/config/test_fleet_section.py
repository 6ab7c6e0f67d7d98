from __future__ import annotations

import pytest

from radixkv.config import Config, FleetConfig
from radixkv.errors import ConfigError


def test_a_fleet_routes_by_prefix() -> None:
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
def test_a_wrong_value_names_its_key(setting) -> None:
    with pytest.raises(ConfigError, match=f"fleet.{setting.partition('=')[0]}"):
        Config.load(settings=[f"fleet.{setting}"])
