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

ROOM_BYTES = 64  # by which an alteration may extend an object
STORED_BYTES = OBJECT_BYTES + TAG_BYTES + ROOM_BYTES
NUM_BLOCKS = 8
_KEY = slice(32, 64)  # in a head
_PARENT = slice(64, 96)
_FLAGS = 10


OURS = BlockFormat("model", "float32", "fp32", "by block", BLOCK_SIZE, PAYLOAD_BYTES, "cpu")


class World(NamedTuple):
    """The blocks of one prompt, and everything that the attacker has seen.

    Attributes:
        wanted: the blocks that the victim loads.
        sound: their objects.
        others: the same tokens of another tenant, salt, adapter and model, and written with another secret.
    """

    wanted: Sequence[Wanted]
    sound: Sequence[bytes]
    others: Sequence[Sequence[bytes]]


def world(*, is_sealed: bool) -> World:
    """Make one whose objects are encrypted or authenticated."""
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
    found = [_objects(*owner, 100 * index, is_sealed=is_sealed) for index, owner in enumerate(owners)]
    return World(found[0][0], found[0][1], [objects for _, objects in found[1:]])


def _objects(
    block_format: BlockFormat, namespace: Namespace, secret: bytes, first_payload: int, *, is_sealed: bool
) -> tuple[list[Wanted], list[bytes]]:
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
        made = BlockObject(key, parent, 0, tokens_of(number), payload, protection)
        wanted.append(Wanted(key, tokens_of(number), protection))
        objects.append(b"".join(made.pieces()))
        parent = key
    return wanted, objects


Alteration = Callable[[World, int, random.Random], bytes]


def _checked(data: bytes | bytearray) -> bytes:
    """Compute the checksum of an object again."""
    return bytes(data[:-CHECKSUM_BYTES]) + xxh3_128_digest(bytes(data[:-CHECKSUM_BYTES]))


def _as_wanted(world: World, index: int, data: bytes) -> bytes:
    """Give an object the key and the parent of the wanted one."""
    moved = bytearray(data)
    moved[_KEY], moved[_PARENT] = world.sound[index][_KEY], world.sound[index][_PARENT]
    return _checked(moved)


def flipped(world: World, index: int, rng: random.Random) -> bytes:
    data = bytearray(world.sound[index])
    for position in rng.sample(range(len(data) - CHECKSUM_BYTES), rng.choice((1, 1, 2, 3))):
        data[position] ^= 1 << rng.randrange(8)
    return _checked(data)


def zeroed(world: World, index: int, rng: random.Random) -> bytes:
    data = bytearray(world.sound[index])
    start = rng.randrange(HEAD_BYTES, len(data) - CHECKSUM_BYTES)
    end = rng.randrange(start + 1, len(data) - CHECKSUM_BYTES + 1)
    data[start:end] = bytes(end - start)
    return flipped(world, index, rng) if data == world.sound[index] else _checked(data)


def swapped(world: World, index: int, rng: random.Random) -> bytes:
    return world.sound[_other(index, rng)]


def moved(world: World, index: int, rng: random.Random) -> bytes:
    return _as_wanted(world, index, swapped(world, index, rng))


def replayed(world: World, index: int, rng: random.Random) -> bytes:
    """Another tenant, salt, adapter, model or secret has the same tokens."""
    return rng.choice(world.others)[index]


def impersonated(world: World, index: int, rng: random.Random) -> bytes:
    return _as_wanted(world, index, replayed(world, index, rng))


def grafted(world: World, index: int, rng: random.Random) -> bytes:
    """The head of the wanted object, with its proof, before the rest of another one."""
    other = rng.choice([swapped, replayed])(world, index, rng)
    return _checked(world.sound[index][:HEAD_BYTES] + other[HEAD_BYTES:])


def spliced(world: World, index: int, rng: random.Random) -> bytes:
    place = rng.randrange(HEAD_BYTES + 4 * BLOCK_SIZE, len(world.sound[index]) - CHECKSUM_BYTES - 8)
    return _checked(world.sound[index][:place] + swapped(world, index, rng)[place:])


def made_up(world: World, index: int, rng: random.Random) -> bytes:
    """An object of the attacker's own, without a proof, or which claims to have one."""
    wanted = world.wanted[index]
    payload = memoryview(rng.randbytes(PAYLOAD_BYTES))
    parent = world.sound[index][_PARENT]
    data = bytearray(b"".join(BlockObject(wanted.key, parent, 0, wanted.tokens, payload).pieces()))
    data[_FLAGS] = rng.choice((0, 0, 1, 2, 3))
    if rng.random() < 0.5:
        data[96:HEAD_BYTES] = world.sound[index][96:HEAD_BYTES]
    return _checked(data)


def unproved(world: World, index: int, rng: random.Random) -> bytes:
    """The sound object with other flags, so that its proof might be ignored, and another payload."""
    data = bytearray(flipped(world, index, rng))
    flags = data[_FLAGS]
    data[_FLAGS] = rng.choice([each for each in range(8) if each != flags])
    return _checked(data)


def cut(world: World, index: int, rng: random.Random) -> bytes:
    data = world.sound[index]
    return _checked(data[: rng.randrange(len(data) - ROOM_BYTES, len(data))])


def extended(world: World, index: int, rng: random.Random) -> bytes:
    data = world.sound[index]
    more = rng.randbytes(rng.randrange(1, ROOM_BYTES + 1))
    return _checked(data[:-CHECKSUM_BYTES] + more + bytes(CHECKSUM_BYTES))


def _other(index: int, rng: random.Random) -> int:
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
    made_up,
    unproved,
    cut,
    extended,
)


class Altered(NamedTuple):
    """An altered object, as a store writes it."""

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
    """Alter blocks in a store, and load them; counts the used ones, and the others by their faults.

    In each round all blocks of a prompt are altered, or all but one, which must be loaded.
    """
    rng = random.Random(seed)
    worlds = [world(is_sealed=False), world(is_sealed=True)]
    store = ThreadedStore(backend)  # its writer also deletes what a tier rejects, so that all this happens in order
    tier = Tier("altered", store, PAYLOAD_BYTES)
    counts: Counter[str] = Counter()
    for start in range(0, num_cases, NUM_BLOCKS):
        world_ = worlds[start // NUM_BLOCKS % 2]
        sound = rng.randrange(2 * NUM_BLOCKS)
        objects = list(world_.sound)
        for index in range(NUM_BLOCKS):
            if index != sound:
                objects[index] = ALTERATIONS[(start + index) % len(ALTERATIONS)](world_, index, rng)
        keys = [each.key for each in world_.wanted]
        store.delete(keys).result(PATIENCE_S)
        altered = [Altered(key, data) for key, data in zip(keys, objects, strict=True)]
        put = store.put(altered).result(PATIENCE_S)  # type: ignore[arg-type]
        assert set(put.outcomes) == {PutOutcome.STORED}
        for index, found in enumerate(tier.load(world_.wanted).result(PATIENCE_S)):
            if not isinstance(found, LoadedBlock):
                counts["lost" if index == sound else found.value] += 1
                continue
            is_right = index == sound and found.payload == payload_of(index)
            counts["right" if is_right else "used"] += 1
            found.loan.release()
    tier.close()
    return counts
