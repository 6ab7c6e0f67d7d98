from __future__ import annotations

import pytest

from radixkv.config.address import host_and_port
from radixkv.errors import ConfigError


def test_the_last_colon_separates_host_and_port() -> None:
    assert host_and_port("a.b", "[::1]:65535") == ("[::1]", 65_535)


@pytest.mark.parametrize(
    "address", ["host", "host:", ":1", "host:port", "host:0", "host:65536", "host:\u0661", "host:" + 5000 * "1"]
)
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^a\.b: expected HOST:PORT with a port from 1 to 65535, got "):
        host_and_port("a.b", address)
