"""Keys are words here, with a token per character; the values are arbitrary, distinguishable nodes."""

import random
from bisect import bisect_left
from typing import Any

import pytest

from radixkv.cache.node import ChildTable, _SortedKeys
from tests.fakes import spell


def table_of(*words: str) -> tuple[ChildTable, dict[str, Any]]:
    table, nodes = ChildTable(), {word: object() for word in words}
    for word, node in nodes.items():
        table[spell(word)] = node
    return table, nodes


FEW = ("abcd", "abXY", "bbbb")
MANY = (*FEW, "aaaa", "cccc", "dddd", "abbb")


@pytest.mark.parametrize("words", [FEW, MANY])
@pytest.mark.parametrize(
    ("block", "nearest", "num_tokens"),
    [("abcX", "abcd", 3), ("abXX", "abXY", 3), ("b", "bbbb", 1), ("bbbc", "bbbb", 3)],
)
def test_the_nearest_node_shares_the_most_tokens(
    words: tuple[str, ...], block: str, nearest: str, num_tokens: int
) -> None:
    table, nodes = table_of(*words)
    assert table.nearest(spell(block)) == (nodes[nearest], num_tokens * 4)


@pytest.mark.parametrize("words", [FEW, MANY])
def test_a_block_that_nothing_begins_like_shares_nothing(words: tuple[str, ...]) -> None:
    table, _ = table_of(*words)
    assert table.nearest(spell("zzzz"))[1] == 0
    assert table.nearest(spell("    "))[1] == 0


def test_a_node_takes_the_place_of_another() -> None:
    table, nodes = table_of(*MANY)
    table[spell("abcd")] = nodes["bbbb"]
    assert len(table) == len(MANY)
    assert table.nearest(spell("abcX")) == (nodes["bbbb"], 3 * 4)
    assert table.is_in_order()


def test_a_table_that_fills_and_empties_finds_what_a_scan_finds() -> None:
    dice, table = random.Random(1), ChildTable()
    nodes: dict[str, Any] = {}
    for _ in range(600):
        word = "".join(dice.choices("abc", k=6))
        if word in nodes and dice.random() < 0.8:
            del nodes[word], table[spell(word)]
        elif len(nodes) < 12:
            nodes[word] = table[spell(word)] = object()
        elif nodes:
            gone = dice.choice(sorted(nodes))
            del nodes[gone], table[spell(gone)]
        assert table.is_in_order()
        assert len(table) == len(nodes)
        if nodes:
            block = "".join(dice.choices("abc", k=6))
            node, num_bytes = table.nearest(spell(block))
            best = max(num_shared(word, block) for word in nodes)
            assert num_bytes == best * 4
            assert any(nodes[word] is node and num_shared(word, block) == best for word in nodes)


def num_shared(word: str, other: str) -> int:
    return next((n for n, (a, b) in enumerate(zip(word, other, strict=True)) if a != b), len(word))


def test_a_key_added_without_its_sorted_entry_is_detected() -> None:
    table, nodes = table_of(*MANY)
    dict.__setitem__(table, spell("zzzz"), nodes["abcd"])
    assert not table.is_in_order()


def test_neighbors_are_found_across_the_lists_that_sorted_keys_are_kept_in() -> None:
    dice = random.Random(2)
    words = sorted({"".join(dice.choices("abcdef", k=3)) for _ in range(60)})
    keys = _SortedKeys(words)
    keys._reset(4)
    assert len(keys._lists) > 5
    for word in [*words, "", "b", "ccc0", "zzz"]:
        after = bisect_left(words, word)
        expected = words[max(after - 1, 0)] if after < len(words) else words[-1], words[min(after, len(words) - 1)]
        assert keys.neighbors(word) == expected
