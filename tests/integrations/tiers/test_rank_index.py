"""Which blocks all ranks of a model hold."""

from __future__ import annotations

from radixkv.integrations.tiers.rank_index import RankIndex, key_of_rank


def test_a_block_is_held_if_every_rank_holds_it() -> None:
    index = RankIndex([{b"a", b"b"}, {b"b", b"c"}])
    assert [index.holds(key) for key in (b"a", b"b", b"c", b"d")] == [False, True, False, False]
    index.update(1, [b"a"], [b"b"])
    assert [index.holds(key) for key in (b"a", b"b", b"c", b"d")] == [True, False, False, False]


def test_without_ranks_no_block_is_held() -> None:
    assert not RankIndex([]).holds(b"a")


def test_keys_of_ranks_differ_and_can_be_converted_back() -> None:
    key = bytes(range(32))
    keys = [key_of_rank(key, rank) for rank in range(1000)]
    assert len(set(keys)) == 1000
    assert [key_of_rank(each, rank) for rank, each in enumerate(keys)] == [key] * 1000
    assert {each[:10] for each in keys} == {key[:10]}  # the owner's tag, by which a disk recognizes the owner
