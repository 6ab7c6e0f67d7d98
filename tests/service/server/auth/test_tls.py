"""TLS and mutual TLS over real connections, and certificates and tokens that change while a stream runs."""

import asyncio
import contextlib
import logging
import ssl

import grpc
import grpc.aio
import pytest
import trustme

from radixkv.config import ServerConfig
from radixkv.errors import ConfigError
from radixkv.service.client import AsyncClient
from radixkv.service.server.auth import reloaded_files, revocation
from radixkv.service.server.auth.server_auth import ServerAuth
from radixkv.service.server.auth.tls import Tls
from tests.events.fake_source import FakeSource
from tests.patience import PATIENCE_S, wait_until
from tests.service.fake_engine import FakeEngine
from tests.service.serving import becomes_true, refusal_of, serving

from .certificates import ALL_ENTRIES, CredentialFiles, entry_of, entry_of_certificate


@pytest.fixture
def credential_files(tmp_path):
    return CredentialFiles(tmp_path)


@pytest.fixture
def checks_often(monkeypatch):
    """Files and streams are checked a hundred times per second, instead of once."""
    monkeypatch.setattr(reloaded_files, "PERIOD_S", 0.01)
    monkeypatch.setattr(revocation, "PERIOD_S", 0.01)


async def prefill_status(address, **credentials):
    """Return OK, or the status of a refusal."""
    async with AsyncClient(address, timeout_s=PATIENCE_S, **credentials) as client:
        try:
            await client.prefill([1, 2])
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def last_of(stream):
    return [each async for each in stream][-1]


def test_a_certificate_of_another_authority_is_not_trusted_by_a_client(credential_files):
    other = credential_files.folder / "other.pem"
    trustme.CA().cert_pem.write_to_path(other)

    async def run():
        async with serving(FakeEngine(), **credential_files.tls) as (_, address):
            acme = credential_files.client("acme")
            return await prefill_status(address, **acme), await prefill_status(address, **{**acme, "tls_ca": other})

    assert asyncio.run(run()) == (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)


def test_a_client_without_tls_is_not_understood(credential_files):
    async def run():
        async with serving(FakeEngine(), **credential_files.tls) as (_, address):
            return await prefill_status(address)

    assert asyncio.run(run()) is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_identifies_the_caller_by_common_or_alternative_name(credential_files):
    tenant = 'role = "tenant"\ntenant = "acme"'
    credential_files.write_tokens(
        ALL_ENTRIES + entry_of_certificate("worker 7", tenant) + entry_of_certificate("w8.example", tenant)
    )
    issue = credential_files.issue_certificate
    common_name = issue("worker 7")
    alternative_name = issue("w8.example", alternative="w8.example")
    unknown_name = issue("stranger")
    names_of_two_callers = issue("two", alternative="w8.example", common_name="worker 7")
    unknown_name_with_token = {**issue("stranger"), **credential_files.client("globex")}
    clients = (common_name, alternative_name, unknown_name, names_of_two_callers, unknown_name_with_token)
    engine = FakeEngine()

    async def run():
        async with serving(engine, **credential_files.mutual_tls) as (_, address):
            return [await prefill_status(address, **client) for client in clients]

    unauthenticated = grpc.StatusCode.UNAUTHENTICATED
    ok = grpc.StatusCode.OK
    assert asyncio.run(run()) == [ok, ok, unauthenticated, unauthenticated, ok]
    assert [params.caller.tenant for params in engine.params] == ["acme", "acme", "globex"]


def test_mutual_tls_refuses_no_certificate_one_of_another_authority_and_one_that_has_expired(credential_files):
    credential_files.write_tokens(ALL_ENTRIES + entry_of_certificate("a", 'role = "admin"'))

    async def run():
        async with serving(FakeEngine(), **credential_files.mutual_tls) as (_, address):
            return {
                await prefill_status(address, **credential_files.client("acme")),
                await prefill_status(address, **credential_files.issue_certificate("a", trustme.CA())),
                await prefill_status(address, **credential_files.issue_certificate("a", is_expired=True)),
            }

    assert asyncio.run(run()) == {grpc.StatusCode.UNAVAILABLE}


