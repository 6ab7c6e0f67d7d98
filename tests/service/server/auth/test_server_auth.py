"""The request port and the admin port of one server."""

import asyncio

import grpc
import grpc.aio
import pytest

from radixkv.service.client import AsyncClient
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import refusal_of, serving

from .certificates import CredentialFiles


@pytest.fixture(scope="module")
def credential_files(tmp_path_factory):
    return CredentialFiles(tmp_path_factory.mktemp("credential_files"))


async def codes_of(*calls):
    return [(await refusal_of(call)).code() for call in calls]


def run(talk, **config):
    """Return the result of `talk(address, server)` with a running server."""

    async def serve_and_talk():
        async with serving(FakeEngine(), **config) as (server, address):
            return await asyncio.wait_for(talk(address, server), PATIENCE_S)

    return asyncio.run(serve_and_talk())


def test_with_an_admin_port_the_main_port_refuses_calls_of_admins_even_if_there_are_no_credentials():
    async def talk(address, server):
        async with AsyncClient(address) as main, AsyncClient(server.admin_address) as admin:
            refused = await codes_of(main.drain(), main.stats(), main.purge(everything=True))
            await main.prefill([1, 2], tenant="anybody")
            await admin.stats()
            await admin.purge(everything=True)
            return refused, await codes_of(admin.prefill([1, 2]))

    denied = grpc.StatusCode.PERMISSION_DENIED
    assert run(talk, admin_port=0) == ([denied] * 3, [grpc.StatusCode.UNIMPLEMENTED])


def test_an_admin_is_refused_on_the_main_port_and_a_tenant_on_the_admin_port(credential_files):
    async def talk(address, server):
        async with (
            AsyncClient(address, **credential_files.client("boss")) as boss_on_main_port,
            AsyncClient(server.admin_address, **credential_files.client("acme")) as acme_on_admin_port,
            AsyncClient(server.admin_address, **credential_files.client("boss")) as boss_on_admin_port,
        ):
            await boss_on_admin_port.purge(everything=True)
            return await codes_of(boss_on_main_port.prefill([1, 2]), acme_on_admin_port.stats())

    assert run(talk, admin_port=0, **credential_files.tls) == [grpc.StatusCode.PERMISSION_DENIED] * 2


def test_without_credentials_and_without_an_admin_port_anyone_may_do_everything():
    async def talk(address, server):
        assert server.admin_address is None
        async with AsyncClient(address) as client:
            await client.purge(everything=True)
            await client.drain()
            return server.stop.is_set(), [each.tenant for each in (await client.stats()).tenants]

    assert run(talk) == (True, ["a", "b"])


def test_a_drain_ends_both_ports(credential_files):
    async def talk(address, server):
        await server.drain()
        async with AsyncClient(address) as main, AsyncClient(server.admin_address) as admin:
            return await codes_of(main.prefill([1, 2]), admin.stats())

    assert run(talk, admin_port=0) == [grpc.StatusCode.UNAVAILABLE] * 2
