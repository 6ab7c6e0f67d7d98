"""Objects: the K and V of one block outside the device, with everything that is needed to verify them.

    plain   [ head, 128 bytes )[ tokens, zeros up to a multiple of 64 )[ payload )[ checksum, 16 bytes )
    sealed  [ head, 128 bytes )[ tokens and payload, encrypted; tag of 16 bytes  )[ checksum, 16 bytes )

    head    magic 8 | version 2 | flags 2 | tokens 4 | payload bytes 8 | generation 8 | key 32 | parent 32 | salt 24 | 8

Numbers are little-endian. The checksum, XXH3 with 128 bits, covers everything before it. Opening an object decodes only
these numbers, so it is safe on untrusted bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128, xxh3_128_digest

from radixkv.kernels.native.copies import NativeCopies
from radixkv.offload.block_keys import KEY_BYTES
from radixkv.offload.tiers.sealing import SALT_BYTES, TAG_BYTES, BlockCipher, NotSealedByUs
from radixkv.tokens import TOKEN_BYTES

CHECKSUM_BYTES = 16
_MAGIC = b"RKVBLOCK"
_VERSION = 1
_IS_SEALED = 1
_HEAD = Struct(f"<8sHHIQQ{KEY_BYTES}s{KEY_BYTES}s{SALT_BYTES}s8x")
_ALIGNMENT = 64
_PIECE_BYTES = 1 << 20  # fits into every L3 cache; smaller pieces are slower to copy
_NO_SALT = bytes(SALT_BYTES)
HEAD_BYTES = _HEAD.size


class ObjectFault(enum.Enum):
    """Reason why an object is not used."""

    CUT = "cut"  # its length differs from that in its head
    FOREIGN = "foreign"  # not an object, of another version, of another block, or of another size
    DAMAGED = "damaged"  # the checksum differs
    OTHER_TOKENS = "other_tokens"
    UNSEALED = "unsealed"  # not encrypted with the key of this tenant, or encrypted although the tier has no key


class ObjectHead(NamedTuple):
    """The fields at the start of an object.

    Attributes:
        key, parent: see `BlockKeys`.
        generation: an object of a later generation replaces one of an earlier generation; see `Saver`.
        num_tokens: tokens of the block.
        payload_bytes: bytes of its K and V.
        salt: of the cipher; zeros if the object is not encrypted.
        is_sealed: whether tokens and payload are encrypted.
    """

    key: bytes
    parent: bytes
    generation: int
    num_tokens: int
    payload_bytes: int
    salt: bytes = _NO_SALT
    is_sealed: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole object."""
        return object_bytes(self.num_tokens, self.payload_bytes, is_sealed=self.is_sealed)

    def pack(self) -> bytes:
        """Serialize the head for `read_head`."""
        flags = _IS_SEALED if self.is_sealed else 0
        counts = (self.num_tokens, self.payload_bytes, self.generation)
        return _HEAD.pack(_MAGIC, _VERSION, flags, *counts, self.key, self.parent, self.salt)


class BlockObject(NamedTuple):
    """A block to be stored.

    Attributes:
        key, parent, generation: see `ObjectHead`.
        tokens: the tokens of the block alone, little-endian uint32.
        payload: contiguous bytes of K and V. Once they are complete, they must never change: pass a copy.
        cipher: encrypts the object; None to store it unencrypted.
        wait_for_payload: blocks until the payload is complete; None if it is. `parts`, `pieces` and `write_to` call it.
    """

    key: bytes
    parent: bytes
    generation: int
    tokens: bytes
    payload: memoryview
    cipher: BlockCipher | None = None
    wait_for_payload: Callable[[], None] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole object."""
        return object_bytes(len(self.tokens) // TOKEN_BYTES, self.payload.nbytes, is_sealed=self.cipher is not None)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Iterate over the bytes of the object in pieces, the checksum last.

        Each piece is hashed before it is yielded, which brings it into the CPU cache. If it changes in between, the
        checksum does not match, so the change is detected.

        Complexity: one pass over the payload, and one more to encrypt it. Stores call it on their threads.
        """
        first, body = self.parts()
        digest = xxh3_128(first)
        yield first
        for start in range(0, len(body), _PIECE_BYTES):
            piece = body[start : start + _PIECE_BYTES]
            digest.update(piece)
            yield piece
        yield digest.digest()

    def write_to(self, memory: npt.NDArray[np.uint8], native: NativeCopies | None = None) -> None:
        """Write the object into memory.

        Args:
            memory: uint8 `[num_bytes]`.
            native: compute the checksum during the copy; None to compute it from the copy.

        Complexity: that of `pieces`.
        """
        first, body = self.parts()
        if native is not None and native.copy_checked(first, body, memory):
            return
        memory[: len(first)] = np.frombuffer(first, np.uint8)  # NumPy copies without the GIL, memoryviews with it
        memory[len(first) : -CHECKSUM_BYTES] = np.frombuffer(body, np.uint8)
        memory[-CHECKSUM_BYTES:] = np.frombuffer(checksum_of(memory.data), np.uint8)

    def parts(self) -> tuple[bytes, memoryview]:
        """Return the bytes before K and V, a multiple of 64 if unencrypted, and K and V; all encrypted but the head.

        Complexity: one pass over the payload to encrypt it.
        """
        if self.wait_for_payload is not None:
            self.wait_for_payload()
        num_tokens = len(self.tokens) // TOKEN_BYTES
        head = ObjectHead(self.key, self.parent, self.generation, num_tokens, self.payload.nbytes)
        if self.cipher is None:
            return head.pack() + self.tokens + bytes(_padding(num_tokens)), self.payload
        salt = self.cipher.new_salt()
        first = head._replace(salt=salt, is_sealed=True).pack()
        return first, memoryview(self.cipher.seal(salt, first, self.tokens, self.payload))


