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
    known = RetentionHints()
    known.raise_to(b"a", ACME, RetentionHint(80, None))
    known.raise_to(b"a", ACME, RetentionHint(60, None))
    assert known.of(b"a") == 80
    known.set(b"a", ACME, RetentionHint(60, None))
    assert known.of(b"a") == 60
    known.set(b"a", ACME, RetentionHint(50, None))
    assert (known.of(b"a"), len(known)) == (50, 0)


def test_a_lower_priority_than_the_default_is_noted_too() -> None:
    known = RetentionHints()
    known.raise_to(b"a", ACME, RetentionHint(20, None))
    assert known.of(b"a") == 20


def test_priorities_end_at_their_time_a_bounded_number_at_once(monkeypatch) -> None:
    monkeypatch.setattr(retention, "_MAX_EXPIRED_AT_ONCE", 2)
    known = RetentionHints()
    for index, key in enumerate((b"a", b"b", b"c")):
        known.set(key, ACME, RetentionHint(80, 10.0 + index))
    known.set(b"d", ACME, RetentionHint(80, None))
    assert known.expire(9.9) == []
    assert known.expire(12.0) == [b"a", b"b"]
    assert known.expire(12.0) == [b"c"]
    assert known.expire(1e9) == []
    assert (known.of(b"a"), known.of(b"d")) == (50, 80)


def test_a_later_hint_replaces_the_expiry_of_an_earlier_one() -> None:
    known = RetentionHints()
    known.set(b"a", ACME, RetentionHint(80, 10.0))
    known.raise_to(b"a", ACME, RetentionHint(80, 20.0))
    assert known.expire(15.0) == []
    assert known.expire(20.0) == [b"a"]


def test_the_same_priority_for_less_time_keeps_the_later_expiry() -> None:
    known = RetentionHints()
    for key, ends_s in ((b"a", (20.0, 10.0)), (b"b", (None, 10.0)), (b"c", (10.0, None))):
        for end_s in ends_s:
            known.raise_to(key, ACME, RetentionHint(80, end_s))
    assert [known.hint_of(key) for key in (b"a", b"b", b"c")] == [
        RetentionHint(80, 20.0),
        RetentionHint(80, None),
        RetentionHint(80, None),
    ]
    known.raise_to(b"a", ACME, RetentionHint(90, 5.0))
    assert known.hint_of(b"a") == RetentionHint(90, 5.0)


def test_beyond_the_bound_the_oldest_hint_is_forgotten() -> None:
    known = RetentionHints(max_keys=2)
    forgotten = [known.set(key, ACME, RetentionHint(80, 10.0)) for key in (b"a", b"b", b"a", b"c")]
    assert forgotten == [None, None, None, b"b"]
    assert [known.of(key) for key in (b"a", b"b", b"c")] == [80, 50, 80]
    assert known.expire(10.0) == [b"a", b"c"]


def test_a_purge_forgets_a_tenant() -> None:
    known = RetentionHints()
    known.set(b"a", ACME, RetentionHint(80, 10.0))
    known.set(b"b", OTHER, RetentionHint(80, 10.0))
    known.purge("acme", None, None)
    assert (known.of(b"a"), known.of(b"b")) == (50, 80)
    assert known.expire(10.0) == [b"b"]


def test_a_tenant_with_its_equal_part_makes_others_forget_nothing() -> None:
    known = RetentionHints(max_keys=4)
    for key in (b"a", b"b"):
        known.set(key, ACME, RetentionHint(80, None))
    forgotten = [known.set(key, OTHER, RetentionHint(80, None)) for key in (b"p", b"q", b"r", b"s")]
    assert forgotten == [None, None, b"p", b"q"]
    assert (known.of(b"a"), known.of(b"b")) == (80, 80)


def test_a_tenant_that_had_all_makes_room_for_another() -> None:
    known = RetentionHints(max_keys=4)
    for key in (b"p", b"q", b"r", b"s"):
        known.set(key, OTHER, RetentionHint(80, None))
    forgotten = [known.set(key, ACME, RetentionHint(80, None)) for key in (b"a", b"b", b"c")]
    assert forgotten == [b"p", b"q", b"a"]
    known.purge("other", None, None)
    assert [known.set(key, ACME, RetentionHint(80, None)) for key in (b"a", b"d", b"e")] == [None, None, b"b"]


