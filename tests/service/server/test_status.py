import asyncio
import inspect
import logging

import grpc
import grpc.aio
import pytest

from radixkv import errors
from radixkv.service.client import AsyncClient
from radixkv.service.server.status import STATUS, status_of, trailing_metadata_of
from radixkv.v1.prefill_pb2 import PrefillRequest, PrefillResponse
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import refusal_of, serving

ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.RadixKVError)]

# The status of each error without subclasses.
EXPECTED = {
    "InvalidAdapter": "INVALID_ARGUMENT",
    "InvalidRequest": "INVALID_ARGUMENT",
    "InvalidCredential": "UNAUTHENTICATED",
    "NotPermitted": "PERMISSION_DENIED",
    "PromptTooLong": "INVALID_ARGUMENT",
    "BeyondCeiling": "FAILED_PRECONDITION",
    "UnknownAdapter": "NOT_FOUND",
    "UnknownLease": "NOT_FOUND",
    "UnknownPublicPrefix": "NOT_FOUND",
    "UnknownEventNumber": "OUT_OF_RANGE",
    "UnknownTokenizer": "NOT_FOUND",
    "SwitchedOff": "UNIMPLEMENTED",
    "NoReplica": "UNAVAILABLE",
    "OutOfBlocks": "RESOURCE_EXHAUSTED",
    "OutOfMemory": "RESOURCE_EXHAUSTED",
    "QueueFull": "RESOURCE_EXHAUSTED",
    "RateExceeded": "RESOURCE_EXHAUSTED",
    "TooManyAdapters": "RESOURCE_EXHAUSTED",
    "TooManyReaders": "RESOURCE_EXHAUSTED",
    "QuotaExceeded": "RESOURCE_EXHAUSTED",
    "LeaseClosed": "INTERNAL",
    "DoubleRelease": "INTERNAL",
    "DeadlinePassed": "DEADLINE_EXCEEDED",
    "Draining": "UNAVAILABLE",
    "EventsLost": "DATA_LOSS",
    "StepHangs": "UNAVAILABLE",
    "KVOfOtherPrompt": "INVALID_ARGUMENT",
    "KVFormatDiffers": "FAILED_PRECONDITION",
    "UnsupportedModel": "FAILED_PRECONDITION",
    "StoreBusy": "UNAVAILABLE",
    "StoreClosed": "UNAVAILABLE",
    "StoreLate": "UNAVAILABLE",
    "StorePaused": "UNAVAILABLE",
    "StoreUnavailable": "UNAVAILABLE",
    "NotFinite": "INTERNAL",
    "InvariantViolation": "INTERNAL",
}


def all_subclasses(kind):
    return {kind}.union(*(all_subclasses(child) for child in kind.__subclasses__()))


def leaf_errors():
    """Return the errors without subclasses."""
    return [kind for kind in ERRORS if not any(issubclass(other, kind) for other in ERRORS if other is not kind)]


def test_every_error_has_a_line_of_its_own_or_of_an_ancestor_below_the_root():
    for kind in all_subclasses(errors.RadixKVError) - {errors.RadixKVError}:
        assert any(ancestor in STATUS for ancestor in kind.__mro__), kind


def test_every_leaf_has_the_status_that_callers_expect():
    assert {kind.__name__: status_of(kind("x")).name for kind in leaf_errors()} == EXPECTED


def test_no_line_of_the_table_repeats_its_parent():
    for kind, code in STATUS.items():
        inherited = next((STATUS[ancestor] for ancestor in kind.__mro__[1:] if ancestor in STATUS), None)
        assert inherited is not code, kind


def test_a_new_error_has_the_status_of_its_nearest_ancestor():
    class Nearly(errors.UnknownLease):
        pass

    assert status_of(Nearly("x")) is grpc.StatusCode.NOT_FOUND


def test_unexpected_exceptions_are_internal():
    assert status_of(KeyError("x")) is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("retry_after_s", "text"), [(1.0, "1000"), (0.0, "0"), (0.0001, "1"), (2.5, "2500"), (-1.0, "0")]
)
def test_retry_after_is_whole_milliseconds_rounded_up(retry_after_s, text):
    error = errors.QueueFull("x", retry_after_s=retry_after_s)
    assert trailing_metadata_of(error) == (("retry-after-ms", text),)


