"""Objects: the K and V of one block outside the device, with everything that is needed to verify them.

    plain   [ head, 128 bytes )[ tokens, zeros up to a multiple of 64 )[ payload )[ checksum, 16 bytes )
    sealed  [ head, 128 bytes )[ tokens and payload, encrypted; tag of 16 bytes  )[ checksum, 16 bytes )

    head    magic 8 | version 2 | flags 2 | tokens 4 | payload bytes 8 | generation 8 | key 32 | parent 32 | proof 32
    proof   plain: zeros, or salt 16 | MAC 16; sealed: salt 24 | zeros

Numbers are little-endian. The checksum, XXH3 with 128 bits, covers everything before it and detects accidents. The MAC,
or the tag of the encryption, covers everything but itself and the checksum, and detects attackers. Opening an object
decodes only these numbers, so it is safe on untrusted bytes.
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
from radixkv.offload.tiers.block_mac import MAC_BYTES, MAC_SALT_BYTES, BlockMac
from radixkv.offload.tiers.sealing import SALT_BYTES, TAG_BYTES, BlockCipher, NotSealedByUs
from radixkv.tokens import TOKEN_BYTES

CHECKSUM_BYTES = 16
_MAGIC = b"RKVBLOCK"
_VERSION = 1
_IS_SEALED = 1
_IS_AUTHENTICATED = 2
_PROOF_BYTES = MAC_SALT_BYTES + MAC_BYTES
_HEAD = Struct(f"<8sHHIQQ{KEY_BYTES}s{KEY_BYTES}s{_PROOF_BYTES}s")
_ALIGNMENT = 64
_PIECE_BYTES = 1 << 20  # fits into every L3 cache; smaller pieces are slower to copy
_NO_PROOF = bytes(_PROOF_BYTES)
HEAD_BYTES = _HEAD.size

Protection = BlockCipher | BlockMac
"""Encryption or a MAC, either of which detects modifications of an object."""


class ObjectFault(enum.Enum):
    """Reason why an object is not used."""

    CUT = "cut"  # its length differs from that in its head
    FOREIGN = "foreign"  # not an object, or an object of another version, block or size
    DAMAGED = "damaged"  # the checksum differs
    OTHER_TOKENS = "other_tokens"
    # Not encrypted with the tenant's key, modified afterwards, or encrypted although the tier has no key.
    UNSEALED = "unsealed"
    UNAUTHENTIC = "unauthentic"  # not written by a server with the same secret, or modified


class ObjectHead(NamedTuple):
    """The fields at the start of an object.

    Attributes:
        key, parent: see `BlockKeys`.
        generation: an object of a later generation replaces one of an earlier generation; see `Saver`.
        num_tokens: tokens of the block.
        payload_bytes: bytes of its K and V.
        proof: salt of the cipher, or salt and MAC; zeros if the object has neither.
        is_sealed: whether tokens and payload are encrypted.
        is_authenticated: whether the object has a MAC.
    """

    key: bytes
    parent: bytes
    generation: int
    num_tokens: int
    payload_bytes: int
    proof: bytes = _NO_PROOF
    is_sealed: bool = False
    is_authenticated: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole object."""
        return object_bytes(self.num_tokens, self.payload_bytes, is_sealed=self.is_sealed)

    def pack(self) -> bytes:
        """Serialize the head for `read_head`."""
        flags = _IS_SEALED * self.is_sealed + _IS_AUTHENTICATED * self.is_authenticated
        counts = (self.num_tokens, self.payload_bytes, self.generation)
        return _HEAD.pack(_MAGIC, _VERSION, flags, *counts, self.key, self.parent, self.proof)


