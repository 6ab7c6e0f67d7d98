"""ListSegments for a store, over a real connection."""

from __future__ import annotations

import grpc
import pytest

from radixkv.namespace import Namespace
from radixkv.service.client import Client
from radixkv.service.server.servicers import segments as segments_module
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serve_and_call

ACME, SALTED = Namespace("model", "acme"), Namespace("model", "acme", "", "a salt")
OTHER = Namespace("model", "other", "0123456789abcdef")


@pytest.fixture
def engine() -> FakeEngine:
    """An engine whose store has four blocks of 16 tokens; the block "b" is retained, with a priority above 50."""
    engine = FakeEngine()
    for key, namespace in ((b"a", ACME), (b"b", ACME), (b"c", SALTED), (b"d", OTHER)):
        engine.stored.add(key, namespace, 90 if key == b"b" else 50)
    return engine


def test_pages_have_every_namespace_once(engine):
    def talk(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            first = client.segments(store="host", page_size=2)
            return first, client.segments(store="host", page_token=first.next_page_token)

    first, second = serve_and_call(engine, talk)
    listed = [*first.stored, *second.stored]
    assert [(each.tenant, each.has_salt, each.adapter, each.num_blocks, each.num_tokens) for each in listed] == [
        ("acme", False, "", 2, 32),
        ("acme", True, "", 1, 16),
        ("other", False, "0123456789abcdef", 1, 16),
    ]
    assert [each.num_retained_blocks for each in listed] == [1, 0, 0]
    assert len({each.namespace_id for each in listed}) == 3
    assert (first.total_segments, len(first.segments), second.next_page_token) == (3, 0, "")


def test_a_tenant_sees_only_its_own_namespaces_in_a_bounded_number_of_calls(engine, monkeypatch):
    monkeypatch.setattr(segments_module, "MAX_CALLS", 1)
    monkeypatch.setattr("radixkv.offload.index.namespace_keys.MAX_PASSED", 2)

    def talk(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            first = client.segments(store="host", tenant="other")
            return first, client.segments(store="host", tenant="other", page_token=first.next_page_token)

    first, second = serve_and_call(engine, talk)
    assert (len(first.stored), [each.tenant for each in second.stored]) == (0, ["other"])
    assert (first.compared_segments, second.compared_segments) == (0, 1), "namespaces of other tenants are counted"
    assert not second.HasField("total_segments")


def test_inconsistent_requests_for_a_store_are_refused(engine):
    def talk(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            details = []
            for options in ({"store": "attic"}, {"store": "host", "hottest_first": True}, {"store": "x" * 257}):
                with pytest.raises(grpc.RpcError) as caught:
                    client.segments(**options)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                details.append(caught.value.details())
            return details

    unknown, hottest, long_name = serve_and_call(engine, talk)
    assert unknown == "store: expected one of host, got 'attic'"
    assert hottest.startswith("store: can't be combined with hottest_first")
    assert long_name.startswith("store: expected at most")
