"""Sessions: which nodes only one session has used, and what happens to them when the session ends."""

from __future__ import annotations

import pytest

from radixkv.api.awaits import Awaits
from radixkv.cache import namespace_trees
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.namespace import Namespace
from tests.fakes import MODEL, FakeClock, cached, spell

ACME = Namespace("m", tenant="acme")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def cache(clock: FakeClock) -> PrefixCache:
    return PrefixCache(num_blocks=12, block_size=2, clock=clock)


def open_lease(cache: PrefixCache, text: str, session_id: str = "", namespace: Namespace = MODEL) -> Lease:
    return cache.lease(namespace, spell(text), session_id=session_id)


def publish(cache: PrefixCache, text: str, session_id: str = "", namespace: Namespace = MODEL) -> None:
    with open_lease(cache, text, session_id, namespace) as lease:
        lease.commit(len(text))
    cache.check()


def own_texts(cache: PrefixCache, session_id: str, tenant: str = "") -> list[str]:
    """Return the texts of the nodes that only this session has used."""
    session = cache.sessions.get(tenant, session_id)
    return [] if session is None else sorted(bytes(node.tokens[::4]).decode() for node in session.nodes)


def test_a_node_belongs_to_the_session_that_published_it(cache: PrefixCache) -> None:
    publish(cache, "abcd", "s")
    publish(cache, "xy")
    assert own_texts(cache, "s") == ["abcd"]
    assert [session.session_id for session in cache.sessions] == ["s"]


@pytest.mark.parametrize("other", ["t", ""])
def test_a_node_that_another_session_or_none_uses_belongs_to_no_session(cache: PrefixCache, other: str) -> None:
    publish(cache, "abcdefgh", "s")
    publish(cache, "abcdxy", other)
    assert own_texts(cache, "s") == ["efgh"]
    assert own_texts(cache, other) == (["xy"] if other else [])
    publish(cache, "abcdefghij", other)
    assert own_texts(cache, "s") == []
    assert cache.sessions.get("", "s") is None


def test_the_next_turns_of_a_session_stay_its_own(cache: PrefixCache) -> None:
    for text in ("ab", "abcd", "abcdefgh", "abxy"):
        publish(cache, text, "s")
    assert own_texts(cache, "s") == ["ab", "cdefgh", "xy"]
    session = cache.sessions.get("", "s")
    assert session is not None
    assert sorted(bytes(node.tokens[::4]).decode() for node in session.ends) == ["cdefgh", "xy"]
    assert session.num_blocks == 5


def test_a_prompt_that_ends_inside_a_node_of_another_session_uses_it(cache: PrefixCache) -> None:
    publish(cache, "abcdef", "s")
    publish(cache, "abcd", "t")
    assert own_texts(cache, "s") == own_texts(cache, "t") == []


def test_two_sessions_that_publish_the_same_prompt_at_the_same_time_share_it(cache: PrefixCache) -> None:
    first, second = open_lease(cache, "abcd", "s"), open_lease(cache, "abcdef", "t")
    first.commit(4)
    second.commit(6)
    first.close()
    second.close()
    cache.check()
    assert (own_texts(cache, "s"), own_texts(cache, "t")) == ([], [])


def test_a_session_is_forgotten_with_its_last_node_or_lease(cache: PrefixCache) -> None:
    lease = open_lease(cache, "abcd", "s")
    assert len(cache.sessions) == 1
    lease.close()
    assert len(cache.sessions) == 0
    publish(cache, "abcd", "s")
    cache.evict(1)
    assert own_texts(cache, "s") == ["ab"]
    cache.evict(1)
    assert len(cache.sessions) == 0
    publish(cache, "abcd", "s")
    cache.purge()
    assert len(cache.sessions) == 0


def test_sessions_of_two_tenants_have_nothing_in_common(cache: PrefixCache) -> None:
    publish(cache, "abcd", "s")
    publish(cache, "abcd", "s", ACME)
    assert cache.end_session("acme", "s") == 2
    assert own_texts(cache, "s") == ["abcd"]
    assert (cache.sessions.num_of("acme"), cache.sessions.num_of("")) == (0, 1)


def test_what_only_an_ended_session_has_used_is_evicted_first(cache: PrefixCache, clock: FakeClock) -> None:
    publish(cache, "abxy")
    clock.now_s = 1
    publish(cache, "abcd", "s")
    publish(cache, "abefgh", "t")
    assert cache.end_session("", "t") == 2
    cache.evict(2)
    assert [cached(cache, text) for text in ("abxy", "abcd", "abefgh")] == [4, 4, 2]


