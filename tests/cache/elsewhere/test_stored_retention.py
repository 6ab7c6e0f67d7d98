import pytest

from radixkv.cache.elsewhere.keyed_block import KeyedBlock
from radixkv.cache.elsewhere.retentions import Retentions, Wish
from radixkv.cache.elsewhere.shared_shelf import SharedShelf
from radixkv.cache.elsewhere.shelf import Shelf
from radixkv.cache.elsewhere.stored_retention import StoredRetention
from radixkv.namespace import Namespace

ACME = Namespace("m", "acme")
PATH = [KeyedBlock(key, b"", b"", ACME) for key in (b"a", b"b", b"c")]


def holding(*keys: bytes) -> tuple[StoredRetention, Shelf]:
    shelf, shared = Shelf("host", 10), SharedShelf("redis")
    for key in keys:
        shelf.add(key, ACME)
        shared.add(key, ACME)
    return StoredRetention({"host": shelf, "redis": shared}), shelf


def test_blocks_before_one_that_is_kept_are_kept_too() -> None:
    retention, shelf = holding(b"a", b"b", b"c", b"x")
    retention.set(PATH[:2], 1, Wish(90, None))
    assert list(shelf) == [b"c", b"x", b"b", b"a"]
    assert retention.granted(PATH, 90) == (2, 3)


def test_blocks_before_one_that_may_go_first_stay() -> None:
    retention, shelf = holding(b"a", b"b", b"x")
    retention.set(PATH[:2], 1, Wish(20, None))
    assert list(shelf) == [b"b", b"a", b"x"]


def test_a_block_that_is_on_the_device_keeps_its_place_until_it_leaves() -> None:
    retention, shelf = holding(b"a", b"x")
    shelf.note_loaded(b"a")
    retention.set(PATH[:1], 0, Wish(90, None))
    assert list(shelf) == [b"a", b"x"]
    shelf.note_left(b"a", retention.priority_of(b"a"))
    assert list(shelf) == [b"x", b"a"]


def test_the_end_of_a_priority_takes_it_back() -> None:
    retention, shelf = holding(b"a", b"x")
    retention.set(PATH[:1], 0, Wish(90, 10.0))
    retention.expire(9.0)
    assert list(shelf) == [b"x", b"a"]
    retention.expire(10.0)
    shelf.note_left(b"x")
    assert list(shelf) == [b"a", b"x"]


PROMPT = [KeyedBlock(key, parent, b"", ACME) for key, parent in ((b"a", b""), (b"b", b"a"), (b"c", b"b"))]


def test_blocks_before_those_that_leave_are_kept_as_long() -> None:
    retention, _ = holding()
    retention.note_leaving(PROMPT[2:], Wish(90, None), 2, iter(PROMPT))
    assert [retention.priority_of(block.key) for block in PROMPT] == [90, 90, 90]


@pytest.mark.parametrize("before", [Wish(80, 10.0), Wish(90, None)])
def test_what_comes_before_those_that_leave_is_not_asked_for_if_it_is_kept_as_long(before: Wish) -> None:
    retention, _ = holding()
    retention.note(PROMPT[:2], 1, before)
    path = iter(PROMPT)
    retention.note_leaving(PROMPT[2:], Wish(80, 10.0), 2, path)
    assert [retention.priority_of(block.key) for block in PROMPT] == [before.priority, before.priority, 80]
    assert list(path) == PROMPT


@pytest.mark.parametrize("before", [Wish(70, None), Wish(80, 9.0)])
def test_what_is_not_kept_as_long_as_those_that_leave_is_from_now_on(before: Wish) -> None:
    retention, shelf = holding(b"a")
    retention.note(PROMPT[:2], 1, before)
    retention.note_leaving(PROMPT[2:], Wish(80, 10.0), 2, iter(PROMPT))
    retention.expire(9.0)
    assert shelf.priority_of(b"a") == 80


def test_what_may_go_first_asks_for_nothing_before_it() -> None:
    retention, _ = holding()
    path = iter(PROMPT)
    retention.note_leaving(PROMPT[2:], Wish(10, None), 2, path)
    assert [retention.priority_of(block.key) for block in PROMPT] == [50, 50, 10]
    assert list(path) == PROMPT


def test_what_left_with_a_priority_does_not_lower_one_that_was_asked_for() -> None:
    retention, _ = holding(b"a")
    retention.set(PATH[:1], 0, Wish(90, None))
    retention.note(PATH[:1], 0, Wish(60, None))
    assert retention.priority_of(b"a") == 90
    retention.set(PATH[:1], 0, Wish(50, None))
    assert retention.priority_of(b"a") == 50


def test_a_block_whose_priority_is_forgotten_goes_with_those_that_have_none() -> None:
    retention, shelf = holding(b"a", b"b", b"c", b"x")
    retention._retentions = Retentions(max_keys=2)
    for block in PATH:
        retention.set([block], 0, Wish(90, 10.0))
    assert list(shelf) == [b"x", b"a", b"b", b"c"]
    assert [shelf.priority_of(block.key) for block in PATH] == [50, 90, 90]
    assert len(shelf.retained) == 2
    other, restored = holding(b"a", b"b", b"c")
    other._retentions = Retentions(max_keys=2)
    other.restore(restored, [(block.key, Wish(90, None)) for block in PATH])
    assert len(restored.retained) == 2


def test_another_process_goes_on_with_the_priorities() -> None:
    retention, shelf = holding(b"a", b"b", b"c", b"x", b"y")
    retention.set(PATH, 2, Wish(20, 10.0))
    retention.set(PATH[:2], 0, Wish(90, None))
    wishes = retention.wishes(shelf)
    assert wishes == [(b"c", Wish(20, 10.0)), (b"b", Wish(90, None)), (b"a", Wish(90, None))]
    other, restored = holding(b"a", b"c", b"x", b"y")
    other.set(PATH[2:], 0, Wish(60, None))
    other.restore(restored, wishes)
    assert list(restored) == [b"x", b"y", b"c", b"a"]
    assert other.wishes(restored) == [(b"c", Wish(60, None)), (b"a", Wish(90, None))]


def test_a_purge_forgets_priorities() -> None:
    retention, _ = holding(b"a")
    retention.set(PATH[:1], 0, Wish(90, None))
    retention.purge("acme", None, None)
    assert retention.priority_of(b"a") == 50


def test_where_not_all_may_be_kept_the_beginning_is() -> None:
    retention, shelf = holding(b"a", b"b", b"c", b"x")
    shelf.retained_share = 0.2  # of ten blocks
    retention.set(PATH, 0, Wish(90, None))
    assert retention.granted(PATH, 90) == (2, 3)


def test_a_block_that_is_nowhere_gets_no_priority_and_loses_what_it_had() -> None:
    retention, shelf = holding(b"a", b"c")
    retention.note(PATH, 1, Wish(80, None))
    retention.set(PATH, 1, Wish(90, None))
    assert [retention.priority_of(block.key) for block in PATH] == [90, 50, 90]
    retention.set(PATH, 0, Wish(20, None))
    assert [shelf.priority_of(key) for key in (b"a", b"c")] == [20, 20]
    assert retention.priority_of(b"b") == 50
