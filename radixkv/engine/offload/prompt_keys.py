"""Keys of a prompt's blocks in stores, from its tokens as the cache knows them."""

from __future__ import annotations

from collections.abc import Iterator

from radixkv.cache.elsewhere.keyed_block import KeyedBlock
from radixkv.invocation import InvocationMarks, plain
from radixkv.namespace import Namespace
from radixkv.storage.tiers.block_key import BlockKeys
from radixkv.tokens import TOKEN_BYTES


class PromptKeys:
    """Keys the blocks of prompts.

    Marks of invoked adapters mean nothing outside this process, so a block has the digest of the adapter that computed
    it in its key, and the number of its tokens before the invocation.

    Args:
        keys: of the format of the blocks.
        marks: tell what invoked adapters computed.
    """

    def __init__(self, keys: BlockKeys, marks: InvocationMarks) -> None:
        self._keys = keys
        self._marks = marks

    def blocks(self, namespace: Namespace, tokens: bytes, parent: bytes | None = None) -> Iterator[KeyedBlock]:
        """Iterate over the whole blocks of a prompt.

        Args:
            namespace: of the prompt, without a trunk.
            tokens: the prompt as the cache knows it, or what follows some of its blocks.
            parent: key of the last one of these; None if there are none.

        Complexity: about 1 us a block.
        """
        size = self._keys.format.block_size * TOKEN_BYTES
        if parent is None:
            parent = self._keys.root(namespace)
        for start in range(0, len(tokens) - size + 1, size):
            own = tokens[start : start + size]
            digest = self._marks.digest_of(own)
            if digest:
                num_plain, own = self._marks.num_plain(own), plain(own)
                owner = namespace._replace(adapter=digest)
                content = own + num_plain.to_bytes(4, "little") + digest.encode()
                key = self._keys.child(self._keys.of_owner(parent, owner), content)
            else:
                key, owner = self._keys.child(parent, own), namespace
            yield KeyedBlock(key, parent, own, owner)
            parent = key
