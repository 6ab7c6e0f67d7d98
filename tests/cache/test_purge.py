"""Forgetting whole namespaces, also while requests use them. Blocks are four tokens."""

import gc
from collections import Counter

import pytest

from radixkv.api.awaits import Awaits
from radixkv.api.retention import Retention
from radixkv.cache import sessions
from radixkv.cache.lease import Lease
from radixkv.cache.node import Node
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.purge import Purged, all_slices
from radixkv.errors import InvalidRequest
from radixkv.namespace import PUBLIC_TENANT, Namespace
from tests.fakes import FakeClock, cached, lease_text, publish, spell

PLAIN = Namespace("model")
TENANT = Namespace("model", "acme")
ADAPTER = Namespace("model", "acme", "lora")
SALT = Namespace("model", "acme", "lora", "salt")
ALL = (PLAIN, TENANT, ADAPTER, SALT)


def make_cache() -> PrefixCache:
    """Return a cache in which each namespace has four blocks: one that both prompts share, and their own ones."""
    cache = PrefixCache(64, 4, clock=FakeClock())
    for namespace in ALL:
        publish(cache, "aaaabbbbcc", namespace)
        publish(cache, "aaaaXXXX", namespace)
    return cache


def cached_namespaces(cache: PrefixCache) -> set[Namespace]:
    """Return the namespaces that have cached tokens, after a check of the cache."""
    cache.check()
    return {namespace for namespace in ALL if cached(cache, "aaaabbbbcc", namespace)}


@pytest.mark.parametrize(
    ("named", "purged"),
    [
        ({}, set(ALL)),
        ({"tenant": "acme"}, {TENANT, ADAPTER, SALT}),
        ({"tenant": "acme", "adapter": ""}, {TENANT}),
        ({"adapter": "lora"}, {ADAPTER, SALT}),
        ({"salt": ""}, {PLAIN, TENANT, ADAPTER}),
        ({"tenant": "acme", "adapter": "lora", "salt": "salt"}, {SALT}),
        ({"tenant": "unknown"}, set()),
    ],
)
def test_a_purge_removes_the_named_namespaces_and_no_others(named: dict[str, str], purged: set[Namespace]) -> None:
    cache = make_cache()
    assert cache.purge(**named) == Purged(4 * len(purged), 0)
    assert cached_namespaces(cache) == set(ALL) - purged
    assert cache.pool.num_free == 64 - 4 * (len(ALL) - len(purged))
    assert cache.tenants["acme"].num_cached_blocks == 4 * len({TENANT, ADAPTER, SALT} - purged)


def test_a_request_in_flight_keeps_its_blocks_and_publishes_nothing_more() -> None:
    cache = make_cache()
    lease = lease_text(cache, "aaaabbbbccDD", TENANT)
    reused = lease.block_ids[:2].tolist()
    assert cache.purge(tenant="acme", adapter="") == Purged(1, 3)
    assert cached_namespaces(cache) == set(ALL) - {TENANT}
    assert lease.commit(12) == 0
    assert cached_namespaces(cache) == set(ALL) - {TENANT}
    free_block_ids = cache.pool.acquire(cache.pool.num_free)
    assert set(reused).isdisjoint(free_block_ids.tolist())
    cache.pool.release(free_block_ids)
    lease.close()
    cache.check()
    assert cache.pool.num_leased == cache.num_pinned_blocks == 0


def test_a_request_that_had_found_nothing_publishes_nothing_either() -> None:
    cache = make_cache()
    with lease_text(cache, "ZZZZ", TENANT) as lease:
        cache.purge(tenant="acme")
        assert lease.commit(4) == 0
    cache.check()
    assert cached(cache, "ZZZZ", TENANT) == 0


def test_a_purged_namespace_can_be_filled_again_while_old_requests_run() -> None:
    cache = make_cache()
    with lease_text(cache, "aaaabbbbccD", TENANT) as old, lease_text(cache, "aaaaXXXXY", TENANT):
        cache.purge(tenant="acme")
        blocks = publish(cache, "aaaabbbbcc", TENANT)
        assert set(blocks).isdisjoint(old.block_ids.tolist())
        cache.check()
        assert cached(cache, "aaaabbbbcc", TENANT) == 10
    cache.check()
    assert cached(cache, "aaaabbbbcc", TENANT) == 10


def test_a_block_replaced_under_a_lease_is_freed_once() -> None:
    cache = make_cache()
    with lease_text(cache, "aaaabbbbccY", TENANT):
        with lease_text(cache, "aaaabbbbccdd", TENANT) as grown:
            grown.commit(12)
        cache.purge(tenant="acme")
        cache.check()
    cache.check()
    assert cache.pool.num_leased == 0


