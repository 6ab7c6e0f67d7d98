"""Namespaces are isolated from each other whatever their names are, even if all hashes collide."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.public_prefixes import PublicPrefixes, PublicRoot
from radixkv.events.block_identity import Identities
from radixkv.invocation import Invocation, InvocationMarks
from radixkv.namespace import Namespace
from radixkv.service.server.opaque_ids import NamespaceIds
from tests.cache.walk.collision_walk import NAMESPACES, WANTED, WRONG, CollisionWalk, every_hash_collides
from tests.engine.simulation.engine_script import make_world
from tests.engine.simulation.engine_walk import walk_seed
from tests.fakes import publish, spell


@pytest.fixture
def colliding_hashes() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # steps fail on purpose
    with every_hash_collides():
        yield
    logging.disable(logging.NOTSET)


def test_no_two_of_thousands_of_names_are_the_same_namespace() -> None:
    assert len(set(NAMESPACES)) == len(NAMESPACES) > 3000
    assert len({namespace.seed for namespace in NAMESPACES}) == len(NAMESPACES)
    identities, ids = Identities(), NamespaceIds()
    of_one_model = [namespace for namespace in NAMESPACES if namespace.model == "model"]  # as in one process
    assert len({identities.of(namespace) for namespace in of_one_model}) == len(of_one_model)
    assert len({ids.of(namespace) for namespace in NAMESPACES}) == len(NAMESPACES)


def test_no_namespace_finds_the_tokens_of_thousands_of_others() -> None:
    cache = PrefixCache(2 * len(NAMESPACES), 4)
    for namespace in NAMESPACES[::7]:
        publish(cache, "abcdef", namespace)
    cached_tokens = [cache.match(namespace, spell("abcdefgh")).cached_tokens for namespace in NAMESPACES]
    assert cached_tokens == [0 if number % 7 else 6 for number in range(len(NAMESPACES))]


def walk_seeds(num_operations: int, seeds: range) -> Counter[str]:
    events: Counter[str] = Counter()
    for seed in seeds:
        walk = CollisionWalk(seed)
        walk.run(num_operations)
        events.update(walk.events)
    return events


@pytest.mark.long
@pytest.mark.usefixtures("colliding_hashes")
def test_nothing_is_reused_across_namespaces_while_every_hash_collides() -> None:
    events = walk_seeds(7_000, range(2))
    assert {each: events[each] for each in WRONG if events[each]} == {}
    assert {each for each in WANTED if not events[each]} == set()


@pytest.mark.slow
@pytest.mark.usefixtures("colliding_hashes")
def test_nothing_is_reused_across_namespaces_in_a_million_operations() -> None:
    events = walk_seeds(50_000, range(20))
    assert {each: events[each] for each in WRONG if events[each]} == {}


@pytest.mark.usefixtures("colliding_hashes")
def test_an_engine_answers_each_request_as_if_it_were_alone_while_every_hash_collides() -> None:
    events: Counter[str] = Counter()
    for seed in range(1, 20):
        # Worlds with `computes_once` are left out: while all hashes are equal, requests find only one leader.
        if not make_world(seed).computes_once:
            events += walk_seed(seed)
    assert events["adapters changed"] > 0
    assert events["follows"] > 0


def test_a_walk_detects_a_cache_that_confuses_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "radixkv.cache.namespace_trees.NamespaceTrees.get", lambda self, _: next(iter(self.values()), None)
    )
    walk = CollisionWalk(0)
    for _ in range(200):
        walk._match()
        walk._prefill()
        if walk.events["cross-namespace reuses"]:
            return
    pytest.fail("expected a reuse across namespaces, got none")


def _find_first_wrong_event(num_operations: int = 3_000) -> str:
    """Walk until an event of `WRONG` happens. Returns the event; empty if none happens."""
    walk = CollisionWalk(0)
    for _ in range(num_operations // 100):
        walk.perform(100)
        for event in WRONG:
            if walk.events[event]:
                return event
    return ""


def test_a_walk_detects_a_tree_below_a_public_prefix_that_tenants_share(monkeypatch: pytest.MonkeyPatch) -> None:
    roots = PublicPrefixes.roots

    def shared_roots(public: PublicPrefixes, namespace: Namespace, tokens: bytes) -> Iterator[PublicRoot]:
        for root in roots(public, namespace, tokens):
            yield root._replace(namespace=root.namespace._replace(tenant="", salt=""))

    monkeypatch.setattr(PublicPrefixes, "roots", shared_roots)
    assert _find_first_wrong_event() == "cross-namespace reuses"


def test_a_walk_detects_a_public_prefix_that_serves_other_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PublicPrefixes, "_key", lambda _, namespace, tokens: (namespace.model, "", tokens[:16]))
    assert _find_first_wrong_event() == "cross-namespace reuses"


def test_a_walk_detects_an_adapter_whose_tokens_have_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InvocationMarks, "invocation", lambda _, digest, start: Invocation(digest, start, 1 << 20))
    assert _find_first_wrong_event() == "cross-namespace reuses"
