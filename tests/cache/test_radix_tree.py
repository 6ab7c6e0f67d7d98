"""The tree alone. Blocks have four tokens, a token is a character, and block ids are assigned in ascending order."""

import itertools
import random

import numpy as np
import pytest

from radixkv.cache.audit import check_tree
from radixkv.cache.node import Node
from radixkv.cache.radix_tree import Insertion
from radixkv.errors import InvariantViolation
from tests.fakes import make_tree, num_shared_tokens, packed, spell


class Planter:
    """Inserts text with new block ids, and returns the shape of the tree as text."""

    def __init__(self, block_size: int = 4) -> None:
        self.tree = make_tree(block_size)
        self._block_ids = itertools.count()

    def insert(self, text: str) -> Insertion:
        num_blocks = -(-len(text) // self.tree.owner.block_size)
        insertion = self.tree.insert(spell(text), packed(*itertools.islice(self._block_ids, num_blocks)))
        check_tree(self.tree)
        return insertion

    def match(self, text: str) -> tuple[int, list[int]]:
        """Return the number of matched tokens, and the ids of their blocks."""
        _, num_bytes, block_ids, _ = self.tree.match(spell(text))
        return num_bytes // 4, unpacked(block_ids)

    def shape(self) -> dict[str, list[int]]:
        """Return the block ids of each node, by the text of its path with `/` between nodes."""
        return {path_text(node): unpacked(node.block_ids) for node in self.tree.nodes()}


def unpacked(block_ids: bytes) -> list[int]:
    return np.frombuffer(block_ids, dtype=np.int32).tolist()


def path_text(node: Node) -> str:
    text = "".join(map(chr, np.frombuffer(node.tokens, dtype="<u4").tolist()))
    parent = node.parent
    return text if parent is None or parent.parent is None else f"{path_text(parent)}/{text}"


def node_of(planter: Planter, path: str) -> Node:
    return next(node for node in planter.tree.nodes() if path_text(node) == path)


def test_an_empty_tree_matches_nothing() -> None:
    assert make_tree(4).match(spell("abcd")) == (None, 0, b"", 0)


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "block_ids"),
    [
        ("", 0, []),
        ("a", 1, [0]),
        ("abc", 3, [0]),
        ("abcd", 4, [0]),
        ("abcde", 5, [0, 1]),
        ("abcdefgh", 8, [0, 1]),
        ("abcdefghi", 9, [0, 1, 2]),
        ("abcdefghij", 10, [0, 1, 2]),
        ("abcdefghijk", 10, [0, 1, 2]),
        ("abcdefghijklmnop", 10, [0, 1, 2]),
        ("abXdefghij", 2, [0]),
        ("abcdeXghij", 5, [0, 1]),
        ("abcdefghXj", 8, [0, 1]),
        ("X", 0, []),
        ("Xbcdefghij", 0, []),
    ],
)
def test_a_match_ends_at_the_first_token_that_differs(prompt: str, num_tokens: int, block_ids: list[int]) -> None:
    planter = Planter()
    planter.insert("abcdefghij")
    assert planter.match(prompt) == (num_tokens, block_ids)


def test_a_match_continues_through_nodes_and_ends_inside_a_sibling() -> None:
    planter = Planter()
    planter.insert("abcdefghijkl")  # 0 1 2
    planter.insert("abcdEFGHIJ")  # 3 4 5; the tree already has a block for "abcd", so 3 is not inserted
    assert planter.match("abcdefghijkl") == (12, [0, 1, 2])
    assert planter.match("abcdefghijXX") == (10, [0, 1, 2])
    assert planter.match("abcdEFGHIJKL") == (10, [0, 4, 5])
    assert planter.match("abcdEFXX") == (6, [0, 4])
    assert planter.match("abcdXX") == (4, [0])


def test_a_match_changes_nothing() -> None:
    planter = Planter()
    planter.insert("abcdefghij")
    shape, node = planter.shape(), node_of(planter, "abcdefghij")
    for prompt in ("abcdeX", "abX", "abcdefghijklm", "X"):
        planter.tree.match(spell(prompt))
    assert planter.shape() == shape
    assert (node.ref_count, node.last_used_s) == (0, 0.0)