def test_purged_retained_blocks_no_longer_count_as_retained() -> None:
    cache = make_cache()
    cache.retain(TENANT, spell("aaaabbbbcc"), Retention(90, ttl_s=60))
    cache.retain(PLAIN, spell("aaaa"), Retention(90))
    assert cache.num_retained_blocks == 4
    cache.purge(tenant="acme")
    cache.check()
    assert cache.num_retained_blocks == 1


class Untouchable(Namespace):
    """A namespace of another tenant, which a purge must not examine."""

    def is_among(self, tenant: str | None, adapter: str | None, salt: str | None) -> bool:
        raise AssertionError("a purge examined a namespace of another tenant")


def test_a_purge_examines_no_namespace_and_no_lease_of_another_tenant() -> None:
    cache = make_cache()
    other = Untouchable("model", "other")
    publish(cache, "aaaa", other)
    with lease_text(cache, "aaaab", other):
        assert cache.purge(tenant="unknown") == Purged(0, 0)
        assert cache.purge(tenant="acme") == Purged(12, 0)


def test_a_purge_examines_each_lease_at_most_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    num_accesses: Counter[str] = Counter()  # by the salt of the lease
    slot = Lease.__dict__["is_revoked"]

    def get_is_revoked(lease: Lease) -> bool:
        num_accesses[lease.namespace.salt] += 1
        return bool(slot.__get__(lease))

    def set_is_revoked(lease: Lease, value: bool) -> None:
        num_accesses[lease.namespace.salt] += 1
        slot.__set__(lease, value)

    cache = PrefixCache(256, 4, clock=FakeClock())
    namespaces = [Namespace("model", "acme", "", str(number)) for number in range(50)]
    leases = []
    for namespace in namespaces:
        publish(cache, "aaaabbbb", namespace)
        leases.append(lease_text(cache, "aaaabbbbc", namespace))
    monkeypatch.setattr(Lease, "is_revoked", property(get_is_revoked, set_is_revoked))
    assert cache.purge(tenant="acme") == Purged(0, 100)
    assert num_accesses == {namespace.salt: 2 for namespace in namespaces}
    num_accesses.clear()
    cache.purge(tenant="acme", adapter="", salt="7")
    assert num_accesses == {"7": 1}
    for lease in leases:
        lease.close()
    assert cache.leases._by_tenant == {}


def test_namespaces_that_are_in_use_are_purged_in_slices_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cache.purge._MAX_REMOVED", 3)
    cache = PrefixCache(64, 4, clock=FakeClock())
    leases = []
    for number in range(7):
        namespace = Namespace("model", "acme", "", str(number))
        publish(cache, "aaaabbbb", namespace)
        leases.append(lease_text(cache, "aaaabbbbc", namespace))
    num_remaining, purging = [], cache.purge_in_slices()
    while next(purging, "over") is None:
        cache.check()
        num_remaining.append(cache.num_namespaces)
    assert num_remaining == [4, 1]
    for lease in leases:
        lease.close()
    assert cache.pool.num_free == 64


@pytest.mark.parametrize(
    ("named", "revoked"),
    [
        ({}, set(ALL)),
        ({"tenant": "acme"}, {TENANT, ADAPTER, SALT}),
        ({"tenant": "acme", "adapter": ""}, {TENANT}),
        ({"adapter": "lora", "salt": "salt"}, {SALT}),
        ({"salt": ""}, {PLAIN, TENANT, ADAPTER}),
        ({"tenant": "acme", "adapter": "lora", "salt": "salt"}, {SALT}),
        ({"tenant": "unknown", "adapter": "", "salt": ""}, set()),
        ({"tenant": PUBLIC_TENANT}, set()),
        ({"tenant": PUBLIC_TENANT, "adapter": "", "salt": ""}, set()),
    ],
)
def test_leases_in_the_named_namespaces_are_revoked_and_no_others(
    named: dict[str, str], revoked: set[Namespace]
) -> None:
    cache = make_cache()
    leases = [lease_text(cache, "ZZZZ", namespace) for namespace in (*ALL, Namespace("model", PUBLIC_TENANT))]
    cache.purge(**named)
    assert {lease.namespace for lease in cache.leases if lease.is_revoked} == revoked
    for lease in leases:
        lease.close()


def test_a_purge_in_slices_removes_namespaces_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cache.purge._MAX_REMOVED", 6)  # two namespaces
    cache = make_cache()
    purging = cache.purge_in_slices()
    next(purging)
    assert len(cached_namespaces(cache)) == 2
    assert all_slices(purging) == Purged(16, 0)
    assert cached_namespaces(cache) == set()


