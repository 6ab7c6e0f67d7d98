"""The trees in which prompts are looked up and published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from radixkv.api.miss_reason import MissReason
from radixkv.blocks import BlockIds
from radixkv.cache.cache_state import CacheState
from radixkv.cache.evicted_prefixes import EvictedPrefixes
from radixkv.cache.held_blocks import Path
from radixkv.cache.ledger import Ledger
from radixkv.cache.prompt_lease import PromptLease
from radixkv.cache.public.hung_lease import HungLease
from radixkv.cache.public.public_prefix import Place, Trunk
from radixkv.cache.public.public_prefixes import PublicPrefixes
from radixkv.namespace import PUBLIC_TENANT, Namespace, PromptKey
from radixkv.tokens import TOKEN_BYTES, shared_bytes


class Match(NamedTuple):
    """The part of a prompt that is cached. Valid until the cache changes.

    Attributes:
        cached_tokens: tokens that can be reused; at most all but the last one.
        block_ids: int32 ids of the `ceil(cached_tokens / block_size)` blocks that hold them. Read-only.
        num_nodes: nodes that were passed.
    """

    cached_tokens: int
    block_ids: BlockIds
    num_nodes: int


class Places:
    """Chooses between the tree of a prompt's namespace, and one that hangs below a public prefix.

        (public)   [ system prompt ................ ]
                             │                     │
        acme                 └─ [own]              ├─ [own] ─ [own]     a namespace for each place
        other                                      └─ [own]

    Only the operator's tokens are ever in a public tree. A tree that hangs below holds tokens of one tenant, adapter
    and salt, as every tree does.

    A prompt shares a public prefix up to some token; its tree hangs after the whole blocks before that. So prompts that
    share more with each other than with the prefix hang at the same place, and find each other there.

    Args:
        holdings: what the cache holds.
        public: the public prefixes.
        ledger: opens leases in the trees.
    """

    def __init__(self, holdings: CacheState, public: PublicPrefixes, ledger: Ledger) -> None:
        self._block_size = holdings.block_size
        self._trees = holdings.trees
        self._parts = holdings.parts
        self._tenants = holdings.tenants
        self._public = public
        self._ledger = ledger

    def of(self, namespace: Namespace, tokens: bytes, *, read: bool = True) -> Place:
        """Return the place of a prompt. With `read` False it is the tree of its namespace.

        What was cached before the prefix was public is there too, and used while it is longer.

        Complexity: a look-up for most prompts; for those that share a public prefix a memory comparison of it, and a
        match in two trees, seldom in more.
        """
        own = Place(namespace, tokens, None)
        if not read or not self._public.are_any_computed:
            return own
        places = [_hung(namespace, tokens, trunk) for trunk in self._trunks(namespace, tokens)]
        return max((*places, own), key=self._worth) if places else own

    def _worth(self, place: Place) -> tuple[int, int]:
        """Count the cached tokens with a place, and the public ones before it."""
        found_tokens = self._trees.find(place.namespace, place.tokens)[2]
        return place.cached_tokens(found_tokens), place.start_tokens

    def _trunks(self, namespace: Namespace, tokens: bytes) -> Iterator[Trunk]:
        """Yield the longest part of a public prefix that a prompt begins with, at least a block, and other trunks.

        Others are those of trees that may reach further, for what they have was cached when there was no longer part:
        the prefix was not public yet, or the prompt ended where a block ends. Such a prompt hangs below the block
        before, for its last token was computed; its next turn shares that block and looks for its answer.

        Complexity: a memory comparison of each prefix, and a look-up for each tree of the namespace below one of them.
        """
        most_tokens = len(tokens) // TOKEN_BYTES - 1  # the last token is always computed
        prefixes = self._public.beginning_with(namespace, tokens)
        if not prefixes or not self._tenants.quota_of(namespace.tenant).uses_public_prefixes:
            return
        shared = [(min(shared_bytes(each.tokens, tokens, 0) // TOKEN_BYTES, most_tokens), each) for each in prefixes]
        num_tokens, longest = max(shared, key=lambda each: each[0])
        num_blocks, num_more_tokens = divmod(num_tokens, self._block_size)
        if not num_blocks:
            return
        block_ids = longest.block_ids[: num_blocks + (num_more_tokens > 0)]
        yield (best := Trunk(longest, num_blocks * self._block_size, num_more_tokens, block_ids))
        for num_shared, prefix in shared:
            for tree in self._trees.hung(namespace, prefix.namespace.salt):
                start = tree.owner.namespace.trunk_tokens
                next_block = tokens[start * TOKEN_BYTES : (start + self._block_size) * TOKEN_BYTES]
                may_reach_further = start + self._block_size > num_tokens or next_block in (tree.root.children or ())
                if start <= num_shared and may_reach_further and (prefix, start) != best[:2]:
                    yield Trunk(prefix, start, 0, prefix.block_ids[: start // self._block_size])

    def match(self, namespace: Namespace, tokens: bytes) -> Match:
        """Find the longest prefix that can be reused, as `PrefixCache.match` describes."""
        place = self.of(namespace, tokens)
        _, _, found_tokens, packed, num_nodes = self._trees.find(place.namespace, place.tokens)
        found_block_ids = np.frombuffer(packed, np.int32, -(-found_tokens // self._block_size))
        return Match(place.cached_tokens(found_tokens), place.block_ids(found_tokens, found_block_ids), num_nodes)

    def cached_tokens(self, namespace: Namespace, tokens: bytes) -> tuple[int, int]:
        """Count the tokens that can be reused, and the nodes that were passed, as `match` does."""
        place = self.of(namespace, tokens)
        _, _, found_tokens, _, num_nodes = self._trees.find(place.namespace, place.tokens)
        return place.cached_tokens(found_tokens), num_nodes

    def found_tokens(self, namespace: Namespace, tokens: bytes) -> int:
        """Count the tokens before the last one whose K/V are cached, whether or not a state lets one go on there."""
        found_bytes = self._trees.find(namespace, tokens)[1]
        return min(found_bytes, len(tokens) - TOKEN_BYTES) // TOKEN_BYTES

    def found_blocks(self, namespace: Namespace, tokens: bytes) -> BlockIds:
        """Return the whole blocks that the tree of a namespace has of a prompt, with or without their parts."""
        num_blocks = self.found_tokens(namespace, tokens) // self._block_size
        return np.frombuffer(self._trees.find(namespace, tokens)[3], np.int32, num_blocks)

    def explain(
        self, lost: EvictedPrefixes, key: PromptKey, cached_tokens: int, former: Sequence[PromptKey]
    ) -> MissReason:
        """Tell why the tokens after the cached ones have to be computed, as `PrefixCache.explain` describes."""
        namespace, tokens = key
        if self._parts.states is not None:
            found_tokens = self.found_tokens(namespace, tokens)
            if cached_tokens < found_tokens // self._block_size * self._block_size:
                return MissReason.NO_STATE
            cached_tokens = found_tokens
        if cached_tokens >= len(tokens) // TOKEN_BYTES - 1:
            return MissReason.NONE
        place = self.of(namespace, tokens)
        if place.trunk is not None:
            start = place.start_tokens * TOKEN_BYTES
            former = [PromptKey(place.namespace, each.tokens[start:]) for each in former if each.namespace == namespace]
            cached_tokens = max(0, cached_tokens - place.start_tokens)
        if self._trees.has_more(place.namespace, place.tokens, cached_tokens):
            return MissReason.EVICTED
        next_end = (cached_tokens // self._block_size + 1) * self._block_size
        return lost.explain(place.namespace, place.tokens, cached_tokens, next_end, former, self._trees.find)

    def path_of(self, namespace: Namespace, tokens: bytes, *, read: bool) -> tuple[Path, int]:
        """Return what a prompt would keep if its lease were held, public blocks excepted, and the nodes passed."""
        place = self.of(namespace, tokens, read=read)
        node, _, cached_tokens, _, num_nodes = self._trees.find(place.namespace, place.tokens, read)
        num_blocks = -(-len(place.tokens) // (self._block_size * TOKEN_BYTES))
        return Path(node, cached_tokens // self._block_size, num_blocks), num_nodes

    def lease(
        self,
        namespace: Namespace,
        tokens: bytes,
        read: bool,
        num_spared_blocks: int,
        num_expected_tokens: int,
        is_resumed: bool,
    ) -> PromptLease:
        """Open a lease, as `PrefixCache.lease` describes."""
        num_tokens = max(num_expected_tokens, len(tokens) // TOKEN_BYTES)
        keeps_all = namespace.tenant == PUBLIC_TENANT
        self._parts.require_room(num_tokens, keeps_all=keeps_all)
        place = self.of(namespace, tokens, read=read)
        trunk = place.trunk
        own = self._ledger.lease(
            place.namespace,
            place.tokens,
            read=read,
            num_spared_blocks=num_spared_blocks,
            num_expected_tokens=max(0, num_expected_tokens - place.start_tokens),
            is_resumed=is_resumed,
            other=(0, b"") if trunk is None else (trunk.num_more_tokens, trunk.next_block),
        )
        lease: PromptLease = own
        if trunk is not None:
            own.usage.num_hit_tokens += trunk.num_tokens
            self._public.enter(trunk.prefix)
            lease = HungLease(tokens, trunk, own, self._public.leave)
        if self._parts.pools:
            own.parts = self._parts.open(
                self._found_blocks(lease),
                lease.cached_tokens,
                num_tokens,
                keeps_all=keeps_all,
                found_tokens=place.start_tokens + own.found_tokens,
            )
        return lease

    def _found_blocks(self, lease: PromptLease) -> BlockIds:
        """Return the blocks that hold the cached tokens of a new lease."""
        block_ids = lease.block_ids[: -(-lease.cached_tokens // self._block_size)]
        if lease.copy is not None:
            block_ids = np.append(block_ids[:-1], np.int32(lease.copy.source))
        return block_ids


def _hung(namespace: Namespace, tokens: bytes, trunk: Trunk) -> Place:
    """Return the place of a prompt below a trunk."""
    place = f"{trunk.prefix.namespace.salt}:{trunk.num_tokens}"
    return Place(namespace._replace(trunk=place), tokens[trunk.num_tokens * TOKEN_BYTES :], trunk)
