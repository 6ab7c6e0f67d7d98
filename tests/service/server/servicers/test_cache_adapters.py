"""LoadAdapter, UnloadAdapter and ListAdapters over a real connection: the server's side and the clients' side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from radixkv.engine.adapters.adapter_directory import AdapterDirectory
from radixkv.engine.adapters.adapters import Adapters
from radixkv.namespace import Namespace
from radixkv.service.client import AsyncClient, Client
from tests.fakes import publish
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serve_and_call, serving


def refusal_of(call: Callable[[], object]) -> Any:
    """Make a call that must be refused, and return the refusal."""
    with pytest.raises(grpc.RpcError) as refusal:
        call()
    return refusal.value


def namespace_of(digest: str) -> Namespace:
    return Namespace("fake", adapter=digest)


def test_both_clients_load_list_and_unload() -> None:
    engine = FakeEngine()

    async def run() -> None:
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            loaded = await client.load_adapter("law", "one")
            assert (loaded.adapter.name, loaded.adapter.digest, loaded.adapter.rank) == ("law", "one", 8)
            assert not loaded.HasField("replaced_digest")
            assert (await client.load_adapter("law", "two")).replaced_digest == "one"
            with Client(address) as blocking:
                again = await asyncio.to_thread(blocking.load_adapter, "tax", "two")
                assert (again.adapter.name, again.adapter.digest) == ("tax", "two")
                listed = await asyncio.to_thread(blocking.adapters)
                assert listed == await client.adapters()
                await asyncio.to_thread(blocking.unload_adapter, "law")
            assert [(each.name, each.digest, each.is_on_device) for each in listed.adapters] == [
                ("law", "two", True),
                ("tax", "two", True),
            ]
            assert listed.max_adapters == 4
            await client.unload_adapter("tax")
            assert not (await client.adapters()).adapters

    asyncio.run(run())
    assert engine.device.held == set()


def test_a_list_counts_tokens_and_requests_and_shows_draining_adapters() -> None:
    engine = FakeEngine()

    def talk(address: str) -> None:
        with Client(address) as client:
            client.load_adapter("law", "one")
            publish(engine.cache, "abcdefgh", namespace_of("one"))
            engine.adapters._names.acquire("law")  # as a running request does
            client.load_adapter("law", "two")
            listed = [
                (each.name, each.digest, each.is_draining, each.unfinished_requests, each.cached_tokens)
                for each in client.adapters().adapters
            ]
            assert listed == [("law", "one", True, 1, 8), ("law", "two", False, 0, 0)]

    serve_and_call(engine, talk)


@pytest.mark.parametrize(
    ("name", "path", "code", "message"),
    [
        ("", "one", grpc.StatusCode.INVALID_ARGUMENT, "name: it is empty"),
        ("x" * 257, "one", grpc.StatusCode.INVALID_ARGUMENT, "name: expected at most 256 characters"),
        ("law", "broken", grpc.StatusCode.INVALID_ARGUMENT, "adapter_config.json: expected a file"),
        ("fifth", "five", grpc.StatusCode.RESOURCE_EXHAUSTED, "adapters: expected at most 4 different ones"),
    ],
)
def test_a_wrong_load_is_refused_by_name(name: str, path: str, code: grpc.StatusCode, message: str) -> None:
    engine = FakeEngine()

    def talk(address: str) -> None:
        with Client(address) as client:
            for number in range(4):
                client.load_adapter(f"a{number}", f"digest {number}")
            refusal = refusal_of(lambda: client.load_adapter(name, path))
            assert (refusal.code(), message in refusal.details()) == (code, True)

    serve_and_call(engine, talk)


def test_an_unknown_name_is_not_found() -> None:
    def talk(address: str) -> None:
        with Client(address) as client:
            refusal = refusal_of(lambda: client.unload_adapter("law"))
            assert refusal.code() is grpc.StatusCode.NOT_FOUND
            refusal = refusal_of(lambda: client.unload_adapter(""))
            assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT

    serve_and_call(FakeEngine(), talk)


@pytest.mark.parametrize("has_adapters", [True, False], ids=["no directory", "no adapters"])
def test_a_service_that_loads_no_adapters_says_that_it_is_switched_off(has_adapters: bool) -> None:
    engine = FakeEngine()
    source = None
    if has_adapters:
        source = engine.device.source()._replace(directory=AdapterDirectory("", ()))
    engine.adapters = Adapters("fake", source, engine.cache, engine.adapters._thread)

    def talk(address: str) -> None:
        with Client(address) as client:
            refusal = refusal_of(lambda: client.load_adapter("law", "one"))
            assert refusal.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "adapter" in refusal.details()
            assert client.adapters().max_adapters == (4 if has_adapters else 0)

    serve_and_call(engine, talk)


def test_segments_show_names_next_to_the_digest() -> None:
    engine = FakeEngine()
    for digest in ("one", "two", ""):
        publish(engine.cache, "abcd", namespace_of(digest))

    def talk(address: str) -> None:
        with Client(address) as client:
            client.load_adapter("law", "one")
            client.load_adapter("court", "one")
            listed = {each.adapter: list(each.adapter_names) for each in client.segments().segments}
            assert listed == {"one": ["law", "court"], "two": [], "": []}

    serve_and_call(engine, talk)
