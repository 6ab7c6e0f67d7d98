"""The table of RPCs: every method of every port is called with every credential."""

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from radixkv.config import Config
from radixkv.service.server.auth.authorizer import RULES
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
# acme and globex are tenants, some and every are routers, watcher is a reader, boss is an admin.
CALLERS = (NO_CREDENTIAL, *TOKENS)
REFUSALS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}

# Methods that reflection does not describe here: old versions of grpcio-health-checking lack Health/List.
MISSING_METHODS = set() if hasattr(health_pb2, "HealthListRequest") else {"/grpc.health.v1.Health/List"}
# Methods of a fleet's server only, which tests/service/fleet/test_ingress_server.py calls.
FLEET_METHODS = {"/radixkv.v1.FleetService/Route"}

_FOR_ACME = {"acme", "some", "every"}  # may act for the tenant acme
_NO_OPERATORS = set(TOKENS) - {"watcher", "boss"}  # operators have the admin port
# The callers that may call each method on the main port, with the tenant acme in the request if it names one.
ALLOWED_ON_MAIN_PORT = {
    "radixkv.v1.PrefillService/Prefill": _FOR_ACME,
    "radixkv.v1.PrefillService/Generate": _FOR_ACME,
    "radixkv.v1.PrefillService/Probe": _FOR_ACME,
    "radixkv.v1.PrefillService/Release": _FOR_ACME,
    "radixkv.v1.PrefillService/Renew": _FOR_ACME,
    "radixkv.v1.PrefillService/FetchKV": _FOR_ACME,
    "radixkv.v1.CacheService/Stats": _FOR_ACME,
    "radixkv.v1.CacheService/Statement": _FOR_ACME,
    "radixkv.v1.CacheService/Diagnose": _FOR_ACME,
    "radixkv.v1.CacheService/Retain": _FOR_ACME,
    "radixkv.v1.CacheService/Hint": _FOR_ACME,
    "radixkv.v1.CacheService/Explain": _FOR_ACME,
    "radixkv.v1.CacheService/EndSession": _FOR_ACME,
    "radixkv.v1.CacheService/Purge": _FOR_ACME,
    "radixkv.v1.CacheService/ListSegments": _FOR_ACME,
    "radixkv.v1.CacheService/LoadAdapter": set(),
    "radixkv.v1.CacheService/UnloadAdapter": set(),
    "radixkv.v1.CacheService/ListAdapters": set(),
    "radixkv.v1.CacheService/RegisterPublicPrefix": set(),
    "radixkv.v1.CacheService/UnregisterPublicPrefix": set(),
    "radixkv.v1.CacheService/ListPublicPrefixes": set(),
    "radixkv.v1.CacheService/Drain": set(),
    "radixkv.v1.EventService/Subscribe": {"every"},
    "radixkv.v1.ModelService/GetTokenizer": _NO_OPERATORS,
    "vllm.grpc.engine.VllmEngine/Generate": _FOR_ACME,  # the gateway's tenant is acme
    "vllm.grpc.engine.VllmEngine/Abort": _FOR_ACME,
    "vllm.grpc.engine.VllmEngine/HealthCheck": {NO_CREDENTIAL, *TOKENS},
    "vllm.grpc.engine.VllmEngine/GetModelInfo": _FOR_ACME,
    "vllm.grpc.engine.VllmEngine/GetServerInfo": _FOR_ACME,
    "vllm.grpc.engine.VllmEngine/GetLoads": _FOR_ACME,
    "vllm.grpc.engine.VllmEngine/SubscribeKvEvents": _FOR_ACME,
    "vllm.grpc.engine.VllmEngine/GetTokenizer": _FOR_ACME,
    "vllm.grpc.engine.VllmEngine/FlushCache": _FOR_ACME,
    "grpc.health.v1.Health/Check": {NO_CREDENTIAL, *TOKENS},
    **({} if MISSING_METHODS else {"grpc.health.v1.Health/List": {NO_CREDENTIAL, *TOKENS}}),
    "grpc.health.v1.Health/Watch": {NO_CREDENTIAL, *TOKENS},
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _NO_OPERATORS,
}
ALLOWED_ON_ADMIN_PORT = {
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
    **({} if MISSING_METHODS else {"grpc.health.v1.Health/List": {NO_CREDENTIAL, *TOKENS}}),
    "grpc.health.v1.Health/Watch": {NO_CREDENTIAL, *TOKENS},
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": {"watcher", "boss"},
}


def metadata_of(caller):
    return None if caller == NO_CREDENTIAL else (("authorization", f"Bearer {TOKENS[caller]}"),)


def request_of(method):
    """Return a request that names the tenant acme if it can, and is otherwise empty."""
    request = method.request()
    messages = [request]
    if method.path.endswith("PrefillService/Generate"):
        messages.append(request.prefill)
    for message in messages:
        if "tenant" in message.DESCRIPTOR.fields_by_name:
            message.tenant = "acme"
    if method.path.endswith("VllmEngine/Generate"):
        request.sampling_params.max_tokens = 1  # the default is as many as fit
    return request


async def allowed_callers(address, credentials, reflection_caller):
    """Return the callers that are not refused, by method. `reflection_caller` asks which methods there are."""
    allowed = {}
    async with grpc.aio.secure_channel(address, credentials) as channel:
        for method in await described_methods(channel, metadata_of(reflection_caller)):
            allowed[method.path[1:]] = {
                caller
                for caller in CALLERS
                if await status_of_call(channel, method, request_of(method), metadata_of(caller)) not in REFUSALS
            }
    return allowed


@pytest.fixture(scope="module")
def allowed_by_port(tmp_path_factory):
    """The callers that may call each method, on the main port and on the admin port."""
    credential_files = CredentialFiles(tmp_path_factory.mktemp("credential_files"))
    config = Config.load(None, ["gateway.enabled=true", "gateway.tenant=acme"])
    credentials = grpc.ssl_channel_credentials(credential_files.ca_file.read_bytes())

    async def call_all_methods():
        engine = FakeEngine()
        engine.events = FakeSource()
        async with serving(engine, model_path="tiny", gateway=config, admin_port=0, **credential_files.tls) as (
            server,
            address,
        ):
            return (
                await allowed_callers(address, credentials, "acme"),
                await allowed_callers(server.admin_address, credentials, "boss"),
            )

    return asyncio.run(asyncio.wait_for(call_all_methods(), PATIENCE_S))


def test_each_method_that_reflection_describes_has_a_rule_and_vice_versa(allowed_by_port):
    on_main_port, on_admin_port = allowed_by_port
    assert {f"/{name}" for name in on_main_port} == set(RULES) - FLEET_METHODS - MISSING_METHODS
    assert {f"/{name}" for name in on_admin_port} <= set(RULES)


def test_each_caller_may_call_the_methods_listed_here_on_the_main_port(allowed_by_port):
    assert allowed_by_port[0] == ALLOWED_ON_MAIN_PORT


def test_each_caller_may_call_the_methods_listed_here_on_the_admin_port(allowed_by_port):
    assert allowed_by_port[1] == ALLOWED_ON_ADMIN_PORT


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
