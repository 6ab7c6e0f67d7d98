"""The next process finds whose blocks are on a disk, and none that it can't name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from radixkv.engine.offload.disk_record import DiskRecord
from radixkv.namespace import Namespace
from radixkv.storage.tiers.block_key import BlockKeys
from radixkv.storage.tiers.block_object import BlockObject
from radixkv.storage.tiers.disk import DiskStore
from tests.fake_runner import tokens

from .tiered_bench import FORMAT, OBJECT_BYTES, PAYLOAD_BYTES

KEYS = BlockKeys(FORMAT)
ACME, OTHER = Namespace("model", "acme"), Namespace("model", "other", salt="s")


def disk_at(path: Path) -> DiskStore:
    return DiskStore(path, FORMAT, OBJECT_BYTES, 1 << 20)


def blocks_of(namespace: Namespace, ids: range) -> list[BlockObject]:
    prompt, parent, blocks = tokens(ids), KEYS.root(namespace), []
    for index, key in enumerate(KEYS.chain(parent, prompt)):
        own = prompt[16 * index : 16 * index + 16]
        blocks.append(BlockObject(key, parent, 0, own, memoryview(bytes(PAYLOAD_BYTES))))
        parent = key
    return blocks


def store(path: Path, blocks: Sequence[BlockObject], noted: Sequence[Namespace]) -> None:
    disk = disk_at(path)
    record = DiskRecord(disk, KEYS)
    for namespace in noted:
        record.note(namespace)
    disk.put(blocks)
    disk.close()


def read(path: Path) -> tuple[list[tuple[bytes, Namespace]], int | None]:
    """Return what a new process finds, and how many blocks the disk has then."""
    disk = disk_at(path)
    found = DiskRecord(disk, KEYS).read()
    left = disk.size().num_objects
    disk.close()
    return found, left


def test_blocks_are_found_with_their_owners_in_the_order_in_which_they_go(tmp_path: Path) -> None:
    ours, theirs = blocks_of(ACME, range(12)), blocks_of(OTHER, range(8))
    written = [ours[2], theirs[1], theirs[0], ours[1], ours[0]]
    store(tmp_path, written, [ACME, OTHER])
    owners = {each.key: ACME for each in ours} | {each.key: OTHER for each in theirs}
    assert read(tmp_path) == ([(each.key, owners[each.key]) for each in written], 5)


def test_what_nobody_can_purge_is_deleted(tmp_path: Path) -> None:
    """Its owner is not known, or what comes before it is gone, so that its owner can't be found."""
    ours, theirs = blocks_of(ACME, range(12)), blocks_of(OTHER, range(8))
    store(tmp_path, [ours[0], ours[2], *theirs], [ACME])
    assert read(tmp_path) == ([(ours[0].key, ACME)], 1)


def test_a_block_that_its_tokens_do_not_name_is_deleted(tmp_path: Path) -> None:
    first, second = blocks_of(ACME, range(8))
    wrong = BlockObject(second.key, second.parent, 0, tokens(range(50, 54)), second.payload)
    store(tmp_path, [first, wrong], [ACME])
    assert read(tmp_path) == ([(first.key, ACME)], 1)


def test_an_empty_disk_is_read(tmp_path: Path) -> None:
    assert read(tmp_path) == ([], 0)


@pytest.mark.parametrize("noted", [[], [OTHER]])
def test_without_names_nothing_is_found(noted: list[Namespace], tmp_path: Path) -> None:
    store(tmp_path, blocks_of(ACME, range(8)), noted)
    assert read(tmp_path) == ([], 0)
