"""Keys of blocks outside the device: digests of everything that changes their K and V.

    root  = digest(format, namespace, tokens of the public prefix before the tree)
    block = digest(parent's key, tokens of the block)

Equal keys mean equal K and V on every server that has the same secret, today and after a restart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from hashlib import blake2b

from radixkv.errors import ConfigError, require_invariant
from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.tokens import TOKEN_BYTES

KEY_BYTES = 32
MAX_SECRET_BYTES = 64
_ROOT, _BLOCK, _FORMAT = b"radixkv root 1", b"radixkv block 1", b"radixkv format 1"


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Everything about a block that its tokens and namespace do not say.

    Attributes:
        model: of `fingerprint_model`: all weights, the configuration, exactness.
        dtype: the dtype that the model computes in.
        kv_dtype: how K and V are stored, as `KVFormat` names it.
        layout: order of the numbers in a payload, such as `by block`.
        block_size: tokens a block.
        payload_bytes: bytes of K and V of one block.
        computed_by: names what the last bits depend on besides the model: device, libraries, kernels.
    """

    model: str
    dtype: str
    kv_dtype: str
    layout: str
    block_size: int
    payload_bytes: int
    computed_by: str

    @property
    def fingerprint(self) -> str:
        """A digest of all fields, 32 hexadecimal digits."""
        return blake2b(_joined(*map(str, astuple(self))), digest_size=16, person=_FORMAT).hexdigest()


class BlockKeys:
    """Makes the keys of one format.

    Nobody finds two chains of tokens with one key: BLAKE2b with 256 bits. With a secret nobody who lacks it can compute
    a key either, so whoever may read a shared store can't test which prompts are in it.

    >>> block_format = BlockFormat("model", "float32", "fp32", "by block", 16, 4096, "cpu")
    >>> keys = BlockKeys(block_format, b"a secret of all servers")
    >>> len(keys.child(keys.root(Namespace("model", "alice")), bytes(64)))
    32

    Args:
        block_format: format of the blocks.
        secret: the same on all servers that share a store, at most 64 bytes; empty for none.

    Raises:
        ConfigError: the secret is too long.
    """

    def __init__(self, block_format: BlockFormat, secret: bytes = b"") -> None:
        if len(secret) > MAX_SECRET_BYTES:
            raise ConfigError(f"secret of stores: expected at most {MAX_SECRET_BYTES} bytes, got {len(secret)}")
        self.format = block_format
        self._secret = secret

    def root(self, namespace: Namespace, trunk: bytes = b"") -> bytes:
        """Return the key that a namespace's first blocks have as their parent.

        The serial of a public prefix means another one after a restart, so its tokens stand in its place.

        Args:
            namespace: whose blocks they are.
            trunk: the tokens that come before the tree, `namespace.trunk_tokens` of them.

        Raises:
            InvariantViolation: the trunk has another length.
        """
        is_whole = len(trunk) == namespace.trunk_tokens * TOKEN_BYTES
        require_invariant("trunk", is_whole, f"expected {namespace.trunk_tokens} tokens, got {len(trunk)} bytes")
        salt = "" if namespace.tenant == PUBLIC_TENANT else namespace.salt  # there it is the serial
        names = (namespace.model, namespace.tenant, namespace.adapter, salt)
        return self._digest(_ROOT, _joined(self.format.fingerprint, *names), trunk)

    def child(self, parent: bytes, tokens: bytes) -> bytes:
        """Return the key of a block.

        Args:
            parent: key of the block before it, or the root.
            tokens: the block's own, little-endian uint32; fewer than a block's if it is not full.

        Complexity: about 1 us for 64 tokens.
        """
        return self._digest(_BLOCK, parent, tokens)

    def chain(self, root: bytes, tokens: bytes) -> Iterator[bytes]:
        """Iterate over the keys of the whole blocks of a run of tokens, from its start."""
        size = self.format.block_size * TOKEN_BYTES
        key = root
        for start in range(0, len(tokens) - size + 1, size):
            key = self.child(key, tokens[start : start + size])
            yield key

    def _digest(self, person: bytes, first: bytes, second: bytes) -> bytes:
        digest = blake2b(len(first).to_bytes(8, "little"), digest_size=KEY_BYTES, key=self._secret, person=person)
        digest.update(first)
        digest.update(second)
        return digest.digest()


def _joined(*fields: str) -> bytes:
    """Join fields so that no two lists of them are joined alike."""
    encoded = (field.encode("utf-8", "surrogatepass") for field in fields)
    return b"".join(len(field).to_bytes(8, "little") + field for field in encoded)
