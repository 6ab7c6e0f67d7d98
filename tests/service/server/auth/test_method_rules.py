"""The table of RPCs: every method of every port is called with every credential."""

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from radixkv.config import Config
from radixkv.service.server.auth.authorizer import RULES
from radixkv.service.server.optional_services import optional_services
from radixkv.v1.cache_pb2 import PurgeRequest, StatsRequest
from radixkv.v1.model_pb2 import GetTokenizerRequest
from radixkv.v1.prefill_pb2 import GenerateRequest, PrefillRequest
from tests.events.fake_source import FakeSource
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving

from .certificates import TOKENS, CredentialFiles
from .reflected_calls import described_methods, status_of_call

NO_CREDENTIAL = "no credential"
CALLERS = (
    NO_CREDENTIAL,
    *TOKENS,
)  # acme and globex are tenants, some and every are routers, watcher reads, boss is an admin
REFUSALS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}

# Reflection describes it where grpcio-health-checking is new enough to have it.
OLD_HEALTH = set() if hasattr(health_pb2, "HealthListRequest") else {"/grpc.health.v1.Health/List"}
OF_FLEETS = {"/radixkv.v1.FleetService/Route"}  # tests/service/fleet/test_ingress_server.py calls it

_OWN = {"acme", "some", "every"}  # those who may act for the tenant acme
_ALL = set(TOKENS) - {"watcher", "boss"}  # operators have another port
# Who may call what on the port of requests, written out: with the tenant acme in the message if it has one.
REQUESTS = {
    "radixkv.v1.PrefillService/Prefill": _OWN,
    "radixkv.v1.PrefillService/Generate": _OWN,
    "radixkv.v1.PrefillService/Probe": _OWN,
    "radixkv.v1.PrefillService/Release": _OWN,
    "radixkv.v1.PrefillService/Renew": _OWN,
    "radixkv.v1.PrefillService/FetchKV": _OWN,
    "radixkv.v1.CacheService/Stats": _OWN,
    "radixkv.v1.CacheService/Statement": _OWN,
    "radixkv.v1.CacheService/Diagnose": _OWN,
    "radixkv.v1.CacheService/Retain": _OWN,
    "radixkv.v1.CacheService/Hint": _OWN,
    "radixkv.v1.CacheService/Explain": _OWN,
    "radixkv.v1.CacheService/EndSession": _OWN,
    "radixkv.v1.CacheService/Purge": _OWN,
    "radixkv.v1.CacheService/ListSegments": _OWN,
    "radixkv.v1.CacheService/LoadAdapter": set(),
    "radixkv.v1.CacheService/UnloadAdapter": set(),
    "radixkv.v1.CacheService/ListAdapters": set(),
    "radixkv.v1.CacheService/RegisterPublicPrefix": set(),
    "radixkv.v1.CacheService/UnregisterPublicPrefix": set(),
    "radixkv.v1.CacheService/ListPublicPrefixes": set(),
    "radixkv.v1.CacheService/Drain": set(),
    "radixkv.v1.EventService/Subscribe": {"every"},
    "radixkv.v1.ModelService/GetTokenizer": _ALL,
    "vllm.grpc.engine.VllmEngine/Generate": _OWN,  # the gateway's tenant is acme
    "vllm.grpc.engine.VllmEngine/Abort": _OWN,
    "vllm.grpc.engine.VllmEngine/HealthCheck": {NO_CREDENTIAL, *TOKENS},
    "vllm.grpc.engine.VllmEngine/GetModelInfo": _OWN,
    "vllm.grpc.engine.VllmEngine/GetServerInfo": _OWN,
    "vllm.grpc.engine.VllmEngine/GetLoads": _OWN,
    "vllm.grpc.engine.VllmEngine/SubscribeKvEvents": _OWN,
    "vllm.grpc.engine.VllmEngine/GetTokenizer": _OWN,
    "vllm.grpc.engine.VllmEngine/FlushCache": _OWN,
    "grpc.health.v1.Health/Check": {NO_CREDENTIAL, *TOKENS},
    **({} if OLD_HEALTH else {"grpc.health.v1.Health/List": {NO_CREDENTIAL, *TOKENS}}),
    "grpc.health.v1.Health/Watch": {NO_CREDENTIAL, *TOKENS},
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ALL,
}
ADMINS = {
    "radixkv.v1.CacheService/Stats": {"watcher", "boss"},
    "radixkv.v1.CacheService/Statement": {"watcher", "boss"},
    "radixkv.v1.CacheService/Diagnose": {"watcher", "boss"},
    "radixkv.v1.CacheService/Retain": {"boss"},
    "radixkv.v1.CacheService/Hint": {"boss"},
    "radixkv.v1.CacheService/Explain": {"boss"},
    "radixkv.v1.CacheService/EndSession": {"boss"},
    "radixkv.v1.CacheService/Purge": {"boss"},
    "radixkv.v1.CacheService/ListSegments": {"watcher", "boss"},
    "radixkv.v1.CacheService/LoadAdapter": {"boss"},
    "radixkv.v1.CacheService/UnloadAdapter": {"boss"},
    "radixkv.v1.CacheService/ListAdapters": {"watcher", "boss"},
    "radixkv.v1.CacheService/RegisterPublicPrefix": {"boss"},
    "radixkv.v1.CacheService/UnregisterPublicPrefix": {"boss"},
    "radixkv.v1.CacheService/ListPublicPrefixes": {"watcher", "boss"},
    "radixkv.v1.CacheService/Drain": {"boss"},
    "grpc.health.v1.Health/Check": {NO_CREDENTIAL, *TOKENS},
    **({} if OLD_HEALTH else {"grpc.health.v1.Health/List": {NO_CREDENTIAL, *TOKENS}}),
    "grpc.health.v1.Health/Watch": {NO_CREDENTIAL, *TOKENS},
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": {"watcher", "boss"},
}


