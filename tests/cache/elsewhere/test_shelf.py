from radixkv.cache.elsewhere.shelf import Shelf
from radixkv.namespace import Namespace

ACME, OTHER = Namespace("model", "acme"), Namespace("model", "other")


def shelf_of(*keys: bytes, num_blocks: int = 3) -> Shelf:
    shelf = Shelf("host", num_blocks)
    for key in keys:
        assert shelf.add(key, ACME) is None
    return shelf


def test_what_left_the_device_longest_ago_goes_first() -> None:
    shelf = shelf_of(b"a", b"b", b"c")
    assert shelf.add(b"d", ACME) == b"a"
    assert list(shelf) == [b"b", b"c", b"d"]
    assert b"a" not in shelf


def test_what_leaves_again_goes_last() -> None:
    shelf = shelf_of(b"a", b"b", b"c")
    shelf.note_left(b"a")
    assert shelf.add(b"d", ACME) == b"b"


def test_what_is_on_the_device_as_well_goes_before_all_else() -> None:
    shelf = shelf_of(b"a", b"b", b"c")
    shelf.note_loaded(b"c")
    shelf.note_loaded(b"b")
    assert list(shelf) == [b"c", b"b", b"a"]
    assert shelf.add(b"d", ACME) == b"c"


def test_what_left_the_device_again_is_no_spare() -> None:
    shelf = shelf_of(b"a", b"b", b"c")
    shelf.note_loaded(b"c")
    shelf.note_left(b"c")
    assert list(shelf) == [b"a", b"b", b"c"]


def test_blocks_of_an_earlier_process_go_before_those_of_this_one() -> None:
    shelf = shelf_of(b"new", num_blocks=4)
    shelf.add_found([(b"oldest", OTHER), (b"older", OTHER), (b"new", OTHER), (b"old", OTHER)])
    assert list(shelf) == [b"oldest", b"older", b"old", b"new"]
    assert shelf.remove_all(ACME) == [b"new"]


def test_of_too_many_found_blocks_those_that_go_last_are_kept() -> None:
    shelf = shelf_of(b"new", num_blocks=2)
    shelf.add_found([(b"older", OTHER), (b"old", OTHER)])
    assert list(shelf) == [b"old", b"new"]


def test_a_namespace_is_forgotten_as_a_whole() -> None:
    shelf = shelf_of(b"a", b"b")
    shelf.add(b"c", OTHER)
    assert sorted(shelf.remove_all(ACME)) == [b"a", b"b"]
    assert shelf.namespaces == [OTHER]
    assert shelf.remove_all(ACME) == []
    assert list(shelf) == [b"c"]


def test_what_is_not_there_is_forgotten_without_effect() -> None:
    shelf = shelf_of(b"a")
    shelf.remove(b"b")
    shelf.remove(b"a")
    assert len(shelf) == 0
    assert shelf.namespaces == []


def test_a_tenant_with_its_share_gives_up_its_own() -> None:
    shelf = Shelf("host", 6)
    shelf.share_of = {"acme": 0.5, "other": None}.get
    for key in (b"o", b"p"):
        shelf.add(key, OTHER)
    assert [shelf.add(key, ACME) for key in (b"a", b"b", b"c")] == [None] * 3
    shelf.note_loaded(b"b")
    assert shelf.add(b"d", ACME) == b"b", "it is on the device as well"
    assert shelf.add(b"e", ACME) == b"a"
    assert shelf.num_by_tenant == {"acme": 3, "other": 2}
    assert shelf.add(b"q", OTHER) is None
    assert shelf.add(b"r", OTHER) == b"o", "without a share the oldest of all goes"
    shelf.remove_all(ACME)
    assert shelf.num_by_tenant == {"other": 3}


def test_of_an_earlier_process_a_tenant_gets_no_more_than_its_share() -> None:
    shelf = Shelf("disk", 4)
    shelf.share_of = lambda tenant: 0.5
    shelf.add_found([(b"a", ACME), (b"b", ACME), (b"c", ACME), (b"o", OTHER)])
    assert list(shelf) == [b"b", b"c", b"o"]
    assert shelf.add(b"d", ACME) == b"b"


def test_a_share_of_less_than_a_block_is_a_block() -> None:
    shelf = Shelf("host", 4)
    shelf.share_of = lambda tenant: 0.1
    assert [shelf.add(key, ACME) for key in (b"a", b"b")] == [None, b"a"]