def test_tokens_of_an_ended_session_that_are_used_again_are_no_longer_evicted_first(
    cache: PrefixCache, clock: FakeClock
) -> None:
    publish(cache, "abcd", "s")
    clock.now_s = 1
    publish(cache, "xy")
    cache.end_session("", "s")
    clock.now_s = 2
    publish(cache, "abcd", "t")
    cache.evict(1)
    assert [cached(cache, text) for text in ("abcd", "xy")] == [4, 0]


def test_a_session_may_end_while_it_has_a_lease(cache: PrefixCache) -> None:
    publish(cache, "xy")
    lease = open_lease(cache, "abcdef", "s")
    lease.commit(4)
    assert cache.end_session("", "s") == 2
    lease.commit(6)
    lease.close()
    cache.check()
    assert lease.awaits is Awaits.NOTHING
    assert len(cache.sessions) == 0
    cache.evict(3)
    assert [cached(cache, text) for text in ("abcdef", "xy")] == [0, 2]
    publish(cache, "abcd", "s")
    assert own_texts(cache, "s") == ["abcd"]


def test_an_unknown_session_cannot_end(cache: PrefixCache) -> None:
    publish(cache, "abcd", "s")
    assert cache.end_session("acme", "s") is None
    assert cache.end_session("", "t") is None


def test_a_session_knows_what_it_waits_for(cache: PrefixCache, clock: FakeClock) -> None:
    with open_lease(cache, "abcd", "s") as lease:
        lease.commit(4)
        lease.awaits = Awaits.TOOL
        clock.now_s = 3
    session = cache.sessions.get("", "s")
    assert session is not None
    assert (session.awaits, session.last_used_s, session.num_leases) == (Awaits.TOOL, 3, 0)
    with open_lease(cache, "abcdef", "s"):
        assert (session.awaits, session.num_leases) == (Awaits.UNKNOWN, 1)


def test_loading_ahead_does_not_count_as_a_use_by_the_session(clock: FakeClock) -> None:
    cache = PrefixCache(num_blocks=12, block_size=2, clock=clock, max_session_prompt_bytes=10_000)
    with open_lease(cache, "abcdef", "s") as lease:
        lease.commit(6)
        lease.awaits = Awaits.TOOL
    session = cache.sessions.get("", "s")
    assert session is not None
    cache.evict(2)
    clock.now_s = 5
    with cache.lease(MODEL, spell("abcd"), is_prefetch=True, session_id="s") as lease:
        lease.commit(4)
        assert session.num_leases == 1
    cache.check()
    assert own_texts(cache, "s") == ["abcd"]
    assert {node.awaits for node in session.nodes} == {Awaits.TOOL}
    assert (session.awaits, session.last_used_s, session.num_leases) == (Awaits.TOOL, 0, 0)
    assert session.prompt == (MODEL, spell("abcdef"))
    clock.now_s = 8
    publish(cache, "abcdefgh", "s")
    assert session.tool_wait_s == 8


def test_the_memory_of_remembered_sessions_is_bounded_however_short_their_prompts_are(clock: FakeClock) -> None:
    cache = PrefixCache(num_blocks=12, block_size=2, clock=clock, max_session_prompt_bytes=10_000)
    for number in range(100):
        publish(cache, "ab", f"s{number}")
    assert [each.session_id for each in cache.sessions] == [f"s{number}" for number in range(91, 100)]


def test_loading_ahead_creates_no_session(cache: PrefixCache) -> None:
    with cache.lease(MODEL, spell("abcd"), is_prefetch=True, session_id="s") as lease:
        lease.commit(4)
    assert cache.sessions.get("", "s") is None
    cache.check()


def test_loading_without_a_session_changes_no_owner(cache: PrefixCache) -> None:
    publish(cache, "abcdefgh", "s")
    cache.evict(2)
    with cache.lease(MODEL, spell("abcdefgh"), is_prefetch=True) as lease:
        lease.commit(8)
    cache.check()
    assert own_texts(cache, "s") == ["abcdefgh"]
    publish(cache, "abxy", "t")
    with cache.lease(MODEL, spell("abpq"), is_prefetch=True) as lease:
        lease.commit(4)
    cache.check()
    assert (own_texts(cache, "s"), own_texts(cache, "t")) == (["cdefgh"], ["xy"])