def test_the_sibling_that_shares_most_is_found_among_many() -> None:
    planter = Planter(block_size=8)
    dice = random.Random(1)
    texts = {"".join(dice.choices("ab", k=8)) for _ in range(60)}
    for text in texts:
        planter.insert(text)
    for _ in range(300):
        prompt = "".join(dice.choices("abc", k=dice.randint(1, 8)))
        expected = max(num_shared_tokens(text, prompt) for text in texts)
        assert planter.match(prompt)[0] == expected


@pytest.mark.parametrize("difference", [0, 1, 15, 16, 17, 31, 37, 47, 48, 49, 63, 64, 111, 112, 113, 200, 298, 299])
def test_the_first_difference_in_a_long_segment_is_found_to_the_token(difference: int) -> None:
    planter = Planter(block_size=512)
    planter.insert("x" * 300)
    assert planter.match("x" * difference + "y" * (300 - difference))[0] == difference
    assert planter.match("x" * difference + "y" * 300)[0] == difference
    assert planter.match("x" * difference)[0] == difference


def test_tokens_are_compared_whole_not_by_byte() -> None:
    tree = make_tree(2)
    tree.insert(np.array([1, 0x01020304], dtype="<u4").tobytes(), packed(0))
    prompt = np.array([1, 0x05020304], dtype="<u4").tobytes()
    _, num_bytes, *_ = tree.match(prompt)
    assert num_bytes == 4, "of the second token, only the lower three bytes are equal"


def test_a_first_insert_makes_one_leaf_of_all_its_blocks() -> None:
    planter = Planter()
    insertion = planter.insert("abcdefghij")
    assert planter.shape() == {"abcdefghij": [0, 1, 2]}
    assert insertion.known_bytes == 0
    assert insertion.num_known_blocks == 0
    assert not insertion.is_covered


def test_a_split_cuts_at_the_block_boundary_below_the_difference() -> None:
    planter = Planter()
    planter.insert("abcdefghij")
    insertion = planter.insert("abcdefXY")
    assert planter.shape() == {"abcd": [0], "abcd/efghij": [1, 2], "abcd/efXY": [4]}
    assert insertion.known_bytes == 6 * 4
    assert unpacked(insertion.known_block_ids) == [0]


def test_a_split_keeps_the_old_object_as_the_lower_half() -> None:
    planter = Planter()
    old = planter.insert("abcdefghij").node
    entry = old.eviction_entry = (1.0, 1, old)
    insertion = planter.insert("abcdXY")
    assert path_text(old) == "abcd/efghij"
    assert insertion.split is old
    assert old.eviction_entry is entry
    assert old.parent is not None
    assert old.parent.eviction_entry is None


def test_a_split_keeps_reference_counts_and_last_use() -> None:
    planter = Planter()
    old = planter.insert("abcdefghij").node
    old.ref_count, old.last_used_s = 3, 7.0  # as if the paths of three leases ended at this node
    planter.insert("abcdXY")
    upper, attached = node_of(planter, "abcd"), node_of(planter, "abcd/XY")
    assert (old.ref_count, old.last_used_s) == (3, 7.0)
    assert (upper.ref_count, upper.last_used_s) == (1, 7.0)
    assert attached.ref_count == 0


def test_a_split_keeps_the_children_below_the_lower_half() -> None:
    planter = Planter()
    planter.insert("abcdefghijkl")
    planter.insert("abcdefghIJKL")
    planter.insert("abcdXXXX")
    assert set(planter.shape()) == {"abcd", "abcd/efgh", "abcd/efgh/ijkl", "abcd/efgh/IJKL", "abcd/XXXX"}


def test_runs_without_a_whole_block_in_common_become_siblings() -> None:
    planter = Planter()
    planter.insert("abcdefgh")
    insertion = planter.insert("abXY")
    assert planter.shape() == {"abcdefgh": [0, 1], "abXY": [2]}
    assert insertion.known_bytes == 2 * 4
    assert insertion.num_known_blocks == 0


