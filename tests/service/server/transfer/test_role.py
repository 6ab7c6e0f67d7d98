from types import SimpleNamespace

import pytest

from radixkv.config import Config, TransferConfig
from radixkv.errors import ConfigError, SwitchedOff
from radixkv.service.server.transfer.role import require_call, require_role


def test_a_server_that_generates_from_others_knows_some() -> None:
    require_role(Config())
    require_role(Config.load(None, ["transfer.role=decode", "kv_sources.a.address=host:1"]))
    with pytest.raises(ConfigError, match=r"transfer\.role: expected sections kv_sources to fetch from beside decode"):
        require_role(Config.load(None, ["transfer.role=decode"]))


def test_a_gateway_is_not_put_before_a_server_that_does_not_generate() -> None:
    require_role(Config.load(None, ["transfer.role=prefill"]))
    with pytest.raises(ConfigError, match=r"transfer\.role: expected gateway.enabled=false beside prefill"):
        require_role(Config.load(None, ["transfer.role=prefill", "gateway.enabled=true"]))


@pytest.mark.parametrize(
    ("role", "call", "other"), [("prefill", "Prefill", "Generate"), ("decode", "Generate", "Prefill")]
)
def test_each_role_has_one_call(role: str, call: str, other: str) -> None:
    engine = SimpleNamespace(transfer=SimpleNamespace(config=TransferConfig(role=role)))
    require_call(engine, call)
    with pytest.raises(
        SwitchedOff, match=rf"{other}: expected a server whose transfer\.role has it, got one with {role}"
    ):
        require_call(engine, other)


@pytest.mark.parametrize("transfer", [None, SimpleNamespace(config=TransferConfig())])
def test_a_server_without_a_role_takes_all_calls(transfer: object) -> None:
    for call in ("Prefill", "Generate"):
        require_call(SimpleNamespace(transfer=transfer), call)
