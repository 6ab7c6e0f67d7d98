import random

from radixkv.offload.index.tier_index import EvictionOrder, EvictionRank


def test_keys_of_lower_levels_are_evicted_first_and_those_of_one_level_in_the_order_of_their_turns() -> None:
    order = EvictionOrder()
    for turn, (key, level) in enumerate([(b"a", 90), (b"b", 50), (b"c", -1), (b"d", 50)]):
        order.put_last(key, level, turn)
    assert [rank.key for rank in order] == [b"c", b"b", b"d", b"a"]
    assert order.first == EvictionRank(-1, 2, b"c")


def test_a_key_that_is_put_again_moves() -> None:
    order = EvictionOrder()
    order.put_last(b"a", 50, 0)
    order.put_last(b"b", 50, 1)
    order.put_last(b"a", 20, 2)
    assert list(order) == [EvictionRank(20, 2, b"a"), EvictionRank(50, 1, b"b")]
    order.put_first(b"a", 50, -1)
    assert [rank.key for rank in order] == [b"a", b"b"]
    order.remove(b"a")
    order.remove(b"a")
    assert [rank.key for rank in order] == [b"b"]
    order.remove(b"b")
    assert order.first is None


def test_after_random_operations_the_order_is_that_of_a_sorted_list() -> None:
    rng = random.Random(5)
    order = EvictionOrder()
    expected = {}
    for turn in range(2000):
        key = bytes([rng.randrange(30)])
        level = rng.choice([-1, 20, 50, 90])
        match rng.randrange(4):
            case 0:
                order.remove(key)
                expected.pop(key, None)
            case 1:
                order.put_first(key, level, -turn - 1)
                expected[key] = EvictionRank(level, -turn - 1, key)
            case _:
                order.put_last(key, level, turn)
                expected[key] = EvictionRank(level, turn, key)
        assert list(order) == sorted(expected.values())
        assert all(order.level_of(key) == rank.level for key, rank in expected.items())
