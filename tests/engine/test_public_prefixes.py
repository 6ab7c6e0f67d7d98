"""Public prefixes of an engine over a fake runner, whose K and V depend on the tokens and the adapter."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from radixkv.api.public_prefixes import PublicPrefixStatus
from radixkv.api.result import GeneratedTokens
from radixkv.api.sampling import Sampling
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.errors import (
    Draining,
    InvalidRequest,
    OutOfBlocks,
    PromptTooLong,
    RadixKVError,
    UnknownAdapter,
    UnknownPublicPrefix,
)
from radixkv.namespace import PUBLIC_TENANT
from tests.adapter_doubles import FakeDevice
from tests.engine.gated_runner import BLOCK_SIZE, NUM_BLOCKS, GatedRunner, params
from tests.fake_runner import FakeRunner, next_token, tokens
from tests.patience import PATIENCE_S, wait_until

SYSTEM = range(3 * BLOCK_SIZE + 1)


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner()


@pytest.fixture
def engine(runner: GatedRunner) -> Iterator[Engine]:
    yield from run_engine(runner, max_step_tokens=64)


@pytest.fixture
def engine_with_small_steps(runner: GatedRunner) -> Iterator[Engine]:
    """An engine that computes a prefix in several steps, and runs calls between them."""
    yield from run_engine(runner, max_step_tokens=BLOCK_SIZE)


def run_engine(runner: GatedRunner, max_step_tokens: int) -> Iterator[Engine]:
    cache = PrefixCache(NUM_BLOCKS, BLOCK_SIZE, max_public_blocks=NUM_BLOCKS // 2)
    engine = Engine(runner, cache, EngineConfig(max_step_tokens=max_step_tokens), adapters=FakeDevice().source(2))
    engine.start()
    yield engine
    runner.gate.set()
    engine.stop()


def register(engine: Engine, name: str = "p", ids: range = SYSTEM, adapter: str = "") -> PublicPrefixStatus:
    return engine.public.register(name, tokens(ids), adapter).result(PATIENCE_S)


def ask(engine: Engine, tenant: str, ids: list[int], **fields: object) -> tuple[int, int]:
    """Prefill, check the answer, and return the number of cached tokens, and how many of these were public."""
    result = engine.prefill(params(ids, tenant=tenant, **fields)).result(PATIENCE_S)
    assert result.next_token_id == next_token(tokens(ids), str(fields.get("adapter", "")))
    engine.check().result(PATIENCE_S)
    return result.usage.cached_tokens, result.usage.public_tokens


def listed(engine: Engine) -> list[str]:
    """Return the names of the public prefixes."""
    return [each.name for each in engine.public.listing().result(PATIENCE_S)]


@pytest.mark.parametrize("num_prompt_tokens", [32, 21, 24])
def test_a_prompt_and_its_answer_fit_below_a_prefix_that_its_tenant_had_cached_before(num_prompt_tokens: int) -> None:
    cache = PrefixCache(10, BLOCK_SIZE, max_public_blocks=4)
    engine = Engine(FakeRunner(10, BLOCK_SIZE), cache, EngineConfig(max_step_tokens=64))
    engine.start()
    prompt = list(range(32))
    ask(engine, "acme", prompt[: 5 * BLOCK_SIZE])
    register(engine, ids=range(4 * BLOCK_SIZE))
    sampling = Sampling(9 * BLOCK_SIZE - num_prompt_tokens, ignore_eos=True)  # it needs a tenth block
    generation = engine.generate(params(prompt[:num_prompt_tokens], tenant="acme"), sampling, lambda chunk: None)
    generation.result(PATIENCE_S)
    assert ask(engine, "acme", prompt)[1] == 4 * BLOCK_SIZE
    engine.stop()


def test_a_registered_prefix_is_computed_once_and_used_by_all(engine: Engine, runner: GatedRunner) -> None:
    status = register(engine)
    assert status == PublicPrefixStatus("p", "", len(SYSTEM), 4, is_computed=True, num_users=0, num_uses=0)
    for tenant in ("acme", "other"):
        assert ask(engine, tenant, [*SYSTEM, 90, 91]) == (len(SYSTEM), len(SYSTEM))
        assert ask(engine, tenant, [*SYSTEM, 90, 91, 92]) == (len(SYSTEM) + 2, 3 * BLOCK_SIZE)
    assert engine.public.listing().result(PATIENCE_S)[0].num_uses == 4
    stats = engine.stats().result(PATIENCE_S)
    assert stats.tokens.computed == len(SYSTEM) + 2 * 2 + 2 * 1


def test_a_prompt_without_room_next_to_the_prefix_does_not_wait_for_others(engine: Engine, runner: GatedRunner) -> None:
    register(engine)
    ended: list[str] = []
    runner.gate.clear()
    runner.entered.clear()
    generation = engine.generate(params([90]), Sampling(max_new_tokens=20, ignore_eos=True), lambda chunk: None)
    generation.add_done_callback(lambda future: ended.append("generation"))
    assert runner.entered.wait(PATIENCE_S)
    prompt = [*range(50, 50 + (NUM_BLOCKS - 4) * BLOCK_SIZE + 1)]
    refused = engine.prefill(params(prompt))
    refused.add_done_callback(lambda future: ended.append("prompt"))
    runner.gate.set()
    assert isinstance(refused.exception(PATIENCE_S), OutOfBlocks)
    generation.result(PATIENCE_S)
    assert ended == ["prompt", "generation"]


def test_a_prompt_that_shares_the_prefix_waits_for_the_remaining_blocks(engine: Engine, runner: GatedRunner) -> None:
    register(engine)
    runner.gate.clear()
    runner.entered.clear()
    generation = engine.generate(params([90]), Sampling(max_new_tokens=20, ignore_eos=True), lambda chunk: None)
    assert runner.entered.wait(PATIENCE_S)
    prompt = [*SYSTEM, *range(51, 50 + (NUM_BLOCKS - 4) * BLOCK_SIZE)]
    waiting = engine.prefill(params(prompt))
    runner.gate.set()
    assert waiting.result(PATIENCE_S).usage.public_tokens == len(SYSTEM)
    assert generation.done()


def test_a_generation_continues_below_the_prefix(engine: Engine) -> None:
    register(engine)
    chunks: list[GeneratedTokens] = []
    request = params([*SYSTEM, 90], tenant="acme")
    result = engine.generate(request, Sampling(max_new_tokens=20, ignore_eos=True), chunks.append).result(PATIENCE_S)
    assert result.usage.public_tokens == len(SYSTEM)
    ids = [*SYSTEM, 90]
    for token_id in result.token_ids:
        assert token_id == next_token(tokens(ids))
        ids.append(token_id)
    assert ask(engine, "acme", [*ids, 1])[0] >= len(ids) - 1
    assert ask(engine, "other", [*ids, 1]) == (len(SYSTEM), len(SYSTEM))


def test_a_held_lease_lists_the_blocks_of_the_prefix_and_keeps_it(engine: Engine) -> None:
    register(engine)
    result = engine.prefill(params([*SYSTEM, 90, 91], tenant="acme", hold_lease=True)).result(PATIENCE_S)
    assert result.held_lease is not None
    assert len(result.held_lease.block_table) == 4
    assert engine.public.unregister("p").result(PATIENCE_S).num_users == 1
    engine.check().result(PATIENCE_S)
    engine.release(result.held_lease.lease_id, params(SYSTEM, tenant="acme").caller).result(PATIENCE_S)
    engine.check().result(PATIENCE_S)
    assert ask(engine, "other", [*SYSTEM, 90]) == (0, 0)


def test_a_prefix_belongs_to_its_adapter(engine: Engine) -> None:
    engine.adapters.load("law", "one").result(PATIENCE_S)
    assert register(engine, adapter="law").adapter == "one"
    assert ask(engine, "acme", [*SYSTEM, 90]) == (0, 0)
    result = engine.prefill(params([*SYSTEM, 90], tenant="acme", adapter="law")).result(PATIENCE_S)
    assert result.next_token_id == next_token(tokens([*SYSTEM, 90]), "one")
    assert result.usage.public_tokens == len(SYSTEM)
    engine.adapters.unload("law").result(PATIENCE_S)
    wait_until(lambda: not listed(engine))
    engine.check().result(PATIENCE_S)


@pytest.mark.parametrize(
    ("name", "ids", "adapter", "error"),
    [
        ("", SYSTEM, "", InvalidRequest),
        ("p", range(BLOCK_SIZE - 1), "", InvalidRequest),
        ("p", range(0), "", InvalidRequest),
        ("p", SYSTEM, "unknown", UnknownAdapter),
        ("p", range((NUM_BLOCKS // 2) * BLOCK_SIZE + 1), "", OutOfBlocks),
        ("p", range(NUM_BLOCKS * BLOCK_SIZE + 1), "", PromptTooLong),
    ],
)
def test_invalid_public_prefixes_are_refused(
    engine: Engine, name: str, ids: range, adapter: str, error: type[RadixKVError]
) -> None:
    with pytest.raises(error):
        register(engine, name, ids, adapter)
    assert listed(engine) == []
    assert ask(engine, "acme", [*SYSTEM, 90]) == (0, 0)


def test_a_name_is_unique_and_can_be_reused_later(engine: Engine) -> None:
    register(engine)
    with pytest.raises(InvalidRequest, match=r"^name: expected a new name, got that of a registered public prefix"):
        register(engine)
    engine.public.unregister("p").result(PATIENCE_S)
    with pytest.raises(UnknownPublicPrefix):
        engine.public.unregister("p").result(PATIENCE_S)
    assert register(engine).is_computed


def test_no_caller_can_be_the_owner_of_public_prefixes(engine: Engine) -> None:
    register(engine)
    with pytest.raises(
        InvalidRequest,
        match=r"^tenant: expected any name but \(public\), which is reserved for the owner of public prefixes",
    ):
        engine.prefill(params(SYSTEM, tenant=PUBLIC_TENANT))
    engine.purge(tenant=PUBLIC_TENANT).result(PATIENCE_S)
    assert ask(engine, "acme", [*SYSTEM, 90])[1] == len(SYSTEM)


def test_a_prefix_that_is_unregistered_while_it_is_computed_is_never_matched(
    engine_with_small_steps: Engine, runner: GatedRunner
) -> None:
    engine = engine_with_small_steps
    runner.gate.clear()
    registration = engine.public.register("p", tokens(SYSTEM))
    assert runner.entered.wait(PATIENCE_S)
    unregistered = engine.public.unregister("p")
    runner.gate.set()
    with pytest.raises(UnknownPublicPrefix, match="expected a registered public prefix"):
        registration.result(PATIENCE_S)
    assert not unregistered.result(PATIENCE_S).is_computed
    assert ask(engine, "acme", [*SYSTEM, 90]) == (0, 0)
    assert engine.load().result(PATIENCE_S).blocks.published == 4  # the four blocks of the prompt above


def test_a_prefix_that_is_unregistered_before_it_is_computed_counts_until_its_request_ends(
    engine: Engine, runner: GatedRunner
) -> None:
    runner.gate.clear()
    engine.prefill(params(range(100, 110)))
    assert runner.entered.wait(PATIENCE_S)  # all following calls are run after this step
    registration = engine.public.register("p", tokens(SYSTEM))
    engine.public.unregister("p")
    largest_ids = range((NUM_BLOCKS // 2 - 3) * BLOCK_SIZE)
    refused = engine.public.register("q", tokens(largest_ids))
    runner.gate.set()
    with pytest.raises(OutOfBlocks, match=r"^public prefixes: expected at most 16 blocks"):
        refused.result(PATIENCE_S)
    with pytest.raises(UnknownPublicPrefix):
        registration.result(PATIENCE_S)
    assert register(engine, "q", largest_ids).is_computed


def test_a_caller_that_disconnects_does_not_end_the_registration(engine: Engine, runner: GatedRunner) -> None:
    runner.gate.clear()
    registration = engine.public.register("p", tokens(SYSTEM))
    assert registration.cancel()
    runner.gate.set()
    wait_until(lambda: listed(engine) == ["p"])
    wait_until(lambda: engine.public.listing().result(PATIENCE_S)[0].is_computed)
    assert ask(engine, "acme", [*SYSTEM, 90])[1] == len(SYSTEM)


def test_an_engine_that_stops_fails_pending_registrations(engine: Engine, runner: GatedRunner) -> None:
    runner.gate.clear()
    registration = engine.public.register("p", tokens(SYSTEM))
    assert runner.entered.wait(PATIENCE_S)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    with pytest.raises(Draining):
        registration.result(PATIENCE_S)
    runner.gate.set()
    stopping.join(PATIENCE_S)
    with pytest.raises(Draining):
        engine.public.register("q", tokens(SYSTEM)).result(PATIENCE_S)
