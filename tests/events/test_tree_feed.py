from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future

import numpy as np
import pytest

from radixkv.api.retention import Retention
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import Draining, InvariantViolation, OutOfBlocks
from radixkv.events.block_identity import Identities
from radixkv.events.event_log import EventLog
from radixkv.events.snapshot import Snapshot
from radixkv.events.tree_feed import _MAX_SNAPSHOT_AGE, TreeFeed
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace
from tests.events.event_oracle import Knowledge, WatchedCache

BASE, SALTED = Namespace("m"), Namespace("m", salt="secret")


def tokens(*ids: int) -> bytes:
    return np.array(ids, dtype="<u4").tobytes()


def cache_prompt(cache: PrefixCache, prompt: bytes, namespace: Namespace = BASE) -> None:
    with cache.lease(namespace, prompt) as lease:
        lease.commit(lease.num_tokens)


def read_to_end(reader: Knowledge, log: EventLog) -> None:
    while reader.last_number != log.last:
        batch = log.after(log.start if reader.last_number is None else reader.last_number)
        assert batch is not None
        reader.read(batch)


def watched(block_size: int, pool_block_size: int, num_blocks: int = 64) -> tuple[WatchedCache, PrefixCache]:
    """Return a cache, and the log of its events with blocks of `block_size` tokens; recording is switched on."""
    watch = WatchedCache(block_size, pool_block_size)
    cache = PrefixCache(num_blocks, pool_block_size, listeners=[watch.feed])
    watch.feed.switch_on(cache.nodes)
    return watch, cache


def snapshot_of(watch: WatchedCache) -> Snapshot:
    answer: Future[Snapshot] = Future()
    watch.feed.request_snapshot(answer)
    watch.feed.publish()
    return answer.result(0)


def test_nothing_is_recorded_until_the_feed_is_switched_on() -> None:
    watch = WatchedCache(2, 4)
    cache = PrefixCache(64, 4, listeners=[watch.feed])
    cache_prompt(cache, tokens(1, 2, 3, 4, 5))
    watch.feed.publish()
    assert not watch.feed.has_backlog
    assert watch.log.num_batches == 0


def test_blocks_cached_earlier_are_published_when_the_feed_is_switched_on() -> None:
    watch = WatchedCache(2, 4)
    cache = PrefixCache(64, 4, listeners=[watch.feed])
    cache_prompt(cache, tokens(1, 2, 3, 4, 5, 6))
    cache_prompt(cache, tokens(1, 2, 3, 4, 7, 8))
    watch.feed.switch_on(cache.nodes)
    assert watch.verify(cache) == 4


