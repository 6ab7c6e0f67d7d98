"""A public prefix, and the part of it that a prompt begins with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from radixkv.blocks import BlockIds
from radixkv.cache.lease import Lease
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES


class PublicPrefix:
    """Tokens that an operator made public.

    registered ── computed ──▶ found by prompts ── unregistered ──▶ used by those that began ── the last ends ──▶ gone

    Attributes:
        name: given by the operator.
        tokens: little-endian uint32 bytes, at least those of a block, as the cache knows them.
        namespace: of a tree that holds nothing else.
        adapter: digest of the adapter that computes it, or its end; empty for the base model.
        lease: keeps its blocks; None until they are computed.
        num_users: open leases that use its blocks.
        num_uses: leases that have used its blocks so far.
        is_computing: whether the request that computes it goes on.
    """

    __slots__ = ("adapter", "is_computing", "lease", "name", "namespace", "num_users", "num_uses", "tokens")

    def __init__(self, name: str, namespace: Namespace, tokens: bytes, adapter: str) -> None:
        self.name = name
        self.adapter = adapter
        self.namespace = namespace
        self.tokens = tokens
        self.lease: Lease | None = None
        self.num_users = 0
        self.num_uses = 0
        self.is_computing = True

    @property
    def num_tokens(self) -> int:
        """Length in tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def block_ids(self) -> BlockIds:
        """Its blocks in order, int32; none until they are computed."""
        return np.empty(0, np.int32) if self.lease is None else self.lease.block_ids


class Trunk(NamedTuple):
    """The part of a public prefix that a prompt begins with, and below which a tenant's tree hangs.

    Attributes:
        prefix: see above.
        num_tokens: tokens of the whole blocks that are shared, at least one block.
        num_more_tokens: tokens at the beginning of the next block that are shared as well.
        block_ids: int32, the whole blocks, and the next one if tokens of it are shared.
    """

    prefix: PublicPrefix
    num_tokens: int
    num_more_tokens: int
    block_ids: BlockIds

    @property
    def whole_block_ids(self) -> BlockIds:
        """The whole blocks, int32."""
        return self.block_ids[: -1 if self.num_more_tokens else None]

    @property
    def next_block(self) -> bytes:
        """Packed id of the next block, if tokens of it are shared; otherwise nothing."""
        return self.block_ids[-1:].tobytes() if self.num_more_tokens else b""


class Place(NamedTuple):
    """A tree to look in, or to publish in, and the tokens to look for there.

    Attributes:
        namespace: of the tree.
        tokens: those after the trunk.
        trunk: what comes before the tree; None for a tree that begins with the prompt.
    """

    namespace: Namespace
    tokens: bytes
    trunk: Trunk | None

    @property
    def start_tokens(self) -> int:
        """Tokens before the tree."""
        return 0 if self.trunk is None else self.trunk.num_tokens

    def cached_tokens(self, found_tokens: int) -> int:
        """Return the tokens that can be reused, those before the tree included, with `found_tokens` of the tree."""
        if self.trunk is None:
            return found_tokens
        return self.trunk.num_tokens + max(found_tokens, self.trunk.num_more_tokens)

    def block_ids(self, found_tokens: int, found_block_ids: BlockIds) -> BlockIds:
        """Return the blocks of `cached_tokens`, with those of `found_tokens`."""
        if self.trunk is None:
            return found_block_ids
        if found_tokens < self.trunk.num_more_tokens:
            return self.trunk.block_ids
        return np.concatenate((self.trunk.whole_block_ids, found_block_ids))
