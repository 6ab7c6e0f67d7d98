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
    async def both():
        async with serving(FakeEngine(), **config) as (server, address):
            return await asyncio.wait_for(talk(address, server), PATIENCE_S)

    return asyncio.run(both())


def test_with_a_port_of_their_own_calls_of_admins_are_refused_on_the_other_also_without_credentials():
    async def talk(address, server):
        async with AsyncClient(address) as first, AsyncClient(server.admin_address) as second:
            refused = await codes_of(first.drain(), first.stats(), first.purge(everything=True))
            await first.prefill([1, 2], tenant="anybody")
            await second.stats()
            await second.purge(everything=True)
            return refused, await codes_of(second.prefill([1, 2]))

    denied = grpc.StatusCode.PERMISSION_DENIED
    assert run(talk, admin_port=0) == ([denied] * 3, [grpc.StatusCode.UNIMPLEMENTED])


def test_an_admin_is_refused_on_the_port_of_requests_and_others_on_that_of_admins(credential_files):
    async def talk(address, server):
        async with (
            AsyncClient(address, **credential_files.client("boss")) as wrong,
            AsyncClient(server.admin_address, **credential_files.client("acme")) as other_wrong,
            AsyncClient(server.admin_address, **credential_files.client("boss")) as right,
        ):
            await right.purge(everything=True)
            return await codes_of(wrong.prefill([1, 2]), other_wrong.stats())

    assert run(talk, admin_port=0, **credential_files.tls) == [grpc.StatusCode.PERMISSION_DENIED] * 2


def test_without_a_port_for_admins_anyone_may_do_everything_when_there_are_no_credentials():
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
        async with AsyncClient(address) as first, AsyncClient(server.admin_address) as second:
            return await codes_of(first.prefill([1, 2]), second.stats())

    assert run(talk, admin_port=0) == [grpc.StatusCode.UNAVAILABLE] * 2
