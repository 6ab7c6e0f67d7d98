import pytest

from radixkv.config import Config, KVSourceConfig
from radixkv.errors import ConfigError


def test_sources_have_a_section_each():
    config = Config.load(
        None, ["kv_sources.a.address=10.0.0.8:50051", "kv_sources.b.address=host:1", "transfer.serve=true"]
    )
    assert config.kv_sources == {"a": KVSourceConfig("10.0.0.8:50051"), "b": KVSourceConfig("host:1")}
    assert config.transfer.serve


@pytest.mark.parametrize("address", ["", "host", ":1", "host:0", "host:65536", "host:x", "host:-1"])
def test_an_address_without_a_port_is_refused_by_name(address):
    with pytest.raises(ConfigError, match=r"kv_sources\.a\.address: expected HOST:PORT"):
        Config.load(None, [f"kv_sources.a.address={address}"])


def test_an_address_that_is_missing_is_said_to_be():
    with pytest.raises(ConfigError, match=r"^kv_sources\.a\.address: expected HOST:PORT with .*, got none$"):
        Config.load(None, ["kv_sources.a.tls_ca=ca.pem"])


def test_room_for_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"transfer\.max_fetching_bytes: expected"):
        Config.load(None, ["transfer.max_fetching_bytes=0"])


def test_who_computes_prompts_for_others_sends_them():
    for role, sends in (("both", False), ("prefill", True), ("decode", False)):
        assert Config.load(None, [f"transfer.role={role}"]).transfer.sends == sends
    with pytest.raises(ConfigError, match=r"transfer\.role: expected one of"):
        Config.load(None, ["transfer.role=neither"])
