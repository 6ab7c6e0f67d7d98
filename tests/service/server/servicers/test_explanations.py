"""`CacheService.Explain` on the wire: who sees what, segments, limits, and nothing in the log."""

import asyncio
import logging
import threading
from concurrent.futures import Future

import grpc
import pytest

from radixkv.api.caller import Caller
from radixkv.errors import QueueFull, RateExceeded
from radixkv.service.client import AsyncClient, Client, DifferenceKind, InvalidArgument, ResourceExhausted
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.servicers import explanations
from radixkv.v1.cache_pb2 import ExplainRequest
from radixkv.v1.cache_pb2_grpc import CacheServiceStub
from radixkv.v1.explain_pb2 import Excerpt, PromptSegment
from radixkv.v1.prefill_pb2 import PrefillRequest
from radixkv.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.fakes import publish, spell
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FAKE, FakeEngine
from tests.service.server.auth.certificates import TOKENS, CredentialFiles
from tests.service.serving import becomes_true, serve_and_call, serving

SHARED = "You are a helpful assistant. "
TAIL = " and this is the rest of the prompt, which is long enough to be found again."
CACHED = SHARED + "Mon" + TAIL
PROMPT = SHARED + "Sunday" + TAIL


def ids(text):
    """Return the token ids of a text with one token per character."""
    return [ord(each) for each in text]


def engine_caching(**texts):
    """Return an engine in which each tenant has cached a text; `texts` are by tenant."""
    engine = FakeEngine()
    for tenant, text in texts.items():
        publish(engine.cache, text, FAKE._replace(tenant=tenant))
    return engine


