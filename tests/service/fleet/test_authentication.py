from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.config import ServerConfig
from radixkv.errors import InvalidCredential
from radixkv.service.fleet.authentication import FLEET, replica_auth
from radixkv.service.server.auth.authorizer import Authorizer
from radixkv.service.server.auth.identity import Identity, Role
from radixkv.v1.cache_pb2 import ExplainRequest


def context_with(*headers: str):
    return SimpleNamespace(invocation_metadata=lambda: [("authorization", header) for header in headers])


def identity_of(authorizer: Authorizer, context: Any) -> Identity:
    caller = authorizer.authorize("/radixkv.v1.PrefillService/Prefill", context).identity
    assert caller is not None
    return caller


@pytest.fixture
def authorizer(tmp_path):
    digest = hashlib.sha256(b"own").hexdigest()
    (tmp_path / "tokens").write_text(
        f'[[credentials]]\nname = "a"\nrole = "tenant"\ntenant = "acme"\ntoken_sha256 = "{digest}"\n', "utf-8"
    )
    config = ServerConfig(tokens_file=str(tmp_path / "tokens"), insecure=True)
    return replica_auth(config, "secret").authorizer()


def test_the_fleet_may_act_for_all_tenants(authorizer) -> None:
    assert identity_of(authorizer, context_with("Bearer secret")) is FLEET
    assert (FLEET.role, FLEET.tenants, FLEET.is_anyone) == (Role.ADMIN, None, False)


def test_the_ingress_decides_who_reads_cached_text(authorizer) -> None:
    for name, is_omitted in (("fleet", False), ("admin", True)):
        rule = authorizer.authorize("/radixkv.v1.CacheService/Explain", context_with("Bearer secret")).rule
        request = ExplainRequest(tenant="acme")
        rule.bind_tenant(FLEET if name == "fleet" else Identity(name, Role.ADMIN), request, "")
        assert request.omit_cached_text is is_omitted


def test_others_need_credentials_of_their_own(authorizer) -> None:
    assert identity_of(authorizer, context_with("Bearer own")).role is Role.TENANT
    for headers in ([], ["Bearer wrong"], ["Bearer secret", "Bearer secret"], ["secret"], ["Bearer \u00fc"]):
        with pytest.raises(InvalidCredential):
            identity_of(authorizer, context_with(*headers))


def test_without_credentials_every_caller_is_accepted() -> None:
    assert identity_of(replica_auth(ServerConfig(), "secret").authorizer(), context_with()).role is Role.ADMIN
