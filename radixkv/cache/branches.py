"""Finds the cached branches from which a prompt diverges: what continues the shared part of the prompt differently.

Only `CacheService.Explain` and the profile of misses use this; a match never does.

    prompt   a b c d e X Y Z        tree   root ── [abcd] ─┬─ [efgh] ─ [ijkl]     the branch is f g h i j k l
                                                           └─ [pqrs]              shares less, so it is not returned
    diverges at    ──────┘ 5 tokens

If the whole prompt is cached, and its last nodes were never found by a request after they were published, these nodes
are the prompt's own. Then the place at which they diverge from the rest of the tree is returned, so that a prompt can
still be explained after it was computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from radixkv.api.explanation import CachedBranch, Divergence, NamedBranch
from radixkv.cache.node import Node
from radixkv.cache.radix_tree import RadixTree
from radixkv.invocation import InvocationMarks, strip_marks
from radixkv.tokens import TOKEN_BYTES, shared_bytes

MAX_BRANCHES = 4
MAX_BRANCH_TOKENS = 262_144
_MAX_SIBLINGS = 256
_MAX_NODES_PER_BRANCH = 192
_MAX_CHILDREN = 16

MAX_EXAMINED_NODES = _MAX_SIBLINGS + 2 + MAX_BRANCHES * _MAX_NODES_PER_BRANCH
"""Nodes that `find_divergence` examines at most, other than those on the path of the prompt: 1,026."""


def find_divergence(tree: RadixTree, tokens: bytes, now_s: float, marks: InvocationMarks) -> Divergence:
    """Find the place at which a prompt diverges from the cached branches of its namespace, and these branches.

    If several branches share the same tokens with the prompt, the `MAX_BRANCHES` most recently used ones are returned.
    Only the 256 branches that were added last, and the neighbors of the prompt in the order of tokens, are compared. A
    branch continues, at each node, with the most recently used of the 16 children that were added last.

    Args:
        tree: the tree of the prompt's namespace.
        tokens: the prompt, which begins with the tokens of the root.
        now_s: time on the cache's clock.
        marks: mark the tokens that invoked adapters compute.

    Returns:
        The place and the branches, whose bytes are not copied.

    Complexity: a match, and at most `MAX_EXAMINED_NODES` nodes, of which only the first blocks are compared.
    """
    node, position, _, _ = tree.match(tokens)
    block_bytes = tree.owner.block_size * TOKEN_BYTES
    own_node: Node | None = None
    if node is None:
        parent, start = tree.root, position
    elif position == len(tokens):
        if node.num_uses:  # a request has found the end of this prompt, so nothing is wrong
            return Divergence(position // TOKEN_BYTES)
        own_node = _first_own_node(node)
        assert own_node.parent is not None
        parent, start = own_node.parent, own_node.start_bytes
    elif position == node.start_bytes + len(node.tokens):
        parent, start = node, position
    else:
        assert node.parent is not None
        parent, start = node.parent, node.start_bytes
        if position - start >= block_bytes:  # no other child of the parent shares the first block
            branches, num_examined = _follow([node], position - start, now_s)
            return Divergence(position // TOKEN_BYTES, branches, num_examined + 1)
    first_block = tokens[start : start + block_bytes]
    shared, siblings, num_siblings = _nearest_siblings(parent, first_block, own_node)
    if start + shared >= len(tokens):
        return Divergence(len(tokens) // TOKEN_BYTES, (), num_siblings)
    token = first_block[shared : shared + TOKEN_BYTES]
    siblings = [each for each in siblings if not _differs_only_in_adapter(each.tokens[shared:], token, marks)]
    branches, num_examined = _follow(siblings, shared, now_s)
    return Divergence((start + shared) // TOKEN_BYTES, branches, num_siblings + num_examined)


def branches_through(nodes: Iterable[Node], max_branches: int, now_s: float) -> list[NamedBranch]:
    """Return the branches from the root through nodes, and from each node on to the most recently used leaf below it.

    A node that is on the branch of a node before it is left out.

    Args:
        nodes: nodes of one cache.
        max_branches: maximum number of branches to return.
        now_s: time on the cache's clock.

    Complexity: O(depth), and at most 192 nodes below each node.
    """
    branches: list[NamedBranch] = []
    covered: set[Node] = set()
    for node in nodes:
        if len(branches) == max_branches:
            break
        if node in covered or node.parent is None:
            continue
        above: list[Node] = []
        upper: Node | None = node
        while upper is not None:
            above.append(upper)
            upper = upper.parent
        below, _ = _nodes_below(node, len(node.tokens))
        covered.update(above, below)
        runs = tuple(each.tokens for each in (*reversed(above), *below))
        session = (below or [node])[-1].session
        branch = CachedBranch(runs, 0, max(0.0, now_s - node.last_used_s))
        branches.append(NamedBranch(node.owner.namespace, "" if session is None else session.session_id, branch))
    return branches


def _differs_only_in_adapter(run: bytes, token: bytes, marks: InvocationMarks) -> bool:
    """Return whether a run begins with the same token as the prompt, but computed by another adapter."""
    run_token = run[:TOKEN_BYTES]
    return strip_marks(run_token) == strip_marks(token) and marks.digest_of(run_token) != marks.digest_of(token)


def _first_own_node(node: Node) -> Node:
    """Return the first of the nodes that only the prompt that ends in `node` has used. Complexity: O(depth)."""
    parent = node.parent
    while parent is not None and parent.parent is not None and not parent.num_uses and len(parent.children or ()) == 1:
        node, parent = parent, parent.parent
    return node


def _nearest_siblings(parent: Node, first_block: bytes, own_node: Node | None) -> tuple[int, list[Node], int]:
    """Return the children that share the most bytes with a block, how many bytes, and how many children were compared.

    Args:
        parent: the node after which the block begins.
        first_block: tokens of the prompt, at most a block.
        own_node: a child that is not considered; None for none.
    """
    children = parent.children
    if children is None:
        return 0, [], 0
    compared: dict[int, Node] = {id(each): each for each in islice(reversed(children.values()), _MAX_SIBLINGS)}
    for key in children.neighbors(first_block):
        compared[id(children[key])] = children[key]
    longest = 0
    nearest: list[Node] = []
    for child in compared.values():
        if child is own_node:
            continue
        shared = shared_bytes(child.tokens[: len(first_block)], first_block, 0)
        if shared > longest:
            longest, nearest = shared, []
        if shared == longest:
            nearest.append(child)
    return longest, nearest, len(compared)


def _follow(nodes: list[Node], start_byte: int, now_s: float) -> tuple[tuple[CachedBranch, ...], int]:
    """Follow the most recently used nodes down to leaves, and return the branches and the number of examined nodes."""
    latest = sorted(nodes, key=lambda each: each.last_used_s, reverse=True)[:MAX_BRANCHES]
    branches, num_examined = [], 0
    for node in latest:
        below, num_compared = _nodes_below(node, len(node.tokens) - start_byte)
        num_examined += num_compared
        runs = tuple(each.tokens for each in (node, *below))
        branches.append(CachedBranch(runs, start_byte, max(0.0, now_s - node.last_used_s)))
    return tuple(branches), num_examined


def _nodes_below(node: Node, num_bytes: int) -> tuple[list[Node], int]:
    """Return the most recently used child, its most recently used child, and so on, and how many were compared.

    Of equally recent children, the one that was added last is chosen. The list ends at a leaf, when the
    branch has `MAX_BRANCH_TOKENS`, or when about 192 children were compared.

    Args:
        node: the node above the children.
        num_bytes: bytes of the branch up to the end of `node`.
    """
    below: list[Node] = []
    num_compared = 0
    while node.children and num_bytes < MAX_BRANCH_TOKENS * TOKEN_BYTES:
        if num_compared + _MAX_CHILDREN > _MAX_NODES_PER_BRANCH:
            break
        latest = list(islice(reversed(node.children.values()), _MAX_CHILDREN))
        num_compared += len(latest)
        node = max(latest, key=lambda each: each.last_used_s)
        below.append(node)
        num_bytes += len(node.tokens)
    return below, num_compared
