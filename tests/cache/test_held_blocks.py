"""Blocks of held leases: each is counted once, with limits in total and per tenant. Blocks have four tokens."""

import pytest

from radixkv.cache.block_pool import BlockState
from radixkv.cache.held_blocks import HeldPath
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenants import Quota
from radixkv.errors import Cause, InvariantViolation, LeaseClosed, OutOfBlocks, QuotaExceeded
from radixkv.namespace import Namespace
from tests.fakes import MODEL, lease_text, publish, spell

OTHER = Namespace("model", tenant="other")


def make_cache(max_held_blocks: int = 8, quotas: dict[str, Quota] | None = None) -> PrefixCache:
    return PrefixCache(32, 4, max_held_blocks=max_held_blocks, quotas=quotas)


def hold(cache: PrefixCache, text: str, namespace: Namespace = MODEL) -> Lease:
    """Cache a prompt and hold its lease."""
    lease = lease_text(cache, text, namespace)
    lease.commit(len(text))
    lease.hold()
    cache.check()
    return lease


def test_a_shared_block_is_counted_once() -> None:
    cache = make_cache()
    first, second = hold(cache, "aaaabbbbcccc"), hold(cache, "aaaabbbbXXXX")
    again = hold(cache, "aaaabbbbcccc")
    assert cache.held.num_blocks == 4
    first.close()
    cache.check()
    assert cache.held.num_blocks == 4
    again.close()
    assert cache.held.num_blocks == 3
    second.close()
    assert cache.held.num_blocks == cache.num_pinned_blocks == 0
    cache.check()


def test_a_held_lease_has_no_tokens_and_no_ids_of_shared_blocks() -> None:
    cache = make_cache()
    lease = hold(cache, "aaaabbbbcccc")
    assert (lease.tokens, lease.block_ids.size) == (b"", 0)
    private = cache.lease(MODEL, spell("ddddeeee"), read=False)
    private.hold()  # nothing was committed: its blocks are its own
    assert private.block_ids.size == 2
    assert cache.held.num_blocks == 5
    private.close()
    cache.check()
    assert cache.pool.num_leased == 0


def test_a_closed_lease_cannot_be_held() -> None:
    cache = make_cache()
    lease = lease_text(cache, "aaaa")
    lease.close()
    with pytest.raises(LeaseClosed):
        lease.hold()


def test_only_blocks_that_are_not_held_yet_count() -> None:
    cache = make_cache()
    hold(cache, "aaaabbbbcccc")
    same, longer = lease_text(cache, "aaaabbbbcccc"), lease_text(cache, "aaaabbbbccccdddde")
    branch, foreign = lease_text(cache, "aaaabbbbX"), lease_text(cache, "aaaabbbbcccc", OTHER)
    assert (
        cache.held.num_blocks_to_add([HeldPath.of(same)]) == 1
    )  # the copy of the last block, whose last token is computed again
    assert cache.held.num_blocks_to_add([HeldPath.of(longer)]) == 2
    assert cache.held.num_blocks_to_add([HeldPath.of(branch)]) == 1
    assert cache.held.num_blocks_to_add([HeldPath.of(foreign)]) == 3


def test_a_tenant_may_hold_half_of_what_all_tenants_may() -> None:
    cache = make_cache(max_held_blocks=6)
    hold(cache, "aaaabbbb")
    cache.held.require_room("", 1)
    message = r"^hold_lease: expected at most 3 blocks in held leases of this tenant, got 2 and 2 more$"
    with pytest.raises(QuotaExceeded, match=message) as caught:
        cache.held.require_room("", 2)
    assert caught.value.cause is Cause.HOLD_LEASE


def test_a_quota_replaces_the_bound_of_a_tenant_but_not_that_of_all_tenants() -> None:
    cache = make_cache(max_held_blocks=4, quotas={"": Quota(max_held_blocks=4)})
    hold(cache, "aaaabbbbcccc")
    cache.held.require_room("", 1)
    hold(cache, "aaaa", OTHER)
    cache.held.require_room("other", 1)
    with pytest.raises(OutOfBlocks, match="of all tenants, got more with the 1 of this one"):
        cache.held.require_room(None, 1)


@pytest.mark.parametrize(
    ("text", "num_held_blocks"), [("aaaabb", 3), ("aaaabbbb", 2)], ids=["the last block is copied", "whole blocks"]
)
def test_blocks_that_are_added_to_a_held_path_are_not_held(text: str, num_held_blocks: int) -> None:
    cache = make_cache()
    lease, same = hold(cache, text), hold(cache, text)
    publish(cache, "aaaabbbbccccdddd")
    cache.check()
    assert (cache.held.num_blocks, cache.num_pinned_blocks) == (num_held_blocks, 2)
    assert cache.evict(32) == 2
    lease.close()
    cache.check()
    assert cache.held.num_blocks == 2
    same.close()
    cache.check()
    assert cache.held.num_blocks == cache.pool.num_leased == 0


def test_a_replaced_block_stays_while_it_is_held() -> None:
    cache = make_cache()
    lease = lease_text(cache, "aaaabb")
    lease.commit(6)
    block_ids = lease.block_ids.tolist()
    lease.hold()
    publish(cache, "aaaabbbbccccdddd")
    cache.check()
    assert all(cache.pool.states()[block_id] != BlockState.FREE for block_id in block_ids)
    lease.close()
    cache.check()
    assert cache.pool.num_leased == 0


def test_a_block_that_was_replaced_before_the_lease_was_held_stays_too() -> None:
    cache = make_cache()
    lease = lease_text(cache, "aaaabb")
    lease.commit(6)
    block_ids = lease.block_ids.tolist()
    publish(cache, "aaaabbbbccccdddd")
    lease.hold()
    cache.check()
    assert all(cache.pool.states()[block_id] != BlockState.FREE for block_id in block_ids)
    assert cache.evict(32) == 2
    lease.close()
    cache.check()
    assert cache.pool.num_leased == 0


def test_a_held_lease_keeps_no_more_of_a_node_than_it_uses() -> None:
    cache = make_cache()
    publish(cache, "aaaabbbbccccdddd")
    lease = hold(cache, "aaaabbbb")
    inside = hold(cache, "aaaaX")
    assert cache.held.num_blocks == 3
    assert cache.num_pinned_blocks == 3
    lease.close()
    inside.close()
    cache.check()
    assert cache.held.num_blocks == 0


def test_blocks_that_several_leases_would_share_are_counted_once() -> None:
    cache = make_cache()
    publish(cache, "aaaabbbbcccc")
    paths = [HeldPath.of(lease_text(cache, text)) for text in ("aaaabbbbX", "aaaabbbbccccX", "aaaabbbbY", "aaaaX")]
    assert cache.held.num_blocks_to_add(paths) == 3 + 4, "three shared blocks, and one private block per lease"


def test_purged_blocks_count_as_held_until_they_are_free() -> None:
    cache = make_cache()
    lease = hold(cache, "aaaabbbbcccc")
    publish(cache, "aaaaX")
    cache.purge()
    cache.check()
    assert cache.held.num_blocks == cache.pool.num_leased == 3
    lease.close()
    cache.check()
    assert cache.held.num_blocks == cache.pool.num_leased == 0


def test_check_notices_a_drifted_number() -> None:
    cache = make_cache()
    lease = hold(cache, "aaaa")
    lease.usage.num_held_blocks += 1
    with pytest.raises(InvariantViolation, match="held blocks drifted"):
        cache.check()