def object_bytes(num_tokens: int, payload_bytes: int, *, is_sealed: bool = False) -> int:
    """Return the size of an object.

    >>> object_bytes(64, 1_048_576)
    1048976
    """
    extra = TAG_BYTES if is_sealed else _padding(num_tokens)
    return HEAD_BYTES + num_tokens * TOKEN_BYTES + extra + payload_bytes + CHECKSUM_BYTES


def read_head(data: memoryview | bytes) -> ObjectHead | None:
    """Parse the head of an object; None if it is invalid. Ignores everything after the head."""
    if len(data) < HEAD_BYTES:
        return None
    magic, version, flags, num_tokens, payload_bytes, generation, key, parent, salt = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or flags not in (0, _IS_SEALED):
        return None
    return ObjectHead(key, parent, generation, num_tokens, payload_bytes, salt, flags == _IS_SEALED)


class Wanted(NamedTuple):
    """A block to be loaded.

    Attributes:
        key: from `BlockKeys`.
        tokens: the tokens of the block alone.
        cipher: of the tenant; None if blocks are stored unencrypted.
    """

    key: bytes
    tokens: bytes
    cipher: BlockCipher | None = None


def checksum_of(data: memoryview) -> bytes:
    """Return the checksum that a valid object with these bytes has at its end."""
    return xxh3_128_digest(data[:-CHECKSUM_BYTES])


def open_object(
    data: memoryview, wanted: Wanted, *payload_bytes: int, checksum: bytes | None = None
) -> memoryview | ObjectFault:
    """Verify an object. Return its payload if it is the wanted block and unmodified, otherwise the fault.

    Args:
        data: what a store returned.
        wanted: the block that it should be.
        payload_bytes: the valid sizes of K and V of a block.
        checksum: `checksum_of(data)` if it is known, None if not.

    Returns:
        A view of `data`, or a new buffer if the object is encrypted.

    Complexity: one pass over the object for the checksum, and one more to decrypt it.
    """
    head = read_head(data)
    if head is None:
        return ObjectFault.CUT if len(data) < HEAD_BYTES else ObjectFault.FOREIGN
    if head.key != wanted.key or head.payload_bytes not in payload_bytes:
        return ObjectFault.FOREIGN
    if head.num_tokens != len(wanted.tokens) // TOKEN_BYTES:
        return ObjectFault.OTHER_TOKENS
    if head.num_bytes != len(data):
        return ObjectFault.CUT
    if (checksum_of(data) if checksum is None else checksum) != data[-CHECKSUM_BYTES:]:
        return ObjectFault.DAMAGED
    if head.is_sealed != (wanted.cipher is not None):
        return ObjectFault.UNSEALED
    return _opened(data, head, wanted)


def _opened(data: memoryview, head: ObjectHead, wanted: Wanted) -> memoryview | ObjectFault:
    token_bytes = len(wanted.tokens)
    if wanted.cipher is None:
        body = data
        start = HEAD_BYTES
        payload = data[start + token_bytes + _padding(head.num_tokens) : -CHECKSUM_BYTES]
    else:
        try:
            opened = wanted.cipher.open(head.salt, data[:HEAD_BYTES], data[HEAD_BYTES:-CHECKSUM_BYTES])
        except NotSealedByUs:
            return ObjectFault.UNSEALED
        body = memoryview(opened)
        start = 0
        payload = body[token_bytes:]
    if (
        body[start : start + token_bytes].tobytes() != wanted.tokens
    ):  # comparing memoryviews is slow, element by element
        return ObjectFault.OTHER_TOKENS
    return payload


def _padding(num_tokens: int) -> int:
    return -num_tokens * TOKEN_BYTES % _ALIGNMENT
