"""Hints: which tokens an action addresses, and what its outcome says. Blocks have four tokens."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.api.awaits import Awaits
from radixkv.api.hints import HintAction, HintOutcome, HintStatus
from radixkv.cache import prefix_cache
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.purge import all_slices
from radixkv.engine import hints
from radixkv.engine.hints import HintApplier
from radixkv.errors import UnknownAdapter
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace, PromptKey
from tests.fakes import FakeClock, cached, publish, spell

PLAIN = Namespace("model", "acme")
LORA = Namespace("model", "acme", "lora")
SALTED = Namespace("model", "acme", "lora", "salt")
OTHER = Namespace("model", "other", "lora")
TEXT = "aaaabbbbcc"  # one token per character, in three blocks


class HintedCache:
    """A cache with one text in several namespaces, and hints of the tenant acme."""

    def __init__(self, *, has_tiers: bool = True) -> None:
        self.cache = PrefixCache(64, 4, clock=FakeClock(), marks=InvocationMarks())
        for namespace in (PLAIN, LORA, SALTED, OTHER):
            publish(self.cache, TEXT, namespace)
        self.hints = HintApplier(self.cache, self.cache.retain, (lambda *_: 0) if has_tiers else None)

    def apply(self, action_type: str, text: str = "", namespace: Namespace = PLAIN, **payload: Any) -> HintOutcome:
        """Apply one action, whose hint names the prompt `text` if this is not empty."""
        prompt = PromptKey(namespace, spell(text)) if text else None
        actions = [HintAction("1", action_type, "1.0", payload)]
        (outcome,) = all_slices(self.hints.apply_in_slices(actions, "acme", prompt, digest_of))
        self.cache.check()
        return outcome

    def cached_namespaces(self) -> set[Namespace]:
        return {namespace for namespace in (PLAIN, LORA, SALTED, OTHER) if cached(self.cache, TEXT, namespace)}


def digest_of(name: str) -> str:
    """Resolve the name of an adapter, of which only "sql" is loaded."""
    if name not in ("", "sql"):
        raise UnknownAdapter("adapter: expected the name of a loaded adapter, got an unknown one")
    return "lora" if name else ""


@pytest.fixture
def hinted() -> HintedCache:
    return HintedCache()


@pytest.mark.parametrize("action_type", ["kv.release", "kv.evict", "kv.demote"])
@pytest.mark.parametrize(
    ("payload", "released"),
    [
        ({"adapter": "sql"}, {LORA, SALTED}),
        ({"adapter": "sql", "salt": ""}, {LORA}),
        ({"salt": "salt"}, {SALTED}),
        ({"adapter": ""}, {PLAIN}),
    ],
)
def test_an_action_may_address_an_adapter_or_a_salt(
    hinted: HintedCache, action_type: str, payload: dict[str, str], released: set[Namespace]
) -> None:
    outcome = hinted.apply(action_type, **payload)
    assert outcome == HintOutcome("1", HintStatus.ACCEPTED, "", 12 * len(released))  # in whole blocks
    assert hinted.cached_namespaces() == {PLAIN, LORA, SALTED, OTHER} - released
    assert hinted.cache.num_evicted_blocks == (3 * len(released) if action_type == "kv.demote" else 0)


def test_blocks_of_an_adapter_that_requests_use_stay(hinted: HintedCache) -> None:
    with hinted.cache.lease(LORA, spell(TEXT)):
        outcome = hinted.apply("kv.release", adapter="sql")
        assert outcome == HintOutcome("1", HintStatus.CLIPPED, "some tokens stay, because requests use them", 12)
        assert hinted.apply("kv.release", adapter="sql").status is HintStatus.REFUSED
        assert not hinted.apply("kv.release", adapter="sql").is_missing
    assert hinted.cached_namespaces() == {PLAIN, LORA, OTHER}


def test_retentions_of_an_adapter_are_bounded_like_others(hinted: HintedCache) -> None:
    outcome = hinted.apply("kv.retain", adapter="sql", priority=20)
    assert outcome == HintOutcome("1", HintStatus.ACCEPTED, "", 2 * len(TEXT))  # in LORA and in SALTED
    assert {node.priority for node in hinted.cache.nodes() if node.owner.namespace in (LORA, SALTED)} == {20}
    assert {node.priority for node in hinted.cache.nodes() if node.owner.namespace in (PLAIN, OTHER)} == {50}
    hinted.cache._retained.max_blocks = 3
    outcome = hinted.apply("kv.pin", adapter="sql", ttl_seconds=9)
    assert (outcome.status, outcome.tokens) == (HintStatus.CLIPPED, 10)
    assert outcome.reason == "10 tokens exceed the share of the cache that may be retained"
    assert hinted.cache.num_retained_blocks == 3


@pytest.mark.parametrize(
    ("action_type", "payload", "reason"),
    [
        ("kv.release", {"adapter": "unknown"}, "payload.adapter: expected the name of a loaded adapter"),
        ("kv.release", {"adapter": 7}, "payload.adapter: expected a string, got 7"),
        ("kv.release", {"adapter": "sql", "start": 4}, "payload.start: expected one of adapter, salt"),
        ("kv.release", {"adapter": "sql", "session_id": "s"}, "payload.session_id: expected one of adapter, salt"),
        (
            "kv.retain",
            {"salt": "salt", "priority": 60, "end": 4},
            "payload.end: expected one of adapter, salt, priority",
        ),
        ("kv.retain", {"salt": "salt"}, "payload.priority: it is required, 0 to 100"),
        ("kv.retain", {"salt": "salt", "priority": 101}, "payload: retention.priority: expected 0 to 100, got 101"),
        ("kv.pin", {"salt": "salt"}, "payload.ttl_seconds: it is required, because a pin must end"),
        ("kv.prefetch", {"adapter": "sql"}, "payload.adapter: kv.prefetch addresses a prompt or a session"),
        ("kv.await", {"salt": "x", "awaits": "user"}, "payload.salt: kv.await addresses a prompt or a session"),
        ("kv.share", {"adapter": "sql"}, "payload.adapter: kv.share addresses a prompt or a session"),
        ("kv.share", {"end": 11}, "payload.end: expected 1 to 10, got 11"),
        ("kv.share", {"end": 0}, "payload.end: expected 1 to 10, got 0"),
        ("kv.share", {"start": 0}, "payload.start: expected one of session_id, end"),
    ],
)
def test_an_action_that_is_wrong_is_refused_with_the_reason(
    hinted: HintedCache, action_type: str, payload: dict[str, Any], reason: str
) -> None:
    outcome = hinted.apply(action_type, TEXT, **payload)
    assert outcome.status is HintStatus.REFUSED
    assert outcome.reason.startswith(reason)
    assert not outcome.is_missing
    assert hinted.cached_namespaces() == {PLAIN, LORA, SALTED, OTHER}


def test_an_invoked_adapter_has_no_namespace(hinted: HintedCache) -> None:
    hinted.cache.marks.add("lora")
    outcome = hinted.apply("kv.release", adapter="sql")
    assert outcome.reason == "payload.adapter: it is invoked in prompts of the base model, so it has no namespace"


def test_the_hints_of_a_request_address_no_adapter(hinted: HintedCache) -> None:
    actions = [HintAction("1", "kv.release", "1.0", {"adapter": "sql"})]
    (outcome,) = hinted.hints.apply(actions, "acme", PromptKey(LORA, spell(TEXT)))
    assert outcome.reason == (
        "payload.adapter: the hints of a request address its prompt or a session; use the method Hint"
    )
    assert hinted.cached_namespaces() == {PLAIN, LORA, SALTED, OTHER}


def test_an_adapter_is_dropped_only_with_tiers_to_save_to() -> None:
    hinted = HintedCache(has_tiers=False)
    outcome = hinted.apply("kv.demote", adapter="sql")
    assert outcome.reason == "there are no tiers to save to; kv.release frees the blocks"
    assert hinted.cached_namespaces() == {PLAIN, LORA, SALTED, OTHER}


def test_steps_may_run_between_the_slices_of_an_action(hinted: HintedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "_MAX_CHANGED_NODES", 1)
    actions = [HintAction("1", "kv.retain", "1.0", {"adapter": "sql", "priority": 20})]
    slices = hinted.hints.apply_in_slices(actions, "acme", None, digest_of)
    next(slices)
    assert [node.priority for node in hinted.cache.nodes()].count(20) == 1
    assert hinted.cache.evict(64) == 12, "three blocks in each of four namespaces"
    (outcome,) = all_slices(slices)
    assert (outcome.status, outcome.tokens) == (HintStatus.ACCEPTED, 10)


def test_shared_tokens_belong_to_no_session(hinted: HintedCache) -> None:
    cache = hinted.cache
    with cache.lease(PLAIN, spell("xxxxyyyyzz"), session_id="s") as lease:
        lease.commit(10)
        lease.awaits = Awaits.TOOL
    assert hinted.apply("kv.share", "xxxxyyyyzz", end=3) == HintOutcome("1", HintStatus.ACCEPTED, "", 3)
    session = cache.sessions.get("acme", "s")
    assert session is not None
    assert session.num_blocks == 2
    outcome = hinted.apply("kv.share", "xxxxyyyyzzww")
    assert outcome == HintOutcome("1", HintStatus.CLIPPED, "2 tokens are not cached", 10)
    assert cache.sessions.get("acme", "s") is None
    assert hinted.apply("kv.share", session_id="s").is_missing


@pytest.mark.parametrize(
    ("action_type", "payload"), [("kv.retain", {"priority": 60}), ("kv.await", {"awaits": "tool"})]
)
def test_a_session_with_too_many_branches_is_changed_in_part(
    hinted: HintedCache, monkeypatch: pytest.MonkeyPatch, action_type: str, payload: dict[str, Any]
) -> None:
    monkeypatch.setattr(hints, "_MAX_ENDS", 2)
    for text in ("xxxxaaaa", "xxxxbbbb", "xxxxcccc"):
        with hinted.cache.lease(PLAIN, spell(text), session_id="s") as lease:
            lease.commit(8)
    outcome = hinted.apply(action_type, session_id="s", **payload)
    assert outcome.status is HintStatus.CLIPPED
    assert outcome.reason == "only 2 of the session's 3 branches are changed"


def test_a_session_shares_what_only_it_has_used(hinted: HintedCache) -> None:
    with hinted.cache.lease(PLAIN, spell("xxxxyyyy"), session_id="s") as lease:
        lease.commit(8)
    outcome = hinted.apply("kv.share", session_id="s", end=4)
    assert outcome.reason == "payload.end: expected none with a session, of which everything is shared"
    assert hinted.apply("kv.share", session_id="s") == HintOutcome("1", HintStatus.ACCEPTED, "", 8)
    assert hinted.cache.sessions.get("acme", "s") is None


@pytest.mark.parametrize(
    ("action_type", "payload"),
    [
        ("kv.release", {}),
        ("kv.demote", {}),
        ("kv.retain", {"priority": 60}),
        ("kv.share", {}),
        ("kv.await", {"awaits": "user"}),
        ("kv.release", {"session_id": "unknown"}),
        ("kv.release", {"salt": "unknown"}),
        ("kv.retain", {"salt": "unknown", "priority": 60}),
    ],
)
def test_an_outcome_says_that_nothing_is_cached(hinted: HintedCache, action_type: str, payload: dict[str, Any]) -> None:
    outcome = hinted.apply(action_type, "unknown", **payload)
    assert (outcome.status, outcome.tokens, outcome.is_missing) == (HintStatus.REFUSED, 0, True)
    assert outcome.reason