def test_a_block_is_stored_when_its_last_token_is_cached() -> None:
    watch, cache = watched(4, 8)
    cache_prompt(cache, tokens(1, 2, 3))
    assert watch.verify(cache) == 0
    cache_prompt(cache, tokens(1, 2, 3, 4, 5))
    assert watch.verify(cache) == 1
    cache_prompt(cache, tokens(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert watch.verify(cache) == 2
    assert watch.log.num_batches == 2


def test_a_split_of_a_node_is_not_reported() -> None:
    watch, cache = watched(2, 2)
    cache_prompt(cache, tokens(1, 2, 3, 4, 5, 6))
    assert watch.verify(cache) == 3
    cache.retain(BASE, tokens(1, 2), Retention(priority=80))
    assert len(cache.segments) == 2
    num_batches_before = watch.log.num_batches
    assert watch.verify(cache) == 3
    assert watch.log.num_batches == num_batches_before


def test_siblings_that_begin_alike_share_their_first_blocks() -> None:
    watch, cache = watched(2, 8)
    cache_prompt(cache, tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 9))
    cache_prompt(cache, tokens(1, 2, 3, 4, 0, 0, 0, 0, 9, 9))
    assert len(cache.segments) == 2
    assert watch.verify(cache) == 5 + 5 - 2, "two prompts of five blocks; they share two"
    cache.evict(2)
    assert watch.verify(cache) == 5
    cache.evict(2)
    assert watch.verify(cache) == 0


def test_blocks_larger_than_those_of_the_pool_end_in_children() -> None:
    watch, cache = watched(6, 4)
    cache_prompt(cache, tokens(*range(12)))
    cache_prompt(cache, tokens(0, 1, 2, 3, 9, 9, 9, 9, 9, 9, 9, 9))
    assert len(cache.segments) == 3
    assert watch.verify(cache) == 4
    cache.evict(2)
    watch.verify(cache)
    cache_prompt(cache, tokens(*range(13)))
    assert watch.verify(cache) >= 2


def test_a_purge_of_everything_is_one_event() -> None:
    watch, cache = watched(2, 4)
    cache_prompt(cache, tokens(1, 2, 3, 4))
    cache_prompt(cache, tokens(1, 2, 3, 4), SALTED)
    watch.verify(cache)
    cache.purge(salt="secret")
    assert watch.verify(cache) == 2
    cache.purge()
    assert watch.verify(cache) == 0
    batch = watch.log.after(watch.log.last - 1)
    assert batch is not None
    assert [type(event).__name__ for event in batch.events] == ["AllCleared"]


def test_namespaces_share_no_hash_and_only_one_has_no_salt() -> None:
    watch, cache = watched(2, 4)
    others = [SALTED, Namespace("m", tenant="acme"), Namespace("m", adapter="acme"), Namespace("m", tenant="secret")]
    for namespace in (BASE, *others):
        cache_prompt(cache, tokens(1, 2, 3, 4), namespace)
    assert watch.verify(cache) == 10
    salts = Counter(salt for _, _, salt in watch.reader.blocks.values())
    assert salts.pop("") == 2
    assert list(salts.values()) == [2] * 4
    assert not any("acme" in salt or "secret" in salt for salt in salts)


def test_a_step_hashes_a_bounded_number_of_blocks() -> None:
    watch = WatchedCache(2, 4, max_step_blocks=3)
    cache = PrefixCache(64, 4, listeners=[watch.feed])
    watch.feed.switch_on(cache.nodes)
    for first in range(4):
        cache_prompt(cache, tokens(first, 1, 2, 3))
    assert watch.verify(cache) == -1, "not all changes are published yet"
    assert watch.log.num_blocks == 2
    while watch.feed.has_backlog:
        watch.feed.publish()
    assert watch.verify(cache) == 8
    assert watch.log.num_batches == 4


def test_a_snapshot_lists_what_is_cached_after_its_batch() -> None:
    watch, cache = watched(2, 8)
    cache_prompt(cache, tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 9))
    cache_prompt(cache, tokens(1, 2, 3, 4, 0, 0, 0, 0, 9, 9))
    cache_prompt(cache, tokens(1, 2, 3, 4), SALTED)
    snapshot = snapshot_of(watch)
    assert snapshot.sequence_number == watch.log.last
    reader = Knowledge()
    for batch in snapshot.batches:
        reader.read(batch)
    watch.verify(cache)
    assert reader.blocks == watch.reader.blocks
    assert len(reader.blocks) == 10


def test_a_snapshot_waits_until_all_earlier_changes_are_published() -> None:
    watch = WatchedCache(2, 4, max_step_blocks=3)
    cache = PrefixCache(64, 4, listeners=[watch.feed])
    watch.feed.switch_on(cache.nodes)
    for first in range(4):
        cache_prompt(cache, tokens(first, 1, 2, 3))
    answer: Future[Snapshot] = Future()
    watch.feed.request_snapshot(answer)
    watch.feed.publish()
    assert not answer.done()
    while watch.feed.has_backlog:
        watch.feed.publish()
    assert answer.result(0).sequence_number == watch.log.last
    assert sum(batch.num_blocks for batch in answer.result(0).batches) == watch.verify(cache) == 8