def test_a_cause_is_sent_by_name():
    assert trailing_metadata_of(errors.UnknownLease("x")) == ()
    assert trailing_metadata_of(errors.UnknownLease("x", cause=errors.Cause.KV_SOURCE)) == (
        ("radixkv-cause", "kv_source"),
    )
    assert trailing_metadata_of(errors.OutOfBlocks("x", cause=errors.Cause.HOLD_LEASE)) == (
        ("retry-after-ms", "1000"),
        ("radixkv-cause", "hold_lease"),
    )


@pytest.mark.parametrize("attribute", ["refusal", "failure"])
def test_every_error_reaches_the_caller_as_its_status(attribute):
    async def run():
        engine = FakeEngine()
        statuses = {}
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            for kind in leaf_errors():
                setattr(engine, attribute, kind("subject: expected this, got that"))
                refusal = await refusal_of(client.prefill([1], timeout_s=PATIENCE_S))
                assert refusal.details() == "subject: expected this, got that"
                metadata = dict(tuple(refusal.trailing_metadata()))
                assert metadata.get("retry-after-ms") == ("1000" if issubclass(kind, errors.CapacityError) else None)
                is_of_source = issubclass(kind, errors.KVSourceError)
                assert metadata.get("radixkv-cause") == ("kv_source" if is_of_source else None)
                statuses[kind.__name__] = refusal.code().name
            setattr(engine, attribute, None)
            assert (await client.prefill([1])).next_token_id == 1
        return statuses

    assert asyncio.run(run()) == EXPECTED


@pytest.mark.parametrize("attribute", ["refusal", "failure"])
def test_an_unexpected_exception_is_internal_and_only_the_log_has_its_message(attribute, caplog):
    async def run():
        engine = FakeEngine()
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            setattr(engine, attribute, KeyError("of another tenant"))
            refusal = await refusal_of(client.prefill([1]))
            setattr(engine, attribute, None)
            assert (await client.prefill([1])).next_token_id == 1
            return refusal

    with caplog.at_level(logging.ERROR):
        refusal = asyncio.run(run())
    assert refusal.code() is grpc.StatusCode.INTERNAL
    assert "another tenant" not in str(refusal)
    assert "another tenant" in caplog.text
    assert "/radixkv.v1.PrefillService/Prefill" in caplog.text


def test_our_own_bugs_are_logged_with_their_traceback(caplog):
    async def run():
        engine = FakeEngine()
        engine.failure = errors.InvariantViolation("blocks: expected 3 free, got 2")
        async with serving(engine) as (_, address), AsyncClient(address) as client:
            await refusal_of(client.prefill([1]))

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert "Traceback" in caplog.text
    assert "blocks: expected 3 free, got 2" in caplog.text


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\x0a\xff", b"\x0a\x03abc", b"\x12\x02\xc3\x28", b"\x12\x02a"],
    ids=["no key", "cut length", "ids of 3 bytes", "not UTF-8", "cut string"],
)
def test_bytes_that_do_not_parse_are_refused_and_the_server_continues(data):
    async def run():
        async with serving(FakeEngine()) as (_, address), grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary(
                "/radixkv.v1.PrefillService/Prefill", response_deserializer=PrefillResponse.FromString
            )
            refusal = await refusal_of(call(data, timeout=PATIENCE_S))
            good = await call(PrefillRequest(token_ids=[1, 2]).SerializeToString(), timeout=PATIENCE_S)
            return refusal, good

    refusal, good = asyncio.run(run())
    assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.details() == f"request: expected a protobuf message, got {len(data)} other bytes"
    assert good.next_token_id == 3


def test_a_method_that_does_not_exist_is_unimplemented():
    async def run():
        async with serving(FakeEngine()) as (_, address), grpc.aio.insecure_channel(address) as channel:
            return await refusal_of(channel.unary_unary("/radixkv.v1.PrefillService/Nothing")(b"", timeout=PATIENCE_S))

    assert asyncio.run(run()).code() is grpc.StatusCode.UNIMPLEMENTED
