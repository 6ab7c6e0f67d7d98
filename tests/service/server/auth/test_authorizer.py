"""Authorization of every call, over a real server with TLS and a fake engine."""

import asyncio
import logging
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from radixkv.errors import SwitchedOff
from radixkv.service.client import AsyncClient, Retention
from radixkv.service.server.auth.authenticator import AnonymousAuthenticator
from radixkv.service.server.auth.authorizer import Authorizer
from radixkv.service.server.auth.identity import Identity, Role
from radixkv.v1.prefill_pb2 import PrefillRequest
from radixkv.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import refusal_of, serving

from .certificates import ALL_ENTRIES, TOKENS, CredentialFiles, entry_of


@pytest.fixture(scope="module")
def credential_files(tmp_path_factory):
    return CredentialFiles(tmp_path_factory.mktemp("credential_files"))


def run_with_clients(credential_files, talk, engine=None, **config):
    """Return the result of `talk(engine, clients)` with a running server; `clients` are by the name of their token."""
    engine = engine or FakeEngine()

    async def run():
        async with serving(engine, **{**credential_files.tls, **config}) as (_, address):
            clients = {name: AsyncClient(address, **credential_files.client(name)) for name in (None, *TOKENS)}
            try:
                return await asyncio.wait_for(talk(engine, clients), PATIENCE_S)
            finally:
                for client in clients.values():
                    await client.close()

    return asyncio.run(run())


async def first_of(stream):
    """Read a stream to its end, and return its first response."""
    responses = [response async for response in stream]
    return responses[0]


def calls_naming(client, tenant):
    """Return each kind of call of a client that can name a tenant, by its name."""
    return {
        "prefill": client.prefill([1, 2], tenant=tenant),
        "generate": first_of(client.generate([1, 2], tenant=tenant, max_new_tokens=2)),
        "probe": client.probe([1, 2], tenant=tenant),
        "release": client.release("lease", tenant=tenant),
        "retain": client.retain([1, 2], Retention(priority=60), tenant=tenant),
        "purge": client.purge(tenant=tenant),
        "stats": client.stats(tenant=tenant),
        "segments": client.segments(tenant=tenant),
    }


def test_a_tenant_that_names_another_is_refused_on_every_call_without_repeating_the_name(credential_files):
    async def talk(engine, clients):
        return {name: await refusal_of(call) for name, call in calls_naming(clients["acme"], "globex").items()}

    for name, refusal in run_with_clients(credential_files, talk).items():
        assert refusal.code() is grpc.StatusCode.PERMISSION_DENIED, name
        assert "globex" not in refusal.details(), name


def test_a_router_may_act_for_the_tenants_on_its_list_and_for_no_others(credential_files):
    async def talk(engine, clients):
        await clients["some"].prefill([1], tenant="initech")
        await clients["every"].prefill([1], tenant="globex")
        refusals = [await refusal_of(clients["some"].prefill([1], tenant=name)) for name in ("globex", "")]
        return [params.caller.tenant for params in engine.params], {refusal.code() for refusal in refusals}

    assert run_with_clients(credential_files, talk) == (["initech", "globex"], {grpc.StatusCode.PERMISSION_DENIED})


def test_a_tenant_that_names_none_means_itself(credential_files):
    async def talk(engine, clients):
        client = clients["acme"]
        await client.prefill([1, 2])
        await first_of(client.generate([1, 2], max_new_tokens=2))
        await client.retain([1, 2], Retention(priority=60))
        await client.purge(salt="s")
        return engine

    engine = run_with_clients(credential_files, talk)
    assert [params.caller.tenant for params in engine.params] == ["acme", "acme"]
    assert engine.retentions[0][2].tenant == "acme"
    assert engine.purges == [("acme", None, "s")]


def test_the_stats_of_a_tenant_reveal_nothing_about_others(credential_files):
    # The fake engine has statistics of a tenant "a".
    credential_files.write_tokens(entry_of("acme", 'role = "tenant"\ntenant = "a"'))

    async def talk(engine, clients):
        return await clients["acme"].stats()

    try:
        stats = run_with_clients(credential_files, talk)
    finally:
        credential_files.write_tokens(ALL_ENTRIES)
    assert [(each.tenant, each.cached_blocks) for each in stats.tenants] == [("a", 3)]
    assert stats.blocks.total > 0
    assert not stats.blocks.published
    assert {field.name for field, _ in stats.ListFields()} == {
        "model",
        "model_fingerprint",
        "device",
        "epoch",
        "uptime_s",
        "block_size",
        "blocks",
        "block_bytes",
        "tenants",
        "kv_dtype",
    }


def test_only_an_admin_purges_or_counts_all_tenants(credential_files):
    async def talk(engine, clients):
        for name in ("every", "some"):
            for call in (clients[name].purge(everything=True), clients[name].stats()):
                assert (await refusal_of(call)).code() is grpc.StatusCode.PERMISSION_DENIED
        await clients["boss"].purge(everything=True)
        stats = await clients["boss"].stats()
        return engine.purges, [each.tenant for each in stats.tenants]

    assert run_with_clients(credential_files, talk) == ([(None, None, None)], ["a", "b"])