def test_changed_certificates_apply_to_new_connections_and_a_running_stream_continues(
    credential_files, checks_often, caplog
):
    caplog.set_level(logging.INFO)
    engine = FakeEngine(is_gated=True)
    new_ca = trustme.CA()

    async def run():
        async with (
            serving(engine, **credential_files.tls) as (_, address),
            AsyncClient(address, **credential_files.client("acme")) as old,
        ):
            stream = old.generate([1, 2], max_new_tokens=4)
            first = await anext(stream)
            credential_files.write_certificate(new_ca)
            assert await becomes_true(lambda: "TLS certificates: reloaded" in caplog.text)
            new_ca.cert_pem.write_to_path(credential_files.folder / "new_ca.pem")
            changed = {**credential_files.client("acme"), "tls_ca": credential_files.folder / "new_ca.pem"}
            async with AsyncClient(address, timeout_s=PATIENCE_S, **changed) as new:
                assert (await new.probe([1, 2])).prompt_tokens == 2
            async with AsyncClient(address, timeout_s=PATIENCE_S, **credential_files.client("acme")) as outdated:
                assert (await refusal_of(outdated.probe([1, 2]))).code() is grpc.StatusCode.UNAVAILABLE
            engine.open_gate()
            later = [response async for response in stream]
            return len(first.token_ids) + sum(len(each.token_ids) for each in later), later[-1].finished

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE_S)) == (4, True)


def test_a_removed_token_is_refused_in_calls_and_streams_and_other_tenants_continue(
    credential_files, checks_often, caplog
):
    caplog.set_level(logging.INFO)
    engine = FakeEngine(is_gated=True)

    async def run():
        async with (
            serving(engine, **credential_files.tls) as (_, address),
            AsyncClient(address, **credential_files.client("acme")) as acme,
            AsyncClient(address, **credential_files.client("globex")) as globex,
        ):
            revoked, stream = (each.generate([1, 2], max_new_tokens=4) for each in (acme, globex))
            first = await anext(stream)
            await anext(revoked)
            credential_files.write_tokens(entry_of("globex", 'role = "tenant"\ntenant = "globex"'))
            assert (await refusal_of(last_of(revoked))).code() is grpc.StatusCode.UNAUTHENTICATED
            assert (await refusal_of(acme.probe([1, 2]))).code() is grpc.StatusCode.UNAUTHENTICATED
            credential_files.write_tokens("[[credentials]]\nname = 'half of a secret")
            assert await becomes_true(lambda: "the changed files cannot be used" in caplog.text)
            assert (await globex.probe([1, 2])).prompt_tokens == 2
            engine.open_gate()
            later = [response async for response in stream]
            return len(first.token_ids) + sum(len(each.token_ids) for each in later)

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE_S)) == 4
    assert "credentials: reloaded" in caplog.text
    assert "credentials: the changed files cannot be used" in caplog.text
    assert "half of a secret" not in caplog.text


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        (entry_of("acme", 'role = "tenant"\ntenant = "initech"'), grpc.StatusCode.PERMISSION_DENIED),
        (entry_of("acme", 'role = "reader"'), grpc.StatusCode.PERMISSION_DENIED),
        (entry_of("acme", 'tenant = "acme"') + "expires = 2001-09-09T01:46:40Z\n", grpc.StatusCode.UNAUTHENTICATED),
        (entry_of("boss", 'role = "admin"'), grpc.StatusCode.UNAUTHENTICATED),
    ],
    ids=["tenant", "role", "expiry", "removal"],
)
def test_a_stream_ends_when_its_credential_loses_the_right_to_it(credential_files, checks_often, entry, code):
    engine, refusals = FakeEngine(is_gated=True), []

    async def run():
        async with (
            serving(engine, **credential_files.tls, count_refusal=refusals.append) as (_, address),
            AsyncClient(address, **credential_files.client("acme")) as acme,
        ):
            stream = acme.generate([1, 2], max_new_tokens=4)
            await anext(stream)
            credential_files.write_tokens(entry.replace("acme credential", "another name"))
            return (await refusal_of(last_of(stream))).code()

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE_S)) is code
    assert len(refusals) == 1