def test_a_leaf_grows_in_place_and_its_tail_block_is_replaced() -> None:
    planter = Planter()
    old = planter.insert("abcdef").node
    insertion = planter.insert("abcdefghij")  # 2 3 4
    assert planter.shape() == {"abcdefghij": [0, 3, 4]}
    assert insertion.node is old
    assert unpacked(insertion.replaced_block_ids) == [1]
    assert unpacked(insertion.known_block_ids) == [0]
    assert insertion.known_bytes == 6 * 4


def test_a_leaf_of_whole_blocks_grows_without_replacing_one() -> None:
    planter = Planter()
    old = planter.insert("abcd").node
    insertion = planter.insert("abcdefgh")
    assert planter.shape() == {"abcdefgh": [0, 2]}
    assert insertion.node is old
    assert insertion.replaced_block_ids == b""


def test_a_leaf_that_grows_inside_its_first_block_is_indexed_again() -> None:
    planter = Planter()
    old = planter.insert("ab").node
    insertion = planter.insert("abc")
    assert planter.shape() == {"abc": [1]}
    assert insertion.node is old
    assert unpacked(insertion.replaced_block_ids) == [0]
    planter.insert("abcdef")
    assert planter.shape() == {"abcdef": [2, 3]}
    assert planter.match("abcdef") == (6, [2, 3])


