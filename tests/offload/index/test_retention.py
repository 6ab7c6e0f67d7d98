import pytest

from radixkv.namespace import Namespace
from radixkv.offload.index import retention
from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.offload.index.retention import RetentionHint, RetentionHints, StoredRetention
from radixkv.offload.index.tier_index import SharedTierIndex, TierIndex

ACME, OTHER, THIRD = (Namespace("m", tenant) for tenant in ("acme", "other", "third"))


def test_an_unknown_block_has_the_default_priority() -> None:
    assert RetentionHints().of(b"a") == 50


def test_raise_to_does_not_lower_a_priority_and_set_does() -> None:
    hints = RetentionHints()
    hints.raise_to(b"a", ACME, RetentionHint(80, None))
    hints.raise_to(b"a", ACME, RetentionHint(60, None))
    assert hints.of(b"a") == 80
    hints.set(b"a", ACME, RetentionHint(60, None))
    assert hints.of(b"a") == 60
    hints.set(b"a", ACME, RetentionHint(50, None))
    assert (hints.of(b"a"), len(hints)) == (50, 0)


def test_a_lower_priority_than_the_default_is_noted_too() -> None:
    hints = RetentionHints()
    hints.raise_to(b"a", ACME, RetentionHint(20, None))
    assert hints.of(b"a") == 20


def test_priorities_end_at_their_time_a_bounded_number_at_once(monkeypatch) -> None:
    monkeypatch.setattr(retention, "_MAX_EXPIRED_AT_ONCE", 2)
    hints = RetentionHints()
    for index, key in enumerate((b"a", b"b", b"c")):
        hints.set(key, ACME, RetentionHint(80, 10.0 + index))
    hints.set(b"d", ACME, RetentionHint(80, None))
    assert hints.expire(9.9) == []
    assert hints.expire(12.0) == [b"a", b"b"]
    assert hints.expire(12.0) == [b"c"]
    assert hints.expire(1e9) == []
    assert (hints.of(b"a"), hints.of(b"d")) == (50, 80)


def test_a_later_hint_replaces_the_expiry_of_an_earlier_one() -> None:
    hints = RetentionHints()
    hints.set(b"a", ACME, RetentionHint(80, 10.0))
    hints.raise_to(b"a", ACME, RetentionHint(80, 20.0))
    assert hints.expire(15.0) == []
    assert hints.expire(20.0) == [b"a"]


def test_the_same_priority_for_less_time_keeps_the_later_expiry() -> None:
    hints = RetentionHints()
    for key, ends_s in ((b"a", (20.0, 10.0)), (b"b", (None, 10.0)), (b"c", (10.0, None))):
        for end_s in ends_s:
            hints.raise_to(key, ACME, RetentionHint(80, end_s))
    assert [hints.hint_of(key) for key in (b"a", b"b", b"c")] == [
        RetentionHint(80, 20.0),
        RetentionHint(80, None),
        RetentionHint(80, None),
    ]
    hints.raise_to(b"a", ACME, RetentionHint(90, 5.0))
    assert hints.hint_of(b"a") == RetentionHint(90, 5.0)


def test_beyond_the_bound_the_oldest_hint_is_forgotten() -> None:
    hints = RetentionHints(max_keys=2)
    forgotten = [hints.set(key, ACME, RetentionHint(80, 10.0)) for key in (b"a", b"b", b"a", b"c")]
    assert forgotten == [None, None, None, b"b"]
    assert [hints.of(key) for key in (b"a", b"b", b"c")] == [80, 50, 80]
    assert hints.expire(10.0) == [b"a", b"c"]


def test_a_purge_forgets_a_tenant() -> None:
    hints = RetentionHints()
    hints.set(b"a", ACME, RetentionHint(80, 10.0))
    hints.set(b"b", OTHER, RetentionHint(80, 10.0))
    hints.purge("acme", None, None)
    assert (hints.of(b"a"), hints.of(b"b")) == (50, 80)
    assert hints.expire(10.0) == [b"b"]


def test_a_tenant_that_exceeds_its_equal_share_replaces_only_its_own_hints() -> None:
    hints = RetentionHints(max_keys=4)
    for key in (b"a", b"b"):
        hints.set(key, ACME, RetentionHint(80, None))
    forgotten = [hints.set(key, OTHER, RetentionHint(80, None)) for key in (b"p", b"q", b"r", b"s")]
    assert forgotten == [None, None, b"p", b"q"]
    assert (hints.of(b"a"), hints.of(b"b")) == (80, 80)