def test_a_snapshot_is_shared_until_too_many_batches_follow_it() -> None:
    watch, cache = watched(2, 4)
    cache_prompt(cache, tokens(1, 2, 3, 4))
    first = snapshot_of(watch)
    cache_prompt(cache, tokens(5, 2, 3, 4))
    assert snapshot_of(watch) is first
    for index in range(_MAX_SNAPSHOT_AGE + 1):
        cache_prompt(cache, tokens(1, 2, 3, 4, 100 + index, 0))
        watch.feed.publish()
    assert snapshot_of(watch) is not first


def test_a_bug_ends_the_log_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, cache = watched(2, 4)
    answer: Future[Snapshot] = Future()
    watch.feed.request_snapshot(answer)
    cache_prompt(cache, tokens(1, 2, 3, 4))
    monkeypatch.setattr(watch.feed._stored_blocks, "process", lambda *_: 1 / 0)
    watch.feed.publish()
    assert isinstance(watch.log.error, InvariantViolation)
    assert isinstance(answer.exception(0), InvariantViolation)
    cache_prompt(cache, tokens(2, 2, 3, 4))
    assert not watch.feed.has_backlog


def test_a_reader_after_the_end_gets_the_error() -> None:
    watch, cache = watched(2, 4)
    watch.feed.close(Draining("engine: stopped"))
    watch.feed.switch_on(cache.nodes)
    answer: Future[Snapshot] = Future()
    watch.feed.request_snapshot(answer)
    assert isinstance(answer.exception(0), Draining)


@pytest.mark.parametrize(
    ("block_size", "pool_block_size"), [(1, 1), (2, 4), (3, 4), (4, 4), (5, 4), (8, 2), (6, 4), (7, 16), (16, 16)]
)
def test_after_random_operations_the_stored_blocks_are_the_cached_ones(block_size: int, pool_block_size: int) -> None:
    rng = random.Random(block_size * 100 + pool_block_size)
    watch, cache = watched(block_size, pool_block_size, num_blocks=max(6, 60 // pool_block_size))
    prompts = [[0]]
    for _ in range(400):
        earlier = rng.choice(prompts)
        prompt = earlier[: rng.randint(0, len(earlier))] + [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        prompts = [*prompts[-20:], prompt]
        namespace = rng.choice((BASE, SALTED))
        try:
            lease = cache.lease(namespace, tokens(*prompt[:40]))
        except OutOfBlocks:
            continue
        for num_committed in (rng.randint(0, lease.num_tokens), lease.num_tokens):
            lease.commit(num_committed)
        lease.close()
        if rng.random() < 0.2:
            cache.evict(rng.randint(1, 6))
        if rng.random() < 0.2:
            cache.retain(namespace, tokens(*prompt), Retention(priority=80, start=0, end=rng.randint(1, len(prompt))))
        if rng.random() < 0.02:
            cache.purge(salt=rng.choice(("", "secret", None)))
        if rng.random() < 0.6:
            assert watch.verify(cache) >= 0
    cache.evict(1000)
    cache.purge()
    assert watch.verify(cache) == 0


@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_tokens_of_an_invoked_adapter_are_not_published(block_size: int) -> None:
    marks = InvocationMarks()
    marks.add("adapter")
    feed = TreeFeed(EventLog(), block_size, 4, Identities(), marks=marks)
    cache = PrefixCache(64, 4, listeners=[feed], marks=marks)
    feed.switch_on(cache.nodes)
    ids = range(1, 23)
    for start in (9, 0, 18):
        cache_prompt(cache, marks.invocation("adapter", start).marked(tokens(*ids)))
        cache_prompt(cache, marks.invocation("adapter", start).marked(tokens(*ids, 30, 31, 32)))
    cache.evict(2)
    feed.publish()
    reader = Knowledge()
    read_to_end(reader, feed.log)

    # The base model has computed at most the first 18 tokens. A cache of only the whole event blocks among them has as
    # many blocks.
    plain, plain_cache = watched(block_size, 4)
    cache_prompt(plain_cache, tokens(*ids[: 18 // block_size * block_size]))
    assert plain.verify(plain_cache) == len(reader.blocks)

    cache.purge()
    feed.publish()
    read_to_end(reader, feed.log)
    assert not reader.blocks