def test_a_large_tree_is_removed_in_slices_and_nodes_in_use_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cache.purge._MAX_REMOVED", 4)
    cache = PrefixCache(128, 4, clock=FakeClock())
    texts = ["aaaa" + letter * 4 + end * 4 for letter in "bcdefghi" for end in "XYZ"]
    for text in texts:
        publish(cache, text)
    cache.retain(PLAIN, spell(texts[5]), Retention(priority=80))
    used = lease_text(cache, texts[3] + "!")
    num_segments = [len(cache.segments)]
    purging = cache.purge_in_slices()
    while (purged := next(purging, None)) is None and len(cache.segments):
        cache.check()
        num_segments.append(len(cache.segments))
    assert num_segments == [33, 29, 25, 21, 17, 13, 9, 5]
    assert purged is None
    assert [cached(cache, text) for text in texts] == [0] * len(texts)
    assert (cache.num_retained_blocks, cache.pool.num_free, cache.pool.num_leased) == (0, 128 - 4, 4)
    used.close()
    cache.check()
    assert cache.pool.num_free == 128


def test_examining_namespaces_is_done_in_slices_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cache.purge._MAX_EXAMINED", 3)
    purging = make_cache().purge_in_slices(salt="unknown")
    next(purging)
    with pytest.raises(StopIteration):
        next(purging)


def test_operations_between_the_slices_of_a_purge_leave_nothing_from_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("radixkv.cache.purge._MAX_REMOVED", 3)  # one namespace
    cache = make_cache()
    before_purge = lease_text(cache, "aaaabbbbccDD", SALT)
    purging = cache.purge_in_slices()
    next(purging)
    assert cached_namespaces(cache) == {TENANT, ADAPTER, SALT}
    not_purged_yet, after_purge = lease_text(cache, "aaaabbbbccDD", ADAPTER), lease_text(cache, "aaaa", PLAIN)
    publish(cache, "eeee", SALT)
    assert [not_purged_yet.cached_tokens, after_purge.cached_tokens] == [10, 0]
    assert after_purge.commit(4) == 4
    while next(purging, "over") is None:
        cache.check()
    assert [not_purged_yet.commit(12), before_purge.commit(12)] == [0, 0]
    for lease in (not_purged_yet, after_purge, before_purge):
        lease.close()
    assert cached_namespaces(cache) == {PLAIN}
    assert [cached(cache, "aaaa", namespace) for namespace in ALL] == [4, 0, 0, 0]
    assert cached(cache, "eeee", SALT) == 0
    assert cache.pool.num_leased == 0


def test_a_namespace_that_was_evicted_and_cached_again_between_slices_is_not_purged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("radixkv.cache.purge._MAX_REMOVED", 1)
    cache = make_cache()
    purging = cache.purge_in_slices()
    next(purging)
    cache.evict(64)
    publish(cache, "aaaabbbbcc", TENANT)
    assert next(purging, None) is None
    assert cached_namespaces(cache) == {TENANT}


def test_purged_and_evicted_nodes_are_freed_without_a_collection() -> None:
    cache = make_cache()
    ids = {id(node) for node in cache.nodes()}
    gc.disable()
    try:
        with lease_text(cache, "aaaabbbbccDD", SALT):
            cache.purge(tenant="acme", adapter="lora")
        cache.evict(64)
        assert cache.num_namespaces == 0
        assert [each for each in gc.get_objects() if type(each) is Node and id(each) in ids] == []
    finally:
        gc.enable()


def test_unused_blocks_are_dropped_in_the_named_namespaces_of_the_tenant() -> None:
    cache = make_cache()
    publish(cache, "aaaa", Namespace("model", "", "lora"))
    assert all_slices(cache.drop_in_slices("acme", adapter="lora", evicts=False)) == (2 * 16, False)
    assert cached_namespaces(cache) == {PLAIN, TENANT}
    assert cached(cache, "aaaa", Namespace("model", "", "lora")) == 4
    assert all_slices(cache.drop_in_slices("acme", salt="", evicts=True)) == (16, False)
    assert cached_namespaces(cache) == {PLAIN}
    assert cache.num_evicted_blocks == 4
    assert all_slices(cache.drop_in_slices("acme", evicts=True)) == (0, False)


def test_blocks_in_use_stay_when_a_namespace_is_dropped() -> None:
    cache = make_cache()
    lease = lease_text(cache, "aaaabbbbccDD", TENANT)
    assert all_slices(cache.drop_in_slices("acme", adapter="", evicts=False)) == (4, True)
    assert not lease.is_revoked
    lease.close()
    assert cached(cache, "aaaabbbbcc", TENANT) == 10
    cache.check()


