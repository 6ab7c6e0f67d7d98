from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace

from radixkv.cache.elsewhere.shelf import Shelf
from radixkv.engine.offload.deleter import Deleter
from radixkv.namespace import Namespace


class Store:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Sequence[bytes], Future[int | None]]] = []

    def delete(self, keys: Sequence[bytes]) -> Future[int | None]:
        self.told.append((keys, Future()))
        return self.told[-1][1]


def test_what_could_not_be_asked_is_asked_again() -> None:
    store, shelf = Store(), Shelf("disk", 10)
    deleter = Deleter(SimpleNamespace(shelves={"disk": shelf}), {"disk": store})  # type: ignore[arg-type, dict-item]
    deleter.delete("disk", [b"a", b"b"])
    deleter.retry()
    assert len(store.told) == 1
    store.told[0][1].set_result(None)
    shelf.add(b"b", Namespace("model"))  # stored again meanwhile
    deleter.retry()
    assert store.told[1][0] == [b"a"]
    store.told[1][1].set_result(1)
    deleter.retry()
    assert len(store.told) == 2