@pytest.mark.parametrize(
    ("now_s", "second_awaits", "has_idle_blocks"),
    [
        # A tool call is expected to take 10 s. If it takes longer, it is expected to take as long again.
        (109.0, Awaits.TOOL, True),  # the first session is expected in 1 s, the second one in 9 s
        (113.0, Awaits.TOOL, False),  # the first session is expected in 13 s, the second one in 5 s
        (113.0, Awaits.USER, True),  # the second session is not expected
    ],
)
def test_a_session_is_loaded_in_place_of_blocks_that_are_needed_later(
    now_s: float, second_awaits: Awaits, *, has_idle_blocks: bool
) -> None:
    clock = FakeClock(100.0)
    cache = PrefixCache(num_blocks=2, block_size=2, clock=clock, max_session_prompt_bytes=10_000)
    for text, session_id, used_s, awaits in (("abcd", "s", 100.0, Awaits.TOOL), ("wxyz", "t", 108.0, second_awaits)):
        clock.now_s = used_s
        lease = open_lease(cache, text, session_id)
        lease.awaits = awaits
        lease.commit(4)
        lease.close()
    clock.now_s = now_s
    first, second = cache.sessions.get("", "s"), cache.sessions.get("", "t")
    assert first is not None
    assert second is not None
    assert cache.has_idle_blocks(2, first) is has_idle_blocks
    assert cache.has_idle_blocks(2, second)  # in place of its own blocks
    assert not cache.has_idle_blocks(3, second)


def awaits_by_text(cache: PrefixCache) -> dict[str, Awaits]:
    """Return what the session of each node waits for, by the text of the node."""
    return {bytes(node.tokens[::4]).decode(): node.awaits for node in cache.nodes()}


def test_shared_tokens_belong_to_no_session_and_outlive_it(cache: PrefixCache, clock: FakeClock) -> None:
    publish(cache, "abcdefgh", "s")
    clock.now_s = 1
    publish(cache, "xy")
    assert cache.share(MODEL, spell("abc")) == 3
    cache.check()
    assert own_texts(cache, "s") == ["efgh"]
    assert cache.end_session("", "s") == 2
    cache.evict(2)
    assert [cached(cache, text) for text in ("abcdefgh", "xy")] == [4, 2]


def test_only_what_is_cached_is_shared(cache: PrefixCache) -> None:
    publish(cache, "abcd", "s")
    assert [cache.share(MODEL, spell(text)) for text in ("abcdefgh", "abcx", "xyz")] == [4, 3, 0]
    assert cache.share(ACME, spell("abcd")) == 0
    assert own_texts(cache, "s") == []


def test_a_session_shares_everything_that_only_it_has_used(cache: PrefixCache) -> None:
    for text in ("abcd", "abcdef", "abxy"):
        publish(cache, text, "s")
    publish(cache, "abcd", "s", ACME)
    session = cache.sessions.get("", "s")
    assert session is not None
    assert cache.share_session(session) == 8
    cache.check()
    assert (cache.sessions.get("", "s"), own_texts(cache, "s", "acme")) == (None, ["abcd"])


def test_tokens_of_an_ended_session_that_are_shared_are_not_evicted_first(cache: PrefixCache, clock: FakeClock) -> None:
    publish(cache, "xy")
    clock.now_s = 1
    publish(cache, "abcd", "s")
    cache.end_session("", "s")
    cache.share(MODEL, spell("abcd"))
    cache.evict(1)
    assert [cached(cache, text) for text in ("abcd", "xy")] == [4, 0]


def test_the_end_of_a_session_does_not_change_the_nodes_that_it_shares(cache: PrefixCache) -> None:
    publish(cache, "abcd", "s")
    cache.share(MODEL, spell("ab"))
    with open_lease(cache, "abcdef", "s") as lease:
        lease.commit(6)
        lease.awaits = Awaits.NOTHING
    assert awaits_by_text(cache) == {"ab": Awaits.UNKNOWN, "cdef": Awaits.NOTHING}
    with open_lease(cache, "abcdef") as lease:  # of no session, so it may have been the only user
        lease.awaits = Awaits.NOTHING
    assert set(awaits_by_text(cache).values()) == {Awaits.NOTHING}


def test_what_a_session_waits_for_can_be_set_after_a_position(cache: PrefixCache) -> None:
    publish(cache, "abcd", "s")
    cache.share(MODEL, spell("ab"))
    assert cache.set_awaits(MODEL, spell("abcd"), Awaits.NOTHING, start=2) == 2
    assert awaits_by_text(cache) == {"ab": Awaits.UNKNOWN, "cd": Awaits.NOTHING}


def test_a_very_long_path_is_not_split_to_share_it(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_trees, "_MAX_CUT_NODES", 1)
    publish(cache, "abcdefgh", "s")
    publish(cache, "abxy", "s")
    assert cache.share(MODEL, spell("abcdef")) == 2
    cache.check()
    assert own_texts(cache, "s") == ["cdefgh", "xy"]


def test_nodes_that_other_prompts_continue_keep_what_they_wait_for(cache: PrefixCache) -> None:
    publish(cache, "abwxyz")
    publish(cache, "abcdef")
    cache.set_awaits(MODEL, spell("abcdef"), Awaits.NOTHING)
    assert awaits_by_text(cache) == {"ab": Awaits.UNKNOWN, "cdef": Awaits.NOTHING, "wxyz": Awaits.UNKNOWN}
