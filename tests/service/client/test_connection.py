"""The credentials and channel options of a connection, and the header with which proxies route prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from radixkv.api.retention import Retention
from radixkv.service.client import AsyncClient, Client
from radixkv.service.client.connection import PREFIX_KEY_HEADER, prefix_key
from radixkv.service.client.requests import prefill_request, prompt_request
from radixkv.v1.prefill_pb2 import ProbeRequest
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving


@pytest.mark.parametrize(
    ("address", "access", "message"),
    [
        ("10.0.0.1:1", {"token": "t"}, "token: requires tls_ca"),
        ("example.org:1", {"token": "t"}, "token: requires tls_ca"),
        ("127.0.0.1:1", {"token": "two words"}, "token: expected printable ASCII"),
        ("127.0.0.1:1", {"token": ""}, "token: expected printable ASCII"),
        ("127.0.0.1:1", {"token": "line\n"}, "token: expected printable ASCII"),
        ("127.0.0.1:1", {"certificate": "c.pem"}, "certificate, key: each requires the other"),
        ("127.0.0.1:1", {"certificate": "c.pem", "key": "k.pem"}, "tls_ca: required with a certificate"),
    ],
)
def test_credentials_that_would_leak_or_are_incomplete_are_refused_without_showing_the_token(address, access, message):
    with pytest.raises(ValueError, match=message) as caught:
        Client(address, **access)
    assert "two words" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"junk", b"-----BEGIN PRIVATE KEY-----\n\xff"])
def test_a_file_without_certificates_is_refused_before_the_first_call(tmp_path, content):
    file = tmp_path / "ca.pem"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="tls_ca: the file contains no readable certificates in PEM"):
        Client("127.0.0.1:1", tls_ca=file)


def key_of(token_ids: list[int], num_tokens: int = 4, **names: Any) -> str:
    return prefix_key(prefill_request(token_ids, names), num_tokens)


def test_prompts_with_the_same_first_tokens_have_the_same_key() -> None:
    assert key_of([1, 2, 3, 4, 5]) == key_of([1, 2, 3, 4]) == key_of([1, 2, 3, 4], request_id="other", read_cache=False)
    assert key_of([1, 2, 3, 4, 5], 5) != key_of([1, 2, 3, 4, 6], 5)
    assert key_of([1, 2]) != key_of([1, 2, 3]), "a short prompt is covered whole"


def test_different_namespaces_have_different_keys() -> None:
    prompt = [1, 2, 3, 4]
    keys = [
        key_of(prompt),
        *(key_of(prompt, **{name: "a"}) for name in ("tenant", "adapter", "salt")),
        key_of(prompt, tenant="ab"),
        key_of(prompt, tenant="a", adapter="b"),
    ]
    assert len(set(keys)) == len(keys)


def test_a_probe_has_the_key_of_its_prefill() -> None:
    probe = prompt_request(ProbeRequest, [7, 8, 9], tenant="t")
    assert prefix_key(probe, 4) == key_of([7, 8, 9], tenant="t")


def test_keys_do_not_change_between_releases() -> None:
    """Clients of different releases must agree, or each upgrade would send all prompts to other servers."""
    assert key_of([1, 2, 3, 4], tenant="acme") == "ff20ef872d66b4cb"


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "8", None])
def test_a_wrong_number_of_key_tokens_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="prefix_key_tokens: expected a whole number from 0, got"):
        Client("127.0.0.1:1", prefix_key_tokens=wrong)


class Headers(grpc.aio.ServerInterceptor):
    """Records the prefix key of each call."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str | None]] = []

    async def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]
        headers = dict(details.invocation_metadata)
        self.received.append((details.method.rpartition("/")[2], headers.get(PREFIX_KEY_HEADER)))
        return await continuation(details)


def test_calls_with_a_prompt_send_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = Headers()
    make_server = grpc.aio.server

    def make_recording_server(*arguments: Any, **options: Any) -> grpc.aio.Server:
        options["interceptors"] = (headers, *(options.get("interceptors") or ()))
        return make_server(*arguments, **options)

    monkeypatch.setattr(grpc.aio, "server", make_recording_server)

    def talk(address: str) -> None:
        with Client(address, prefix_key_tokens=2) as client:
            client.prefill([1, 2, 3])
            list(client.generate([1, 2, 4], max_new_tokens=1))
            client.probe([1, 2])
            client.retain([1, 2, 3], Retention(60))
            client.stats()

    async def run() -> None:
        async with serving(FakeEngine()) as (_, address):
            await asyncio.to_thread(talk, address)
            async with AsyncClient(address, prefix_key_tokens=2) as client:
                await client.prefill([1, 2, 3])
                _ = [each async for each in client.generate([1, 2, 4], max_new_tokens=1)]
                await client.probe([1, 2])
                await client.retain([1, 2, 3], Retention(60))
                await client.stats()
            async with AsyncClient(address) as client:
                await client.prefill([1, 2, 3])

    asyncio.run(run())
    key = key_of([1, 2], 2)
    calls_of_a_client = [("Prefill", key), ("Generate", key), ("Probe", key), ("Retain", key), ("Stats", None)]
    assert headers.received == [*calls_of_a_client, *calls_of_a_client, ("Prefill", None)]
