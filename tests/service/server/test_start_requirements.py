import pytest

from radixkv.config import Config
from radixkv.errors import ConfigError
from radixkv.service.server.start_requirements import require_role


def test_a_server_that_only_decodes_needs_a_source() -> None:
    require_role(Config())
    require_role(Config.load(None, ["transfer.role=decode", "kv_sources.a.address=host:1"]))
    with pytest.raises(
        ConfigError, match=r"transfer\.role: the role decode requires a section kv_sources to fetch from"
    ):
        require_role(Config.load(None, ["transfer.role=decode"]))


def test_a_server_that_only_prefills_has_no_gateway() -> None:
    require_role(Config.load(None, ["transfer.role=prefill"]))
    with pytest.raises(ConfigError, match=r"transfer\.role: the role prefill requires gateway.enabled=false"):
        require_role(Config.load(None, ["transfer.role=prefill", "gateway.enabled=true"]))
