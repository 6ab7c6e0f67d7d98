from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest

from radixkv.config import ServerConfig
from radixkv.errors import InvalidCredential
from radixkv.service.fleet.authentication import FLEET, replica_doors
from radixkv.service.server.identity.identity import Role


def call(*headers: str):
    return SimpleNamespace(invocation_metadata=lambda: [("authorization", header) for header in headers])


@pytest.fixture
def door(tmp_path):
    digest = hashlib.sha256(b"own").hexdigest()
    (tmp_path / "tokens").write_text(
        f'[[credentials]]\nname = "a"\nrole = "tenant"\ntenant = "acme"\ntoken_sha256 = "{digest}"\n', "utf-8"
    )
    config = ServerConfig(tokens_file=str(tmp_path / "tokens"), insecure=True)
    return replica_doors(config, "secret").requests


def test_the_fleet_brings_calls_of_all_callers(door) -> None:
    assert door.of_call(call("Bearer secret")) is FLEET
    assert (FLEET.role, FLEET.tenants, FLEET.is_anyone) == (Role.ADMIN, None, False)


def test_others_need_credentials_of_their_own(door) -> None:
    assert door.of_call(call("Bearer own")).role is Role.TENANT
    for headers in ([], ["Bearer wrong"], ["Bearer secret", "Bearer secret"], ["secret"], ["Bearer \u00fc"]):
        with pytest.raises(InvalidCredential):
            door.of_call(call(*headers))


def test_without_credentials_everybody_may_call() -> None:
    assert replica_doors(ServerConfig(), "secret").requests.of_call(call()).role is Role.ADMIN