@pytest.mark.parametrize("text", ["a", "abc", "abcd", "abcdef", "abcdefgh", "abcdefghij"])
def test_a_known_run_is_covered_and_adds_no_block(text: str) -> None:
    planter = Planter()
    planter.insert("abcdefghij")
    insertion = planter.insert(text)
    assert planter.shape() == {"abcdefghij": [0, 1, 2]}
    assert insertion.is_covered
    assert insertion.known_bytes == len(text) * 4
    assert unpacked(insertion.known_block_ids) == [0, 1, 2][: len(text) // 4]
    assert insertion.replaced_block_ids == b""


def test_a_known_run_through_two_nodes_returns_the_blocks_of_both() -> None:
    planter = Planter()
    planter.insert("abcdefghij")
    planter.insert("abcdXXXX")
    insertion = planter.insert("abcdefghi")
    assert unpacked(insertion.known_block_ids) == [0, 1]
    assert insertion.is_covered


def test_an_insert_below_an_inner_node_adds_only_its_unknown_blocks() -> None:
    planter = Planter()
    planter.insert("abcdefgh")  # 0 1
    planter.insert("abcdEFGH")  # 2 3
    insertion = planter.insert("abcdXXXXYY")  # 4 5 6
    assert planter.shape()["abcd/XXXXYY"] == [5, 6]
    assert unpacked(insertion.known_block_ids) == [0]
    assert insertion.split is None


def test_a_removed_leaf_is_not_matched_any_more() -> None:
    planter = Planter()
    planter.insert("abcdefgh")
    planter.insert("abcdEFGH")
    planter.tree.remove(node_of(planter, "abcd/efgh"))
    check_tree(planter.tree)
    assert planter.match("abcdefgh") == (4, [0])
    assert planter.match("abcdEFGH") == (8, [0, 3])


def test_a_node_without_children_is_a_leaf_again_and_grows() -> None:
    planter = Planter()
    planter.insert("abcdefgh")
    planter.insert("abcdEFGH")
    for path in ("abcd/efgh", "abcd/EFGH"):
        planter.tree.remove(node_of(planter, path))
    assert node_of(planter, "abcd").is_leaf
    planter.insert("abcdXX")
    assert set(planter.shape()) == {"abcdXX"}


@pytest.mark.parametrize("text", ["abcdefghij", "abcdefghijkl"])
def test_truncating_cuts_from_the_end(text: str) -> None:
    planter = Planter()
    leaf = planter.insert(text).node
    removed = planter.tree.truncate(leaf, 2)
    check_tree(planter.tree)
    assert planter.shape() == {"abcdefgh": [0, 1]}
    assert unpacked(removed) == [2]
    assert planter.match(text) == (8, [0, 1])


def test_truncated_blocks_have_the_fingerprint_of_the_leaf_that_they_would_have_been() -> None:
    planter, other = Planter(), Planter()
    leaf = planter.insert("abcdefghij").node
    fingerprint = planter.tree.fingerprint_after(leaf, 1)
    other.insert("abcdXXXX")
    assert fingerprint == other.insert("abcdefghij").node.fingerprint


def test_the_fingerprint_of_a_truncated_leaf_below_a_parent_depends_on_its_whole_path() -> None:
    planter, other = Planter(), Planter()
    planter.insert("abcdefghijkl")
    planter.insert("abcdXXXX")
    fingerprint = planter.tree.fingerprint_after(node_of(planter, "abcd/efghijkl"), 1)
    other.insert("abcdefghXXXX")
    assert fingerprint == other.insert("abcdefghijkl").node.fingerprint


def test_cutting_splits_a_node_and_returns_the_upper_half() -> None:
    planter = Planter()
    planter.insert("abcdefghijkl")
    planter.insert("abcdXXXX")
    lower = node_of(planter, "abcd/efghijkl")
    upper = planter.tree.cut(lower, 1)
    check_tree(planter.tree)
    assert path_text(upper) == "abcd/efgh"
    assert path_text(lower) == "abcd/efgh/ijkl"


def test_a_fingerprint_depends_on_the_path_and_not_on_how_the_tree_was_built() -> None:
    grown, split = Planter(), Planter()
    for text in ("ab", "abcd", "abcdXXXX", "abcdefghij"):
        grown.insert(text)
    for text in ("abcdefghij", "abcdXXXX"):
        split.insert(text)
    fingerprints = [{path_text(node): node.fingerprint for node in each.tree.nodes()} for each in (grown, split)]
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints[0].values())) == 3


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 7])
def test_random_inserts_match_a_set_of_prefixes(block_size: int) -> None:
    dice, planter, prefixes = random.Random(block_size), Planter(block_size), {""}
    for _ in range(200):
        text = "".join(dice.choices("ab", k=dice.randint(1, 4 * block_size + 2)))
        longest = next(end for end in range(len(text), -1, -1) if text[:end] in prefixes)
        assert planter.match(text)[0] == longest
        insertion = planter.insert(text)
        assert insertion.known_bytes == longest * 4
        assert insertion.is_covered == (longest == len(text))
        prefixes.update(text[:end] for end in range(len(text) + 1))
        assert planter.match(text)[0] == len(text)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", spell("Xfgh"), "not filed under its first block"),
        ("tokens", spell("efgh") + b"\0", "not whole tokens"),
        ("block_ids", packed(1, 2), "the number of blocks is wrong"),
        ("num_blocks", 2, "the number of blocks is wrong"),
        ("fingerprint", 5, "fingerprint is stale"),
        ("owner", make_tree(4).owner, "another tree"),
        ("parent", None, "no parent"),
    ],
)
def test_check_names_a_broken_node(field: str, value: object, message: str) -> None:
    planter = Planter()
    planter.insert("abcdefgh")
    planter.insert("abcdEFGH")
    setattr(node_of(planter, "abcd/efgh"), field, value)
    with pytest.raises(InvariantViolation, match=message):
        check_tree(planter.tree)


def test_check_notices_blocks_that_do_not_cover_the_run() -> None:
    planter = Planter()
    planter.insert("abcdefgh")
    node_of(planter, "abcdefgh").set_block_ids(packed(1, 2, 3))
    with pytest.raises(InvariantViolation, match="blocks do not cover the run"):
        check_tree(planter.tree)


def test_check_notices_a_leaf_that_begins_its_sibling() -> None:
    planter = Planter()
    planter.insert("abcd")
    root = planter.tree.root
    assert root.children is not None
    fingerprint = planter.tree._fingerprint(spell("ab"), 0)
    root.children[spell("ab")] = Node(planter.tree.owner, root, 0, spell("ab"), packed(9), fingerprint)
    with pytest.raises(InvariantViolation, match="a leaf is a prefix of its sibling"):
        check_tree(planter.tree)