def test_a_reader_counts_and_lists_all_tenants_and_does_nothing_else(credential_files):
    async def talk(engine, clients):
        client = clients["watcher"]
        reads = [client.stats(), client.stats(tenant="a"), client.segments(), client.segments(tenant="a")]
        await asyncio.gather(*reads)
        calls = calls_naming(client, "acme")
        for name in ("stats", "segments"):
            calls.pop(name).close()
        calls["purge all"] = client.purge(everything=True)
        calls["drain"] = client.drain()
        return {name: (await refusal_of(call)).code() for name, call in calls.items()}, engine.purges

    codes, purges = run_with_clients(credential_files, talk)
    assert set(codes.values()) == {grpc.StatusCode.PERMISSION_DENIED}
    assert len(codes) == 8  # all calls that name a tenant but `stats` and `segments`; and two more
    assert purges == []


def test_a_lease_is_released_by_its_tenant_only(credential_files):
    async def talk(engine, clients):
        held = await clients["acme"].prefill([1, 2], hold_lease=True)
        refusal = await refusal_of(clients["globex"].release(held.lease_id))
        await clients["acme"].release(held.lease_id)
        return refusal.code()

    assert run_with_clients(credential_files, talk) is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Basic eDp5", "Bearer rkv_of_nobody", f"Bearer {TOKENS['acme']}x"]
)
def test_a_header_without_a_known_token_is_unauthenticated_and_not_repeated(credential_files, header):
    async def talk(engine, clients):
        prefill = PrefillServiceStub(clients[None]._channel).Prefill
        return await refusal_of(prefill(PrefillRequest(token_ids=[1, 2]), metadata=(("authorization", header),)))

    refusal = run_with_clients(credential_files, talk)
    assert refusal.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "rkv_" not in refusal.details()


def test_two_tokens_in_one_call_are_refused(credential_files):
    async def talk(engine, clients):
        prefill = PrefillServiceStub(clients[None]._channel).Prefill
        header = ("authorization", f"Bearer {TOKENS['acme']}")
        return (await refusal_of(prefill(PrefillRequest(token_ids=[1, 2]), metadata=(header, header)))).code()

    assert run_with_clients(credential_files, talk) is grpc.StatusCode.UNAUTHENTICATED


def test_a_message_of_an_unauthenticated_caller_is_not_parsed(credential_files):
    async def run():
        credentials = grpc.ssl_channel_credentials(credential_files.ca_file.read_bytes())
        async with (
            serving(FakeEngine(), **credential_files.tls) as (_, address),
            grpc.aio.secure_channel(address, credentials) as channel,
        ):
            call = channel.unary_unary("/radixkv.v1.PrefillService/Prefill")
            return (await refusal_of(call(b"\xff\xff", timeout=PATIENCE_S))).code()

    assert asyncio.run(run()) is grpc.StatusCode.UNAUTHENTICATED


def test_nothing_secret_is_logged_in_a_whole_session(credential_files, caplog):
    caplog.set_level(logging.DEBUG)
    prompt = [210, 211, 212, 213]

    async def talk(engine, clients):
        for name in (None, *TOKENS):
            for call in calls_naming(clients[name], "acme").values():
                try:
                    await call
                except grpc.aio.AioRpcError:
                    continue
        await refusal_of(clients["acme"].prefill(prompt, tenant="globex"))
        await clients["acme"].prefill(prompt)
        engine.failure = RuntimeError("a failing step")
        await refusal_of(clients["acme"].prefill(prompt))

    run_with_clients(credential_files, talk)
    text = caplog.text + "".join(str(record.__dict__) for record in caplog.records)
    assert "Purge by acme credential" in text
    assert [token for token in TOKENS.values() if token in text] == []
    assert "210, 211" not in text


def test_the_log_reports_allowed_purges(credential_files, caplog):
    caplog.set_level(logging.INFO)

    async def talk(engine, clients):
        await refusal_of(clients["acme"].purge(tenant="globex"))
        await clients["acme"].purge(tenant="acme")

    run_with_clients(credential_files, talk)
    assert len([each for each in caplog.messages if each.endswith("Purge by acme credential")]) == 1


def test_a_method_without_a_rule_is_unimplemented_for_an_admin_too():
    authorizer = Authorizer(AnonymousAuthenticator(Identity("boss", Role.ADMIN)))
    with pytest.raises(SwitchedOff, match=r"/new\.Service/Method: this server does not implement the method"):
        authorizer.authorize("/new.Service/Method", None)


def test_an_open_method_needs_no_authentication():
    message = SimpleNamespace(tenant="x")
    Authorizer(None).authorize("/grpc.health.v1.Health/Check", None).bind_tenant(message)
    assert message.tenant == "x"
