"""Keys of blocks outside the device: digests of everything that determines their K and V.

    root  = tags | digest(format, namespace, tokens of the public prefix above the tree)
    block = tags | digest(parent's key, tokens of the block)
    tags  = digests of `private` or `public` (2 bytes), tenant (3), adapter (2), salt (3); other digests have 22 bytes

Equal keys mean equal K and V on every server with the same secret, also after a restart. The tags let a purge find the
blocks that other servers stored. If two names have the same tag, a purge of one deletes the blocks of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import lru_cache
from hashlib import blake2b

from radixkv.errors import ConfigError, require_invariant
from radixkv.invocation import InvocationMarks, strip_marks
from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.tokens import TOKEN_BYTES

KEY_BYTES = 32
MAX_SECRET_BYTES = 64
_TAG_BYTES = {"format": 2, "tenant": 3, "adapter": 2, "salt": 3}
_TAGS_BYTES = sum(_TAG_BYTES.values())
# The `person` of BLAKE2b, so that digests for different purposes differ.
_ROOT = b"radixkv root 2"
_BLOCK = b"radixkv block 2"
_FORMAT = b"radixkv format 2"
_TAG = b"radixkv tag 2"


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Everything that determines the bytes of a block, except its tokens and its namespace.

    Attributes:
        model: from `fingerprint_model`: all weights, the configuration, exactness.
        dtype: the dtype that the model computes in.
        kv_dtype: how K and V are stored, as `KVFormat` names it.
        layout: order of the numbers in a payload, from `payload_layout`.
        block_size: tokens per block.
        payload_bytes: bytes of K and V of one block.
        computed_by: device, libraries and kernels, on which the last bits of K and V depend.
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


@dataclass(frozen=True, slots=True)
class KeyScope:
    """The keys of all namespaces with certain names.

    Attributes:
        tags: the tags at the start of such a key; None matches any.
    """

    tags: tuple[bytes | None, ...]

    def has(self, key: bytes) -> bool:
        """Whether a key is in the scope."""
        start = 0
        for tag, size in zip(self.tags, _TAG_BYTES.values(), strict=True):
            if tag is not None and key[start : start + size] != tag:
                return False
            start += size
        return True

    def hex_pattern(self, any_digit: str) -> str:
        """Return a pattern for the hexadecimal start of keys in the scope; `any_digit` stands for any digit."""
        pairs = zip(self.tags, _TAG_BYTES.values(), strict=True)
        return "".join(2 * size * any_digit if tag is None else tag.hex() for tag, size in pairs)


class BlockKeys:
    """Computes the keys of blocks of one format.

    BLAKE2b with 176 bits is collision-resistant, so it is infeasible to find two chains of tokens with the same key.
    Keys cannot be computed without the secret, so a reader of a shared store cannot test which prompts it holds.

    >>> block_format = BlockFormat("model", "float32", "fp32", "by block", 16, 4096, "cpu")
    >>> keys = BlockKeys(block_format, b"a shared secret")
    >>> len(keys.child(keys.root(Namespace("model", "alice")), bytes(64)))
    32

    Args:
        block_format: format of the blocks.
        secret: secret that all servers with the same store share, at most 64 bytes; empty for none.

    Raises:
        ConfigError: the secret is too long.
    """

    def __init__(self, block_format: BlockFormat, secret: bytes = b"") -> None:
        if len(secret) > MAX_SECRET_BYTES:
            raise ConfigError(f"secret of stores: expected at most {MAX_SECRET_BYTES} bytes, got {len(secret)}")
        self.format = block_format
        self._secret = secret
        self._fingerprint = block_format.fingerprint
        self._tag = lru_cache(maxsize=4096)(self._new_tag)

    def root(self, namespace: Namespace, prefix_tokens: bytes = b"") -> bytes:
        """Return the root key of a namespace, which is the parent of its first blocks.

        The serial of a public prefix may identify another prefix after a restart, so the key depends on its tokens
        instead.

        Args:
            namespace: namespace of the blocks.
            prefix_tokens: the tokens of the public prefix above the tree, `namespace.public_prefix_tokens` of them.

        Raises:
            InvariantViolation: the number of these tokens is wrong.
        """
        num_tokens = namespace.public_prefix_tokens
        is_whole = len(prefix_tokens) == num_tokens * TOKEN_BYTES
        require_invariant("public prefix", is_whole, f"expected {num_tokens} tokens, got {len(prefix_tokens)} bytes")
        salt = "" if namespace.tenant == PUBLIC_TENANT else namespace.salt  # the salt of a public prefix is its serial
        names = (namespace.model, namespace.tenant, namespace.adapter, salt)
        return self._tags_of(namespace) + self._digest(_ROOT, _joined(self._fingerprint, *names), prefix_tokens)

    def child(self, parent: bytes, tokens: bytes) -> bytes:
        """Return the key of a block.

        Args:
            parent: key of the block before it, or the root.
            tokens: the tokens of this block only, little-endian uint32; fewer than `block_size` if it is not full.
                `PromptKeys` appends more bytes for a block that an invoked adapter computed.

        Complexity: about 1 us for 64 tokens.
        """
        return parent[:_TAGS_BYTES] + self._digest(_BLOCK, parent, tokens)

    def with_tags_of(self, parent: bytes, namespace: Namespace) -> bytes:
        """Replace the tags of a parent key by those of the namespace of the blocks that follow it."""
        return self._tags_of(namespace) + parent[_TAGS_BYTES:]

    def tags_of(self, key: bytes) -> bytes:
        """Return the tags of a key. Two namespaces may have the same tags, although this is unlikely."""
        return key[:_TAGS_BYTES]

    def scope(self, tenant: str | None, adapter: str | None, salt: str | None) -> KeyScope:
        """Return the scope of the namespaces with these names, as in `Namespace.is_among`; None matches any name."""
        names = (("tenant", tenant), ("adapter", adapter), ("salt", salt))
        tags = (None if name is None else self._tag(kind, name) for kind, name in names)
        return KeyScope((self._tag("format", "private"), *tags))

    def _digest(self, person: bytes, first: bytes, second: bytes) -> bytes:
        size = KEY_BYTES - _TAGS_BYTES
        digest = blake2b(len(first).to_bytes(8, "little"), digest_size=size, key=self._secret, person=person)
        digest.update(first)
        digest.update(second)
        return digest.digest()

    def _tags_of(self, namespace: Namespace) -> bytes:
        tag = self._tag
        if namespace.tenant == PUBLIC_TENANT:  # no scope includes it, and its salt is a serial
            return tag("format", "public") + tag("tenant", "") + tag("adapter", namespace.adapter) + tag("salt", "")
        names = tag("tenant", namespace.tenant) + tag("adapter", namespace.adapter) + tag("salt", namespace.salt)
        return tag("format", "private") + names

    def _new_tag(self, kind: str, name: str) -> bytes:
        data = _joined(self._fingerprint, kind, name)
        return blake2b(data, digest_size=_TAG_BYTES[kind], key=self._secret, person=_TAG).digest()


def _joined(*fields: str) -> bytes:
    """Join fields unambiguously: different lists of fields give different bytes."""
    encoded = [field.encode("utf-8", "surrogatepass") for field in fields]
    return b"".join([len(field).to_bytes(8, "little") + field for field in encoded])


class PromptKeys:
    """Computes the keys of the blocks of prompts.

    Marks of invoked adapters are local to this process. Therefore the key of a block that an invoked adapter computed
    depends on the digest of the adapter, and on the number of tokens of the block before the invocation.

    Args:
        keys: computes keys for the format of the blocks.
        marks: identify the tokens that invoked adapters computed.
    """

    def __init__(self, keys: BlockKeys, marks: InvocationMarks) -> None:
        self._keys = keys
        self._marks = marks

    def blocks(self, namespace: Namespace, tokens: bytes, parent: bytes | None = None) -> Iterator[KeyedBlock]:
        """Iterate over the whole blocks of a prompt.

        Args:
            namespace: namespace of the prompt, without a public prefix.
            tokens: the prompt as the cache stores it, or the part of it that follows `parent`.
            parent: key of the block before these tokens; None at the start of the prompt.

        Complexity: about 1 us per block.
        """
        block_bytes = self._keys.format.block_size * TOKEN_BYTES
        if parent is None:
            parent = self._keys.root(namespace)
        for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
            block_tokens = tokens[start : start + block_bytes]
            digest = self._marks.digest_of(block_tokens)
            if digest:
                num_plain = self._marks.num_plain(block_tokens)
                block_tokens = strip_marks(block_tokens)
                owner = namespace._replace(adapter=digest)
                content = block_tokens + num_plain.to_bytes(4, "little") + digest.encode()
                key = self._keys.child(self._keys.with_tags_of(parent, owner), content)
            else:
                key = self._keys.child(parent, block_tokens)
                owner = namespace
            yield KeyedBlock(key, parent, block_tokens, owner)
            parent = key