def explain(engine, text, *, model_path=None, **options):
    def call(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            return client.explain(ids(text), **options)

    return serve_and_call(engine, call, model_path)


def test_a_difference_is_described_in_tokens_without_a_tokenizer():
    engine = engine_caching(acme=CACHED)
    engine.token_s = 0.5
    segments = [("system", len(SHARED)), ("day", len(SHARED) + len("Sunday"))]
    explanation = explain(engine, PROMPT, tenant="acme", segments=segments)
    num_computed = len(PROMPT) - len(SHARED)
    assert (explanation.prompt_tokens, explanation.cached_tokens) == (len(PROMPT), len(SHARED))
    assert (explanation.left_at_token, explanation.segment) == (len(SHARED), "day")
    assert (explanation.computed_tokens, explanation.computed_s) == (num_computed, 0.5 * num_computed)
    difference = explanation.difference
    assert difference.kind == DifferenceKind.REPLACED
    assert (difference.prompt_span_tokens, difference.branch_span_tokens) == (6, 3)
    assert (difference.lost_tokens, difference.lost_s) == (len(TAIL), 0.5 * len(TAIL))
    assert list(difference.before_token_ids) == ids(SHARED[-8:])
    assert difference.prompt == Excerpt(token_ids=ids("Sunday and this "), different_tokens=6)
    assert difference.branch == Excerpt(token_ids=ids("Mon and this is "), different_tokens=3)
    assert difference.before_text == ""


def test_with_a_tokenizer_text_is_returned_and_decides_the_kind():
    """The embedded model has a token for each ASCII character, with the same id."""
    difference = explain(engine_caching(acme=CACHED), PROMPT, tenant="acme", model_path="tiny").difference
    assert difference.kind == DifferenceKind.DATE_OR_TIME
    assert difference.before_text == SHARED[-8:]
    assert (difference.prompt.different_text, difference.prompt.equal_text) == ("Sunday", " and this ")
    assert (difference.branch.different_text, difference.branch.equal_text) == ("Mon", " and this is ")


def test_seconds_are_absent_without_measurements():
    explanation = explain(engine_caching(acme=CACHED), PROMPT, tenant="acme")
    assert not explanation.HasField("computed_s")
    assert not explanation.difference.HasField("lost_s")


def test_nothing_of_another_tenant_or_salt_is_in_a_response():
    engine = engine_caching(acme=SHARED + "acme's secret" + TAIL, globex=SHARED + "theirs" + TAIL)
    publish(engine.cache, SHARED + "salted secret" + TAIL, FAKE._replace(tenant="globex", salt="s"))
    explanation = explain(engine, PROMPT, tenant="globex")
    assert list(explanation.difference.branch.token_ids) == ids("theirs and this ")
    assert not explain(engine, PROMPT, tenant="initech").HasField("difference")
    assert not explain(engine, PROMPT, tenant="acme", salt="s").HasField("difference")


def test_a_caller_may_leave_out_what_is_cached():
    difference = explain(engine_caching(acme=CACHED), PROMPT, tenant="acme", omit_cached_text=True).difference
    assert not difference.HasField("branch")
    assert difference.lost_tokens == len(TAIL)


def test_only_a_tenant_and_its_routers_read_what_it_has_cached(tmp_path):
    files = CredentialFiles(tmp_path)
    credentials = grpc.ssl_channel_credentials(files.ca_file.read_bytes())

    async def test():
        async with (
            serving(engine_caching(acme=CACHED, globex=SHARED + "!"), **files.tls) as (_, address),
            grpc.aio.secure_channel(address, credentials) as channel,
        ):
            excerpts = {}
            for name, tenant in (("acme", ""), ("globex", ""), ("some", "acme"), ("every", "acme"), ("boss", "acme")):
                request = ExplainRequest(token_ids=ids(PROMPT), tenant=tenant)
                metadata = (("authorization", f"Bearer {TOKENS[name]}"),)
                response = await CacheServiceStub(channel).Explain(request, metadata=metadata, timeout=PATIENCE_S)
                excerpts[name] = "".join(map(chr, response.difference.branch.token_ids))
            return excerpts

    excerpt = "Mon and this is "
    assert asyncio.run(test()) == {"acme": excerpt, "globex": "!", "some": excerpt, "every": excerpt, "boss": ""}


@pytest.mark.parametrize(
    ("segments", "field"),
    [
        ([("a", 9), ("b", 8)], "segments[1].end_token"),
        ([("a" * 257, 9)], "segments[0].name"),
        ([("a", 9)] * 1025, "segments"),
    ],
)
def test_wrong_segments_are_refused_by_name(segments, field):
    with pytest.raises(InvalidArgument) as caught:
        explain(FakeEngine(), "abc", segments=segments)
    assert caught.value.details().startswith(f"{field}: expected at ")


def test_a_refusal_of_the_engine_is_returned():
    engine = FakeEngine()
    engine.refusal = RateExceeded("tenant: too fast", retry_after_s=1.0)
    with pytest.raises(ResourceExhausted):
        explain(engine, "abc")


def test_a_tenant_with_many_explanations_does_not_block_another(monkeypatch):
    monkeypatch.setattr(explanations, "MAX_WAITING", 4)
    engine = engine_caching(acme=CACHED)
    look_up = engine.look_up
    pending = []

    def start_look_up(tokens, caller):
        pending.append(Future())
        return pending[-1]

    def request_of(tenant):
        return ExplainRequest(token_ids=ids(PROMPT), tenant=tenant)

    async def test():
        engine.look_up = start_look_up
        explainer = explanations.Explainer(engine, ModelTokenizer(None))
        calls = [asyncio.ensure_future(explainer.explain(request_of("acme"))) for _ in range(10)]
        while sum(call.done() for call in calls) < 6:  # all but the MAX_WAITING
            await asyncio.sleep(0)
        assert all(isinstance(call.exception(), QueueFull) for call in calls if call.done())
        other = asyncio.ensure_future(explainer.explain(request_of("globex")))
        while len(pending) < 5:  # the four of acme and the one of globex
            await asyncio.sleep(0)
        engine.look_up = look_up
        for each in pending:
            each.set_result(look_up(spell(PROMPT), Caller("acme")).result())
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in results].count(QueueFull) == 6
        assert (await other).prompt_tokens == len(PROMPT)
        again = [explainer.explain(request_of("acme")) for _ in range(4)]
        assert len(await asyncio.gather(*again)) == 4

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_a_cancelled_explanation_frees_its_place_and_ends_before_the_next_one_begins(monkeypatch):
    monkeypatch.setattr(explanations, "MAX_WAITING", 4)
    may_end, running, running_counts = threading.Event(), [], []
    explain_prompt = explanations.explain

    def slow_explain(*arguments, **options):
        running.append(None)
        running_counts.append(len(running))
        may_end.wait(PATIENCE_S)
        running.pop()
        return explain_prompt(*arguments, **options)

    monkeypatch.setattr(explanations, "explain", slow_explain)
    request = ExplainRequest(token_ids=ids(PROMPT), tenant="acme")

    async def test():
        explainer = explanations.Explainer(engine_caching(acme=CACHED), ModelTokenizer(None))
        for _ in range(2):
            calls = [asyncio.ensure_future(explainer.explain(request)) for _ in range(4)]
            while not running_counts:
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            assert not any(call.done() for call in calls), "a call was refused, because places were not freed"
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        last = asyncio.ensure_future(explainer.explain(request))
        await asyncio.sleep(0.01)
        assert max(running_counts) == 1
        may_end.set()
        assert (await last).prompt_tokens == len(PROMPT)

    try:
        asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
    finally:
        may_end.set()


def test_neither_tokens_nor_text_are_logged(caplog):
    caplog.set_level(logging.DEBUG)
    explain(engine_caching(acme=CACHED), PROMPT, tenant="acme", model_path="tiny")
    assert "helpful" not in caplog.text
    assert "and this" not in caplog.text


def test_both_clients_send_the_same_request():
    received = []

    class Engine(FakeEngine):
        def look_up(self, tokens, caller):
            received.append((tokens, caller))
            return super().look_up(tokens, caller)

    names = {"tenant": "t", "adapter": "a", "salt": "s"}

    async def test():
        async with serving(Engine()) as (_, address):
            async with AsyncClient(address, timeout_s=PATIENCE_S) as client:
                from_async_client = await client.explain([1, 2], segments=[("x", 1)], **names)
            with Client(address, timeout_s=PATIENCE_S) as client:
                from_client = await asyncio.to_thread(lambda: client.explain([1, 2], segments=[("x", 1)], **names))
        return from_async_client, from_client

    from_async_client, from_client = asyncio.run(test())
    assert from_async_client == from_client
    assert received[0] == received[1]
    assert received[0][1].salt == "s"


