"""ListSegments over a real connection: the server's side and the clients' side."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from radixkv.api.retention import Retention
from radixkv.namespace import Namespace
from radixkv.service.client import AsyncClient, Client
from radixkv.service.server.servicers import segments as segments_module
from tests.fakes import lease_text, publish, spell
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serve_and_call, serving

SALTED = Namespace("model", "b", "", "a salt")


@pytest.fixture
def engine() -> FakeEngine:
    """An engine with four segments: of tenant a, "abcd" and its continuations "efgh" and "xy"; of tenant b, "ab"."""
    engine = FakeEngine()
    cache = engine.cache
    publish(cache, "abcdefgh", Namespace("model", "a"))
    publish(cache, "abcdxy", Namespace("model", "a"))
    publish(cache, "ab", SALTED)
    return engine


def refusal_of(client: Client, **options) -> tuple[grpc.StatusCode, str]:
    """List segments, which must be refused; return the status and the details of the refusal."""
    with pytest.raises(grpc.RpcError) as caught:
        client.segments(**options)
    return caught.value.code(), caught.value.details()


def test_pages_follow_each_other_and_have_every_segment_once(engine):
    def talk(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            pages = [client.segments(page_size=3)]
            while pages[-1].next_page_token:
                pages.append(client.segments(page_size=3, page_token=pages[-1].next_page_token))
            return pages

    pages = serve_and_call(engine, talk)
    assert [len(page.segments) for page in pages] == [3, 1]
    segments = [segment for page in pages for segment in page.segments]
    assert len({segment.segment_id for segment in segments}) == 4
    assert {page.total_segments for page in pages} == {4}
    by_id = {segment.segment_id: segment for segment in segments}
    assert sorted((each.tenant, each.start_token, each.num_tokens, each.num_blocks) for each in segments) == [
        ("a", 0, 4, 1),
        ("a", 4, 2, 1),
        ("a", 4, 4, 1),
        ("b", 0, 2, 1),
    ]
    assert all(by_id[each.parent_id].num_children == 2 for each in segments if each.start_token)


def test_ids_reveal_nothing_about_the_segments_of_other_tenants(engine):
    def talk(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            return client.segments(tenant="b")

    (own,) = serve_and_call(engine, talk).segments
    assert own.segment_id > 1000, "a small number would count all segments"
    assert own.parent_id == 0


def test_a_salt_is_not_returned(engine):
    def talk(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            return client.segments()

    answer = serve_and_call(engine, talk)
    assert [each.has_salt for each in answer.segments if each.tenant == "b"] == [True]
    assert len({each.namespace_id for each in answer.segments}) == 2
    assert SALTED.salt.encode() not in answer.SerializeToString()


def test_a_tenant_sees_its_own_segments_and_no_total(engine):
    def talk(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            hottest = client.segments(tenant="b", hottest_first=True)
            return client.segments(tenant="b"), hottest, client.segments(tenant="")

    answer, hottest, of_unnamed_tenant = serve_and_call(engine, talk)
    for each in (answer, hottest):
        assert ([segment.tenant for segment in each.segments], each.compared_segments) == (["b"], 1)
        assert not each.HasField("total_segments")
    assert list(of_unnamed_tenant.segments) == []


def test_the_hottest_segments_are_listed_first_with_pins_and_retention(engine):
    cache = engine.cache
    namespace = Namespace("model", "a")
    cache.retain(namespace, spell("abcdefgh"), Retention(80, ttl_s=1000.0))
    for _ in range(3):
        lease = lease_text(cache, "abcdefghij", namespace)

    async def talk():
        async with serving(engine) as (_, address), AsyncClient(address, timeout_s=PATIENCE_S) as client:
            return await client.segments(hottest_first=True, page_size=2)

    answer = asyncio.run(talk())
    first, second = answer.segments
    assert (answer.total_segments, answer.compared_segments, answer.next_page_token) == (4, 4, "")
    assert (first.start_token, second.start_token, second.parent_id) == (0, 4, first.segment_id)
    assert (second.num_uses, second.num_leases, second.priority, second.is_retained) == (3, 3, 80, True)
    assert 0 < second.expires_in_s <= 1000
    assert first.heat >= second.heat
    lease.close()


def test_pages_are_made_of_a_bounded_number_of_calls(engine, monkeypatch):
    monkeypatch.setattr(segments_module, "MAX_CALLS", 1)
    # A call to the engine scans at most two numbers of the index.
    monkeypatch.setattr("radixkv.cache.segment_index.MAX_PASSED", 2)

    def talk(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            first = client.segments(tenant="b")
            return first, client.segments(tenant="b", page_token=first.next_page_token)

    first, second = serve_and_call(engine, talk)
    assert list(first.segments) == []
    assert [each.tenant for each in second.segments] == ["b"]
    assert second.next_page_token == ""


def test_inconsistent_requests_are_refused(engine):
    def talk(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            token = client.segments(page_size=1).next_page_token
            foreign = f"{1:x}-{1:x}"  # it has the form of a token, but this server has not returned it
            return [
                refusal_of(client, page_size=0),
                refusal_of(client, page_size=1001),
                refusal_of(client, page_size=257, hottest_first=True),
                refusal_of(client, page_token="x"),
                refusal_of(client, page_token=foreign),
                refusal_of(client, page_token=token, hottest_first=True),
                refusal_of(client, tenant="x" * 257),
            ]

    refusals = serve_and_call(engine, talk)
    assert {code for code, _ in refusals} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert [text.partition(":")[0] for _, text in refusals] == ["page_size"] * 3 + ["page_token"] * 3 + ["tenant"]


def test_a_wrong_type_is_refused_by_name_before_anything_is_sent():
    client = Client("127.0.0.1:1")
    with pytest.raises(TypeError, match="page_size: expected a whole number from 0"):
        client.segments(page_size="many")
    with pytest.raises(ValueError, match="page_size: expected a whole number from 0"):
        client.segments(page_size=-1)