def test_a_stream_continues_when_its_credential_changes_in_other_ways(credential_files, checks_often, caplog):
    caplog.set_level(logging.INFO)
    engine = FakeEngine(is_gated=True)

    async def run():
        async with (
            serving(engine, **credential_files.tls) as (_, address),
            AsyncClient(address, **credential_files.client("acme")) as acme,
        ):
            stream = acme.generate([1, 2], max_new_tokens=4)
            await anext(stream)
            credential_files.write_tokens(entry_of("acme", 'role = "router"\ntenants = ["acme", "initech"]'))
            assert await becomes_true(lambda: "credentials: reloaded" in caplog.text)
            await asyncio.sleep(0.1)
            engine.open_gate()
            return [each async for each in stream][-1].finished

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_the_events_of_a_router_end_with_its_credential(credential_files, checks_often):
    engine = FakeEngine()
    engine.events = FakeSource()

    async def run():
        async with (
            serving(engine, **credential_files.tls) as (_, address),
            AsyncClient(address, **credential_files.client("every")) as router,
        ):
            events = router.subscribe()
            assert (await anext(events)).snapshot.count == 1
            credential_files.write_tokens(entry_of("boss", 'role = "admin"'))
            return (await refusal_of(last_of(events))).code()

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE_S)) is grpc.StatusCode.UNAUTHENTICATED


def test_only_an_admin_may_ask_for_the_physical_ids_of_blocks(credential_files):
    async def run():
        async with serving(FakeEngine(), **credential_files.tls) as (_, address), contextlib.AsyncExitStack() as stack:

            async def prefill_by(name):
                client = AsyncClient(address, timeout_s=PATIENCE_S, **credential_files.client(name))
                await stack.enter_async_context(client)
                return await client.prefill([1, 2], tenant="acme", hold_lease=True, return_block_table=True)

            codes = [(await refusal_of(prefill_by(name))).code() for name in ("acme", "every")]
            return codes, len((await prefill_by("boss")).block_table)

    assert asyncio.run(run()) == ([grpc.StatusCode.PERMISSION_DENIED] * 2, 1)


def test_a_key_of_another_certificate_is_refused_at_start_and_later_leaves_the_old_pair(
    credential_files, checks_often, caplog
):
    tls = Tls(ServerConfig(**credential_files.tls))
    before = tls.https()
    other = credential_files.ca.issue_cert("localhost")
    other.private_key_pem.write_to_path(credential_files.folder / "server.key")
    wait_until(lambda: "the changed files cannot be used" in caplog.text)
    assert tls.https() is before
    assert "TLS certificates: the changed files cannot be used" in caplog.text
    assert "PRIVATE KEY" not in caplog.text
    with pytest.raises(ConfigError, match=r"server\.tls_key: it must be the private key of server\.tls_certificate"):
        Tls(ServerConfig(**credential_files.tls))


@pytest.mark.parametrize("key", ["tls_certificate", "tls_key", "client_ca"])
def test_a_missing_file_is_named_by_its_key(credential_files, key):
    with pytest.raises(ConfigError, match=rf"server\.{key}: expected a readable file, got .*none\.pem: No such file"):
        Tls(ServerConfig(**{**credential_files.mutual_tls, key: str(credential_files.folder / "none.pem")}))


def test_files_without_certificate_authorities_are_refused(credential_files):
    (credential_files.folder / "client_ca.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=r"server\.client_ca: the file contains no readable certificates"):
        Tls(ServerConfig(**credential_files.mutual_tls))


def test_without_a_certificate_there_is_no_tls():
    assert ServerAuth(ServerConfig()).tls is None


def test_the_context_for_https_asks_callers_for_no_certificate(credential_files):
    assert Tls(ServerConfig(**credential_files.mutual_tls)).https().verify_mode is ssl.CERT_NONE