def test_a_tenant_that_has_all_hints_makes_room_for_another() -> None:
    hints = RetentionHints(max_keys=4)
    for key in (b"p", b"q", b"r", b"s"):
        hints.set(key, OTHER, RetentionHint(80, None))
    forgotten = [hints.set(key, ACME, RetentionHint(80, None)) for key in (b"a", b"b", b"c")]
    assert forgotten == [b"p", b"q", b"a"]
    hints.purge("other", None, None)
    assert [hints.set(key, ACME, RetentionHint(80, None)) for key in (b"a", b"d", b"e")] == [None, None, b"b"]


def test_of_three_tenants_the_one_with_the_most_hints_makes_room_for_another() -> None:
    hints = RetentionHints(max_keys=8)
    for key in (b"p", b"q"):
        hints.set(key, OTHER, RetentionHint(80, None))
    for key in (b"a", b"b", b"c", b"d", b"e", b"f"):
        hints.set(key, ACME, RetentionHint(80, None))
    forgotten = [hints.set(key, THIRD, RetentionHint(80, None)) for key in (b"x", b"y", b"z", b"w")]
    assert forgotten == [b"a", b"b", b"c", b"x"]
    assert [hints.of(key) for key in (b"p", b"q", b"y", b"f")] == [80, 80, 80, 80]


def test_a_tenant_that_has_fewer_keys_now_makes_no_room() -> None:
    hints = RetentionHints(max_keys=5)
    for key in (b"a", b"b", b"c"):
        hints.set(key, ACME, RetentionHint(80, 10.0))
    for key in (b"p", b"q"):
        hints.set(key, OTHER, RetentionHint(80, None))
    hints.forget(b"a")
    hints.set(b"b", ACME, RetentionHint(50, None))
    hints.set(b"x", THIRD, RetentionHint(80, None))
    hints.set(b"y", THIRD, RetentionHint(80, None))
    assert hints.set(b"r", OTHER, RetentionHint(80, None)) == b"p"
    assert hints.set(b"d", ACME, RetentionHint(80, None)) == b"x"


PATH = [KeyedBlock(key, b"", b"", ACME) for key in (b"a", b"b", b"c")]


def retention_of(*keys: bytes, retained_share: float = 1.0) -> tuple[StoredRetention, TierIndex]:
    """Return the retention of blocks that a tier and a shared store hold, and the index of the tier."""
    tier_index = TierIndex("host", 10, retained_share=retained_share)
    shared = SharedTierIndex("redis", 2**18)
    for key in keys:
        tier_index.add(key, ACME)
        shared.add(key, ACME)
    return StoredRetention({"host": tier_index, "redis": shared}), tier_index


def test_blocks_before_a_retained_one_are_retained_too() -> None:
    stored_retention, tier_index = retention_of(b"a", b"b", b"c", b"x")
    stored_retention.set(PATH[:2], 1, RetentionHint(90, None))
    assert list(tier_index) == [b"c", b"x", b"b", b"a"]
    assert stored_retention.granted(PATH, 90) == (2, 3)


def test_blocks_before_a_block_of_low_priority_keep_their_priorities() -> None:
    stored_retention, tier_index = retention_of(b"a", b"b", b"x")
    stored_retention.set(PATH[:2], 1, RetentionHint(20, None))
    assert list(tier_index) == [b"b", b"a", b"x"]


def test_a_block_on_the_device_keeps_its_position_until_it_is_evicted() -> None:
    stored_retention, tier_index = retention_of(b"a", b"x")
    tier_index.note_loaded(b"a")
    stored_retention.set(PATH[:1], 0, RetentionHint(90, None))
    assert list(tier_index) == [b"a", b"x"]
    tier_index.note_evicted(b"a", stored_retention.priority_of(b"a"))
    assert list(tier_index) == [b"x", b"a"]


def test_an_expired_priority_is_reset() -> None:
    stored_retention, tier_index = retention_of(b"a", b"x")
    stored_retention.set(PATH[:1], 0, RetentionHint(90, 10.0))
    stored_retention.expire(9.0)
    assert list(tier_index) == [b"x", b"a"]
    stored_retention.expire(10.0)
    tier_index.note_evicted(b"x")
    assert list(tier_index) == [b"a", b"x"]


PROMPT = [KeyedBlock(key, parent, b"", ACME) for key, parent in ((b"a", b""), (b"b", b"a"), (b"c", b"b"))]


def test_blocks_before_evicted_ones_are_retained_as_long() -> None:
    stored_retention, _ = retention_of()
    stored_retention.note_evicted(PROMPT[2:], RetentionHint(90, None), 2, iter(PROMPT))
    assert [stored_retention.priority_of(block.key) for block in PROMPT] == [90, 90, 90]


