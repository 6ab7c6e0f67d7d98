"""Tests that every store must pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.offload.block_keys import BlockKeys
from radixkv.offload.tiers.block_object import open_object
from radixkv.offload.tiers.block_store import BlockStore, Loan, PutOutcome
from radixkv.offload.tiers.threaded_store import ThreadedStore
from tests.patience import PATIENCE_S

from .backends import BACKENDS, SHARED
from .blocks import FORMAT, KEYS, PAYLOAD_BYTES, block, key_of, object_of, payload_of, tokens_of, wanted

STORED = PutOutcome.STORED
ALREADY_THERE = PutOutcome.ALREADY_THERE


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest) -> Iterator[BlockStore]:
    """Yield each of the stores, with room for 64 objects."""
    with BACKENDS[request.param](64) as backend:
        store = ThreadedStore(backend)
        yield store
        store.close()


def put(store: BlockStore, *numbers: int, generation: int = 0) -> tuple[PutOutcome, ...]:
    return store.put([block(number, generation) for number in numbers]).result(PATIENCE_S).outcomes


def get(store: BlockStore, *numbers: int) -> list[bytes | None]:
    loans: list[Loan | None] = store.get([key_of(number) for number in numbers]).result(PATIENCE_S)
    return [loan and bytes(loan.data) for loan in loans]


def test_get_returns_objects_in_the_order_of_the_keys(store: BlockStore) -> None:
    assert put(store, 1, 2, 3) == (STORED,) * 3
    assert get(store, 3, 9, 1, 3) == [object_of(3), None, object_of(1), object_of(3)]


def test_a_loan_is_a_valid_object(store: BlockStore) -> None:
    put(store, 1)
    (loan,) = store.get([key_of(1)]).result(PATIENCE_S)
    assert loan is not None
    with loan:
        assert loan.data.readonly
        assert open_object(loan.data, wanted(1), PAYLOAD_BYTES) == payload_of(1)
    loan.release()


def test_an_empty_store_has_nothing(store: BlockStore) -> None:
    keys = [key_of(1), key_of(2)]
    assert store.exists(keys).result(PATIENCE_S) == [False, False]
    assert store.delete(keys).result(PATIENCE_S) == 0
    assert get(store, 1, 2) == [None, None]


def test_empty_batches_are_answered(store: BlockStore) -> None:
    assert put(store) == ()
    assert get(store) == []
    assert store.exists([]).result(PATIENCE_S) == []
    assert store.delete([]).result(PATIENCE_S) == 0


def test_deleted_objects_are_gone(store: BlockStore) -> None:
    put(store, 1, 2)
    assert store.delete([key_of(1), key_of(7)]).result(PATIENCE_S) == 1
    assert store.exists([key_of(1), key_of(2)]).result(PATIENCE_S) == [False, True]
    assert get(store, 1) == [None]


def test_a_later_generation_replaces_an_earlier_one(store: BlockStore) -> None:
    put(store, 1, generation=4)
    assert put(store, 1, generation=5) == (STORED,)
    assert get(store, 1) == [object_of(1, 5)]


def test_the_same_object_again_changes_nothing(store: BlockStore) -> None:
    put(store, 1)
    assert put(store, 1) in ((STORED,), (ALREADY_THERE,))
    assert get(store, 1) == [object_of(1)]


def test_a_loan_does_not_change(store: BlockStore) -> None:
    put(store, 1)
    (loan,) = store.get([key_of(1)]).result(PATIENCE_S)
    store.delete([key_of(1)]).result(PATIENCE_S)
    put(store, *range(2, 200))
    assert loan is not None
    assert loan.data == object_of(1)


def test_large_batches_are_stored_as_a_whole(store: BlockStore) -> None:
    assert set(put(store, *range(60))) == {STORED}
    assert get(store, *range(60)) == [object_of(number) for number in range(60)]


def test_threads_that_write_and_read_the_same_blocks_see_whole_ones(store: BlockStore) -> None:
    wrong_objects: list[bytes] = []
    objects = {number: object_of(number) for number in range(8)}

    def put_get_and_delete(first: int) -> None:
        for turn in range(20):
            number = (first + turn) % 8
            put(store, number)
            wrong_objects.extend(data for data in get(store, number) if data not in (None, objects[number]))
            if turn % 3 == 0:
                store.delete([key_of(number)]).result(PATIENCE_S)

    threads = [threading.Thread(target=put_get_and_delete, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong_objects == []


def test_sizes_are_those_of_the_stored_objects(store: BlockStore) -> None:
    before = store.size()
    put(store, 1, 2)
    after = store.size()
    assert after.capacity_bytes == before.capacity_bytes
    if after.num_objects is not None:
        assert (before.num_objects, after.num_objects) == (0, 2)
    if after.used_bytes is not None:
        assert before.used_bytes == 0
        assert after.used_bytes >= 2 * len(object_of(1))


def test_a_store_can_be_closed_again(store: BlockStore) -> None:
    put(store, 1)
    store.close()
    store.close()
    assert isinstance(store.get([key_of(1)]).exception(PATIENCE_S), Exception)


@pytest.mark.parametrize("name", SHARED)
def test_a_purge_deletes_the_objects_of_the_namespaces_with_these_names(name: str) -> None:
    """Two tenants, with and without an adapter and a salt; and a public prefix, which no purge deletes."""
    namespaces = [
        Namespace("model", tenant, adapter, salt) for tenant in "ab" for adapter in ("", "x") for salt in ("", "s")
    ]
    public = Namespace("model", PUBLIC_TENANT, salt="1")
    keys = {namespace: KEYS.child(KEYS.root(namespace), tokens_of(1)) for namespace in [*namespaces, public]}
    objects = [block(1)._replace(key=key) for key in keys.values()]
    with BACKENDS[name](64) as backend:
        store = ThreadedStore(backend)
        for names in (("a", None, None), (None, "x", None), (None, None, "s"), ("b", "", "s"), (None, None, None)):
            store.put(objects).result(PATIENCE_S)
            scope_of_another_secret = BlockKeys(FORMAT, b"other").scope(*names)
            assert store.purge(scope_of_another_secret).result(PATIENCE_S) == 0
            purged = {namespace for namespace in namespaces if namespace.is_among(*names)}
            assert store.purge(KEYS.scope(*names)).result(PATIENCE_S) == len(purged)
            exist = store.exists(list(keys.values())).result(PATIENCE_S)
            assert dict(zip(keys, exist, strict=True)) == {namespace: namespace not in purged for namespace in keys}
        store.close()