class BlockObject(NamedTuple):
    """A block to be stored.

    Attributes:
        key, parent, generation: see `ObjectHead`.
        tokens: the tokens of the block alone, little-endian uint32.
        payload: contiguous bytes of K and V. Once they are complete, they must never change: pass a copy.
        protection: encrypts or authenticates the object; None for an object that only this process can write.
        wait_for_payload: blocks until the payload is complete; None if it is complete already. `parts`, `pieces` and
            `write_to` call it.
    """

    key: bytes
    parent: bytes
    generation: int
    tokens: bytes
    payload: memoryview
    protection: Protection | None = None
    wait_for_payload: Callable[[], None] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole object."""
        is_sealed = isinstance(self.protection, BlockCipher)
        return object_bytes(len(self.tokens) // TOKEN_BYTES, self.payload.nbytes, is_sealed=is_sealed)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Iterate over the bytes of the object in pieces, the checksum last.

        Each piece is hashed before it is yielded, which brings it into the CPU cache. If the piece changes afterwards,
        the checksum does not match, so the change is detected.

        Complexity: one pass over the payload, and one more to protect it. Stores call it on their threads.
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
        """Return the bytes before K and V, and K and V; if the object is encrypted, its head, and the rest, encrypted.

        The checksum is not included. The size of the first part is a multiple of 64.

        Complexity: one pass over the payload to protect it.
        """
        if self.wait_for_payload is not None:
            self.wait_for_payload()
        num_tokens = len(self.tokens) // TOKEN_BYTES
        head = ObjectHead(self.key, self.parent, self.generation, num_tokens, self.payload.nbytes)
        protection = self.protection
        if isinstance(protection, BlockCipher):
            salt = protection.new_salt()
            first = head._replace(proof=salt.ljust(_PROOF_BYTES, b"\0"), is_sealed=True).pack()
            return first, memoryview(protection.seal(salt, first, self.tokens, self.payload))
        tokens = self.tokens + bytes(_padding(num_tokens))
        if protection is None:
            return head.pack() + tokens, self.payload
        salt = protection.new_salt()
        first = head._replace(proof=salt + bytes(MAC_BYTES), is_authenticated=True).pack()[:-MAC_BYTES]
        return first + protection.of(salt, (first, tokens, self.payload)) + tokens, self.payload


def object_bytes(num_tokens: int, payload_bytes: int, *, is_sealed: bool = False) -> int:
    """Return the size of an object.

    >>> object_bytes(64, 1_048_576)
    1048976
    """
    tag_or_padding_bytes = TAG_BYTES if is_sealed else _padding(num_tokens)
    return HEAD_BYTES + num_tokens * TOKEN_BYTES + tag_or_padding_bytes + payload_bytes + CHECKSUM_BYTES


def max_object_bytes(num_tokens: int, payload_bytes: int) -> int:
    """Return the size of the largest object of a store, which may contain sealed (encrypted) objects and others."""
    return max(object_bytes(num_tokens, payload_bytes, is_sealed=is_sealed) for is_sealed in (False, True))


def read_head(data: memoryview | bytes) -> ObjectHead | None:
    """Parse the head of an object; None if it is invalid. Ignores everything after the head."""
    if len(data) < HEAD_BYTES:
        return None
    magic, version, flags, num_tokens, payload_bytes, generation, key, parent, proof = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or flags not in (0, _IS_SEALED, _IS_AUTHENTICATED):
        return None
    counts = (generation, num_tokens, payload_bytes)
    return ObjectHead(key, parent, *counts, proof, flags == _IS_SEALED, flags == _IS_AUTHENTICATED)


class Wanted(NamedTuple):
    """A block to be loaded.

    Attributes:
        key: from `BlockKeys`.
        tokens: the tokens of the block alone.
        protection: the encryption or MAC that the object must have; None to accept any object that is not encrypted.
    """

    key: bytes
    tokens: bytes
    protection: Protection | None = None


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
        checksum: `checksum_of(data)`; None to compute it.

    Returns:
        A view of `data`, or a new buffer if the object is encrypted.

    Complexity: one pass over the object for the checksum, and one more to decrypt or authenticate it.
    """
    mac = wanted.protection if isinstance(wanted.protection, BlockMac) else None
    head = read_head(data)
    if len(data) < HEAD_BYTES:
        return ObjectFault.CUT
    is_wanted = head is not None and head.key == wanted.key and head.payload_bytes in payload_bytes
    if head is None or not is_wanted:
        return ObjectFault.FOREIGN if mac is None or _is_authentic(data, head, mac) else ObjectFault.UNAUTHENTIC
    if head.num_tokens != len(wanted.tokens) // TOKEN_BYTES:
        return ObjectFault.OTHER_TOKENS if mac is None or _is_authentic(data, head, mac) else ObjectFault.UNAUTHENTIC
    if head.num_bytes != len(data):
        return ObjectFault.CUT
    if (checksum_of(data) if checksum is None else checksum) != data[-CHECKSUM_BYTES:]:
        return ObjectFault.DAMAGED
    if head.is_sealed != isinstance(wanted.protection, BlockCipher):
        return ObjectFault.UNSEALED
    if mac is not None and not _is_authentic(data, head, mac):
        return ObjectFault.UNAUTHENTIC
    return _open_verified(data, head, wanted)


def _is_authentic(data: memoryview, head: ObjectHead | None, mac: BlockMac) -> bool:
    if head is None or not head.is_authenticated:
        return False
    salt, tag = head.proof[:MAC_SALT_BYTES], head.proof[MAC_SALT_BYTES:]
    return mac.is_of(tag, salt, (data[: HEAD_BYTES - MAC_BYTES], data[HEAD_BYTES:-CHECKSUM_BYTES]))


def _open_verified(data: memoryview, head: ObjectHead, wanted: Wanted) -> memoryview | ObjectFault:
    """Return the payload of an object whose checksum and MAC are valid, decrypted, or the fault."""
    token_bytes = len(wanted.tokens)
    if isinstance(wanted.protection, BlockCipher):
        try:
            decrypted = wanted.protection.open(
                head.proof[:SALT_BYTES], data[:HEAD_BYTES], data[HEAD_BYTES:-CHECKSUM_BYTES]
            )
        except NotSealedByUs:
            return ObjectFault.UNSEALED
        body = memoryview(decrypted)
        start = 0
        payload = body[token_bytes:]
    else:
        body = data
        start = HEAD_BYTES
        payload = data[start + token_bytes + _padding(head.num_tokens) : -CHECKSUM_BYTES]
    # Comparing memoryviews would be slow, since they are compared element by element.
    if body[start : start + token_bytes].tobytes() != wanted.tokens:
        return ObjectFault.OTHER_TOKENS
    return payload


def _padding(num_tokens: int) -> int:
    """Return the number of zeros after the tokens of an object that is not encrypted."""
    return -num_tokens * TOKEN_BYTES % _ALIGNMENT