def test_of_three_tenants_the_one_that_has_most_makes_room_for_another() -> None:
    known = RetentionHints(max_keys=8)
    for key in (b"p", b"q"):
        known.set(key, OTHER, RetentionHint(80, None))
    for key in (b"a", b"b", b"c", b"d", b"e", b"f"):
        known.set(key, ACME, RetentionHint(80, None))
    forgotten = [known.set(key, THIRD, RetentionHint(80, None)) for key in (b"x", b"y", b"z", b"w")]
    assert forgotten == [b"a", b"b", b"c", b"x"]
    assert [known.of(key) for key in (b"p", b"q", b"y", b"f")] == [80, 80, 80, 80]


def test_a_tenant_that_has_fewer_keys_now_makes_no_room() -> None:
    known = RetentionHints(max_keys=5)
    for key in (b"a", b"b", b"c"):
        known.set(key, ACME, RetentionHint(80, 10.0))
    for key in (b"p", b"q"):
        known.set(key, OTHER, RetentionHint(80, None))
    known.forget(b"a")
    known.set(b"b", ACME, RetentionHint(50, None))
    known.set(b"x", THIRD, RetentionHint(80, None))
    known.set(b"y", THIRD, RetentionHint(80, None))
    assert known.set(b"r", OTHER, RetentionHint(80, None)) == b"p"
    assert known.set(b"d", ACME, RetentionHint(80, None)) == b"x"


ACME = Namespace("m", "acme")
PATH = [KeyedBlock(key, b"", b"", ACME) for key in (b"a", b"b", b"c")]


def holding(*keys: bytes, retained_share: float = 1.0) -> tuple[StoredRetention, TierIndex]:
    tier_index = TierIndex("host", 10, retained_share=retained_share)
    shared = SharedTierIndex("redis", 2**18)
    for key in keys:
        tier_index.add(key, ACME)
        shared.add(key, ACME)
    return StoredRetention({"host": tier_index, "redis": shared}), tier_index


def test_blocks_before_a_retained_one_are_retained_too() -> None:
    retention, tier_index = holding(b"a", b"b", b"c", b"x")
    retention.set(PATH[:2], 1, RetentionHint(90, None))
    assert list(tier_index) == [b"c", b"x", b"b", b"a"]
    assert retention.granted(PATH, 90) == (2, 3)


def test_blocks_before_one_of_low_priority_keep_theirs() -> None:
    retention, tier_index = holding(b"a", b"b", b"x")
    retention.set(PATH[:2], 1, RetentionHint(20, None))
    assert list(tier_index) == [b"b", b"a", b"x"]


def test_a_block_on_the_device_keeps_its_position_until_it_is_evicted() -> None:
    retention, tier_index = holding(b"a", b"x")
    tier_index.note_loaded(b"a")
    retention.set(PATH[:1], 0, RetentionHint(90, None))
    assert list(tier_index) == [b"a", b"x"]
    tier_index.note_evicted(b"a", retention.priority_of(b"a"))
    assert list(tier_index) == [b"x", b"a"]


def test_an_expired_priority_is_reset() -> None:
    retention, tier_index = holding(b"a", b"x")
    retention.set(PATH[:1], 0, RetentionHint(90, 10.0))
    retention.expire(9.0)
    assert list(tier_index) == [b"x", b"a"]
    retention.expire(10.0)
    tier_index.note_evicted(b"x")
    assert list(tier_index) == [b"a", b"x"]


PROMPT = [KeyedBlock(key, parent, b"", ACME) for key, parent in ((b"a", b""), (b"b", b"a"), (b"c", b"b"))]


def test_blocks_before_evicted_ones_are_retained_as_long() -> None:
    retention, _ = holding()
    retention.note_evicted(PROMPT[2:], RetentionHint(90, None), 2, iter(PROMPT))
    assert [retention.priority_of(block.key) for block in PROMPT] == [90, 90, 90]


@pytest.mark.parametrize("before", [RetentionHint(80, 10.0), RetentionHint(90, None)])
def test_blocks_before_evicted_ones_get_no_hint_if_retained_as_long(before: RetentionHint) -> None:
    retention, _ = holding()
    retention.note(PROMPT[:2], 1, before)
    path = iter(PROMPT)
    retention.note_evicted(PROMPT[2:], RetentionHint(80, 10.0), 2, path)
    assert [retention.priority_of(block.key) for block in PROMPT] == [before.priority, before.priority, 80]
    assert list(path) == PROMPT