@pytest.mark.parametrize("before", [RetentionHint(80, 10.0), RetentionHint(90, None)])
def test_blocks_before_evicted_ones_get_no_hint_if_retained_as_long(before: RetentionHint) -> None:
    stored_retention, _ = retention_of()
    stored_retention.note(PROMPT[:2], 1, before)
    path = iter(PROMPT)
    stored_retention.note_evicted(PROMPT[2:], RetentionHint(80, 10.0), 2, path)
    assert [stored_retention.priority_of(block.key) for block in PROMPT] == [before.priority, before.priority, 80]
    assert list(path) == PROMPT


@pytest.mark.parametrize("before", [RetentionHint(70, None), RetentionHint(80, 9.0)])
def test_blocks_before_evicted_ones_get_a_hint_if_not_retained_as_long(before: RetentionHint) -> None:
    stored_retention, tier_index = retention_of(b"a")
    stored_retention.note(PROMPT[:2], 1, before)
    stored_retention.note_evicted(PROMPT[2:], RetentionHint(80, 10.0), 2, iter(PROMPT))
    stored_retention.expire(9.0)
    assert tier_index.priority_of(b"a") == 80


def test_a_low_priority_sets_nothing_on_the_blocks_before_it() -> None:
    stored_retention, _ = retention_of()
    path = iter(PROMPT)
    stored_retention.note_evicted(PROMPT[2:], RetentionHint(10, None), 2, path)
    assert [stored_retention.priority_of(block.key) for block in PROMPT] == [50, 50, 10]
    assert list(path) == PROMPT


def test_the_priority_of_an_evicted_block_does_not_lower_a_requested_one() -> None:
    stored_retention, _ = retention_of(b"a")
    stored_retention.set(PATH[:1], 0, RetentionHint(90, None))
    stored_retention.note(PATH[:1], 0, RetentionHint(60, None))
    assert stored_retention.priority_of(b"a") == 90
    stored_retention.set(PATH[:1], 0, RetentionHint(50, None))
    assert stored_retention.priority_of(b"a") == 50


def test_a_block_whose_priority_is_forgotten_is_evicted_like_others() -> None:
    stored_retention, tier_index = retention_of(b"a", b"b", b"c", b"x")
    stored_retention._hints = RetentionHints(max_keys=2)
    for block in PATH:
        stored_retention.set([block], 0, RetentionHint(90, 10.0))
    assert list(tier_index) == [b"x", b"a", b"b", b"c"]
    assert [tier_index.priority_of(block.key) for block in PATH] == [50, 90, 90]
    assert len(tier_index.retained) == 2
    other, restored = retention_of(b"a", b"b", b"c")
    other._hints = RetentionHints(max_keys=2)
    other.restore(restored, [(block.key, RetentionHint(90, None)) for block in PATH])
    assert len(restored.retained) == 2


def test_another_process_restores_the_priorities() -> None:
    stored_retention, tier_index = retention_of(b"a", b"b", b"c", b"x", b"y")
    stored_retention.set(PATH, 2, RetentionHint(20, 10.0))
    stored_retention.set(PATH[:2], 0, RetentionHint(90, None))
    hints = stored_retention.hints(tier_index)
    assert hints == [(b"c", RetentionHint(20, 10.0)), (b"b", RetentionHint(90, None)), (b"a", RetentionHint(90, None))]
    other, restored = retention_of(b"a", b"c", b"x", b"y")
    other.set(PATH[2:], 0, RetentionHint(60, None))
    other.restore(restored, hints)
    assert list(restored) == [b"x", b"y", b"c", b"a"]
    assert other.hints(restored) == [(b"c", RetentionHint(60, None)), (b"a", RetentionHint(90, None))]


def test_a_purge_forgets_priorities() -> None:
    stored_retention, _ = retention_of(b"a")
    stored_retention.set(PATH[:1], 0, RetentionHint(90, None))
    stored_retention.purge("acme", None, None)
    assert stored_retention.priority_of(b"a") == 50


def test_if_not_all_blocks_can_be_retained_the_first_ones_are() -> None:
    stored_retention, _ = retention_of(b"a", b"b", b"c", b"x", retained_share=0.2)  # two of ten blocks
    stored_retention.set(PATH, 0, RetentionHint(90, None))
    assert stored_retention.granted(PATH, 90) == (2, 3)


def test_a_block_that_no_tier_holds_gets_no_priority() -> None:
    stored_retention, tier_index = retention_of(b"a", b"c")
    stored_retention.note(PATH, 1, RetentionHint(80, None))
    stored_retention.set(PATH, 1, RetentionHint(90, None))
    assert [stored_retention.priority_of(block.key) for block in PATH] == [90, 50, 90]
    stored_retention.set(PATH, 0, RetentionHint(20, None))
    assert [tier_index.priority_of(key) for key in (b"a", b"c")] == [20, 20]
    assert stored_retention.priority_of(b"b") == 50