def test_a_slice_drops_at_most_128_nodes_and_examines_at_most_1024_namespaces() -> None:
    cache = PrefixCache(3000, 4, clock=FakeClock())
    for number in range(300):
        publish(cache, f"{number:04}", TENANT)
    for number in range(2000):
        publish(cache, "aaaa", Namespace("model", "acme", "", str(number)))
    num_remaining = [cache.pool.num_published for _ in cache.drop_in_slices("acme", salt="", evicts=False)]
    # The third slice also examines 1,024 namespaces, and the last one, after which nothing is yielded, all others.
    assert num_remaining == [2000 + 172, 2000 + 44, 2000]
    cache.check()


def test_sessions_of_dropped_namespaces_are_not_loaded_again() -> None:
    cache = PrefixCache(64, 4, clock=FakeClock(), max_session_prompt_bytes=10_000)
    for namespace in (TENANT, SALT):
        with cache.lease(namespace, spell("aaaabbbb"), session_id=namespace.salt or "plain") as lease:
            lease.commit(8)
            lease.awaits = Awaits.TOOL
    all_slices(cache.drop_in_slices("acme", salt="salt", evicts=True))
    assert [session.session_id for session in cache.sessions.pop_returning(1000.0, 10)] == ["plain"]
    cache.check()


def test_the_sessions_of_a_slice_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_MAX_EXAMINED", 2)
    cache = PrefixCache(64, 4, clock=FakeClock(), max_session_prompt_bytes=10_000)
    for number in range(5):
        with cache.lease(TENANT, spell("aaaabbbb"), session_id=str(number)) as lease:
            lease.commit(8)
            lease.awaits = Awaits.TOOL
    assert len(list(cache.sessions.expect_none_in_slices("acme", None, None))) == 2
    assert cache.sessions.next_return_s is None


def test_a_purge_forgets_the_prompts_of_sessions_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_MAX_EXAMINED", 2)
    cache = PrefixCache(64, 4, clock=FakeClock(), max_session_prompt_bytes=100_000)
    for number in range(5):
        for namespace in (TENANT, PLAIN):
            with cache.lease(namespace, spell("aaaabbbb"), session_id=str(number)) as lease:
                lease.commit(8)
    num_sessions = [cache.sessions.num_of("acme") for _ in cache.purge_in_slices(tenant="acme")]
    assert num_sessions == [4, 3, 2, 1, 0]
    assert cache.sessions.num_of("") == 5
    cache.check()


def test_a_retention_of_namespaces_reaches_every_node_of_them() -> None:
    cache = make_cache()
    cache.max_retained_blocks = cache._retained.max_blocks = 64
    grant = all_slices(cache.retain_in_slices("acme", Retention(80, ttl_s=9.0), adapter="lora"))
    num_tokens = 2 * (4 + 6 + 4)  # two namespaces with the nodes "aaaa", "bbbbcc" and "XXXX"
    assert grant[:3] == (num_tokens, 0, 0)
    assert {node.priority for node in cache.nodes() if node.owner.namespace in (ADAPTER, SALT)} == {80}
    assert {node.priority for node in cache.nodes() if node.owner.namespace in (PLAIN, TENANT)} == {50}
    assert cache.num_retained_blocks == 8
    cache.evict(8)
    assert cached_namespaces(cache) == {ADAPTER, SALT}
    cache._clock.now_s = 10.0
    assert cache.num_retained_blocks == 0
    cache.check()


def test_a_retention_of_namespaces_is_bounded_by_the_maximum_of_retained_blocks() -> None:
    cache = make_cache()
    cache.max_retained_blocks = cache._retained.max_blocks = 3
    grant = all_slices(cache.retain_in_slices("acme", Retention(80), adapter="lora"))
    assert grant.granted_tokens + grant.refused_tokens == 2 * (4 + 6 + 4), "all tokens of both namespaces"
    assert cache.num_retained_blocks == 3
    assert all_slices(cache.retain_in_slices("acme", Retention(20), adapter="lora")).refused_tokens == 0
    assert cache.num_retained_blocks == 0
    cache.check()


def test_a_retention_of_namespaces_changes_at_most_128_nodes_in_a_slice() -> None:
    cache = PrefixCache(600, 4, clock=FakeClock())
    for number in range(600):
        publish(cache, f"{number:04}", TENANT)
    slices = cache.retain_in_slices("acme", Retention(20), adapter="")
    next(slices)
    assert sum(node.priority == 20 for node in cache.nodes()) == 128
    cache.evict(500)  # including nodes that are not changed yet
    all_slices(slices)
    assert {node.priority for node in cache.nodes()} == {20}
    with pytest.raises(InvalidRequest, match=r"retention\.priority: expected 0 to 100, got 101"):
        all_slices(cache.retain_in_slices("acme", Retention(101), adapter=""))
