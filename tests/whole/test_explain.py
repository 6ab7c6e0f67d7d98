"""A server with the embedded model, its tokenizer and the real cache explains why prompts are not reused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radixkv.service.client import Client, DifferenceKind, MissReason, NotFound, ResourceExhausted
from tests.explain.shapes import SHAPES
from tests.patience import PATIENCE_S
from tests.whole.forked_server import serving


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        serving("--set", "tenants.limited.max_calls_per_s=0.001") as (_, address),
        Client(address, timeout_s=PATIENCE_S) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def _empty_cache(client: Client) -> None:
    client.purge(everything=True)


@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_has_the_same_explanation_before_and_after_it_is_computed(client: Client, name: str) -> None:
    prompt, cached, kind = SHAPES[name]
    client.prefill(cached, tenant="acme")
    before = client.explain(prompt, tenant="acme")
    usage = client.prefill(prompt, tenant="acme").usage
    assert (before.cached_tokens, before.computed_tokens) == (usage.cached_tokens, usage.computed_tokens)
    assert before.left_at_token == usage.cached_tokens
    assert before.difference.kind == DifferenceKind.Value(kind.value)
    after = client.explain(prompt, tenant="acme")
    assert (after.miss_reason, after.cached_tokens) == (MissReason.NONE, after.prompt_tokens - 1)
    assert after.left_at_token == before.left_at_token
    assert (after.difference.kind, after.difference.lost_tokens) == (
        before.difference.kind,
        before.difference.lost_tokens,
    )
    assert before.HasField("computed_s") or usage.computed_tokens < 128


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape[2].value != "UNCLASSIFIED"])
def test_lost_tokens_are_reused_if_the_difference_is_replaced_by_the_cached_tokens(client: Client, name: str) -> None:
    encode = client.tokenizer().encode
    prompt, cached = (encode(text) for text in SHAPES[name][:2])
    client.prefill(cached)
    explanation = client.explain(prompt)
    difference, start = explanation.difference, explanation.left_at_token
    end_in_cached = start + difference.branch_span_tokens
    end_in_prompt = start + difference.prompt_span_tokens
    corrected_prompt = cached[:end_in_cached] + prompt[end_in_prompt:]
    assert difference.lost_tokens >= 32
    num_reusable = min(end_in_cached + difference.lost_tokens, len(corrected_prompt) - 1)
    assert client.probe(corrected_prompt).cached_tokens == num_reusable


def test_a_prompt_that_was_reused_has_nothing_to_explain(client: Client) -> None:
    prompt, cached, _ = SHAPES["ISO timestamp"]
    for text in (cached, prompt, prompt):
        client.prefill(text)
    explanation = client.explain(prompt)
    assert (explanation.left_at_token, explanation.computed_tokens) == (explanation.prompt_tokens, 1)
    assert not explanation.HasField("difference")


def test_the_next_turn_of_a_conversation_has_nothing_to_explain(client: Client) -> None:
    turn = [*range(40, 140)]
    answer = [token_id for chunk in client.generate(turn, max_new_tokens=20) for token_id in chunk.token_ids]
    explanation = client.explain([*turn, *answer, 7, 8, 9])
    assert explanation.left_at_token >= len(turn) + len(answer) - 1
    assert not explanation.HasField("difference")


def test_an_unknown_adapter_is_not_found(client: Client) -> None:
    with pytest.raises(NotFound):
        client.explain([1, 2, 3], adapter="none")


def test_explanations_count_against_the_rate_of_a_tenant(client: Client) -> None:
    client.explain([1, 2, 3], tenant="limited")
    with pytest.raises(ResourceExhausted):
        client.explain([1, 2, 3], tenant="limited")


def test_an_explanation_changes_nothing(client: Client) -> None:
    prompt, cached, _ = SHAPES["ISO timestamp"]
    client.prefill(cached)

    def visible_state() -> list[object]:
        segments = [(each.num_uses, each.start_token, each.num_tokens) for each in client.segments().segments]
        stats = client.stats()
        return [segments, stats.tokens, stats.blocks, stats.tenants, stats.evicted_blocks]

    before = visible_state()
    client.explain(prompt)
    assert visible_state() == before
