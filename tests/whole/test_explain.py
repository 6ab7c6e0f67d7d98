"""Explanations of a whole server: the embedded model, its tokenizer and the real cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radixkv.service.client import Client, DifferenceKind, MissReason, NotFound, ResourceExhausted
from tests.explain.shapes import SHAPES
from tests.patience import PATIENCE_S
from tests.whole.forked_server import serving


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    limited = ("--set", "tenants.limited.max_calls_per_s=0.001")
    with serving(*limited) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
        yield client


@pytest.fixture(autouse=True)
def _empty(client: Client) -> None:
    client.purge(everything=True)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_explained_before_and_after_it_was_computed(client: Client, name: str) -> None:
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
def test_lost_tokens_are_reused_if_the_span_is_that_of_the_cached_prompt(client: Client, name: str) -> None:
    encode = client.tokenizer().encode
    prompt, cached = (encode(text) for text in SHAPES[name][:2])
    client.prefill(cached)
    found = client.explain(prompt)
    start, lost = found.left_at_token, found.difference.lost_tokens
    shared_end = start + found.difference.branch_span_tokens
    corrected = cached[:shared_end] + prompt[start + found.difference.prompt_span_tokens :]
    assert lost >= 32
    assert client.probe(corrected).cached_tokens == min(shared_end + lost, len(corrected) - 1)


def test_a_prompt_that_was_reused_has_nothing_to_explain(client: Client) -> None:
    prompt, cached, _ = SHAPES["ISO timestamp"]
    for text in (cached, prompt, prompt):
        client.prefill(text)
    found = client.explain(prompt)
    assert (found.left_at_token, found.computed_tokens) == (found.prompt_tokens, 1)
    assert not found.HasField("difference")


def test_the_next_turn_of_a_conversation_has_nothing_to_explain(client: Client) -> None:
    turn = [*range(40, 140)]
    answer = [each for part in client.generate(turn, max_new_tokens=20) for each in part.token_ids]
    found = client.explain([*turn, *answer, 7, 8, 9])
    assert found.left_at_token >= len(turn) + len(answer) - 1
    assert not found.HasField("difference")


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

    def seen() -> list[object]:
        segments = [(each.num_uses, each.start_token, each.num_tokens) for each in client.segments().segments]
        stats = client.stats()
        return [segments, stats.tokens, stats.blocks, stats.tenants, stats.evicted_blocks]

    before = seen()
    client.explain(prompt)
    assert seen() == before