def metadata_of(caller):
    return None if caller == NO_CREDENTIAL else (("authorization", f"Bearer {TOKENS[caller]}"),)


def request_of(method):
    """An otherwise empty request that names the tenant acme where it can."""
    request = method.request()
    for message in (request, *([request.prefill] if method.path.endswith("PrefillService/Generate") else [])):
        if "tenant" in message.DESCRIPTOR.fields_by_name:
            message.tenant = "acme"
    if method.path.endswith("VllmEngine/Generate"):
        request.sampling_params.max_tokens = 1  # not as many as fit
    return request


async def allowed_on(address, credentials, describer):
    """Return the callers that are not refused, by method."""
    allowed = {}
    async with grpc.aio.secure_channel(address, credentials) as channel:
        for method in await described_methods(channel, metadata_of(describer)):
            allowed[method.path[1:]] = {
                caller
                for caller in CALLERS
                if await status_of_call(channel, method, request_of(method), metadata_of(caller)) not in REFUSALS
            }
    return allowed


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """Callers of each method on the port of requests, and on that of admins."""
    credential_files = CredentialFiles(tmp_path_factory.mktemp("credential_files"))
    whole = Config.load(None, ["gateway.enabled=true", "gateway.tenant=acme"])
    credentials = grpc.ssl_channel_credentials(credential_files.ca_file.read_bytes())

    async def walk():
        engine = FakeEngine()
        engine.events = FakeSource()
        services = optional_services(engine, whole)
        async with serving(
            engine, model_path="tiny", services=services, gateway_tenant="acme", admin_port=0, **credential_files.tls
        ) as (server, address):
            return (
                await allowed_on(address, credentials, "acme"),
                await allowed_on(server.admin_address, credentials, "boss"),
            )

    return asyncio.run(asyncio.wait_for(walk(), PATIENCE_S))


def test_reflected_methods_and_rules_are_the_same(walked):
    assert {f"/{name}" for name in walked[0]} == set(RULES) - OF_FLEETS - OLD_HEALTH
    assert {f"/{name}" for name in walked[1]} <= set(RULES)


def test_each_caller_may_call_the_methods_listed_here_on_the_main_port(walked):
    assert walked[0] == REQUESTS


def test_each_caller_may_call_the_methods_listed_here_on_the_admin_port(walked):
    assert walked[1] == ADMINS


@pytest.mark.parametrize(
    ("method", "message", "owner"),
    [
        ("PrefillService/Prefill", PrefillRequest(tenant="a"), "a"),
        ("PrefillService/Prefill", PrefillRequest(), ""),
        ("PrefillService/Generate", GenerateRequest(prefill=PrefillRequest(tenant="b")), "b"),
        ("CacheService/Purge", PurgeRequest(tenant=""), ""),
        ("CacheService/Purge", PurgeRequest(), None),
        ("CacheService/Stats", StatsRequest(), None),
        ("ModelService/GetTokenizer", GetTokenizerRequest(), None),
    ],
)
def test_a_request_belongs_to_the_tenant_that_it_names_or_to_none(method, message, owner):
    assert RULES[f"/radixkv.v1.{method}"].bind_tenant(None, message, "gateway's") == owner


def test_requests_of_a_gateway_belong_to_its_tenant():
    assert RULES["/vllm.grpc.engine.VllmEngine/GetLoads"].bind_tenant(None, None, "gateway's") == "gateway's"
    assert RULES["/vllm.grpc.engine.VllmEngine/HealthCheck"].bind_tenant(None, None, "gateway's") is None
    assert RULES["/grpc.health.v1.Health/Check"].bind_tenant(None, None, "gateway's") is None