def test_an_end_token_that_is_no_number_is_refused_before_anything_is_sent():
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match="end_token"):
        client.explain([1], segments=[("a", "b")])
    assert PromptSegment(name="a", end_token=1).end_token == 1


def test_a_prefill_is_explained_as_the_prompt_was_when_it_arrived():
    def call(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            options = {"tenant": "acme", "explain": True}
            return (
                client.explain(ids(PROMPT), tenant="acme"),
                client.prefill(ids(PROMPT), **options).explanation,
                client.prefill(ids(PROMPT), **options, omit_cached_text=True).explanation,
                client.prefill(ids(PROMPT), tenant="acme").HasField("explanation"),
            )

    alone, explained, without_text, has_unrequested = serve_and_call(engine_caching(acme=CACHED), call, "tiny")
    for each in (alone, explained):
        each.difference.idle_s = 0.0
    assert explained == alone
    assert explained.difference.HasField("branch")
    assert explained.difference.lost_tokens == len(TAIL)
    assert not without_text.difference.HasField("branch")
    assert not has_unrequested


@pytest.mark.parametrize("num_completions", [1, 3])
def test_the_first_response_of_a_generation_has_the_explanation(num_completions):
    def call(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            options = {"tenant": "acme", "max_new_tokens": 4, "n": num_completions}
            return list(client.generate(ids(PROMPT), **options, explain=True))

    responses = serve_and_call(engine_caching(acme=CACHED), call)
    explained = [each for each in responses if each.HasField("explanation")]
    assert len(explained) == 1
    assert explained[0] is next(each for each in responses if each.index == 0)
    assert explained[0].explanation.left_at_token == len(SHARED)


def test_a_request_with_an_explanation_is_refused_if_its_explanation_is():
    class Engine(FakeEngine):
        def look_up(self, tokens, caller):
            raise RateExceeded("tenant: too many calls")

    def call(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            with pytest.raises(ResourceExhausted, match="too many calls"):
                client.prefill(ids(PROMPT), explain=True)
            with pytest.raises(ResourceExhausted, match="too many calls"):
                list(client.generate(ids(PROMPT), explain=True))
            return client.prefill(ids(PROMPT)).usage.prompt_tokens

    engine = Engine()
    assert serve_and_call(engine, call) == len(PROMPT)
    assert len(engine.params) == 1


def test_an_admin_gets_no_cached_text_with_a_prefill(tmp_path):
    files = CredentialFiles(tmp_path)
    credentials = grpc.ssl_channel_credentials(files.ca_file.read_bytes())

    async def test():
        async with (
            serving(engine_caching(acme=CACHED), **files.tls) as (_, address),
            grpc.aio.secure_channel(address, credentials) as channel,
        ):
            has_cached_text = {}
            for name in ("acme", "boss"):
                request = PrefillRequest(token_ids=ids(PROMPT), tenant="acme", explain=True)
                metadata = (("authorization", f"Bearer {TOKENS[name]}"),)
                response = await PrefillServiceStub(channel).Prefill(request, metadata=metadata, timeout=PATIENCE_S)
                has_cached_text[name] = response.explanation.difference.HasField("branch")
            return has_cached_text

    assert asyncio.run(test()) == {"acme": True, "boss": False}


def test_a_cancelled_request_frees_the_place_of_its_explanation(monkeypatch):
    monkeypatch.setattr(explanations, "MAX_WAITING", 1)
    engine = FakeEngine(is_gated=True)

    async def test():
        async with serving(engine) as (_, address), AsyncClient(address, timeout_s=PATIENCE_S) as client:
            running = asyncio.ensure_future(client.prefill(ids(PROMPT), explain=True))
            assert await becomes_true(lambda: len(engine.futures) == 1)
            running.cancel()
            assert await becomes_true(engine.futures[0].cancelled)
            engine.open_gate()
            return await client.prefill(ids(PROMPT), explain=True)

    assert asyncio.run(test()).explanation.prompt_tokens == len(PROMPT)


def test_an_explanation_keeps_its_place_only_until_it_is_done(monkeypatch):
    monkeypatch.setattr(explanations, "MAX_WAITING", 1)
    engine = FakeEngine(is_gated=True)

    async def test():
        async with serving(engine) as (_, address), AsyncClient(address, timeout_s=PATIENCE_S) as client:
            running = asyncio.ensure_future(client.prefill(ids(PROMPT), explain=True))
            assert await becomes_true(lambda: len(engine.futures) == 1)
            explanation = None
            while explanation is None:
                try:
                    explanation = await client.explain(ids(PROMPT))
                except ResourceExhausted:
                    await asyncio.sleep(0.01)
            assert not running.done()
            engine.open_gate()
            return explanation, (await running).explanation

    explanation, of_prefill = asyncio.run(test())
    assert explanation == of_prefill
