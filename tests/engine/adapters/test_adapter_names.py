"""Names of adapters: the content to which each name maps, and when a content without a name has drained."""

from __future__ import annotations

import pytest

from radixkv.engine.adapters.adapter_names import AdapterNames, ResolvedAdapter
from radixkv.errors import TooManyAdapters, UnknownAdapter
from tests.adapter_doubles import FakeFiles

OLD, NEW = FakeFiles("old"), FakeFiles("new", rank=16, num_bytes=7)


def names_of_contents(*pairs: tuple[str, str], max_adapters: int = 4) -> AdapterNames:
    """Assign names to digests, in this order."""
    names = AdapterNames(max_adapters)
    for name, digest in pairs:
        names.assign(name, FakeFiles(digest))
    return names


def test_the_empty_name_is_the_base_model() -> None:
    names = names_of_contents()
    assert names.find("") == names.acquire("") == ResolvedAdapter("", ())
    assert names.release("") is False
    assert names.names_of("") == ()


def test_a_name_that_was_never_assigned_is_unknown() -> None:
    names = names_of_contents(("law", "old"))
    for call in (names.find, names.acquire, names.drop):
        with pytest.raises(UnknownAdapter, match="adapter: expected the name of a loaded adapter, got an unknown one"):
            call("old")


def test_two_names_of_one_content_share_its_digest() -> None:
    names = names_of_contents(("law", "old"), ("court", "old"))
    assert names.find("law").digest == names.find("court").digest == "old"
    assert names.names_of("old") == ("law", "court")


def test_a_reassigned_name_maps_to_the_new_content_and_remembers_the_old() -> None:
    names = names_of_contents(("law", "old"))
    assert names.assign("law", NEW) == "old"
    assert names.find("law") == ResolvedAdapter("new", ("old",), NEW)
    assert names.assign("law", NEW) == "new"
    assert names.find("law") == ResolvedAdapter("new", ("old",), NEW)


def test_the_current_content_of_a_name_is_not_a_former_one() -> None:
    names = names_of_contents(("law", "a"), ("law", "b"), ("law", "a"))
    assert names.find("law") == ResolvedAdapter("a", ("b",), FakeFiles("a"))


def test_a_name_remembers_four_former_contents() -> None:
    names = names_of_contents(*(("law", str(number)) for number in range(8)))
    assert names.find("law") == ResolvedAdapter("7", ("6", "5", "4", "3"), FakeFiles("7"))


def test_a_name_that_was_dropped_and_loaded_again_remembers_its_former_content() -> None:
    names = names_of_contents(("law", "old"))
    assert names.drop("law") == "old"
    names.assign("law", NEW)
    assert names.find("law") == ResolvedAdapter("new", ("old",), NEW)


def test_content_without_names_drains_until_its_last_request_ends() -> None:
    names = names_of_contents(("law", "old"))
    for _ in range(2):
        assert names.acquire("law").digest == "old"
    names.assign("law", NEW)
    assert names.take_drained() == []
    assert (names.release("old"), names.take_drained()) == (False, [])
    assert (names.release("old"), names.take_drained()) == (True, ["old"])
    assert names.take_drained() == []


def test_unused_content_has_drained_with_its_last_name() -> None:
    names = names_of_contents(("law", "old"), ("court", "old"))
    names.drop("law")
    assert names.take_drained() == []
    names.drop("court")
    assert names.take_drained() == ["old"]


def test_content_that_gets_a_name_again_does_not_drain() -> None:
    names = names_of_contents(("law", "old"))
    names.acquire("law")
    names.drop("law")
    names.assign("court", OLD)
    assert names.release("old") is False
    assert names.take_drained() == []
    assert names.names_of("old") == ("court",)


def test_a_listing_has_every_name_and_each_draining_content_under_its_last_name() -> None:
    names = names_of_contents(("law", "old"), ("court", "old"))
    names.acquire("law")
    names.assign("law", NEW)
    names.assign("court", NEW)
    listed = [
        (name, resolved.weights.digest, resolved.weights.rank, is_draining, num_unfinished)
        for name, resolved, is_draining, num_unfinished in names.listing()
    ]
    assert listed == [("court", "old", 8, True, 1), ("law", "new", 16, False, 0), ("court", "new", 16, False, 0)]


class TestRoom:
    def test_the_number_of_contents_with_names_is_bounded(self) -> None:
        names = names_of_contents(("a", "1"), ("b", "2"), max_adapters=2)
        with pytest.raises(TooManyAdapters, match="expected at most 2 different ones"):
            names.require_room("c", "3")
        names.require_room("c", "2")

    def test_the_only_name_of_a_content_makes_room_for_its_next_content(self) -> None:
        names = names_of_contents(("a", "1"), ("b", "2"), max_adapters=2)
        names.require_room("a", "3")

    def test_a_name_that_shares_its_content_makes_no_room(self) -> None:
        names = names_of_contents(("a", "1"), ("b", "2"), ("c", "2"), max_adapters=2)
        with pytest.raises(TooManyAdapters):
            names.require_room("c", "3")

    def test_as_many_contents_may_drain_as_may_have_names(self) -> None:
        names = names_of_contents(("a", "0"), max_adapters=2)
        for number in range(1, 4):
            names.acquire("a")
            names.require_room("a", str(number))
            names.assign("a", FakeFiles(str(number)))
        names.acquire("a")
        with pytest.raises(
            TooManyAdapters, match=r"expected at most 4 loaded and draining ones, twice model\.max_adapters"
        ):
            names.require_room("a", "4")
        names.require_room("a", "1")

    def test_with_a_maximum_of_0_every_content_is_refused(self) -> None:
        with pytest.raises(TooManyAdapters):
            AdapterNames(0).require_room("a", "1")
