"""Adapters of an engine over a fake runner, whose K and V depend on the adapter."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from radixkv.api.caller import Caller
from radixkv.api.miss_reason import MissReason
from radixkv.api.params import PrefillParams
from radixkv.api.retention import Retention
from radixkv.api.sampling import Sampling
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.errors import (
    Draining,
    InvalidAdapter,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    SwitchedOff,
    TooManyAdapters,
    UnknownAdapter,
)
from radixkv.namespace import RESERVED_TENANTS
from tests.adapter_doubles import FakeDevice
from tests.engine.gated_runner import BLOCK_SIZE, NUM_BLOCKS, GatedRunner, params
from tests.fake_runner import next_token, tokens
from tests.patience import PATIENCE_S, wait_until

PROMPT = range(20)


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner()


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def engine(runner: GatedRunner, device: FakeDevice) -> Iterator[Engine]:
    config = EngineConfig(max_step_tokens=64, held_lease_ttl_s=60)
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), config, adapters=device.source(2))
    engine.start()
    yield engine
    runner.gate.set()
    device.gate.set()
    engine.stop()


def load(engine: Engine, name: str, digest: str) -> str | None:
    return engine.adapters.load(name, digest).result(PATIENCE_S).replaced_digest


def ask(engine: Engine, adapter: str, ids: range | list[int] = PROMPT, **fields: object) -> tuple[int, int, str]:
    """Prefill, and return the next token, the number of cached tokens, and the miss reason."""
    result = engine.prefill(params(ids, adapter=adapter, **fields)).result(PATIENCE_S)
    engine.check().result(PATIENCE_S)
    return result.next_token_id, result.usage.cached_tokens, result.miss_reason.value


def next_token_with(digest: str, ids: range | list[int] = PROMPT) -> int:
    """Return the token that the fake model generates after a prompt with an adapter."""
    return next_token(tokens(ids), digest)


def start_generation(engine: Engine, runner: GatedRunner, adapter: str):  # type: ignore[no-untyped-def]
    """Start a generation of four tokens, whose first step waits for the gate of the runner."""
    runner.gate.clear()
    runner.entered.clear()
    future = engine.generate(params(PROMPT, adapter=adapter), Sampling(4, ignore_eos=True), lambda _: None)
    assert runner.entered.wait(PATIENCE_S)
    return future


def wait_until_all_free(engine: Engine) -> None:
    wait_until(lambda: engine.load().result(PATIENCE_S).blocks.free == NUM_BLOCKS)


def test_each_adapter_answers_and_caches_for_itself(engine: Engine) -> None:
    load(engine, "law", "one")
    load(engine, "tax", "two")
    for name, digest in (("", ""), ("law", "one"), ("tax", "two")):
        assert ask(engine, name) == (next_token_with(digest), 0, "COLD")
    for name, digest in (("", ""), ("law", "one"), ("tax", "two")):
        assert ask(engine, name) == (next_token_with(digest), 19, "NONE")


def test_names_of_the_same_weights_share_the_cache(engine: Engine) -> None:
    load(engine, "law", "one")
    load(engine, "court", "one")
    ask(engine, "law")
    assert ask(engine, "court") == (next_token_with("one"), 19, "NONE")


def test_a_reload_reuses_nothing_and_says_why(engine: Engine, device: FakeDevice) -> None:
    load(engine, "law", "one")
    ask(engine, "law")
    assert load(engine, "law", "two") == "one"
    assert (
        engine.probe(tokens(PROMPT), Caller(adapter="law")).result(PATIENCE_S).miss_reason is MissReason.ADAPTER_CHANGED
    )
    assert ask(engine, "law") == (next_token_with("two"), 0, "ADAPTER_CHANGED")
    assert ask(engine, "law") == (next_token_with("two"), 19, "NONE")
    assert ask(engine, "law", range(40, 60)) == (next_token_with("two", range(40, 60)), 0, "COLD")
    assert device.calls == [("add", "one"), ("add", "two"), ("remove", "one")]


def test_a_reload_of_the_same_weights_keeps_everything(engine: Engine, device: FakeDevice) -> None:
    load(engine, "law", "one")
    ask(engine, "law")
    assert load(engine, "law", "one") == "one"
    assert ask(engine, "law") == (next_token_with("one"), 19, "NONE")
    assert device.calls == [("add", "one")]


def test_running_requests_finish_with_the_old_weights_which_are_then_removed(
    engine: Engine, runner: GatedRunner, device: FakeDevice
) -> None:
    load(engine, "law", "one")
    ask(engine, "law")
    future = start_generation(engine, runner, "law")
    reload = engine.adapters.load("law", "two")
    waiting = engine.prefill(
        params(PROMPT, adapter="law")
    )  # received while the step runs, so before the reload takes effect
    runner.gate.set()
    assert reload.result(PATIENCE_S).replaced_digest == "one"
    expected = list(PROMPT)
    for _ in range(4):
        expected.append(next_token_with("one", expected))
    assert list(future.result(PATIENCE_S).token_ids) == expected[20:]
    assert waiting.result(PATIENCE_S).next_token_id == next_token_with("one")
    wait_until(lambda: device.held == {"two"})
    assert ask(engine, "law")[1:] == (0, "ADAPTER_CHANGED")
    engine.purge(adapter="law").result(PATIENCE_S)
    wait_until_all_free(engine)


def test_a_held_lease_keeps_its_blocks_of_the_old_root(engine: Engine, device: FakeDevice) -> None:
    load(engine, "law", "one")
    ask(engine, "law", range(40, 60))
    held = engine.prefill(params(PROMPT, adapter="law", hold_lease=True)).result(PATIENCE_S).held_lease
    engine.adapters.unload("law").result(PATIENCE_S)
    wait_until(lambda: engine.load().result(PATIENCE_S).blocks.free == NUM_BLOCKS - 5)  # 20 tokens
    assert device.held == set()
    engine.check().result(PATIENCE_S)
    engine.release(held.lease_id).result(PATIENCE_S)
    wait_until_all_free(engine)


def test_an_unloaded_adapter_is_unknown_and_its_blocks_are_freed(engine: Engine, device: FakeDevice) -> None:
    load(engine, "law", "one")
    ask(engine, "law")
    engine.adapters.unload("law").result(PATIENCE_S)
    with pytest.raises(UnknownAdapter):
        engine.prefill(params(PROMPT, adapter="law"))
    with pytest.raises(UnknownAdapter):
        engine.adapters.unload("law").result(PATIENCE_S)
    wait_until_all_free(engine)
    assert device.held == set()
    load(engine, "law", "one")
    assert ask(engine, "law") == (next_token_with("one"), 0, "EVICTED")


def test_unloading_one_of_two_names_frees_nothing(engine: Engine, device: FakeDevice) -> None:
    load(engine, "law", "one")
    load(engine, "court", "one")
    ask(engine, "law")
    engine.adapters.unload("law").result(PATIENCE_S)
    assert ask(engine, "court") == (next_token_with("one"), 19, "NONE")
    assert device.calls == [("add", "one")]


def test_an_adapter_that_is_loaded_again_while_it_drains_keeps_its_cache(engine: Engine) -> None:
    load(engine, "law", "one")
    ask(engine, "law")
    prompt = engine.adapters.acquire(Caller(adapter="law"), tokens(PROMPT))  # like a request that has not ended
    load(engine, "law", "two")
    load(engine, "law", "one")
    engine.adapters.release(prompt.adapter)
    assert ask(engine, "law") == (next_token_with("one"), 19, "NONE")


def test_a_refused_request_keeps_no_adapter(engine: Engine, device: FakeDevice) -> None:
    load(engine, "law", "one")
    for _ in range(3):
        with pytest.raises(PromptTooLong):
            engine.prefill(params([0] * 200, adapter="law"))
        with pytest.raises(PromptTooLong):
            engine.generate(params([0] * 200, adapter="law"), Sampling(4), lambda _: None)
    assert engine.adapters.loaded()[0].num_unfinished == 0
    engine.adapters.unload("law").result(PATIENCE_S)
    wait_until(lambda: device.held == set())


def test_a_cancelled_request_releases_its_adapter(engine: Engine, runner: GatedRunner, device: FakeDevice) -> None:
    load(engine, "law", "one")
    future = start_generation(engine, runner, "law")
    assert engine.adapters.loaded()[0].num_unfinished == 1
    future.cancel()
    runner.gate.set()
    engine.adapters.unload("law").result(PATIENCE_S)
    wait_until(lambda: device.held == set())


def test_a_purge_takes_the_name_of_an_adapter(engine: Engine) -> None:
    load(engine, "law", "one")
    ask(engine, "law")
    ask(engine, "")
    assert engine.purge(adapter="law").result(PATIENCE_S).freed_blocks == 5  # 20 tokens
    assert ask(engine, "law") == (next_token_with("one"), 0, "COLD")
    assert ask(engine, "") == (next_token_with(""), 19, "NONE")
    with pytest.raises(UnknownAdapter):
        engine.purge(adapter="one")


def test_too_many_adapters_and_broken_ones_are_refused(engine: Engine) -> None:
    load(engine, "a", "one")
    load(engine, "b", "two")
    with pytest.raises(TooManyAdapters):
        load(engine, "c", "three")
    with pytest.raises(InvalidAdapter, match="adapter_config"):
        load(engine, "a", "broken")
    assert ask(engine, "a")[0] == next_token_with("one")


def test_a_listing_has_the_content_of_each_name(engine: Engine, runner: GatedRunner) -> None:
    load(engine, "law", "one")
    load(engine, "court", "one")
    ask(engine, "law")
    ask(engine, "")
    listed = engine.adapters.listing().result(PATIENCE_S)
    assert [(each.name, each.digest, each.cached_tokens, each.num_unfinished) for each in listed] == [
        ("law", "one", 20, 0),
        ("court", "one", 20, 0),
    ]
    assert all(each.is_on_device and not each.is_draining and each.rank == 8 for each in listed)
    assert engine.adapters.names_of("one") == ("law", "court")


def test_an_engine_without_adapters_loads_none(runner: GatedRunner) -> None:
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), EngineConfig())
    with pytest.raises(SwitchedOff, match="max_adapters above 0"):
        engine.adapters.load("law", "one")
    with pytest.raises(UnknownAdapter):
        engine.prefill(params(PROMPT, adapter="law"))


def test_the_engine_serves_requests_while_an_adapter_is_read(engine: Engine, device: FakeDevice) -> None:
    device.gate.clear()
    future = engine.adapters.load("law", "one")
    assert ask(engine, "")[1:] == (0, "COLD")
    assert not future.done()
    device.gate.set()
    future.result(PATIENCE_S)
    assert ask(engine, "law") == (next_token_with("one"), 0, "COLD")


def test_loads_continue_if_their_callers_disconnect(engine: Engine, device: FakeDevice) -> None:
    device.gate.clear()
    loads = [engine.adapters.load(name, f"/{name}") for name in ("one", "two")]
    for future in loads:
        future.cancel()
    device.gate.set()
    wait_until(lambda: [each.name for each in engine.adapters.loaded()] == ["one", "two"])


def test_too_many_unfinished_loads_are_refused_even_if_their_callers_disconnected(
    engine: Engine, device: FakeDevice
) -> None:
    device.gate.clear()
    *abandoned, last = (engine.adapters.load("law", digest) for digest in ("one", "broken", "two", "one"))
    for future in abandoned:
        future.cancel()
    with pytest.raises(QueueFull, match=r"^adapters: expected at most 4 unfinished loads, got one more$"):
        engine.adapters.load("tax", "two")
    device.gate.set()
    last.result(PATIENCE_S)
    for digest in ("two", "one") * 3:
        load(engine, "tax", digest)
    assert [(each.name, each.digest) for each in engine.adapters.loaded()] == [("law", "one"), ("tax", "one")]


def test_a_load_that_waits_is_cancelled_when_the_engine_stops(runner: GatedRunner, device: FakeDevice) -> None:
    engine = Engine(runner, PrefixCache(NUM_BLOCKS, BLOCK_SIZE), EngineConfig(), adapters=device.source(2))
    engine.start()
    device.gate.clear()
    reading, waiting = (engine.adapters.load(name, f"/{name}") for name in ("one", "two"))
    engine.stop()
    assert waiting.cancelled()
    device.gate.set()
    assert isinstance(reading.exception(PATIENCE_S), Draining)


def test_roots_are_freed_in_slices(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cache.purge._MAX_REMOVED", 1)
    load(engine, "law", "one")
    load(engine, "tax", "two")
    for start in range(0, 30, 10):
        ask(engine, "law", range(start, start + 8))
        ask(engine, "tax", range(start, start + 8))
    engine.adapters.unload("law").result(PATIENCE_S)
    engine.adapters.unload("tax").result(PATIENCE_S)
    wait_until_all_free(engine)
    engine.check().result(PATIENCE_S)


@pytest.mark.parametrize("tenant", RESERVED_TENANTS)
def test_no_caller_has_a_reserved_name(engine: Engine, tenant: str) -> None:
    def probe(prompt: PrefillParams) -> object:
        return engine.probe(prompt.tokens, prompt.caller)

    for call in (engine.prefill, probe):
        with pytest.raises(InvalidRequest, match=f"^tenant: expected any name but {re.escape(tenant)}"):
            call(params(PROMPT, tenant=tenant))


def test_a_prompt_may_publish_nothing_or_read_nothing(engine: Engine) -> None:
    load(engine, "law", "one")
    assert ask(engine, "law", write_cache=False) == (next_token_with("one"), 0, "COLD")
    wait_until_all_free(engine)
    assert ask(engine, "law") == (next_token_with("one"), 0, "COLD")
    assert ask(engine, "law", read_cache=False) == (next_token_with("one"), 0, "READ_DISABLED")
    assert ask(engine, "law") == (next_token_with("one"), 19, "NONE")


class TestInvoked:
    """Adapters that begin at the last occurrence of their invocation tokens."""

    def test_a_prompt_that_does_not_invoke_its_adapter_is_the_base_models(self, engine: Engine) -> None:
        load(engine, "law", "one+99")
        ask(engine, "")
        assert ask(engine, "law") == (next_token_with(""), 19, "NONE")
        assert engine.adapters.loaded()[0].num_unfinished == 0

    def test_tokens_before_the_invocation_are_shared_with_the_base_model_to_the_token(self, engine: Engine) -> None:
        load(engine, "law", "one+10")
        ask(engine, "")
        assert ask(engine, "law") == (next_token_with("one"), 10, "DIVERGED")
        longer = [*range(30, 40), *range(20)]
        ask(engine, "law", longer)
        assert ask(engine, "", longer) == (next_token_with("", longer), 20, "DIVERGED")

    def test_adapters_share_the_tokens_before_the_invocation(self, engine: Engine) -> None:
        load(engine, "law", "one+10")
        load(engine, "tax", "two+10")
        ask(engine, "law")
        assert ask(engine, "tax") == (next_token_with("two"), 10, "DIVERGED")
        assert ask(engine, "law") == (next_token_with("one"), 19, "NONE")
        assert ask(engine, "tax") == (next_token_with("two"), 19, "NONE")

    def test_tokens_after_one_invocation_are_the_base_models_before_the_next(self, engine: Engine) -> None:
        load(engine, "law", "one+10")
        assert ask(engine, "law") == (next_token_with("one"), 0, "COLD")
        assert ask(engine, "law", range(25)) == (next_token_with("one", range(25)), 20, "DIVERGED")
        later = [*range(20), 10, 3, 4]  # the adapter begins ten tokens later, so 10 to 19 are the base model's here
        assert ask(engine, "law", later) == (next_token_with("one", later), 10, "DIVERGED")
        assert ask(engine, "law", later) == (next_token_with("one", later), 22, "NONE")
        assert ask(engine, "") == (next_token_with(""), 19, "NONE")

    def test_generated_tokens_are_matched_by_the_same_adapter_only(self, engine: Engine) -> None:
        load(engine, "law", "one+10")
        turn = engine.generate(params(PROMPT, adapter="law"), Sampling(max_new_tokens=6), lambda _: None)
        ids = [*PROMPT, *turn.result(PATIENCE_S).token_ids]
        assert 10 not in ids[20:], "the answer must not contain another invocation"
        assert ask(engine, "law", [*ids, 1])[1] == 25
        assert ask(engine, "", [*ids, 1])[1] == 10

    def test_tokens_that_an_adapter_computed_are_purged_with_it_and_those_before_stay(
        self, engine: Engine, device: FakeDevice
    ) -> None:
        load(engine, "law", "one+10")
        for ids in (range(20), [*range(20), 10, 3, 4]):
            ask(engine, "law", ids)
        assert engine.adapters.listing().result(PATIENCE_S)[0].cached_tokens == 10 + 3  # after the invocations
        load(engine, "law", "two+10")
        wait_until(lambda: device.held == {"two"})
        assert ask(engine, "law") == (next_token_with("two"), 10, "ADAPTER_CHANGED")
        assert ask(engine, "") == (next_token_with(""), 19, "NONE")
        engine.adapters.unload("law").result(PATIENCE_S)
        engine.purge().result(PATIENCE_S)
        wait_until_all_free(engine)

    def test_content_that_is_loaded_again_matches_what_a_held_lease_kept(self, engine: Engine) -> None:
        load(engine, "law", "one+10")
        held = engine.prefill(params(PROMPT, adapter="law", hold_lease=True)).result(PATIENCE_S).held_lease
        engine.adapters.unload("law").result(PATIENCE_S)
        load(engine, "law", "two+10")
        assert ask(engine, "law") == (next_token_with("two"), 10, "ADAPTER_CHANGED")
        load(engine, "law", "one+10")
        assert ask(engine, "law")[:2] == (next_token_with("one"), 19)
        assert held is not None
        engine.release(held.lease_id).result(PATIENCE_S)
        engine.check().result(PATIENCE_S)

    def test_a_purge_of_an_invoked_adapter_purges_the_trees_that_contain_its_tokens(self, engine: Engine) -> None:
        load(engine, "law", "one+10")
        ask(engine, "law")
        ask(engine, "", range(40, 60))
        ask(engine, "law", range(50, 70), tenant="other")  # does not invoke the adapter
        engine.purge(adapter="law").result(PATIENCE_S)
        assert ask(engine, "law")[1] == ask(engine, "", range(40, 60))[1] == 0
        assert ask(engine, "", range(50, 70), tenant="other")[1] == 19

    def test_a_purge_of_an_invoked_adapter_stops_running_requests_from_publishing(
        self, engine: Engine, runner: GatedRunner
    ) -> None:
        load(engine, "law", "one+10")
        runner.gate.clear()
        runner.entered.clear()
        ids = [20, 10, *([30] * 90)]  # computed in two steps, of 64 tokens at most
        running = engine.prefill(params(ids, adapter="law"))
        assert runner.entered.wait(PATIENCE_S)
        purged = engine.purge(adapter="law")
        runner.gate.set()
        purged.result(PATIENCE_S)
        assert running.result(PATIENCE_S).usage.written_tokens <= 64
        assert ask(engine, "law", ids)[1] == 0

    def test_a_retention_applies_to_its_prompt(self, engine: Engine) -> None:
        load(engine, "law", "one+10")
        ask(engine, "law")
        grant = engine.retain(tokens(PROMPT), Retention(priority=90), Caller(adapter="law")).result(PATIENCE_S).grant
        assert grant.granted_tokens == 20

    def test_segments_name_the_adapter_that_computed_their_end(self, engine: Engine) -> None:
        load(engine, "law", "one+10")
        ask(engine, "law")
        ask(engine, "")
        page = engine.segments.page(0, None, 100).result(PATIENCE_S)
        assert {each.namespace.adapter for each in page.segments} == {"", "one"}
