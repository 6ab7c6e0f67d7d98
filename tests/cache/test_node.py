"""The children of a node, by their first block. A block is a word with a token per character, a child any object."""

import random
from bisect import bisect_left
from typing import Any

import pytest

from radixkv.cache.node import ChildTable, _SortedKeys
from tests.fakes import num_shared_tokens, spell


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
def test_a_block_with_another_first_token_than_all_nodes_shares_nothing(words: tuple[str, ...]) -> None:
    table, _ = table_of(*words)
    for block in ("    ", "zzzz"):  # before and after all words
        _, num_shared_bytes = table.nearest(spell(block))
        assert num_shared_bytes == 0


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
            removed_word = dice.choice(sorted(nodes))
            del nodes[removed_word], table[spell(removed_word)]
        assert table.is_in_order()
        assert len(table) == len(nodes)
        if nodes:
            block = "".join(dice.choices("abc", k=6))
            node, num_bytes = table.nearest(spell(block))
            max_shared_tokens = max(num_shared_tokens(word, block) for word in nodes)
            assert num_bytes == max_shared_tokens * 4
            (nearest_word,) = (word for word in nodes if nodes[word] is node)
            assert num_shared_tokens(nearest_word, block) == max_shared_tokens


def test_a_key_added_without_its_sorted_entry_is_detected() -> None:
    table, nodes = table_of(*MANY)
    dict.__setitem__(table, spell("zzzz"), nodes["abcd"])
    assert not table.is_in_order()


def test_neighbors_are_found_in_all_lists_over_which_sorted_keys_are_distributed() -> None:
    dice = random.Random(2)
    words = sorted({"".join(dice.choices("abcdef", k=3)) for _ in range(60)})
    keys = _SortedKeys(words)
    keys._reset(4)
    assert len(keys._lists) > 5
    for word in [*words, "", "b", "ccc0", "zzz"]:
        index = bisect_left(words, word)  # the first word that is not below `word`
        below, not_below = words[max(index - 1, 0)], words[min(index, len(words) - 1)]
        assert keys.neighbors(word) == (below, not_below)