@pytest.mark.parametrize("before", [RetentionHint(70, None), RetentionHint(80, 9.0)])
def test_blocks_before_evicted_ones_get_a_hint_if_not_retained_as_long(before: RetentionHint) -> None:
    retention, tier_index = holding(b"a")
    retention.note(PROMPT[:2], 1, before)
    retention.note_evicted(PROMPT[2:], RetentionHint(80, 10.0), 2, iter(PROMPT))
    retention.expire(9.0)
    assert tier_index.priority_of(b"a") == 80


def test_a_low_priority_sets_nothing_on_the_blocks_before_it() -> None:
    retention, _ = holding()
    path = iter(PROMPT)
    retention.note_evicted(PROMPT[2:], RetentionHint(10, None), 2, path)
    assert [retention.priority_of(block.key) for block in PROMPT] == [50, 50, 10]
    assert list(path) == PROMPT


def test_the_priority_of_an_evicted_block_does_not_lower_a_requested_one() -> None:
    retention, _ = holding(b"a")
    retention.set(PATH[:1], 0, RetentionHint(90, None))
    retention.note(PATH[:1], 0, RetentionHint(60, None))
    assert retention.priority_of(b"a") == 90
    retention.set(PATH[:1], 0, RetentionHint(50, None))
    assert retention.priority_of(b"a") == 50


def test_a_block_whose_priority_is_forgotten_is_evicted_like_others() -> None:
    retention, tier_index = holding(b"a", b"b", b"c", b"x")
    retention._hints = RetentionHints(max_keys=2)
    for block in PATH:
        retention.set([block], 0, RetentionHint(90, 10.0))
    assert list(tier_index) == [b"x", b"a", b"b", b"c"]
    assert [tier_index.priority_of(block.key) for block in PATH] == [50, 90, 90]
    assert len(tier_index.retained) == 2
    other, restored = holding(b"a", b"b", b"c")
    other._hints = RetentionHints(max_keys=2)
    other.restore(restored, [(block.key, RetentionHint(90, None)) for block in PATH])
    assert len(restored.retained) == 2


def test_another_process_restores_the_priorities() -> None:
    retention, tier_index = holding(b"a", b"b", b"c", b"x", b"y")
    retention.set(PATH, 2, RetentionHint(20, 10.0))
    retention.set(PATH[:2], 0, RetentionHint(90, None))
    hints = retention.hints(tier_index)
    assert hints == [(b"c", RetentionHint(20, 10.0)), (b"b", RetentionHint(90, None)), (b"a", RetentionHint(90, None))]
    other, restored = holding(b"a", b"c", b"x", b"y")
    other.set(PATH[2:], 0, RetentionHint(60, None))
    other.restore(restored, hints)
    assert list(restored) == [b"x", b"y", b"c", b"a"]
    assert other.hints(restored) == [(b"c", RetentionHint(60, None)), (b"a", RetentionHint(90, None))]


def test_a_purge_forgets_priorities() -> None:
    retention, _ = holding(b"a")
    retention.set(PATH[:1], 0, RetentionHint(90, None))
    retention.purge("acme", None, None)
    assert retention.priority_of(b"a") == 50


def test_if_not_all_blocks_can_be_retained_the_first_ones_are() -> None:
    retention, _ = holding(b"a", b"b", b"c", b"x", retained_share=0.2)  # of ten blocks
    retention.set(PATH, 0, RetentionHint(90, None))
    assert retention.granted(PATH, 90) == (2, 3)


def test_a_block_that_no_tier_holds_gets_no_priority() -> None:
    retention, tier_index = holding(b"a", b"c")
    retention.note(PATH, 1, RetentionHint(80, None))
    retention.set(PATH, 1, RetentionHint(90, None))
    assert [retention.priority_of(block.key) for block in PATH] == [90, 50, 90]
    retention.set(PATH, 0, RetentionHint(20, None))
    assert [tier_index.priority_of(key) for key in (b"a", b"c")] == [20, 20]
    assert retention.priority_of(b"b") == 50
