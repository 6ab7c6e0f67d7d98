"""Alterations of stored blocks by an attacker who can write to a store or impersonate another server.

The attacker knows how objects are made, has seen those of all tenants, models and secrets, and computes the checksum of
each alteration again, but does not have this server's secret.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from xxhash import xxh3_128_digest

from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockFormat, BlockKeys
from radixkv.offload.tiers.block_mac import BlockMac
from radixkv.offload.tiers.block_object import CHECKSUM_BYTES, HEAD_BYTES, BlockObject, Protection, Wanted
from radixkv.offload.tiers.block_store import PutOutcome, StoreBackend
from radixkv.offload.tiers.sealing import TAG_BYTES, TenantCiphers
from radixkv.offload.tiers.threaded_store import ThreadedStore
from radixkv.offload.tiers.tier import LoadedBlock, Tier
from tests.patience import PATIENCE_S

from .blocks import BLOCK_SIZE, OBJECT_BYTES, PAYLOAD_BYTES, payload_of, tokens_of

MAX_ADDED_BYTES = 64  # by which an alteration extends or cuts an object
STORED_BYTES = OBJECT_BYTES + TAG_BYTES + MAX_ADDED_BYTES
NUM_BLOCKS = 8
# Positions in the head of an object. The proof is the salt of the encryption, or the salt and the MAC.
_FLAGS = 10
_KEY = slice(32, 64)
_PARENT = slice(64, 96)
_PROOF = slice(96, HEAD_BYTES)


OURS = BlockFormat("model", "float32", "fp32", "by block", BLOCK_SIZE, PAYLOAD_BYTES, "cpu")


class World(NamedTuple):
    """The blocks of one prompt, and everything that the attacker has seen.

    Attributes:
        wanted: the blocks that the server loads.
        sound: their unaltered objects.
        others: the objects of blocks with the same tokens, but of another tenant, salt, adapter or model, or written
            with another secret.
    """

    wanted: Sequence[Wanted]
    sound: Sequence[bytes]
    others: Sequence[Sequence[bytes]]


def make_world(*, is_sealed: bool) -> World:
    """Return a world whose objects are encrypted if `is_sealed`, or else authenticated with a MAC."""
    theirs = BlockFormat("model", "bfloat16", "fp32", "by layer", BLOCK_SIZE, PAYLOAD_BYTES, "cpu")
    acme = Namespace("model", "acme")
    owners = [
        (OURS, acme, b"secret"),
        (OURS, Namespace("model", "globex"), b"secret"),
        (OURS, Namespace("model", "acme", salt="salt"), b"secret"),
        (OURS, Namespace("model", "acme", adapter="adapter"), b"secret"),
        (theirs, acme, b"secret"),
        (OURS, acme, b"another secret"),
    ]
    (wanted, sound), *others = (
        _make_objects(*owner, 100 * index, is_sealed=is_sealed) for index, owner in enumerate(owners)
    )
    return World(wanted, sound, [objects for _, objects in others])


def _make_objects(
    block_format: BlockFormat, namespace: Namespace, secret: bytes, first_payload: int, *, is_sealed: bool
) -> tuple[list[Wanted], list[bytes]]:
    """Return the blocks of a prompt, and their objects, whose payloads begin with the number `first_payload`."""
    keys = BlockKeys(block_format, secret)
    protection: Protection = BlockMac(secret, block_format.fingerprint)
    if is_sealed:
        protection = TenantCiphers(secret.ljust(32, b"\0")).of(namespace.tenant)
    parent = keys.root(namespace)
    wanted: list[Wanted] = []
    objects: list[bytes] = []
    for number in range(NUM_BLOCKS):
        key = keys.child(parent, tokens_of(number))
        payload = memoryview(payload_of(number + first_payload))
        block_object = BlockObject(key, parent, 0, tokens_of(number), payload, protection)
        wanted.append(Wanted(key, tokens_of(number), protection))
        objects.append(b"".join(block_object.pieces()))
        parent = key
    return wanted, objects


Alteration = Callable[[World, int, random.Random], bytes]


def _with_new_checksum(data: bytes | bytearray) -> bytes:
    """Return an object with the checksum of its altered bytes."""
    return bytes(data[:-CHECKSUM_BYTES]) + xxh3_128_digest(bytes(data[:-CHECKSUM_BYTES]))


def _under_wanted_key(world: World, index: int, data: bytes) -> bytes:
    """Return an object with the key and the parent of the wanted one."""
    altered = bytearray(data)
    altered[_KEY], altered[_PARENT] = world.sound[index][_KEY], world.sound[index][_PARENT]
    return _with_new_checksum(altered)


def flipped(world: World, index: int, rng: random.Random) -> bytes:
    """A few bits are flipped."""
    data = bytearray(world.sound[index])
    for position in rng.sample(range(len(data) - CHECKSUM_BYTES), rng.choice((1, 1, 2, 3))):
        data[position] ^= 1 << rng.randrange(8)
    return _with_new_checksum(data)


def zeroed(world: World, index: int, rng: random.Random) -> bytes:
    """A range of bytes after the head is zero."""
    data = bytearray(world.sound[index])
    start = rng.randrange(HEAD_BYTES, len(data) - CHECKSUM_BYTES)
    end = rng.randrange(start + 1, len(data) - CHECKSUM_BYTES + 1)
    data[start:end] = bytes(end - start)
    return flipped(world, index, rng) if data == world.sound[index] else _with_new_checksum(data)


def swapped(world: World, index: int, rng: random.Random) -> bytes:
    """The object of another block of the prompt."""
    return world.sound[_index_of_another_block(index, rng)]


def moved(world: World, index: int, rng: random.Random) -> bytes:
    """The object of another block of the prompt, with the key of the wanted one."""
    return _under_wanted_key(world, index, swapped(world, index, rng))


def replayed(world: World, index: int, rng: random.Random) -> bytes:
    """An object with the same tokens of another tenant, salt, adapter, model or secret."""
    return rng.choice(world.others)[index]


def impersonated(world: World, index: int, rng: random.Random) -> bytes:
    """An object with the same tokens of another tenant, salt, adapter, model or secret, with the wanted key."""
    return _under_wanted_key(world, index, replayed(world, index, rng))


def grafted(world: World, index: int, rng: random.Random) -> bytes:
    """The head of the wanted object, which contains its proof, followed by the other bytes of another object."""
    other = rng.choice([swapped, replayed])(world, index, rng)
    return _with_new_checksum(world.sound[index][:HEAD_BYTES] + other[HEAD_BYTES:])


def spliced(world: World, index: int, rng: random.Random) -> bytes:
    """The beginning of the wanted object, followed by the end of another one."""
    place = rng.randrange(HEAD_BYTES + 4 * BLOCK_SIZE, len(world.sound[index]) - CHECKSUM_BYTES - 8)
    return _with_new_checksum(world.sound[index][:place] + swapped(world, index, rng)[place:])


def forged(world: World, index: int, rng: random.Random) -> bytes:
    """An object that the attacker made, with any flags, and half of the time with the proof of the wanted one."""
    wanted = world.wanted[index]
    payload = memoryview(rng.randbytes(PAYLOAD_BYTES))
    parent = world.sound[index][_PARENT]
    data = bytearray(b"".join(BlockObject(wanted.key, parent, 0, wanted.tokens, payload).pieces()))
    data[_FLAGS] = rng.choice((0, 0, 1, 2, 3))
    if rng.random() < 0.5:
        data[_PROOF] = world.sound[index][_PROOF]
    return _with_new_checksum(data)


def reflagged(world: World, index: int, rng: random.Random) -> bytes:
    """The sound object with flipped bits, and with other flags, which might say that it has no proof."""
    data = bytearray(flipped(world, index, rng))
    flags = data[_FLAGS]
    data[_FLAGS] = rng.choice([each for each in range(8) if each != flags])
    return _with_new_checksum(data)


def cut(world: World, index: int, rng: random.Random) -> bytes:
    """The object without its last bytes."""
    data = world.sound[index]
    return _with_new_checksum(data[: rng.randrange(len(data) - MAX_ADDED_BYTES, len(data))])


def extended(world: World, index: int, rng: random.Random) -> bytes:
    """The object with random bytes before its checksum."""
    data = world.sound[index]
    added = rng.randbytes(rng.randrange(1, MAX_ADDED_BYTES + 1))
    return _with_new_checksum(data[:-CHECKSUM_BYTES] + added + bytes(CHECKSUM_BYTES))


def _index_of_another_block(index: int, rng: random.Random) -> int:
    return (index + rng.randrange(1, NUM_BLOCKS)) % NUM_BLOCKS


ALTERATIONS: tuple[Alteration, ...] = (
    flipped,
    zeroed,
    swapped,
    moved,
    replayed,
    impersonated,
    grafted,
    spliced,
    forged,
    reflagged,
    cut,
    extended,
)


class Altered(NamedTuple):
    """An altered object with the interface of `BlockObject`, so that a store can write it."""

    key: bytes
    data: bytes
    generation: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def parts(self) -> tuple[bytes, memoryview]:
        return self.data[:HEAD_BYTES], memoryview(self.data)[HEAD_BYTES:-CHECKSUM_BYTES]

    def pieces(self) -> Iterator[bytes]:
        yield self.data


def outcomes_of(backend: StoreBackend, num_cases: int, seed: int) -> Counter[str]:
    """Alter blocks in a store, and load them.

    In each round all blocks of a prompt are altered, or all but one, which must be loaded.

    Returns:
        The number of unaltered blocks that were loaded (`right`) or not (`lost`), of altered blocks that were loaded
        (`used`), and of other altered blocks, by their faults.
    """
    rng = random.Random(seed)
    worlds = [make_world(is_sealed=False), make_world(is_sealed=True)]
    store = ThreadedStore(backend)  # runs the deletions of rejected blocks in order with the writes
    tier = Tier("altered", store, PAYLOAD_BYTES)
    counts: Counter[str] = Counter()
    for start in range(0, num_cases, NUM_BLOCKS):
        world = worlds[start // NUM_BLOCKS % 2]
        sound_index = rng.randrange(2 * NUM_BLOCKS)  # from `NUM_BLOCKS` on, all blocks are altered
        objects = list(world.sound)
        for index in range(NUM_BLOCKS):
            if index != sound_index:
                alter = ALTERATIONS[(start + index) % len(ALTERATIONS)]
                objects[index] = alter(world, index, rng)
        keys = [each.key for each in world.wanted]
        store.delete(keys).result(PATIENCE_S)
        altered = [Altered(key, data) for key, data in zip(keys, objects, strict=True)]
        put = store.put(altered).result(PATIENCE_S)  # type: ignore[arg-type]
        assert set(put.outcomes) == {PutOutcome.STORED}
        for index, found in enumerate(tier.load(world.wanted).result(PATIENCE_S)):
            if not isinstance(found, LoadedBlock):
                counts["lost" if index == sound_index else found.value] += 1
                continue
            is_right = index == sound_index and found.payload == payload_of(index)
            counts["right" if is_right else "used"] += 1
            found.loan.release()
    tier.close()
    return counts
