from radixkv.cache.elsewhere.shared_shelf import SharedShelf
from radixkv.namespace import Namespace

NAMESPACE = Namespace("m")


def test_it_forgets_what_was_used_longest_ago_and_the_store_does_not() -> None:
    shelf = SharedShelf("redis", 2)
    for key in (b"a", b"b"):
        assert shelf.add(key, NAMESPACE) is None
    shelf.note_left(b"a")
    assert shelf.add(b"c", NAMESPACE) is None, "the store is told nothing"
    assert [key in shelf for key in (b"a", b"b", b"c")] == [True, False, True]
