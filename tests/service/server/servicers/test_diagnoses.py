"""`CacheService.Diagnose` on the wire: who sees what, and limits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from radixkv.doctor.miss_profile import MissCounts
from radixkv.service.client import AsyncClient, Client, InvalidArgument, Unimplemented
from radixkv.v1.cache_pb2 import DiagnosedCause, DiagnoseRequest, DiagnoseResponse, MissSample
from radixkv.v1.cache_pb2_grpc import CacheServiceStub
from radixkv.v1.explain_pb2 import Excerpt
from tests.patience import PATIENCE_S
from tests.service.diagnosed import COUNTS, diagnosed_engine
from tests.service.fake_engine import FakeEngine
from tests.service.server.auth.certificates import TOKENS, CredentialFiles
from tests.service.serving import serve_and_call, serving


def diagnose(engine: FakeEngine, **options: Any) -> DiagnoseResponse:
    def call(address: str) -> DiagnoseResponse:
        with Client(address, timeout_s=PATIENCE_S) as client:
            return client.diagnose(**options)

    return serve_and_call(engine, call)


def test_a_response_has_everything_that_is_known() -> None:
    response = diagnose(diagnosed_engine("acme"))
    assert MissCounts(*(getattr(response, name) for name in MissCounts._fields)) == COUNTS
    assert (response.covered_s, response.further_causes) == (90.0, 0)
    first, second = response.causes
    assert second == DiagnosedCause(
        cause="SALT_CHANGED",
        tenant="acme",
        prompts=1,
        lost_tokens=500,
        is_upper_bound=True,
        what=second.what,
        change=second.change,
    )
    assert first == DiagnosedCause(
        cause="RANDOM_ID",
        tenant="acme",
        place="tokens 16 to 255",
        pattern="7 hexadecimal digits",
        prompts=3,
        lost_tokens=183_000,
        lost_s=18.0,
        min_position=37,
        max_position=37,
        sample=MissSample(
            before_token_ids=[7, 8],
            before_text="build ",
            prompt=Excerpt(token_ids=[1, 2, 3], different_tokens=2, different_text="4f2a9c1", equal_text=" tools"),
            branch=Excerpt(token_ids=[4, 5, 3], different_tokens=2, different_text="b07e55d", equal_text=" tools"),
            prompt_span_tokens=7,
        ),
        what="a random id changes",
        change=first.change,
    )
    assert first.change.startswith("Remove the id")


def test_the_counts_on_the_wire_are_those_of_a_profile() -> None:
    names = {each.name for each in DiagnoseResponse.DESCRIPTOR.fields}
    assert names == set(MissCounts._fields) | {"covered_s", "causes", "further_causes"}


def test_only_the_most_expensive_causes_are_listed() -> None:
    response = diagnose(diagnosed_engine("acme", "globex"), max_causes=3)
    assert [(each.tenant, each.cause) for each in response.causes] == [
        ("acme", "RANDOM_ID"),
        ("globex", "RANDOM_ID"),
        ("acme", "SALT_CHANGED"),
    ]
    assert (response.prompts, response.further_causes) == (40, 1)
    assert len(diagnose(diagnosed_engine("acme"), max_causes=0).causes) == 0


def test_samples_are_left_out_on_request() -> None:
    response = diagnose(diagnosed_engine("acme"), omit_cached_text=True)
    assert response.causes
    assert not any(each.HasField("sample") for each in response.causes)
    assert "4f2a9c1" not in str(response)


def test_one_tenant_gets_nothing_of_another() -> None:
    response = diagnose(diagnosed_engine("acme", "globex"), tenant="globex")
    assert {each.tenant for each in response.causes} == {"globex"}
    assert response.prompts == 20
    assert diagnose(diagnosed_engine("acme"), tenant="globex") == DiagnoseResponse(covered_s=90.0)


def test_credentials_decide_whose_misses_and_texts_are_returned(tmp_path: Path) -> None:
    files = CredentialFiles(tmp_path)
    credentials = grpc.ssl_channel_credentials(files.ca_file.read_bytes())

    async def test() -> dict[tuple[str, str | None], tuple[set[str], bool]]:
        async with (
            serving(diagnosed_engine("acme", "globex"), **files.tls) as (_, address),
            grpc.aio.secure_channel(address, credentials) as channel,
        ):
            visible = {}
            for name, tenant in (
                ("acme", None),
                ("some", "acme"),
                ("every", "acme"),
                ("watcher", None),
                ("boss", None),
                ("boss", "acme"),
            ):
                request = DiagnoseRequest(tenant=tenant)
                metadata = (("authorization", f"Bearer {TOKENS[name]}"),)
                response = await CacheServiceStub(channel).Diagnose(request, metadata=metadata, timeout=PATIENCE_S)
                has_text = any(each.HasField("sample") for each in response.causes)
                visible[name, tenant] = {each.tenant for each in response.causes}, has_text
            return visible

    both = {"acme", "globex"}
    assert asyncio.run(test()) == {
        ("acme", None): ({"acme"}, True),
        ("some", "acme"): ({"acme"}, True),
        ("every", "acme"): ({"acme"}, True),
        ("watcher", None): (both, False),
        ("boss", None): (both, False),
        ("boss", "acme"): ({"acme"}, False),
    }


def test_a_tenant_may_not_name_another(tmp_path: Path) -> None:
    files = CredentialFiles(tmp_path)
    credentials = grpc.ssl_channel_credentials(files.ca_file.read_bytes())

    async def test() -> grpc.StatusCode:
        async with (
            serving(diagnosed_engine("acme", "globex"), **files.tls) as (_, address),
            grpc.aio.secure_channel(address, credentials) as channel,
        ):
            metadata = (("authorization", f"Bearer {TOKENS['acme']}"),)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await CacheServiceStub(channel).Diagnose(
                    DiagnoseRequest(tenant="globex"), metadata=metadata, timeout=PATIENCE_S
                )
            return refused.value.code()

    assert asyncio.run(test()) is grpc.StatusCode.PERMISSION_DENIED


def test_a_server_without_a_profile_says_which_key_to_set() -> None:
    with pytest.raises(Unimplemented, match=r"server\.diagnosed_share is 0"):
        diagnose(FakeEngine())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_causes": 101}, "max_causes: expected at most 100, got 101"),
        ({"tenant": "a" * 257}, "tenant: "),
    ],
)
def test_wrong_arguments_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        diagnose(diagnosed_engine("acme"), **options)
    assert message in caught.value.details()


def test_the_async_client_returns_the_same() -> None:
    async def test() -> DiagnoseResponse:
        async with serving(diagnosed_engine("acme")) as (_, address), AsyncClient(address) as client:
            return await client.diagnose(tenant="acme", max_causes=1)

    assert [each.cause for each in asyncio.run(test()).causes] == ["RANDOM_ID"]
